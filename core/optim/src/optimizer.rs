//! The optimizer trait.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};

use super::{GradScale, ParamGroup, StepScale, UpdateRanks};
use crate::{Error, Result};
use fulgurite_collective::shard::Region;
use fulgurite_module::parameter::Parameter;

/// One tensor of an optimizer's state, as a checkpoint stores it.
#[derive(Debug, Clone)]
pub struct StateTensor {
    /// The parameter's FQN.
    pub fqn: String,
    /// The state's name: `exp_avg`, `exp_avg_sq`, `momentum_buffer`.
    pub name: &'static str,
    /// This rank's values, flat; shared with the optimizer, not a copy.
    pub values: Tensor,
    /// The position of `values` in a tensor of `shape`.
    pub region: Region,
    /// The parameter's global shape. State of another shape is whole on every rank, with equal
    /// values.
    pub shape: Vec<usize>,
}

/// Updates this rank's shards of parameters.
///
/// Object-safe. State is keyed by FQN and sharded as the parameters are. Every rank calls every
/// method alike. No method is collective, except the steps of an optimizer that communicates over
/// the ranks that [`set_ranks`](Self::set_ranks) gave it.
pub trait Optimizer: Send {
    /// Returns the parameters that this optimizer updates, in declaration order.
    fn parameters(&self) -> &[Parameter];

    /// Updates every parameter that has a [`local_grad`](Parameter::local_grad), in place on
    /// [`local`](Parameter::local)'s values. A parameter without a gradient does not change.
    ///
    /// Collective over the [ranks](Self::set_ranks) for an optimizer that communicates. All of them
    /// have gradients of the same parameters then, and step with the same scale, or none of them
    /// steps.
    fn step(&mut self, scale: &GradScale) -> Result<()>;

    /// Like [`step`](Self::step), with a scale that may still be on the device.
    ///
    /// Training calls this method. By default it waits for the scale; an optimizer that leaves the
    /// scale on the device overrides it, so that the host does not wait.
    ///
    /// A step that the scale skips changes neither values nor state. The optimizer may count a
    /// skipped step: [`load_scalars`](Self::load_scalars) then restores the counts from before it.
    ///
    /// # Errors
    /// As [`step`](Self::step), and if the device cannot be read.
    fn step_by(&mut self, scale: &StepScale) -> Result<()> {
        scale.read()?.map_or(Ok(()), |scale| self.step(&scale))
    }

    /// Gives the optimizer the ranks that hold the other shards of its parameters, for optimizers
    /// that compute with whole tensors. Not collective.
    ///
    /// `Fabric` calls it once, before the first step. An optimizer that updates each element by
    /// itself ignores it, which is the default.
    ///
    /// # Errors
    /// If the optimizer cannot update parameters that are sharded so.
    fn set_ranks(&mut self, ranks: &UpdateRanks) -> Result<()> {
        let _ = ranks;
        Ok(())
    }

    /// Sets the run's seed, for optimizers whose updates use random numbers.
    ///
    /// `Fabric` calls it before the first step.
    fn set_seed(&mut self, seed: u64) {
        let _ = seed;
    }

    /// Whether evaluations have other weights than training, as with an optimizer that averages
    /// them itself: see [`set_training`](Self::set_training).
    fn averages_weights(&self) -> bool {
        false
    }

    /// Puts the weights of training (`true`) or of evaluations in place, and returns whether the
    /// weights may have changed. Not collective.
    ///
    /// The weights of training return to the bit. After a change, `Strategy::prepare_forward` must
    /// be called: layers may compute with a copy of the shards. Training calls it around
    /// validations and saves. An optimizer whose weights are the same in both ignores it, which is
    /// the default.
    ///
    /// # Errors
    /// If a parameter lacks values.
    fn set_training(&mut self, training: bool) -> Result<bool> {
        let _ = training;
        Ok(false)
    }

    /// The base learning rate, before groups' own rates and the schedule.
    fn learning_rate(&self) -> f64;

    /// Sets the factor that the schedule multiplies every group's learning rate with.
    fn set_schedule_factor(&mut self, factor: f64);

    /// Returns all state tensors. Before the first step they are allocated and zero, ready for
    /// loading.
    fn state_tensors(&mut self) -> Result<Vec<StateTensor>>;

    /// Returns the state that is not a tensor, by name, such as `step`.
    fn scalars(&self) -> BTreeMap<String, f64>;

    /// Restores the state that [`scalars`](Self::scalars) returned.
    fn load_scalars(&mut self, scalars: &BTreeMap<String, f64>) -> Result<()>;

    /// Returns the options of the parameters by group, as torch's `param_groups`.
    ///
    /// The first group has the optimizer's own options. By default the list is empty.
    fn param_groups(&self) -> Vec<ParamGroup> {
        Vec::new()
    }

    /// Sets the options that [`param_groups`](Self::param_groups) returned, as torch's
    /// `load_state_dict`.
    ///
    /// Groups are matched by parameter name. A parameter that no group names keeps its options.
    ///
    /// # Errors
    /// If the groups belong to another kind of optimizer, or an option is out of range.
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
    /// Checks the options before any process is started.
    ///
    /// `parameters` is the whole model. No strategy has set it up, so the parameters have no
    /// values.
    ///
    /// # Errors
    /// As [`build`](Self::build). The default checks nothing: errors appear when the optimizer is
    /// built.
    fn check(&self, parameters: &[Parameter]) -> Result<()> {
        let _ = parameters;
        Ok(())
    }

    /// Returns the bytes of state per updated element of a parameter of `dtype`.
    ///
    /// Used to estimate a rank's memory. The default, 0, means unknown.
    fn state_bytes(&self, dtype: DType) -> usize {
        let _ = dtype;
        0
    }

    /// Returns the bytes of state of a whole parameter.
    ///
    /// Used to estimate a rank's memory. By default [`state_bytes`](Self::state_bytes) for each
    /// element; an optimizer whose parameters differ overrides it.
    fn parameter_state_bytes(&self, parameter: &Parameter) -> u128 {
        parameter.elem_count() as u128 * self.state_bytes(parameter.dtype()) as u128
    }

    /// Builds the optimizer for the parameters of a model that a strategy has set up.
    ///
    /// Patterns may name frozen parameters too; frozen parameters are not updated and have no
    /// state.
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
    /// Returns the factor on the learning rate for optimizer step `step`, counted from 0.
    ///
    /// A pure function, so that nothing has to be saved. `max_steps` is the run's length, if known.
    ///
    /// # Errors
    /// If the schedule needs the run's length and `max_steps` is `None`.
    fn factor(&self, step: u64, max_steps: Option<u64>) -> Result<f64>;

    /// Returns the unit that [`factor`](Self::factor) counts. [`ByEpoch`](super::ByEpoch) makes any
    /// schedule count epochs.
    fn interval(&self) -> Interval {
        Interval::Step
    }
}

/// The unit that a schedule counts.
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
