//! What loops exchange over all ranks.

use candle_core::Tensor;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Fabric;
use crate::{Error, Result};
use fulgurite_engine::collective::{
    AllGather, Collective, ReduceOp, all_gather_object, broadcast_object,
};

impl Fabric {
    /// Reduces a tensor over all ranks, in place. Collective.
    ///
    /// # Errors
    /// If a peer fails.
    pub fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<()> {
        self.world().run(Collective::all_reduce(tensor, op))
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
        let input = tensor.detach().contiguous()?;
        let shape = [&[self.world_size()], input.dims()].concat();
        let output = Tensor::zeros(shape, input.dtype(), input.device())?;
        let part = AllGather::even(&output, &input, self.world_size());
        self.world().run(Collective::all_gather_into(vec![part]))?;
        Ok(output)
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
                "there is no rank {src} to broadcast from: there are {ranks} rank(s), counted from 0"
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
