//! One optimizer step of a session.

use super::hooks::Hook;
use super::late::{StepReport, UnreadStep};
use super::log_table::{Stage, taken};
use super::manual::Manual;
use super::session::{Cursor, Session, training};
use super::training_loop::LoopPlan;
use super::{ItemRate, StepContext};
use crate::fabric::{FabricOptimizer, FabricOptimizers, NON_FINITE_HINT, PendingStep, StepNumbers};
use crate::{Error, Result};
use fulgurite_engine::autograd::detect_anomaly;
use fulgurite_engine::data::StepSamples;
use fulgurite_engine::module::ForwardScope;
use fulgurite_engine::optim::Interval;
use fulgurite_engine::parallel::explain_mismatch;
use fulgurite_engine::strategy::Loss;

/// How a step ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StepEnd {
    /// The parameters are updated.
    Done,
    /// It was left, and is to begin again with smaller micro-batches.
    BeginAgain,
}

/// What came of a step.
struct UpdateOutcome {
    pending: PendingStep,
    /// The count of the losses, over all ranks.
    count: f64,
    lr: f64,
}

impl Session {
    /// One optimizer step: micro-batches, reduction, clipping, update. Collective.
    pub(super) fn train_step(&mut self, plan: &LoopPlan) -> Result<StepEnd> {
        self.parts.meter.begin_step();
        let step = self.cursor.step + 1;
        let of_step = plan.sampler.step_at(self.cursor.samples);
        let ranks = (self.rank(), self.world_size());
        let wanted = self.logs_step(step);
        let mut logged = StepContext::training((step, self.epoch), ranks, wanted);
        self.set_schedules_position();
        let UpdateOutcome { pending, count, lr } = if self.runner.automatic_optimization() {
            match self.gradients(plan, &of_step, &mut logged) {
                Ok(count) => self.update(count)?,
                Err(error) => {
                    self.leave_step(error)?;
                    return Ok(StepEnd::BeginAgain);
                }
            }
        } else {
            self.manual_step(plan, &of_step, &mut logged)?
        };
        // While the device is at this step.
        self.catch_up()?;
        let (samples, before) = (of_step.end, self.cursor);
        self.cursor = Cursor { step, samples };
        self.items = count;
        let rate = ItemRate::new(self.items_name, self.parts.meter.end_step(count));
        logged.table.add_to_epoch(&mut self.epoch_table, wanted)?;
        let mut metrics = self.reduce(&mut logged.table, Stage::Step)?;
        if let Some(scale) = self.parts.fabric.loss_scale()? {
            metrics.insert("loss_scale".to_owned(), scale.factor());
        }
        if metrics.contains_key(&rate.name()) {
            let taken = taken("how many items a second there are");
            return Err(Error::other(format!("logging `{}`: {taken}", rate.name())));
        }
        let skipped = self.skipped_steps();
        if skipped > 0 {
            metrics.insert("skipped_steps".to_owned(), skipped as f64);
        }
        self.record(&metrics);
        self.record(&[("lr".to_owned(), lr)].into());
        let epoch = samples as f64 / plan.order.epoch_len() as f64;
        let report = StepReport { step, epoch, lr, rate, metrics };
        let is_read = pending.is_read();
        self.unread = Some(UnreadStep { report, pending, before });
        if is_read {
            self.catch_up()?;
        }
        self.log_media(&mut logged.table)?;
        self.hook(Hook::TrainStepEnd)?;
        Ok(StepEnd::Done)
    }

    /// The part of a step that can be done again: everything before the update. Returns the count of the losses, over all
    /// ranks. Collective.
    fn gradients(
        &mut self,
        plan: &LoopPlan,
        of_step: &StepSamples,
        logged: &mut StepContext,
    ) -> Result<f64> {
        self.parts.fabric.begin_attempt()?;
        for micro_batch in 0..of_step.micro_batches {
            self.micro_batch(plan, (of_step, micro_batch), logged)?;
        }
        let defer = self.defers_reads(logged.is_logged());
        if !defer {
            self.catch_up()?;
        }
        let clip = self.parts.config.clipping();
        let count = only(&mut self.optimizers).reduce(clip, defer)?;
        self.parts.fabric.end_attempt()?;
        Ok(count)
    }

    /// Forward and backward of one micro-batch. Collective.
    fn micro_batch(
        &mut self,
        plan: &LoopPlan,
        (of_step, micro_batch): (&StepSamples, usize),
        logged: &mut StepContext,
    ) -> Result<()> {
        let index = micro_batch as u64;
        self.batch_hook(Hook::TrainBatchStart, index)?;
        let first_sample = self.load_batch(plan, (of_step, micro_batch), logged)?;
        let step = logged.step;
        let _detecting = self.parts.config.detect_anomaly.then(detect_anomaly);
        let loss = self.forward(first_sample, logged)?;
        self.batch_hook(Hook::BeforeBackward(&loss), index)?;
        {
            let fabric = &self.parts.fabric;
            let _scope = fabric.forward_scope(true, step, first_sample);
            let _no_sync = fabric.no_backward_sync(micro_batch + 1 < of_step.micro_batches);
            let located = |error: Error| error.during(format_args!("in backward of step {step}"));
            fabric.backward(&loss).map_err(located)?;
        }
        drop(loss);
        self.batch_hook(Hook::AfterBackward, index)?;
        self.batch_hook(Hook::TrainBatchEnd, index)
    }

