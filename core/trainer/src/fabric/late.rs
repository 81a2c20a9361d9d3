//! Steps whose loss and gradient norm stay on the device.

use std::collections::BTreeMap;

use super::FabricOptimizer;
use super::optimizer::check_positive;
use crate::Result;
use crate::run::ClipAlgorithm;
use fulgurite_engine::execution::read::{self, Later};
use fulgurite_engine::optim::StepScale;
use fulgurite_engine::strategy::StepTotals;

/// The numbers of a step that are still on the device, and what undoes the step if they are not finite: the device has
/// skipped it then, and all after it.
#[derive(Debug)]
pub(crate) struct LateStep {
    scale: StepScale,
    /// The sum of the loss, and the norm.
    numbers: Later,
    /// What the loss counted, of all ranks.
    count: f64,
    /// Those of the optimizer before the step.
    scalars: BTreeMap<String, f64>,
}

impl LateStep {
    pub(crate) fn count(&self) -> f64 {
        self.count
    }

    /// The mean loss and the norm for somebody who asks for them before they are due: waits for the device.
    pub(crate) fn at_once(&self) -> Result<(f64, f64)> {
        let numbers = self.numbers.at_once()?;
        Ok((numbers[0] / self.count, numbers[1]))
    }
}

/// The mean loss of a step, over all ranks and micro-batches, and the norm of its mean gradient before it is clipped.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepNumbers {
    /// The mean loss; NaN if nothing counted, so that the step was skipped.
    pub loss: f64,
    /// The norm of the gradient; not finite in f16 if the step was skipped.
    pub grad_norm: f64,
}

/// The numbers of a step of [`FabricOptimizer::step_late`], to be [read](FabricOptimizer::read_late).
#[derive(Debug)]
#[must_use = "a loss that is not finite is found when the numbers are read"]
pub struct LateNumbers(Numbers);

/// What the host has of a step's numbers.
#[derive(Debug)]
pub(crate) enum Numbers {
    /// They are on the device, where the update uses them.
    Late(LateStep),
    /// It has read them: it needed them for the step.
    Known(StepNumbers),
}

impl FabricOptimizer {
    /// As clipping and [`step`](Self::step), for loops that wait for no device: loss and norm stay there and make the
    /// factor of clipping, and if one of them is not finite, this step and all after it change nothing. The host
    /// [reads](Self::read_late) them when it has given the device something else to do, such as the next step. This is what
    /// the trainer does with `trainer.late_reads`. Collective.
    ///
    /// Where the host has to know the numbers, it reads them before the step: in f16, whose loss scale it sets, with several
    /// optimizers, under `cpu_offload`, and with a strategy that cannot ([`can_step_late`]). An optimizer that
    /// [reads](fulgurite_engine::optim::StepScale::read) the scale waits for it. A loop that never reads does not hear that its
    /// steps change nothing any more.
    ///
    /// ```
    /// use fulgurite_core::fabric::{FabricOptimizer, LateNumbers};
    /// use fulgurite_core::run::ClipAlgorithm;
    /// # use fulgurite_core::Result;
    ///
    /// /// A step of which the numbers are printed a step later.
    /// fn step(optimizer: &mut FabricOptimizer, last: &mut Option<LateNumbers>) -> Result<()> {
    ///     let numbers = optimizer.step_late(Some((1.0, ClipAlgorithm::Norm)))?;
    ///     if let Some(last) = last.replace(numbers) {
    ///         println!("loss {}", optimizer.read_late(last)?.loss);
    ///     }
    ///     Ok(())
    /// }
    /// ```
    ///
    /// [`can_step_late`]: fulgurite_engine::strategy::Strategy::can_step_late
    ///
    /// # Errors
    /// As clipping and [`step`](Self::step), those of numbers that are not finite when they are read.
    pub fn step_late(&mut self, clip: Option<(f64, ClipAlgorithm)>) -> Result<LateNumbers> {
        if self.can_step_late()? {
            let numbers = self.late_step(clip)?;
            match &numbers {
                Numbers::Late(late) => self.update_late(late)?,
                Numbers::Known(_) => self.update()?,
            }
            self.finish_step()?;
            return Ok(LateNumbers(numbers));
        }
        let numbers = self.clip(clip)?;
        self.step()?;
        Ok(LateNumbers(Numbers::Known(numbers)))
    }

