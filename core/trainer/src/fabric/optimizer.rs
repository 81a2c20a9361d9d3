//! [`FabricOptimizer`].

use std::collections::BTreeMap;
use std::sync::Arc;

use super::step::CurrentStep;
use crate::runtime::{StrategyRuntime, UnusedParameters};
use crate::{Error, Result};
use fulgurite_engine::optim::{
    Interval, Optimizer, ParamGroup, SchedulerConfig, StateTensor, StepScale, WeightAverage,
};
use fulgurite_engine::parameter::{Parameter, PausedGradients};

/// Prefix of the loss scale's scalars in a checkpoint.
const LOSS_SCALE: &str = "fabric.loss_scale.";

/// An optimizer set up by [`Fabric`](super::Fabric).
///
/// Its step takes the mean over the global batch, then clips and updates in one pass, by the
/// learning-rate schedule. The step also clears the gradients, so `zero_grad` is not needed, and
/// makes the model ready for the next forward.
pub struct FabricOptimizer {
    pub(super) inner: Box<dyn Optimizer>,
    pub(super) runtime: Arc<StrategyRuntime>,
    /// [`Parameter::optimizer`](fulgurite_engine::parameter::Parameter::optimizer) of its
    /// parameters.
    pub(super) index: usize,
    /// Its name among several optimizers.
    pub(super) name: Option<String>,
    scheduler: Option<Box<dyn SchedulerConfig>>,
    max_steps: Option<u64>,
    /// Position in the schedule, instead of the number of steps done.
    position: Option<u64>,
    pub(super) unused: UnusedParameters,
    pub(super) steps: u64,
    /// Whether an update has begun and not ended.
    pub(super) updating: bool,
    /// Number of steps skipped because nothing counted.
    pub(super) skipped: u64,
    pub(super) current: CurrentStep,
    pub(super) average: Option<WeightAverage>,
    /// The scale of the last step whose numbers were left on the device.
    pub(super) last_scale: Option<StepScale>,
    /// Factor on the learning rate, besides the schedule's factor.
    lr_scale: f64,
    /// Learning rate that replaces the schedule and `lr_scale`.
    held_lr: Option<f64>,
}

impl FabricOptimizer {
    pub(super) fn new(
        inner: Box<dyn Optimizer>,
        runtime: Arc<StrategyRuntime>,
        index: usize,
    ) -> Self {
        Self {
            inner,
            runtime,
            index,
            name: None,
            scheduler: None,
            max_steps: None,
            position: None,
            unused: UnusedParameters::default(),
            steps: 0,
            updating: false,
            skipped: 0,
            current: CurrentStep::default(),
            average: None,
            last_scale: None,
            lr_scale: 1.0,
            held_lr: None,
        }
    }

    /// Sets the learning-rate schedule; `max_steps` is the run's length, if it is known.
    #[must_use]
    pub fn with_scheduler(
        mut self,
        scheduler: Box<dyn SchedulerConfig>,
        max_steps: Option<u64>,
    ) -> Self {
        self.set_scheduler(scheduler, max_steps);
        self
    }

    /// Like [`with_scheduler`](Self::with_scheduler), for an optimizer in use.
    pub(crate) fn set_scheduler(
        &mut self,
        scheduler: Box<dyn SchedulerConfig>,
        max_steps: Option<u64>,
    ) {
        self.scheduler = Some(scheduler);
        self.max_steps = max_steps;
    }

    /// Sets the run's length for the schedule.
    pub(crate) fn set_max_steps(&mut self, max_steps: Option<u64>) {
        self.max_steps = max_steps;
    }

    /// Sets the schedule's position, instead of the number of steps that this optimizer has done.
    ///
    /// For a [schedule by epochs](SchedulerConfig::interval) the position is the epoch. For a loop
    /// in which this optimizer does not step each time, it is the loop's number of steps.
    pub fn set_schedule_position(&mut self, position: u64) {
        self.position = Some(position);
    }

    /// Returns whether the schedule counts steps or epochs.
    pub fn schedule_interval(&self) -> Interval {
        self.scheduler.as_ref().map_or(Interval::Step, |scheduler| scheduler.interval())
    }

    /// Sets the optimizer's name for messages.
    pub(crate) fn named(mut self, name: &str) -> Self {
        self.name = Some(name.to_owned());
        self
    }

    /// Sets what happens to trainable parameters without a gradient.
    #[must_use]
    pub fn with_unused_parameters(mut self, policy: UnusedParameters) -> Self {
        self.unused = policy;
        self.runtime.set_unused(self.index, policy);
        self
    }

