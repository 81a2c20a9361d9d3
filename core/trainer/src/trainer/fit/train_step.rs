//! One training step: forwards, backwards, reduction over ranks, clipping, update, report.

use std::collections::BTreeMap;
use std::mem;

use crate::fabric::{FabricOptimizer, NON_FINITE_HINT, PendingStep, StepNumbers};
use crate::trainer::StepContext;
use crate::trainer::fit::plan::LoopPlan;
use crate::trainer::module::hooks::Hook;
use crate::trainer::module::manual::Manual;
use crate::trainer::record::recorder::{DoneStep, StepReport};
use crate::trainer::session::Session;
use crate::{Error, Result, counted};
use fulgurite_engine::autograd::detect_anomaly;
use fulgurite_engine::data::StepSamples;
use fulgurite_engine::module::ForwardScope;
use fulgurite_engine::optim::Interval;
use fulgurite_engine::parallel::explain_mismatch;
use fulgurite_engine::strategy::Loss;

/// The outcome of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StepEnd {
    /// The parameters are updated.
    Done,
    /// The step was abandoned, and must restart with smaller micro-batches.
    BeginAgain,
}

/// The update of a step.
struct Update {
    numbers: PendingStep,
    /// The count of the losses, over all ranks.
    items: f64,
    lr: f64,
    /// Whether the other ranks have finished the step too.
    finished: Result<()>,
}

impl Session {
    /// Runs one optimizer step: micro-batches, reduction, clipping, update. Collective.
    pub(crate) fn train_step(&mut self, plan: &LoopPlan) -> Result<StepEnd> {
        self.recorder.begin_step();
        let step = self.progress.step() + 1;
        let of_step = plan.sampler.step_at(self.progress.samples());
        let is_logged = self.logs_step(step);
        let position = (step, self.progress.epoch());
        let mut ctx = StepContext::training(position, self.step_parts(), is_logged);
        self.set_schedules_position();

        let update = if self.runner.automatic_optimization() {
            match self.accumulate_gradients(plan, &of_step, &mut ctx) {
                Ok(items) => self.update(items)?,
                Err(error) => {
                    self.leave_step(error)?;
                    return Ok(StepEnd::BeginAgain);
                }
            }
        } else {
            self.manual_step(plan, &of_step, &mut ctx)?
        };
        let Update { numbers, items, lr, finished } = update;

        // Read the step before while the device computes this one.
        self.read_pending_step()?;
        let before = self.progress.end_step(of_step.end, items);
        self.buffers_before.clear();
        let rate = self.recorder.end_step(items);
        let fabric = &self.setup.fabric;
        let reduced = finished
            .and_then(|()| self.recorder.reduce_step(fabric, &mut ctx.table, is_logged, &rate));
        let (mut metrics, lost) = match reduced {
            Ok(metrics) => (metrics, None),
            // The step is done on this rank, which may go on with it in the next generation.
            Err(error @ (Error::PeerFailed { .. } | Error::Collective { .. })) => {
                (BTreeMap::new(), Some(error))
            }
            Err(error) => return Err(error),
        };
        let skipped = self.skipped_steps();
        if skipped > 0 {
            metrics.insert("skipped_steps".to_owned(), skipped as f64);
        }
        self.recorder.record(step, &metrics);
        self.recorder.record_one(step, "lr", lr);
        let epoch = of_step.end as f64 / plan.order.epoch_len() as f64;
        let report = StepReport { step, epoch, lr, rate, metrics };
        let is_read = numbers.is_read();
        self.recorder.set_pending(DoneStep { report, numbers, before });
        if let Some(error) = lost {
            return Err(error);
        }
        if is_read {
            self.read_pending_step()?;
        }
        self.recorder.log_media(&self.setup.fabric, step, &mut ctx.table)?;
        self.hook(Hook::TrainStepEnd)?;
        Ok(StepEnd::Done)
    }

    /// Runs the repeatable part of a step, which is everything before the update. Collective.
    ///
    /// Returns the count of the losses, over all ranks.
    fn accumulate_gradients(
        &mut self,
        plan: &LoopPlan,
        of_step: &StepSamples,
        ctx: &mut StepContext,
    ) -> Result<f64> {
        self.setup.fabric.begin_attempt()?;
        self.buffers_before = match self.setup.config.elastic.enabled {
            true => self.setup.fabric.copy_buffers()?,
            false => Vec::new(),
        };
        if let Some(pipeline) = self.setup.fabric.runtime.pipeline()? {
            self.micro_batches_in_pipeline(&*pipeline, (plan, of_step), ctx)?;
        } else {
            for micro_batch in 0..of_step.micro_batches {
                self.micro_batch(plan, (of_step, micro_batch), ctx)?;
            }
        }
        let defer = self.defers_reads(ctx.is_logged());
        if !defer {
            self.read_pending_step()?;
        }
        let clip = self.setup.config.clipping();
        let items = self.sole_optimizer().reduce(clip, defer)?;
        self.setup.fabric.end_attempt()?;
        Ok(items)
    }

