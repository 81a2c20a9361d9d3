//! An optimizer's step, from complete gradients to updated parameters.
//!
//! Ranks reduce loss and norm, gradients are clipped, and the optimizer updates. The host reads
//! loss and norm before or after the update.

use std::collections::BTreeMap;
use std::mem;

use super::FabricOptimizer;
use crate::run::ClipAlgorithm;
use crate::runtime::{DeviceSums, UnusedParameters};
use crate::{Error, Result};
use fulgurite_engine::execution::read::{self, Later};
use fulgurite_engine::optim::{GradScale, StepScale, clip_factor};
use fulgurite_engine::parameter::Parameter;
use fulgurite_engine::strategy::StepTotals;

/// The end of messages about a loss or norm that is not finite.
pub(crate) const NON_FINITE_HINT: &str = "; parameters are as they were before the step. A lower `optimizer.lr`, a longer warm-up \
     (`scheduler.warmup_steps`) or `trainer.gradient_clip_val` may help; `trainer.detect_anomaly = true` names the layer where it came from";

/// A step's mean loss over all ranks and micro-batches, and its gradient norm before clipping.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepNumbers {
    /// The mean loss; NaN if the step was skipped because nothing counted.
    pub loss: f64,
    /// The norm of the mean gradient; not finite if gradients overflowed in f16 and the step was
    /// skipped.
    pub grad_norm: f64,
}

/// An update whose loss and norm may still be on the device.
///
/// See [`clip_and_step`](FabricOptimizer::clip_and_step).
#[derive(Debug)]
#[must_use = "a loss that is not finite is found when the step is read"]
pub struct PendingStep(Numbers);

#[derive(Debug)]
enum Numbers {
    Read(StepNumbers),
    Pending {
        /// Sum of the loss, and gradient norm.
        read: Later,
        /// Count of the loss over all ranks.
        count: f64,
        /// The optimizer's [`scalars`](FabricOptimizer::scalars) before the update. They are
        /// restored if loss or norm is not finite, because the device then skipped the update.
        scalars: BTreeMap<String, f64>,
    },
}

impl PendingStep {
    /// Creates a step whose loss and norm the host knows.
    pub(crate) fn known(numbers: StepNumbers) -> Self {
        Self(Numbers::Read(numbers))
    }

    /// Whether the host knows loss and norm, so that reading them does not wait.
    pub(crate) fn is_read(&self) -> bool {
        matches!(self.0, Numbers::Read(_))
    }

    /// Returns loss and norm early, for a hook. Waits for the device; the values are not checked.
    pub(crate) fn numbers(&self) -> Result<StepNumbers> {
        match &self.0 {
            Numbers::Read(numbers) => Ok(*numbers),
            Numbers::Pending { read, count, .. } => {
                let numbers = read.at_once()?;
                Ok(StepNumbers { loss: numbers[0] / count, grad_norm: numbers[1] })
            }
        }
    }
}

/// State of the step in progress, before the update.
#[derive(Debug, Default)]
pub(super) struct CurrentStep {
    /// Loss and norm on the device. `None` if the host sums them.
    deferred: Option<Deferred>,
    /// Loss and norm, once the host has read them.
    numbers: Option<StepNumbers>,
    clip: Clip,
    /// Whether the gradients overflowed in f16; `None` until the norm is read.
    overflowed: Option<bool>,
    /// Whether the update has changed nothing. Until the step is finished.
    skipped: bool,
}

/// A step whose loss and norm stay on the device.
#[derive(Debug)]
struct Deferred {
    sums: DeviceSums,
    /// The optimizer's [`scalars`](FabricOptimizer::scalars) before the step and its hooks.
    scalars: BTreeMap<String, f64>,
}

/// The clipping of a step's gradients.
#[derive(Debug, Default, Clone, Copy)]
struct Clip {
    /// Factor on the gradients, which the host computed from the norm.
    factor: Option<f64>,
    /// Largest norm; the device computes the factor.
    max_norm: Option<f64>,
    /// Largest absolute value of an element.
    value: Option<f64>,
}

