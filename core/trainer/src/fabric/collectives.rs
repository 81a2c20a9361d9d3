//! What loops exchange over all ranks.

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

    /// [`all_reduce`](Self::all_reduce) over the ranks of a mesh dimension or view, such as `"data_parallel"` or
    /// `"tensor_parallel"`: those that differ from this one in it. Collective over them.
    ///
    /// # Errors
    /// If the mesh has no dimension or view of this name, or a peer fails.
    pub fn all_reduce_over(&self, dimension: &str, tensor: &Tensor, op: ReduceOp) -> Result<()> {
        self.device_mesh().group(dimension)?.run(Collective::all_reduce(tensor, op))
    }

    /// The mean of the ranks' tensors, of the same shape and a floating-point dtype, on each of them; outside the
    /// graph. This is Lightning's `Fabric.all_reduce`, whose default is the mean. Collective.
    ///
    /// # Errors
    /// If the tensor is of integers, the tensors differ in size, or a peer fails.
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

    /// [`all_mean`](Self::all_mean) over the ranks of a mesh dimension or view, as
    /// [`all_reduce_over`](Self::all_reduce_over). Collective over them.
    ///
    /// # Errors
    /// As [`all_mean`](Self::all_mean), and if the mesh has no dimension or view of this name.
    pub fn all_mean_over(&self, dimension: &str, tensor: &Tensor) -> Result<Tensor> {
        mean_over(&**self.device_mesh().group(dimension)?, tensor)
    }

    /// The tensors of all ranks, of the same shape and dtype, one below the other in rank order: of shape
    /// `[world_size, …]`, outside the graph, as Lightning's `Fabric.all_gather`. Collective.
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

    /// [`all_gather`](Self::all_gather) over the ranks of a mesh dimension or view, as
    /// [`all_reduce_over`](Self::all_reduce_over). Collective over them.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather), and if the mesh has no dimension or view of this name.
    pub fn all_gather_over(&self, dimension: &str, tensor: &Tensor) -> Result<Tensor> {
        gather_over(&**self.device_mesh().group(dimension)?, tensor)
    }

    /// The `value` of rank `src` (anything that serialises) on every rank; those of the others are ignored.
    /// Collective.
    ///
    /// # Errors
    /// If it cannot be written as JSON, there is no such rank, or a peer fails.
    ///
    /// ```
    /// # use fulgurite_core::{Result, fabric::Fabric};
    /// # fn start(fabric: &Fabric) -> Result<()> {
    /// // Clocks differ, so one says what time it is.
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

    /// The values of all ranks (anything that serialises), in rank order. Collective.
    ///
    /// # Errors
    /// If one cannot be written as JSON, or a peer fails.
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
