//! Collectives for training loops.

use candle_core::Tensor;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Fabric;
use crate::{Error, Result, counted};
use fulgurite_engine::collective::{
    AllGather, Collective, ProcessGroup, ReduceOp, all_gather_object, broadcast_object,
};

impl Fabric {
    /// Reduces a tensor over all ranks, in place. Collective.
    ///
    /// # Errors
    /// If a peer fails.
    pub fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<()> {
        self.world().run(Collective::all_reduce(tensor, op))
    }

    /// Like [`all_reduce`](Self::all_reduce), over the ranks of a mesh dimension or view.
    ///
    /// Examples are `"data_parallel"` and `"tensor_parallel"`. These ranks differ from each other
    /// only in that dimension. Collective over them.
    ///
    /// # Errors
    /// If the mesh lacks this dimension or view, or a peer fails.
    pub fn all_reduce_over(&self, dimension: &str, tensor: &Tensor, op: ReduceOp) -> Result<()> {
        self.device_mesh().group(dimension)?.run(Collective::all_reduce(tensor, op))
    }

    /// Returns the mean of the ranks' tensors on every rank. Collective.
    ///
    /// The tensors have the same shape and a floating-point dtype. The result is outside the graph.
    /// This is Lightning's `Fabric.all_reduce`, whose default is the mean.
    ///
    /// # Errors
    /// If the dtype is an integer type, if the tensors differ in size, or if a peer fails.
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fulgurite_core::{Result, fabric::Fabric};
    /// # fn accuracy(fabric: &Fabric, own: f64) -> Result<f64> {
    /// let mean = fabric.all_mean(&Tensor::new(own, &Device::Cpu)?)?;
    /// # Ok(mean.to_scalar()?)
    /// # }
    /// ```
    pub fn all_mean(&self, tensor: &Tensor) -> Result<Tensor> {
        mean_over(&**self.world(), tensor)
    }

    /// Like [`all_mean`](Self::all_mean), over the ranks of a mesh dimension or view.
    ///
    /// See [`all_reduce_over`](Self::all_reduce_over) for these ranks. Collective over them.
    ///
    /// # Errors
    /// As [`all_mean`](Self::all_mean), and if the mesh lacks this dimension or view.
    pub fn all_mean_over(&self, dimension: &str, tensor: &Tensor) -> Result<Tensor> {
        mean_over(&**self.device_mesh().group(dimension)?, tensor)
    }

    /// Stacks the tensors of all ranks in rank order, to shape `[world_size, …]`. Collective.
    ///
    /// The tensors have the same shape and dtype. The result is outside the graph, as in
    /// Lightning's `Fabric.all_gather`.
    ///
    /// # Errors
    /// If the tensors differ in size, or a peer fails.
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fulgurite_core::{Result, fabric::Fabric};
    /// # fn scores(fabric: &Fabric, own: &Tensor) -> Result<()> {
    /// let of_ranks = fabric.all_gather(own)?;
    /// assert_eq!(of_ranks.dim(0)?, fabric.world_size());
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_gather(&self, tensor: &Tensor) -> Result<Tensor> {
        gather_over(&**self.world(), tensor)
    }

    /// Like [`all_gather`](Self::all_gather), over the ranks of a mesh dimension or view.
    ///
    /// See [`all_reduce_over`](Self::all_reduce_over) for these ranks. Collective over them.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather), and if the mesh lacks this dimension or view.
    pub fn all_gather_over(&self, dimension: &str, tensor: &Tensor) -> Result<Tensor> {
        gather_over(&**self.device_mesh().group(dimension)?, tensor)
    }

    /// Returns the `value` of rank `src` on every rank. Collective.
    ///
    /// The value is anything that serialises. The other ranks' values are ignored.
    ///
    /// # Errors
    /// If the value cannot be written as JSON, if rank `src` does not exist, or if a peer fails.
    ///
    /// ```
    /// # use fulgurite_core::{Result, fabric::Fabric};
    /// # fn start(fabric: &Fabric) -> Result<()> {
    /// // Clocks differ, so all ranks take rank 0's time.
    /// let started = std::time::SystemTime::now();
    /// let started = fabric.broadcast(&started, 0)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn broadcast<T: Serialize + DeserializeOwned>(&self, value: &T, src: usize) -> Result<T> {
        let ranks = self.world_size();
        if src >= ranks {
            return Err(Error::other(format!(
                "there is no rank {src} to broadcast from: the job has {}, counted from 0",
                counted(ranks, "rank")
            )));
        }
        broadcast_object(&**self.world(), value, src)
    }

    /// Returns the values of all ranks (anything that serialises), in rank order. Collective.
    ///
    /// # Errors
    /// If a value cannot be written as JSON, or a peer fails.
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<Vec<T>> {
        all_gather_object(&**self.world(), value)
    }

    /// Waits for all ranks. Collective.
    ///
    /// # Errors
    /// If a peer fails.
    pub fn barrier(&self) -> Result<()> {
        self.world().run(Collective::Barrier)
    }
}

fn mean_over(group: &dyn ProcessGroup, tensor: &Tensor) -> Result<Tensor> {
    if !tensor.dtype().is_float() {
        return Err(Error::other(format!(
            "a mean over ranks is of floating-point numbers, and this tensor is of {:?}; convert it first",
            tensor.dtype()
        )));
    }
    let sum = tensor.detach().copy()?.contiguous()?;
    group.run(Collective::all_reduce(&sum, ReduceOp::Sum))?;
    Ok((sum / group.size() as f64)?)
}

fn gather_over(group: &dyn ProcessGroup, tensor: &Tensor) -> Result<Tensor> {
    let input = tensor.detach().contiguous()?;
    let shape = [&[group.size()], input.dims()].concat();
    let output = Tensor::zeros(shape, input.dtype(), input.device())?;
    let part = AllGather::even(&output, &input, group.size());
    group.run(Collective::all_gather_into(vec![part]))?;
    Ok(output)
}