impl FabricOptimizer {
    /// Updates the parameters with the mean gradient over all ranks and micro-batches since the
    /// last step, and clears the gradients. Collective.
    ///
    /// A step in which nothing counts on any rank (every target is ignored) changes nothing.
    /// [`skipped_steps`](Self::skipped_steps) counts such steps.
    ///
    /// # Errors
    /// [`Error::UnusedParameters`] in the first step, and [`Error::NonFinite`] if the loss is not
    /// finite. Also if the count of a loss is negative or not finite, or if the last backward ran
    /// under `no_backward_sync`. Nothing is changed then.
    pub fn step(&mut self) -> Result<()> {
        // Loss and norm are not pending, because no `reduce` left them on the device.
        let PendingStep(_) = self.update()?;
        self.finish_step()
    }

    /// Clips and [steps](Self::step), without waiting for the device where possible. Collective.
    ///
    /// Loss and norm stay on the device, which computes the clipping factor. If loss or norm is not
    /// finite, the device skips this update and all later ones. [`read`](Self::read) the result
    /// once the device has other work, such as the next step. The trainer does so under
    /// `trainer.late_reads`.
    ///
    /// The host reads loss and norm before the update in f16 (to set the loss scale), with several
    /// optimizers, under `cpu_offload`, and with a strategy without [`deferred_reads`]. An
    /// optimizer that [reads](StepScale::read) the scale waits for the device. A loop that never
    /// reads the results does not notice that its steps have stopped changing anything.
    ///
    /// ```
    /// use fulgurite_core::fabric::{FabricOptimizer, PendingStep};
    /// use fulgurite_core::run::ClipAlgorithm;
    /// # use fulgurite_core::Result;
    ///
    /// /// Steps, and prints the previous step's loss.
    /// fn step(optimizer: &mut FabricOptimizer, last: &mut Option<PendingStep>) -> Result<()> {
    ///     let pending = optimizer.clip_and_step(Some((1.0, ClipAlgorithm::Norm)))?;
    ///     if let Some(last) = last.replace(pending) {
    ///         println!("loss {}", optimizer.read(last)?.loss);
    ///     }
    ///     Ok(())
    /// }
    /// ```
    ///
    /// [`deferred_reads`]: fulgurite_engine::strategy::Capabilities::deferred_reads
    ///
    /// # Errors
    /// As clipping and [`step`](Self::step). If loss and norm stay on the device,
    /// [`read`](Self::read) fails instead if they are not finite.
    pub fn clip_and_step(&mut self, clip: Option<(f64, ClipAlgorithm)>) -> Result<PendingStep> {
        self.reduce(clip, true)?;
        let pending = self.update()?;
        self.finish_step()?;
        Ok(pending)
    }

    /// Returns a step's loss and norm. Waits for the device if they are not computed yet.
    ///
    /// Read steps in order, and read the last step before saving a checkpoint.
    ///
    /// # Errors
    /// On every rank: [`Error::NonFinite`] if loss or norm is not finite. Parameters, optimizer
    /// state and averages are then as before that step, even if later steps have run.
    pub fn read(&mut self, step: PendingStep) -> Result<StepNumbers> {
        let (read, count, scalars) = match step.0 {
            Numbers::Read(numbers) => return Ok(numbers),
            Numbers::Pending { read, count, scalars } => (read, count, scalars),
        };
        let numbers = read.numbers()?;
        let (loss_sum, grad_norm) = (numbers[0], numbers[1]);
        if !(loss_sum.is_finite() && grad_norm.is_finite()) {
            self.load_scalars(&scalars)?;
            self.last_scale = None;
        }
        let loss = self.check_loss(&StepTotals { loss_sum, count, flags: Vec::new() })?;
        self.check_norm(grad_norm)?;
        Ok(StepNumbers { loss, grad_norm })
    }