    /// Runs forward and backward of one micro-batch. Collective.
    fn micro_batch(
        &mut self,
        plan: &LoopPlan,
        (of_step, micro_batch): (&StepSamples, usize),
        ctx: &mut StepContext,
    ) -> Result<()> {
        let index = micro_batch as u64;
        self.batch_hook(Hook::TrainBatchStart, index)?;
        let first_sample = self.load_batch(plan, (of_step, micro_batch), ctx)?;
        let step = ctx.step;
        let _detecting = self.setup.config.detect_anomaly.then(detect_anomaly);
        let loss = self.forward(first_sample, ctx)?;
        self.batch_hook(Hook::BeforeBackward(&loss), index)?;
        {
            let fabric = &self.setup.fabric;
            let _scope = fabric.forward_scope(true, step, first_sample);
            let _no_sync = fabric.no_backward_sync(micro_batch + 1 < of_step.micro_batches);
            let located = |error: Error| error.during(format_args!("in backward of step {step}"));
            fabric.backward(&loss).map_err(located)?;
        }
        drop(loss);
        self.batch_hook(Hook::AfterBackward, index)?;
        self.batch_hook(Hook::TrainBatchEnd, index)
    }

    /// Waits for the next batch, and returns the index of its first sample in the step.
    fn load_batch(
        &mut self,
        plan: &LoopPlan,
        (of_step, micro_batch): (&StepSamples, usize),
        ctx: &mut StepContext,
    ) -> Result<u64> {
        let _phase = self.setup.fabric.measurements().phase("data");
        let samples = self.runner.next_training_batch()?;
        let is_padding = plan.sampler.is_padding(of_step, micro_batch);
        ctx.begin_batch(micro_batch as u64, samples.indices().len(), is_padding);
        Ok(plan.sampler.first_sample(of_step, micro_batch))
    }

    /// Computes the loss by the module's `training_step`. A padding batch does not count.
    /// Collective.
    fn forward(&mut self, first_sample: u64, ctx: &mut StepContext) -> Result<Loss> {
        let (fabric, step, is_padding) = (&self.setup.fabric, ctx.step, ctx.is_padding);
        let loss = self.runner.training_step(ctx, &mut |forward| {
            let scope = fabric.scope(true, step, first_sample);
            let _scope = ForwardScope { is_padding, ..scope }.enter();
            let _phase = fabric.measurements().phase("forward");
            forward().map_err(|error| {
                explain_mismatch(error).during(format_args!("in training_step of step {step}"))
            })
        })?;
        if ctx.is_padding { loss.ignored() } else { Ok(loss) }
    }

    /// Updates the parameters. Collective.
    fn update(&mut self, items: f64) -> Result<Update> {
        self.hook(Hook::BeforeOptimizerStep)?;
        let optimizer = self.sole_optimizer();
        let lr = optimizer.learning_rate()?;
        let numbers = optimizer.update()?;
        let finished = self.hook(Hook::BeforeZeroGrad);
        let finished = finished.and_then(|()| self.sole_optimizer().finish_step());
        // With buffers, which are made equal after the update, the step is done on all ranks or on
        // none.
        let is_loss =
            |error: &Error| matches!(error, Error::PeerFailed { .. } | Error::Collective { .. });
        match finished {
            Err(error) if !is_loss(&error) || self.setup.fabric.has_buffers()? => Err(error),
            finished => Ok(Update { numbers, items, lr, finished }),
        }
    }

    /// Runs a step of a module with manual optimization. Collective.
    fn manual_step(
        &mut self,
        plan: &LoopPlan,
        of_step: &StepSamples,
        ctx: &mut StepContext,
    ) -> Result<Update> {
        self.hook(Hook::TrainBatchStart)?;
        let first_sample = self.load_batch(plan, (of_step, 0), ctx)?;
        let runtime = self.setup.fabric.runtime.clone();
        let _detecting = self.setup.config.detect_anomaly.then(detect_anomaly);
        let optimizers = mem::take(self.optimizers_mut());
        let clip = self.setup.config.clipping();
        ctx.manual = Some(Manual { optimizers, runtime: runtime.clone(), clip });
        let loss = self.forward(first_sample, ctx);
        // Restore the optimizers even after an error: hooks at the end of a run may save.
        self.optimizers = ctx.manual.take().map(|manual| manual.optimizers);
        let totals = runtime.totals_of(&loss?)?;
        if !totals.loss_sum.is_finite() {
            return Err(Error::NonFinite {
                what: "loss",
                value: totals.mean(),
                step: ctx.step,
                detail: NON_FINITE_HINT.to_owned(),
            });
        }
        self.hook(Hook::TrainBatchEnd)?;
        // A step that only accumulates reports the last update's gradient norm and the next
        // update's learning rate.
        let (grad_norm, lr) = match ctx.last_step {
            Some(update) => update,
            None => (self.recorder.last_grad_norm(), self.sole_optimizer().learning_rate()?),
        };
        let numbers = PendingStep::known(StepNumbers { loss: totals.mean(), grad_norm });
        Ok(Update { numbers, items: totals.count, lr, finished: Ok(()) })
    }

