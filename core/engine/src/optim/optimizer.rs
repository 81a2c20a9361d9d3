//! The optimizer trait.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};

use super::{GradScale, ParamGroup, StepScale};
use crate::parameter::Parameter;
use crate::shard::Region;
use crate::{Error, Result};

/// One tensor of an optimizer's state, as a checkpoint takes it.
#[derive(Debug, Clone)]
pub struct StateTensor {
    /// The parameter's FQN.
    pub fqn: String,
    /// The state's name: `exp_avg`, `exp_avg_sq`, `momentum_buffer`.
    pub name: &'static str,
    /// This rank's values, flat; shared with the optimizer, not a copy.
    pub values: Tensor,
    /// Where they lie in a tensor of the parameter's global shape.
    pub region: Region,
    /// The parameter's global shape.
    pub shape: Vec<usize>,
}

/// Updates this rank's shards of parameters. Object-safe; state is keyed by FQN and sharded as the
/// parameters are.
///
/// Every rank calls every method alike; none is collective.
pub trait Optimizer: Send {
    /// The parameters it updates, in declaration order.
    fn parameters(&self) -> &[Parameter];

    /// One update of every parameter that has a [`local_grad`](Parameter::local_grad), in place on
    /// [`local`](Parameter::local)'s values; a parameter without one does not change.
    fn step(&mut self, scale: &GradScale) -> Result<()>;

    /// Like [`step`](Self::step), with a scale that may still be on the device. By default waits for it. Training calls this
    /// one.
    ///
    /// An optimizer that leaves the scale on the device overrides it, so that the host does not wait. A step that the scale
    /// skips changes neither values nor state. Whether it counts makes no difference: [`load_scalars`](Self::load_scalars)
    /// sets the numbers back to those before it.
    ///
    /// # Errors
    /// As [`step`](Self::step), and if the device cannot be read.
    fn step_by(&mut self, scale: &StepScale) -> Result<()> {
        scale.read()?.map_or(Ok(()), |scale| self.step(&scale))
    }

    /// Sets the run's seed, for optimizers whose updates use random numbers. `Fabric` calls it before
    /// the first step.
    fn set_seed(&mut self, seed: u64) {
        let _ = seed;
    }

    /// The base learning rate, before groups' own rates and the schedule.
    fn learning_rate(&self) -> f64;

    /// Sets the factor that the schedule multiplies every group's learning rate with.
    fn set_schedule_factor(&mut self, factor: f64);

    /// All state tensors, allocated (zero-filled) if no step was taken yet, so that they can be
    /// loaded into.
    fn state_tensors(&mut self) -> Result<Vec<StateTensor>>;

    /// State that is not a tensor, by name: `step`.
    fn scalars(&self) -> BTreeMap<String, f64>;

    /// Restores what [`scalars`](Self::scalars) returned.
    fn load_scalars(&mut self, scalars: &BTreeMap<String, f64>) -> Result<()>;

    /// The options that parameters are updated with, as torch's `param_groups`; the first group has the
    /// optimizer's own. By default none are told.
    fn param_groups(&self) -> Vec<ParamGroup> {
        Vec::new()
    }

    /// Sets the options to what [`param_groups`](Self::param_groups) returned, as torch's
    /// `load_state_dict` does. Groups are matched by name; a parameter that none names keeps its options.
    ///
    /// # Errors
    /// If they are of another kind of optimizer, or out of range.
    fn load_param_groups(&mut self, groups: &[ParamGroup]) -> Result<()> {
        match groups {
            [] => Ok(()),
            _ => Err(Error::other(
                "this optimizer takes no parameter groups; its options are those it was built with",
            )),
        }
    }
}

/// An optimizer's configuration: `optimizer.type = "adamw"`.
#[typetag::serde(tag = "type")]
pub trait OptimizerConfig: std::fmt::Debug + Send + Sync {
    /// Checks the options, before any process is started: `parameters` are those of the whole model,
    /// which no strategy has set up, so they have no values.
    ///
    /// # Errors
    /// Those of [`build`](Self::build). By default none: they are found when the optimizer is built.
    fn check(&self, parameters: &[Parameter]) -> Result<()> {
        let _ = parameters;
        Ok(())
    }

    /// Bytes of state for each element that a rank updates, of a parameter of `dtype`: for the estimate
    /// of a rank's memory. By default 0, for an unknown number.
    fn state_bytes(&self, dtype: DType) -> usize {
        let _ = dtype;
        0
    }

    /// Builds the optimizer for the parameters of a model that a strategy has set up. Patterns may name
    /// frozen ones too; those are not updated and have no state.
    ///
    /// # Errors
    /// If an option is out of range or a pattern matches no parameter.
    fn build(&self, parameters: &[Parameter]) -> Result<Box<dyn Optimizer>>;
}

fulgurite_config::plugin_kind!(
    dyn OptimizerConfig,
    fulgurite_config::registry::kind::OPTIMIZER,
    "optimizer"
);

/// A learning-rate schedule's configuration: `scheduler.type = "cosine"`.
#[typetag::serde(tag = "type")]
pub trait SchedulerConfig: std::fmt::Debug + Send + Sync {
    /// The factor on the learning rate for optimizer step `step` (counted from 0), a pure function,
    /// so that nothing need be saved. `max_steps` is the run's length, if it is known.
    ///
    /// # Errors
    /// If the schedule needs a length and there is none.
    fn factor(&self, step: u64, max_steps: Option<u64>) -> Result<f64>;

    /// What [`factor`](Self::factor) counts; [`ByEpoch`](super::ByEpoch) makes any schedule count epochs.
    fn interval(&self) -> Interval {
        Interval::Step
    }
}

/// What a schedule counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interval {
    /// Optimizer steps.
    Step,
    /// Epochs.
    Epoch,
}

fulgurite_config::plugin_kind!(
    dyn SchedulerConfig,
    fulgurite_config::registry::kind::SCHEDULER,
    "scheduler"
);