    /// The numbers of a step. Waits for the device if it has not come that far. Steps are read in their order, the last one
    /// before anything is made of the state after it that lasts, such as a checkpoint.
    ///
    /// # Errors
    /// On every rank: [`Error::NonFinite`](crate::Error::NonFinite) if one is not finite. Values, state and averages are as
    /// before that step, also if there were others since.
    pub fn read_late(&mut self, numbers: LateNumbers) -> Result<StepNumbers> {
        match numbers.0 {
            Numbers::Known(numbers) => Ok(numbers),
            Numbers::Late(late) => self.end_late_step(&late),
        }
    }

    /// The numbers of the step that is being computed, whose gradients are clipped at its end. Collective.
    pub(crate) fn clip(&mut self, clip: Option<(f64, ClipAlgorithm)>) -> Result<StepNumbers> {
        self.read_step()?;
        let totals = self.step_totals(&[])?;
        let loss = self.check_loss(&totals)?;
        let grad_norm = match clip {
            None => self.norm_without_clipping()?,
            Some((limit, ClipAlgorithm::Norm)) => self.clip_gradients_norm(limit)?,
            Some((limit, ClipAlgorithm::Value)) => self.clip_gradients_value(limit)?,
        };
        Ok(StepNumbers { loss, grad_norm })
    }

    /// Whether [`late_step`](Self::late_step) may be called. The same on all ranks.
    pub(crate) fn can_step_late(&self) -> Result<bool> {
        // Values on the host make the update wait for the scale: nothing is won by reading later.
        let on_host = |parameter: &fulgurite_engine::parameter::Parameter| {
            Ok(!parameter.local()?.values.device().same_device(parameter.device()))
        };
        let on_host: Result<Vec<bool>> = self.inner.parameters().iter().map(on_host).collect();
        Ok(self.runtime.can_step_late()? && !on_host?.contains(&true))
    }

    /// In place of totals, norm and clipping: makes the scale of the step's gradients on the device, and begins to read loss
    /// and norm. For [`update_late`](Self::update_late). Collective.
    ///
    /// # Errors
    /// If a limit is not above 0, and if the count of a loss is none.
    pub(crate) fn late_step(&mut self, clip: Option<(f64, ClipAlgorithm)>) -> Result<Numbers> {
        let limits = match clip {
            None => (None, None),
            Some((max_norm, ClipAlgorithm::Norm)) => {
                check_positive("max_norm", max_norm)?;
                (Some(max_norm), None)
            }
            Some((clip_value, ClipAlgorithm::Value)) => {
                check_positive("clip_value", clip_value)?;
                (None, Some(clip_value))
            }
        };
        let before = self.late_before.as_ref();
        let late = self.runtime.late_scale(self.index, limits, before);
        let (scale, count) = late.map_err(|error| self.during_step(error))?;
        if count == 0.0 {
            // It is skipped, which the host has to know.
            return self.clip(clip).map(Numbers::Known);
        }
        let numbers = scale.numbers().expect("the scale was made on the device");
        let numbers = read::later(numbers, "loss and gradient norm")?;
        Ok(Numbers::Late(LateStep { scale, numbers, count, scalars: self.scalars() }))
    }

    /// As [`update`](Self::update), of a step that the device skips if its loss or norm is not finite. Collective.
    pub(crate) fn update_late(&mut self, late: &LateStep) -> Result<()> {
        let _phase = self.runtime.phase("optimizer");
        self.runtime.check_synchronised(self.index)?;
        self.runtime.audit_gradients(self.index, self.unused_now())?;
        let factor = self.schedule_factor()?;
        self.inner.set_schedule_factor(factor);
        self.inner.step_by(&late.scale)?;
        self.late_before = Some(late.scale.clone());
        self.steps += 1;
        match &mut self.average {
            Some(average) if average.follows_steps() => average.update_after(&late.scale),
            _ => Ok(()),
        }
    }

    /// The mean loss and the norm of a step that was left on the device. Waits for the device if it has not come that far.
    ///
    /// # Errors
    /// On every rank: [`Error::NonFinite`](crate::Error::NonFinite) if one is not finite. Values, state and averages are as
    /// before that step, and the optimizer's numbers are set back to what they were then.
    pub(crate) fn end_late_step(&mut self, late: &LateStep) -> Result<StepNumbers> {
        let numbers = late.numbers.numbers()?;
        let (loss_sum, norm) = (numbers[0], numbers[1]);
        if !(loss_sum.is_finite() && norm.is_finite()) {
            self.load_scalars(&late.scalars)?;
            self.late_before = None;
        }
        let loss =
            self.check_loss(&StepTotals { loss_sum, count: late.count, flags: Vec::new() })?;
        self.check_norm(norm)?;
        Ok(StepNumbers { loss, grad_norm: norm })
    }
}
