//! Replacing a checkpoint's weights by their average.

use std::path::Path;

use candle_core::{DType, Device, Tensor};

use super::super::{StoredTensors, TensorInfo, TensorSource};
use super::AnyCheckpoint;
use crate::{Error, Result};
use fulgurite_engine::shard::Region;

/// The names of averages in an optimizer's state.
const AVERAGES: [&str; 2] = ["ema", "swa"];

/// A checkpoint's model with the averages of its trained parameters.
///
/// The averages come from the optimizer's state, in the parameters' dtypes.
pub(super) struct AveragedModel<'a> {
    model: &'a dyn TensorSource,
    optimizer: &'a StoredTensors,
    /// The entry of [`AVERAGES`] that the checkpoint has.
    kind: &'static str,
}

impl<'a> AveragedModel<'a> {
    /// Finds the average in `checkpoint`.
    pub(super) fn new(checkpoint: &'a AnyCheckpoint) -> Result<Self> {
        let is_kept = |kind: &&&str| {
            let end = format!(".{kind}");
            let names = checkpoint.optimizer().map(|optimizer| optimizer.names());
            names.is_some_and(|names| names.iter().any(|name| name.ends_with(&end)))
        };
        let fails = |message: &str| Err(Error::checkpoint(checkpoint.location(), message));
        let (Some(kind), Some(optimizer)) = (AVERAGES.iter().find(is_kept), checkpoint.optimizer())
        else {
            return fails(
                "it has no average of the weights: training keeps one with `trainer.ema_decay` or the callback \
                 `stochastic_weight_averaging`",
            );
        };
        let state = checkpoint.manifest().map(|manifest| &manifest.state["optimizer"]);
        if state.is_some_and(|state| state[format!("{kind}.updates")] == 0.0) {
            return fails(
                "it was saved before anything was averaged; take a later checkpoint, or the weights \
                 themselves",
            );
        }
        Ok(Self { model: checkpoint.model(), optimizer, kind })
    }

    /// Returns the key of a parameter's average; `None` for a frozen parameter.
    fn key(&self, name: &str) -> Option<String> {
        let key = format!("state.{name}.{}", self.kind);
        self.optimizer.info(&key).is_some().then_some(key)
    }
}

impl TensorSource for AveragedModel<'_> {
    fn location(&self) -> &Path {
        self.model.location()
    }

    fn names(&self) -> Vec<&str> {
        self.model.names()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.model.info(name)
    }

    fn read(&self, name: &str, region: &Region, dtype: DType, device: &Device) -> Result<Tensor> {
        match self.key(name) {
            Some(key) => self.optimizer.read(&key, region, dtype, device),
            None => self.model.read(name, region, dtype, device),
        }
    }

    fn read_stored(&self, name: &str) -> Result<Vec<u8>> {
        match self.key(name) {
            Some(key) => self.optimizer.read_stored(&key),
            None => self.model.read_stored(name),
        }
    }

    fn unreadable(&self, name: &str) -> Option<&str> {
        self.model.unreadable(name)
    }
}
