//! Collectives for training loops.

use candle_core::Tensor;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Fabric;
use crate::{Error, Result, counted};
use fulgurite_engine::collective::{
    AllGather, Collective, ProcessGroup, ReduceOp, all_gather_object, broadcast_object,
};

/// The collectives of the ranks along a mesh dimension; see [`Fabric::collectives`].
pub struct GroupCollectives<'a>(&'a dyn ProcessGroup);

impl GroupCollectives<'_> {
    /// Reduces a tensor over these ranks, in place. Collective over them.
    ///
    /// # Errors
    /// If a peer fails.
    pub fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<()> {
        self.0.run(Collective::all_reduce(tensor, op))
    }

    /// Returns the mean of these ranks' tensors, like [`Fabric::all_mean`]. Collective over them.
    ///
    /// # Errors
    /// As [`Fabric::all_mean`].
    pub fn all_mean(&self, tensor: &Tensor) -> Result<Tensor> {
        if !tensor.dtype().is_float() {
            return Err(Error::other(format!(
                "a mean over ranks is of floating-point numbers, and this tensor is of {:?}; convert it first",
                tensor.dtype()
            )));
        }
        let sum = tensor.detach().copy()?.contiguous()?;
        self.all_reduce(&sum, ReduceOp::Sum)?;
        Ok((sum / self.0.size() as f64)?)
    }

    /// Stacks these ranks' tensors, like [`Fabric::all_gather`]. Collective over them.
    ///
    /// # Errors
    /// As [`Fabric::all_gather`].
    pub fn all_gather(&self, tensor: &Tensor) -> Result<Tensor> {
        let input = tensor.detach().contiguous()?;
        let shape = [&[self.0.size()], input.dims()].concat();
        let output = Tensor::zeros(shape, input.dtype(), input.device())?;
        let part = AllGather::even(&output, &input, self.0.size());
        self.0.run(Collective::all_gather_into(vec![part]))?;
        Ok(output)
    }
}

impl Fabric {
    /// Reduces a tensor over all ranks, in place. Collective.
    ///
    /// # Errors
    /// If a peer fails.
    pub fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<()> {
        GroupCollectives(&**self.world()).all_reduce(tensor, op)
    }

    /// Returns the collectives of the ranks along a mesh dimension or view. Not collective.
    ///
    /// Examples are `"data_parallel"` and `"tensor_parallel"`. These ranks differ from each other
    /// only in that dimension.
    ///
    /// # Errors
    /// If the mesh lacks this dimension or view.
    pub fn collectives(&self, dimension: &str) -> Result<GroupCollectives<'_>> {
        Ok(GroupCollectives(&**self.device_mesh().group(dimension)?))
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
        GroupCollectives(&**self.world()).all_mean(tensor)
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
        GroupCollectives(&**self.world()).all_gather(tensor)
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