    /// Sets an average of the weights, which checkpoints save with the optimizer's state.
    ///
    /// It is updated after each step if it [follows steps](WeightAverage::follows_steps).
    #[must_use]
    pub fn with_average(mut self, average: WeightAverage) -> Self {
        self.set_average(average);
        self
    }

    /// Like [`with_average`](Self::with_average), for an optimizer in use.
    ///
    /// Set the average before a checkpoint is loaded, such as in a callback's
    /// [`setup`](crate::trainer::Hooks::setup).
    pub fn set_average(&mut self, average: WeightAverage) {
        self.average = Some(average);
    }

    /// Returns the average of the weights, if one was set.
    pub fn average(&self) -> Option<&WeightAverage> {
        self.average.as_ref()
    }

    /// Updates an average from the current weights.
    ///
    /// Does nothing if the average [follows steps](WeightAverage::follows_steps), or without one.
    ///
    /// Call it on all ranks.
    ///
    /// # Errors
    /// As [`WeightAverage::update`].
    pub fn update_average(&mut self) -> Result<()> {
        match &mut self.average {
            Some(average) if !average.follows_steps() => average.update(),
            _ => Ok(()),
        }
    }

    /// Swaps the weights and their average, and makes the model ready for a forward. Collective.
    ///
    /// Does nothing without an average. Do not step before a second call has swapped them back.
    ///
    /// # Errors
    /// As [`WeightAverage::swap`], and if a peer fails.
    pub fn swap_average(&mut self) -> Result<()> {
        let Some(average) = &mut self.average else { return Ok(()) };
        average.swap()?;
        self.runtime.prepare_forward()
    }

    /// Puts the weights of training (`true`) or of evaluations in place, for an optimizer whose
    /// weights differ ([`Optimizer::set_training`]), and makes the model ready for a forward.
    /// Returns whether anything changed. Collective.
    ///
    /// With other optimizers nothing happens. Call it around evaluations and
    /// [saves](super::Checkpoints::save) in a loop of your own.
    ///
    /// # Errors
    /// As [`Optimizer::set_training`], and if a peer fails.
    pub fn set_training(&mut self, training: bool) -> Result<bool> {
        let changed = self.inner.set_training(training)?;
        if changed {
            self.runtime.prepare_forward()?;
        }
        Ok(changed)
    }

    /// Whether the optimizer averages weights itself ([`Optimizer::averages_weights`]).
    pub fn averages_weights(&self) -> bool {
        self.inner.averages_weights()
    }

    /// Number of optimizer steps done, including [skipped](Self::skipped_steps) steps.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Number of steps that changed nothing because every target of the global batch was ignored.
    pub fn skipped_steps(&self) -> u64 {
        self.skipped
    }

    /// Returns the next step's learning rate, for parameter groups without their own rate.
    ///
    /// # Errors
    /// If the schedule needs the run's length, but it is unknown.
    pub fn learning_rate(&self) -> Result<f64> {
        Ok(self.inner.learning_rate() * self.schedule_factor()?)
    }

    /// The factor on the learning rate besides the schedule's; 1 unless [set](Self::set_lr_scale).
    pub fn lr_scale(&self) -> f64 {
        self.lr_scale
    }

    /// Sets a factor on the learning rate of all groups, from the next step on.
    ///
    /// It replaces the previous factor, and checkpoints save it. Set the same factor on all ranks.
    pub fn set_lr_scale(&mut self, scale: f64) {
        self.lr_scale = scale;
    }

    /// Sets the learning rate from the next step on.
    ///
    /// It replaces the schedule and [`lr_scale`](Self::lr_scale), until a call with `None`. Groups
    /// with their own rate keep their proportion to it. Checkpoints save it. Set the same rate on
    /// all ranks.
    ///
    /// # Errors
    /// If the rate is not finite or negative, or if the configured rate is 0, because a factor
    /// cannot change it.
    pub fn set_learning_rate(&mut self, lr: Option<f64>) -> Result<()> {
        if let Some(lr) = lr {
            if !(lr >= 0.0 && lr.is_finite()) {
                return Err(Error::other(format!("the learning rate {lr} is no number from 0 on")));
            }
            if self.inner.learning_rate() == 0.0 {
                let message =
                    "`optimizer.lr` is 0, so that the learning rate cannot be set to another";
                return Err(Error::Config(message.to_owned()));
            }
        }
        self.held_lr = lr;
        Ok(())
    }

    /// Whether a [set](Self::set_learning_rate) rate replaces the schedule and
    /// [`lr_scale`](Self::lr_scale).
    pub fn holds_learning_rate(&self) -> bool {
        self.held_lr.is_some()
    }