    /// Sums loss and norm over all ranks, and clips. Collective.
    ///
    /// With `defer` loss and norm stay on the device where possible; otherwise the host reads and
    /// checks both. Returns the count of the step's losses over all ranks.
    ///
    /// # Errors
    /// If a limit is not above 0, if the last backward ran under `no_backward_sync`, if the count
    /// of a loss is negative or not finite, or if the host reads a loss or norm that is not finite.
    pub(crate) fn reduce(
        &mut self,
        clip: Option<(f64, ClipAlgorithm)>,
        defer: bool,
    ) -> Result<f64> {
        self.current.deferred = None;
        self.runtime.check_synchronised(self.index)?;
        if defer && self.can_defer_reads()? {
            match clip {
                None => {}
                Some((max_norm, ClipAlgorithm::Norm)) => check_positive("max_norm", max_norm)?,
                Some((value, ClipAlgorithm::Value)) => check_positive("clip_value", value)?,
            }
            let sums = self.runtime.sum_on_device(self.index);
            let sums = sums.map_err(|error| self.during_step(error))?;
            // The host handles a step in which nothing counts.
            if sums.count > 0.0 {
                match clip {
                    None => {}
                    Some((max_norm, ClipAlgorithm::Norm)) => {
                        self.current.clip.factor = None;
                        self.current.clip.max_norm = Some(max_norm);
                    }
                    Some((value, ClipAlgorithm::Value)) => self.current.clip.value = Some(value),
                }
                let count = sums.count;
                self.current.deferred = Some(Deferred { sums, scalars: self.scalars() });
                return Ok(count);
            }
        }
        self.runtime.read_step(self.index)?;
        let totals = self.step_totals(&[])?;
        let loss = self.check_loss(&totals)?;
        let grad_norm = match clip {
            None => self.read_norm()?,
            Some((limit, ClipAlgorithm::Norm)) => self.clip_gradients_norm(limit)?,
            Some((limit, ClipAlgorithm::Value)) => self.clip_gradients_value(limit)?,
        };
        self.current.numbers = Some(StepNumbers { loss, grad_norm });
        Ok(totals.count)
    }

    /// Whether the host may read loss and norm after the update. The same on all ranks.
    fn can_defer_reads(&self) -> Result<bool> {
        // An update of values in host memory waits for the scale anyway.
        let in_place = |parameter: &Parameter| -> Result<bool> {
            Ok(parameter.local()?.values.device().same_device(parameter.device()))
        };
        let mut parameters = self.inner.parameters().iter();
        Ok(self.runtime.can_defer_reads()?
            && parameters
                .try_fold(true, |all, parameter| Ok::<_, Error>(all && in_place(parameter)?))?)
    }

    /// Updates the parameters, with the clipping that [`reduce`](Self::reduce) or later hooks set.
    /// Collective.
    pub(crate) fn update(&mut self) -> Result<PendingStep> {
        let _phase = self.runtime.phase("optimizer");
        // Taken first, so that an update that fails leaves nothing to the next one.
        let CurrentStep { deferred, numbers, clip, overflowed, .. } = mem::take(&mut self.current);
        self.runtime.check_synchronised(self.index)?;
        if let Some(deferred) = deferred {
            return self.update_on_device(deferred, clip);
        }
        let totals = self.step_totals(&[])?;
        let loss = self.check_loss(&totals)?;
        let numbers = numbers.unwrap_or(StepNumbers { loss, grad_norm: f64::NAN });
        self.current.skipped = totals.count == 0.0;
        if self.current.skipped {
            self.skip();
            return Ok(PendingStep::known(numbers));
        }
        self.runtime.audit_gradients(self.index, self.unused_now())?;
        let overflowed = self.overflowed(overflowed)?;
        let factor = self.runtime.grad_scale(self.index)? * clip.factor.unwrap_or(1.0);
        let scale = GradScale { factor, clip_value: clip.value }.into();
        self.current.skipped = overflowed == Some(true);
        self.apply((!self.current.skipped).then_some(&scale))?;
        if let Some(overflowed) = overflowed {
            self.end_scaled_step(overflowed)?;
        }
        Ok(PendingStep::known(numbers))
    }