    /// Waits for the next batch, and returns the number of its first sample in the step.
    fn load_batch(
        &mut self,
        plan: &LoopPlan,
        (of_step, micro_batch): (&StepSamples, usize),
        logged: &mut StepContext,
    ) -> Result<u64> {
        let _phase = self.parts.fabric.phase("data");
        let samples = self.runner.next_training_batch()?;
        let is_padding = plan.sampler.is_padding(of_step, micro_batch);
        logged.begin_batch(micro_batch as u64, samples.indices().len(), is_padding);
        Ok(plan.sampler.first_sample(of_step, micro_batch))
    }

    /// The loss by the module's `training_step`, of which nothing counts for padding. Collective.
    fn forward(&mut self, first_sample: u64, logged: &mut StepContext) -> Result<Loss> {
        let (fabric, step, is_padding) = (&self.parts.fabric, logged.step, logged.is_padding);
        let loss = self.runner.training_step(logged, &mut |forward| {
            let scope = fabric.scope(true, step, first_sample);
            let _scope = ForwardScope { is_padding, ..scope }.enter();
            let _phase = fabric.phase("forward");
            forward().map_err(|error| {
                explain_mismatch(error).during(format_args!("in training_step of step {step}"))
            })
        })?;
        if logged.is_padding { loss.ignored() } else { Ok(loss) }
    }

    /// Updates the parameters. Collective.
    fn update(&mut self, count: f64) -> Result<UpdateOutcome> {
        self.hook(Hook::BeforeOptimizerStep)?;
        let optimizer = only(&mut self.optimizers);
        let lr = optimizer.learning_rate()?;
        let pending = optimizer.update()?;
        self.hook(Hook::BeforeZeroGrad)?;
        only(&mut self.optimizers).finish_step()?;
        Ok(UpdateOutcome { pending, count, lr })
    }

    /// A step of a module that optimizes by itself. Collective.
    fn manual_step(
        &mut self,
        plan: &LoopPlan,
        of_step: &StepSamples,
        logged: &mut StepContext,
    ) -> Result<UpdateOutcome> {
        self.hook(Hook::TrainBatchStart)?;
        let first_sample = self.load_batch(plan, (of_step, 0), logged)?;
        let runtime = self.parts.fabric.runtime.clone();
        let _detecting = self.parts.config.detect_anomaly.then(detect_anomaly);
        let optimizers = std::mem::take(training(&mut self.optimizers));
        let clip = self.parts.config.clipping();
        logged.manual = Some(Manual { optimizers, runtime: runtime.clone(), clip });
        let loss = self.forward(first_sample, logged);
        // Also after an error: hooks at the end of a run may save.
        self.optimizers = logged.manual.take().map(|manual| manual.optimizers);
        let totals = runtime.totals_of(&loss?)?;
        if !totals.loss_sum.is_finite() {
            return Err(Error::NonFinite {
                what: "loss",
                value: totals.mean(),
                step: logged.step,
                detail: NON_FINITE_HINT.to_owned(),
            });
        }
        self.hook(Hook::TrainBatchEnd)?;
        // In a step that only accumulates, those of the last update, and what the next one will take.
        let (grad_norm, lr) = match logged.last_step {
            Some(update) => update,
            None => (
                self.metrics.get("grad_norm").copied().unwrap_or(0.0),
                only(&mut self.optimizers).learning_rate()?,
            ),
        };
        let pending = PendingStep::known(StepNumbers { loss: totals.mean(), grad_norm });
        Ok(UpdateOutcome { pending, count: totals.count, lr })
    }

    /// Tells schedules where the next step is, unless they count steps of an optimizer that does one each time.
    pub(super) fn set_schedules_position(&mut self) {
        let automatic = self.runner.automatic_optimization();
        for (_, optimizer) in training(&mut self.optimizers).iter_mut() {
            match optimizer.schedule_interval() {
                Interval::Epoch => optimizer.set_schedule_position(self.epoch),
                Interval::Step if automatic => {}
                Interval::Step => optimizer.set_schedule_position(self.cursor.step),
            }
        }
    }
}

/// The only optimizer of a session whose trainer optimizes; otherwise the first one.
pub(super) fn only(optimizers: &mut Option<FabricOptimizers>) -> &mut FabricOptimizer {
    training(optimizers).first_mut().expect("there is one: it was checked")
}