    pub(super) fn schedule_factor(&self) -> Result<f64> {
        if let Some(lr) = self.held_lr {
            return Ok(lr / self.inner.learning_rate());
        }
        let factor = match &self.scheduler {
            Some(scheduler) => {
                let position = match scheduler.interval() {
                    Interval::Step => self.position.unwrap_or(self.steps),
                    Interval::Epoch => self.position.unwrap_or(0),
                };
                scheduler.factor(position, self.max_steps)?
            }
            None => 1.0,
        };
        Ok(factor * self.lr_scale)
    }

    /// See [`Fabric::toggle_optimizer`](super::Fabric::toggle_optimizer).
    pub(crate) fn toggle(&self) -> Result<PausedGradients> {
        let others = self.runtime.tree()?.trainable().filter(|p| p.optimizer() != self.index);
        Ok(PausedGradients::of(others))
    }

    /// The parameters that the optimizer updates.
    pub fn parameters(&self) -> &[Parameter] {
        self.inner.parameters()
    }

    /// Returns all state tensors, for checkpoints.
    ///
    /// # Errors
    /// If memory for them cannot be allocated.
    pub fn state_tensors(&mut self) -> Result<Vec<StateTensor>> {
        let mut states = self.inner.state_tensors()?;
        if let Some(average) = &self.average {
            states.extend(average.state()?);
        }
        Ok(states)
    }

    /// Returns the parameter groups with their options.
    ///
    /// The first group has the optimizer's own options. Options are the learning rate before the
    /// schedule, the weight decay, and others that depend on the optimizer.
    pub fn param_groups(&self) -> Vec<ParamGroup> {
        self.inner.param_groups()
    }

    /// Restores the options that [`param_groups`](Self::param_groups) returned.
    ///
    /// # Errors
    /// If the options belong to another kind of optimizer or are out of range.
    pub fn load_param_groups(&mut self, groups: &[ParamGroup]) -> Result<()> {
        self.inner.load_param_groups(groups)
    }

    /// Returns the state that is not a tensor, by name, for checkpoints.
    pub fn scalars(&self) -> BTreeMap<String, f64> {
        let mut scalars = self.inner.scalars();
        scalars.insert("fabric.steps".to_owned(), self.steps as f64);
        if self.skipped > 0 {
            scalars.insert("fabric.skipped_steps".to_owned(), self.skipped as f64);
        }
        if self.lr_scale != 1.0 {
            scalars.insert("fabric.lr_scale".to_owned(), self.lr_scale);
        }
        if let Some(lr) = self.held_lr {
            scalars.insert("fabric.learning_rate".to_owned(), lr);
        }
        if let Ok(Some(scale)) = self.runtime.loss_scale() {
            let named = |(key, value)| (format!("{LOSS_SCALE}{key}"), value);
            scalars.extend(scale.scalars().into_iter().map(named));
        }
        if let Some(average) = &self.average {
            let named = |(key, value)| (format!("{}.{key}", average.name()), value);
            scalars.extend(average.scalars().into_iter().map(named));
        }
        scalars
    }

    /// Restores the state that [`scalars`](Self::scalars) returned.
    ///
    /// # Errors
    /// If a scalar that the optimizer needs is missing.
    pub fn load_scalars(&mut self, scalars: &BTreeMap<String, f64>) -> Result<()> {
        let mut inner = scalars.clone();
        let steps = inner.remove("fabric.steps").ok_or_else(|| {
            Error::other("the optimizer's state has no `fabric.steps`; it is of another version")
        })?;
        self.steps = steps as u64;
        self.skipped = inner.remove("fabric.skipped_steps").unwrap_or(0.0) as u64;
        self.lr_scale = inner.remove("fabric.lr_scale").unwrap_or(1.0);
        self.held_lr = inner.remove("fabric.learning_rate");
        if let Some(mut scale) = self.runtime.loss_scale()? {
            let own = |(name, value): (&String, &f64)| {
                name.strip_prefix(LOSS_SCALE).map(|name| (name.to_owned(), *value))
            };
            scale.load_scalars(&inner.iter().filter_map(own).collect());
            self.runtime.set_loss_scale(scale)?;
        }
        inner.retain(|name, _| !name.starts_with(LOSS_SCALE));
        if let Some(average) = &mut self.average {
            let prefix = format!("{}.", average.name());
            let own = |(name, value): (&String, &f64)| {
                name.strip_prefix(&prefix).map(|name| (name.to_owned(), *value))
            };
            average.load_scalars(&inner.iter().filter_map(own).collect())?;
        }
        inner.retain(|name, _| !name.starts_with("ema.") && !name.starts_with("swa."));
        self.inner.load_scalars(&inner)
    }
}