    /// Like [`update`](Self::update), with loss and norm on the device.
    fn update_on_device(&mut self, deferred: Deferred, clip: Clip) -> Result<PendingStep> {
        let (Deferred { sums, scalars }, Clip { factor, max_norm, value }) = (deferred, clip);
        let scale =
            sums.scale((factor.unwrap_or(1.0), value), max_norm, self.last_scale.as_ref())?;
        let numbers = scale.numbers().expect("the scale was made on the device");
        let read = read::later(numbers, "loss and gradient norm")?;
        self.runtime.audit_gradients(self.index, self.unused_now())?;
        self.apply(Some(&scale))?;
        self.last_scale = Some(scale);
        Ok(PendingStep(Numbers::Pending { read, count: sums.count, scalars }))
    }

    /// Counts the step and updates parameters, state and averages. With `None` it only counts.
    fn apply(&mut self, scale: Option<&StepScale>) -> Result<()> {
        self.updating = true;
        if let Some(scale) = scale {
            let factor = self.schedule_factor()?;
            self.inner.set_schedule_factor(factor);
            self.inner.step_by(scale)?;
        }
        self.steps += 1;
        if let (Some(average), Some(scale)) = (&mut self.average, scale)
            && average.follows_steps()
        {
            average.update_after(scale)?;
        }
        self.updating = false;
        Ok(())
    }

    /// Whether an update has failed, so that only some values may be those after the step.
    pub(crate) fn is_updating(&self) -> bool {
        self.updating
    }

    /// Counts a step in which nothing counts. Parameters, state and averages stay as they are.
    fn skip(&mut self) {
        self.steps += 1;
        self.skipped += 1;
        if self.runtime.mesh().world().rank() == 0 {
            tracing::warn!(
                "step {} was skipped: nothing counts in its global batch, every target is ignored (`ignore_index`)",
                self.steps
            );
        }
    }

    /// The second half of [`step`](Self::step): clears the gradients and makes the model ready for
    /// the next forward. Collective.
    pub(crate) fn finish_step(&mut self) -> Result<()> {
        let phase = self.runtime.phase("zero grad");
        let skipped = mem::take(&mut self.current.skipped);
        self.runtime.finish_step(self.index, skipped)?;
        drop(phase);
        if let Some(profiler) = self.runtime.profiler() {
            profiler.end_step();
        }
        Ok(())
    }

    /// Clears the gradients since the last step. Not collective.
    ///
    /// [`step`](Self::step) clears them itself. This is for gradients from another optimizer's
    /// loss, computed outside its [turn](super::Fabric::toggle_optimizer).
    ///
    /// # Errors
    /// If the last backward ran under `no_backward_sync`.
    pub fn zero_grad(&mut self) -> Result<()> {
        self.current = CurrentStep::default();
        self.runtime.zero_grad(self.index)
    }

    /// Like [`Fabric::step_totals`](super::Fabric::step_totals), for this optimizer's step.
    ///
    /// # Errors
    /// If a peer fails.
    pub fn step_totals(&self, flags: &[f64]) -> Result<StepTotals> {
        self.runtime.step_totals(self.index, flags).map_err(|error| self.during_step(error))
    }

    /// Returns the mean loss of the step in progress. NaN if nothing counts, so that the step will
    /// be [skipped](Self::skipped_steps).
    ///
    /// # Errors
    /// On every rank: [`Error::NonFinite`] if the sum is not finite. Nothing is changed then.
    pub fn check_loss(&self, totals: &StepTotals) -> Result<f64> {
        if totals.loss_sum.is_finite() {
            return Ok(totals.mean());
        }
        Err(self.non_finite("loss", totals.mean()))
    }

