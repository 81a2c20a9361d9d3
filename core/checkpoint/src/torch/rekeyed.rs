//! [`RekeyedOptimizer`]: the state of a PyTorch optimizer under its parameters' names.

use std::path::Path;

use candle_core::{DType, Device, Tensor};

use super::optimizer_kind::Kind;
use super::source::TorchSource;
use crate::{RenamedSource, Result, TensorInfo, TensorSource};
use fulgurite_engine::optim::ParamGroup;
use fulgurite_engine::shard::Region;

/// The state of a PyTorch optimizer under its parameters' names.
///
/// [`TorchOptimizer::rekey`](super::TorchOptimizer::rekey) returns it, for
/// `Checkpoints::load_torch_optimizer`. As a [`TensorSource`] it has the moments by
/// [`optimizer_key`](crate::optimizer_key); a read loads only the requested part.
#[derive(Debug)]
pub struct RekeyedOptimizer {
    tensors: RenamedSource<TorchSource>,
    kind: Kind,
    groups: Vec<ParamGroup>,
    /// The step number for the bias correction.
    step: u64,
    /// The step number for the schedule.
    steps: u64,
    /// Whether there are moments.
    moments: bool,
    warning: Option<String>,
}

impl RekeyedOptimizer {
    pub(super) fn new(
        tensors: RenamedSource<TorchSource>,
        kind: Kind,
        groups: Vec<ParamGroup>,
        steps: u64,
        moments: bool,
        warning: Option<String>,
    ) -> Self {
        Self { tensors, kind, groups, step: steps, steps, moments, warning }.with_steps(steps)
    }

    /// The parameter groups with their options under Fulgurite's names.
    ///
    /// `lr` is the learning rate before the schedule: torch's `initial_lr` if it has one.
    pub fn param_groups(&self) -> &[ParamGroup] {
        &self.groups
    }

    /// Returns the number of completed steps, from which a schedule goes on.
    ///
    /// It comes from the state. For SGD it is Lightning's `global_step` if the file has a
    /// single optimizer, and else 1.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Sets the number of steps for the schedule. The state's own number stays; only SGD's state
    /// has none.
    #[must_use]
    pub fn with_steps(mut self, steps: u64) -> Self {
        self.steps = steps;
        if let Kind::Sgd { .. } = self.kind {
            // An existing momentum means that the first step is done.
            self.step = steps.max(u64::from(self.moments));
        }
        self
    }

    /// The optimizer's own `step`, used by Adam's bias correction.
    pub fn optimizer_step(&self) -> u64 {
        self.step
    }
}

impl TensorSource for RekeyedOptimizer {
    fn location(&self) -> &Path {
        self.tensors.location()
    }

    fn names(&self) -> Vec<&str> {
        self.tensors.names()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.tensors.info(name)
    }

    fn read(&self, name: &str, region: &Region, dtype: DType, device: &Device) -> Result<Tensor> {
        self.tensors.read(name, region, dtype, device)
    }

    fn read_into(&self, name: &str, region: &Region, target: &Tensor) -> Result<()> {
        self.tensors.read_into(name, region, target)
    }

    fn read_into_unverified(&self, name: &str, region: &Region, target: &Tensor) -> Result<()> {
        self.tensors.read_into_unverified(name, region, target)
    }

    fn warning(&self) -> Option<String> {
        self.warning.clone()
    }
}