    /// Returns whether the next step may leave its loss and norm on the device.
    ///
    /// The step must not be logged. And a hook must not have asked for a checkpoint after an error,
    /// which would be noticed too late. Equal on all ranks.
    fn defers_reads(&self, is_logged: bool) -> bool {
        let config = &self.setup.config;
        config.late_reads.on(self.setup.fabric.device())
            && !config.detect_anomaly
            && !is_logged
            && self.requests.save_on_exception.is_none()
    }

    /// Reads and reports the last step, unless done already.
    ///
    /// Must be called before the state after the step is used for a checkpoint, a validation, or
    /// the end of the run.
    ///
    /// # Errors
    /// On every rank, if the step's loss or norm is not finite. The state is then that before the
    /// step.
    pub(crate) fn read_pending_step(&mut self) -> Result<()> {
        let Some(DoneStep { report, numbers, before }) = self.recorder.take_pending() else {
            return Ok(());
        };
        match self.sole_optimizer().read(numbers) {
            Ok(numbers) => self.recorder.report_step(&self.setup.fabric, report, numbers),
            Err(error) => {
                self.progress.go_back(before);
                Err(error)
            }
        }
    }

    /// Reads the last step after an error, and returns the first error.
    ///
    /// After an error of a peer or a device nothing is read, because the device may never finish.
    pub(crate) fn read_pending_step_after(&mut self, error: Error) -> Error {
        if matches!(error, Error::PeerFailed { .. } | Error::Collective { .. } | Error::Candle(..))
        {
            return error;
        }
        match self.read_pending_step() {
            Err(first @ Error::NonFinite { .. }) => first,
            Ok(()) | Err(_) => error,
        }
    }

    /// Takes back what a step has changed that was cut off by the loss of a rank. Not collective if
    /// replicas have everything.
    pub(crate) fn take_back_step(&mut self) -> Result<()> {
        self.restore_training_weights()?;
        let before = mem::take(&mut self.buffers_before);
        self.setup.fabric.set_buffers(&before)
    }

    /// Abandons a step that failed because a rank ran out of memory, if smaller micro-batches are
    /// possible.
    ///
    /// The step then restarts with smaller micro-batches. Collective in that case.
    ///
    /// # Errors
    /// `error` in all other cases, or if the ranks cannot abandon the step together.
    fn leave_step(&mut self, error: Error) -> Result<()> {
        let fabric = &self.setup.fabric;
        let Some(rank) = fabric.abandon_step(&error)? else { return Err(error) };
        let (step, batch_size) = (self.progress.step() + 1, self.setup.batch_size);
        let before = batch_size / self.progress.micro_batches_in_batch();
        let Some(samples) = next_smaller(before) else {
            let why = format!(
                "rank {rank} has no memory left in step {step}, and a micro-batch of one sample cannot be smaller: \
                 shard the model over more ranks, or set `trainer.activation_checkpointing`"
            );
            // The error of the other ranks only tells that this rank has abandoned the step.
            let is_own = rank == self.setup.rank();
            return Err(if is_own { error.during(why) } else { Error::other(why) });
        };
        self.progress.split_batches_into(batch_size / samples);
        if self.setup.rank() == 0 {
            tracing::warn!(
                "rank {rank} has no memory left in step {step}, which begins again: micro-batches now have {} \
                 instead of {before}, {} for each batch of {batch_size}",
                counted(samples, "sample"),
                self.progress.micro_batches_in_batch(),
            );
        }
        Ok(())
    }

    /// Sets the position of schedules, unless they count the steps of an optimizer that steps each
    /// time.
    pub(crate) fn set_schedules_position(&mut self) {
        let (epoch, step) = (self.progress.epoch(), self.progress.step());
        let automatic = self.runner.automatic_optimization();
        let optimizers = self.optimizers_mut().iter_mut().map(|(_, optimizer)| optimizer);
        optimizers.for_each(|optimizer: &mut FabricOptimizer| {
            match optimizer.schedule_interval() {
                Interval::Epoch => optimizer.set_schedule_position(epoch),
                Interval::Step if automatic => {}
                Interval::Step => optimizer.set_schedule_position(step),
            }
        });
    }
}

/// Returns the largest number that divides `samples` and is at most half of it.
fn next_smaller(samples: usize) -> Option<usize> {
    (1..=samples / 2).rev().find(|smaller| samples.is_multiple_of(*smaller))
}

#[cfg(test)]
mod tests {
    use super::next_smaller;

    #[test]
    fn batches_are_halved_where_they_can_be() {
        let sizes = |first| std::iter::successors(Some(first), |size| next_smaller(*size));
        assert_eq!(sizes(8).collect::<Vec<_>>(), [8, 4, 2, 1]);
        assert_eq!(sizes(45).collect::<Vec<_>>(), [45, 15, 5, 1]);
        assert_eq!(sizes(7).collect::<Vec<_>>(), [7, 1]);
    }
}