    /// Returns the norm of the mean gradient over all parameters of the optimizer. Collective.
    ///
    /// # Errors
    /// [`Error::NonFinite`] on every rank if the norm is not finite. Nothing is changed then.
    pub fn gradient_norm(&self) -> Result<f64> {
        let norm = self.runtime.gradient_norm(self.index)?;
        if self.runtime.loss_scale()?.is_none() {
            self.check_norm(norm)?;
        }
        Ok(norm)
    }

    /// Like [`gradient_norm`](Self::gradient_norm). Also records whether the gradients overflowed
    /// in f16.
    fn read_norm(&mut self) -> Result<f64> {
        let norm = self.gradient_norm()?;
        self.current.overflowed = Some(!norm.is_finite());
        Ok(norm)
    }

    /// As [`Fabric::clip_gradients_norm`](super::Fabric::clip_gradients_norm).
    pub(crate) fn clip_gradients_norm(&mut self, max_norm: f64) -> Result<f64> {
        check_positive("max_norm", max_norm)?;
        let norm = self.read_norm()?;
        self.current.clip.factor = Some(clip_factor(norm, max_norm));
        self.current.clip.max_norm = None;
        Ok(norm)
    }

    /// As [`Fabric::clip_gradients_value`](super::Fabric::clip_gradients_value).
    pub(crate) fn clip_gradients_value(&mut self, clip_value: f64) -> Result<f64> {
        check_positive("clip_value", clip_value)?;
        let norm = self.read_norm()?;
        self.current.clip.value = Some(clip_value);
        Ok(norm)
    }

    fn check_norm(&self, norm: f64) -> Result<()> {
        if norm.is_finite() { Ok(()) } else { Err(self.non_finite("gradient norm", norm)) }
    }

    fn non_finite(&self, what: &'static str, value: f64) -> Error {
        let of = self.name.as_ref().map(|name| format!(", of the optimizer `{name}`"));
        let detail = format!("{}{NON_FINITE_HINT}", of.unwrap_or_default());
        Error::NonFinite { what, value, step: self.current_step(), detail }
    }

    fn during_step(&self, error: Error) -> Error {
        error.during(format_args!("in step {}", self.current_step()))
    }

    /// The number of the step in progress, counted from 1.
    fn current_step(&self) -> u64 {
        self.steps + 1
    }

    /// Policy for parameters without a gradient in this step. They are an error only in a run's
    /// first step, so never in a resumed run.
    fn unused_now(&self) -> UnusedParameters {
        match self.unused {
            UnusedParameters::Error if self.steps > 0 => UnusedParameters::Ignore,
            policy => policy,
        }
    }

    /// Whether the gradients overflowed in f16 on any rank; `None` in other dtypes. Collective if
    /// `known` is `None`.
    fn overflowed(&self, known: Option<bool>) -> Result<Option<bool>> {
        if self.runtime.loss_scale()?.is_none() {
            return Ok(None);
        }
        match known {
            Some(overflowed) => Ok(Some(overflowed)),
            None => Ok(Some(!self.gradient_norm()?.is_finite())),
        }
    }

    /// Sets the next loss scale.
    fn end_scaled_step(&self, overflowed: bool) -> Result<()> {
        let Some(mut scale) = self.runtime.loss_scale()? else { return Ok(()) };
        let before = scale.factor();
        scale.end_step(overflowed)?;
        if overflowed && self.runtime.mesh().world().rank() == 0 {
            tracing::warn!(
                "step {} was skipped: its gradients overflowed in f16 with a loss scale of {before}, which is {} now",
                self.steps,
                scale.factor()
            );
        }
        self.runtime.set_loss_scale(scale)
    }
}

fn check_positive(name: &str, value: f64) -> Result<()> {
    if value > 0.0 {
        return Ok(());
    }
    Err(Error::Config(format!("{name} = {value}: clipping needs a number greater than 0")))
}
