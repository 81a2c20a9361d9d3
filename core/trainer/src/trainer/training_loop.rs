//! The training loop of a session.

use std::time::Instant;

use candle_core::{Device, Tensor};

use super::Stage as RunStage;
use super::evaluation::{Evaluated, EvaluationStage};
use super::hooks::Hook;
use super::log_table::Stage;
use super::runner::Loading;
use super::session::{Cursor, Session, training};
use super::train_step::StepEnd;
use crate::fabric::FabricOptimizers;
use crate::run::{CountOrFraction, Limits, TrainerConfig};
use crate::{Error, Result, counted};
use fulgurite_engine::collective::ReduceOp;
use fulgurite_engine::data::{LastBatch, SampleOrder, TrainSampler, Workers};
use fulgurite_engine::execution::read;
use fulgurite_engine::optim::Interval;
use fulgurite_engine::parallel::ContextParallel;
use fulgurite_launch::Interruption;

/// What does not change from step to step.
pub(super) struct LoopPlan {
    pub(super) order: SampleOrder,
    pub(super) sampler: TrainSampler,
    validation: ValidationTimes,
    device: Device,
    /// The ranks that share sequences with this one; `None` if sequences are whole.
    context: Option<ContextParallel>,
}

impl LoopPlan {
    /// The epoch of the next sample.
    fn epoch(&self, cursor: Cursor) -> u64 {
        self.order.epoch(cursor.samples)
    }

    /// The micro-batches of this rank from here on.
    fn loading(&self, cursor: Cursor, workers: Workers) -> Loading {
        Loading {
            plan: Box::new(self.sampler.batches_from(cursor.samples)),
            device: self.device.clone(),
            context: self.context.clone(),
            workers,
        }
    }
}

/// The times when validation is due.
#[derive(Debug, Clone, Copy)]
enum ValidationTimes {
    EverySteps(u64),
    /// Whenever the number of samples passes a multiple of this.
    EverySamples(f64),
}

impl ValidationTimes {
    /// Whether validation is due after a step from `before` to `after`.
    fn is_due(self, before: Cursor, after: Cursor) -> bool {
        match self {
            Self::EverySteps(n) => after.step.is_multiple_of(n),
            Self::EverySamples(n) => {
                // Against rounding, where the boundary is met exactly.
                let passed = |cursor: Cursor| (cursor.samples as f64 / n + 1e-9).floor();
                passed(after) > passed(before)
            }
        }
    }
}

/// The result of the vote at the end of a step, equal on all ranks.
pub(super) struct StopVote {
    /// On some rank the time is up or a hook asked to stop.
    pub(super) stop: bool,
    /// The most urgent interruption on any rank.
    pub(super) interruption: Option<Interruption>,
    /// No rank has a save under way.
    pub(super) saved: bool,
}

/// An interruption as a number; the largest is the most urgent.
fn urgency(interruption: Option<Interruption>) -> u8 {
    match interruption {
        None => 0,
        Some(Interruption::CtrlC) => 1,
        Some(Interruption::HangUp) => 2,
        Some(Interruption::Preemption) => 3,
        Some(Interruption::Termination) => 4,
    }
}

/// The inverse of [`urgency`].
fn interruption(urgency: u8) -> Option<Interruption> {
    match urgency {
        0 => None,
        1 => Some(Interruption::CtrlC),
        2 => Some(Interruption::HangUp),
        3 => Some(Interruption::Preemption),
        _ => Some(Interruption::Termination),
    }
}

/// Why the loop ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FitEnd {
    /// A limit was reached, or a hook asked to stop.
    Finished,
    /// The run was interrupted.
    Interrupted(Interruption),
}

impl Session {
    /// The training loop. Collective.
    pub(super) fn fit(&mut self) -> Result<FitEnd> {
        self.accumulate = self.accumulate_in(self.train_sampler()?.0.epoch(self.cursor.samples))?;
        let mut plan = self.loop_plan()?;
        let max_steps = self.max_steps()?;
        let max_time = self.parts.config.limits().max_time;
        if let Some(why) = self.sanity_check()? {
            return Ok(FitEnd::Interrupted(why));
        }
        let workers = self.parts.config.workers(&plan.device);
        self.runner.load_training(plan.loading(self.cursor, workers))?;
        let started = Instant::now();
        let mut end = FitEnd::Finished;
        if self.started_epoch.is_none() {
            self.epoch = plan.epoch(self.cursor);
        }
        self.hook(Hook::TrainStart)?;
        let mut has_run = false;
        // A run that was interrupted in a validation begins with that validation.
        while self.validation_due || max_steps.is_none_or(|max| self.cursor.step < max) {
            has_run = true;
            if !self.validation_due {
                self.epoch = plan.epoch(self.cursor);
                if self.started_epoch.replace(self.epoch) != Some(self.epoch) {
                    self.hook(Hook::TrainEpochStart)?;
                }
                let accumulate = self.accumulate_in(self.epoch)?;
                if accumulate != self.accumulate {
                    self.accumulate = accumulate;
                    plan = self.loop_plan()?;
                    self.runner.load_training(plan.loading(self.cursor, workers))?;
                }
                let before = self.cursor;
                while self.train_step(&plan)? == StepEnd::BeginAgain {
                    plan = self.loop_plan()?;
                    self.runner.load_training(plan.loading(self.cursor, workers))?;
                }
                self.validation_due =
                    self.is_validated_in(self.epoch) && plan.validation.is_due(before, self.cursor);
            }
            let validated = self.validation_due;
            if self.validation_due
                && let Evaluated::Interrupted(why) = self.validate_training()?
            {
                end = FitEnd::Interrupted(why);
                break;
            }
            self.validation_due = false;
            if plan.epoch(self.cursor) != self.epoch {
                self.end_epoch()?;
            }
            if self.parts.saving.is_due(self.cursor.step, validated) {
                self.save(false)?;
            }
            self.save_as_requested()?;
            let out_of_time = max_time.is_some_and(|limit| started.elapsed() >= limit);
            let vote = self.vote_on_stop(out_of_time)?;
            if vote.saved {
                self.finish_saving()?;
            }
            if let Some(why) = vote.interruption {
                end = FitEnd::Interrupted(why);
                break;
            }
            if vote.stop && self.may_stop(&plan) {
                break;
            }
        }
        self.catch_up()?;
        self.runner.stop_loading(true);
        self.parts.fabric.runtime.unite_replicas()?;
        self.save_at_end(end)?;
        // An interrupted epoch is continued by the resumed run.
        if has_run && end == FitEnd::Finished && plan.epoch(self.cursor) == self.epoch {
            self.end_epoch()?;
        }
        self.hook(Hook::TrainEnd)?;
        // What was asked for before an interruption of a validation, and by the last hooks.
        self.save_as_requested()?;
        self.finish_saving()?;
        Ok(end)
    }

    /// Whether the least number of steps and epochs is done.
    fn may_stop(&self, plan: &LoopPlan) -> bool {
        let TrainerConfig { min_steps, min_epochs, .. } = self.parts.config;
        let epochs = self.cursor.samples / plan.order.epoch_len();
        min_steps.is_none_or(|min| self.cursor.step >= min)
            && min_epochs.is_none_or(|min| epochs >= min)
    }

    /// The short validation before a training that starts anew. Collective.
    fn sanity_check(&mut self) -> Result<Option<Interruption>> {
        let has_data = self.has_validation_data()?;
        if self.cursor.step > 0 || self.parts.config.num_sanity_val_steps == 0 || !has_data {
            return Ok(None);
        }
        self.stage = RunStage::SanityCheck;
        self.hook(Hook::SanityCheckStart)?;
        let metrics = self.metrics.clone();
        let evaluated = self.validate_training()?;
        self.metrics = metrics;
        self.hook(Hook::SanityCheckEnd)?;
        self.stage = RunStage::Fit;
        Ok(match evaluated {
            Evaluated::Interrupted(why) => Some(why),
            Evaluated::Done(_) | Evaluated::NoData => None,
        })
    }

    /// Validates during training, with the moving average of the weights if there is one.
    /// Collective.
    fn validate_training(&mut self) -> Result<Evaluated> {
        self.catch_up()?;
        let _phase = self.parts.fabric.phase("validation");
        let swap = |optimizers: &mut FabricOptimizers| -> Result<()> {
            let mut all = optimizers.iter_mut().map(|(_, optimizer)| optimizer);
            all.try_for_each(|optimizer| match optimizer.average() {
                Some(average) if average.follows_steps() => optimizer.swap_average(),
                _ => Ok(()),
            })
        };
        swap(training(&mut self.optimizers))?;
        let validated = self.evaluate(EvaluationStage::Validation)?;
        swap(training(&mut self.optimizers))?;
        Ok(validated)
    }

    /// Reports what was logged by the epoch that ends, and calls its hook. Collective.
    fn end_epoch(&mut self) -> Result<()> {
        self.catch_up()?;
        let mut table = std::mem::take(&mut self.epoch_table);
        self.log_table(&mut table, Stage::Epoch)?;
        self.hook(Hook::TrainEpochEnd)
    }

    /// Saves the last step, unless a checkpoint has it or it is not wanted. Before the hooks at the
    /// end, which a resumed run calls again. Collective.
    fn save_at_end(&mut self, end: FitEnd) -> Result<()> {
        let wanted = match end {
            FitEnd::Finished | FitEnd::Interrupted(Interruption::CtrlC) => {
                self.parts.saving.config.save_last
            }
            // The run is resumed when the scheduler gives it a machine again.
            FitEnd::Interrupted(_) => true,
        };
        if wanted && !self.parts.saving.has_saved(self.cursor.step) {
            self.save(end != FitEnd::Finished)?;
        }
        if wanted && self.parts.fabric.adapters().is_some() {
            self.parts.fabric.save_adapter(self.parts.run_dir.join("adapter"))?;
        }
        // The machine may be taken soon, so the save is waited for at once.
        if end == FitEnd::Finished { Ok(()) } else { self.finish_saving() }
    }

    /// Exchanges whether the run ends: if it does on one rank, it does on all. Collective.
    pub(super) fn vote_on_stop(&self, out_of_time: bool) -> Result<StopVote> {
        let stop = out_of_time || self.requests.stop;
        let saving = self.parts.saving.is_running();
        let votes = [u8::from(stop), urgency((self.parts.interrupted)()), u8::from(saving)];
        let votes = Tensor::new(&votes, &Device::Cpu)?;
        self.parts.fabric.all_reduce(&votes, ReduceOp::Max).map_err(|error| match error {
            // The others are in another collective, or wait for this rank in another group.
            Error::Collective { rank, group, op, message } => {
                let logged: Vec<&str> = self.metrics.keys().map(String::as_str).collect();
                let message = format!(
                    "{message} (the vote after step {}. A rank that is elsewhere may have logged a metric that this \
                     one has not: it knows {}. All ranks must log the same names, or log with \
                     `LogOptions::default().sync(false)` what is rank 0's own)",
                    self.cursor.step,
                    logged.join(", ")
                );
                Error::Collective { rank, group, op, message }
            }
            other => other,
        })?;
        let votes = read::host::<u8>(&votes)?;
        let (stop, interruption) = (votes[0] == 1, interruption(votes[1]));
        Ok(StopVote { stop, interruption, saved: votes[2] == 0 })
    }

    /// The values that do not change from step to step.
    fn loop_plan(&self) -> Result<LoopPlan> {
        let (order, sampler) = self.train_sampler()?;
        let validation = self.validation_times(&order);
        let (samples, step) = (order.epoch_len(), sampler.global_batch_size());
        let wraps = self.parts.config.last_batch == LastBatch::Wrap;
        if samples < step && wraps && self.rank() == 0 {
            tracing::warn!(
                "the training data has {} and a step takes {step}: each is in a step more \
                 than once, and a step is {:.1} epochs; give more data, lower the batch size, \
                 `trainer.accumulate_grad_batches` or the number of ranks, or set `trainer.last_batch` = \
                 \"partial\"",
                counted(samples, "sample"),
                step as f64 / samples as f64
            );
        }
        let device = self.device();
        let context = self.parts.fabric.context_parallel();
        Ok(LoopPlan { order, sampler, validation, device, context })
    }

    fn validation_times(&self, order: &SampleOrder) -> ValidationTimes {
        match self.parts.config.val_check_interval {
            CountOrFraction::Count(steps) => ValidationTimes::EverySteps(steps),
            CountOrFraction::Fraction(part) => {
                ValidationTimes::EverySamples(order.epoch_len() as f64 * part)
            }
        }
    }

    /// Whether a validation is due after one of the first `max_steps` steps, as far as that can be said soon.
    pub(super) fn is_ever_validated(&self, max_steps: u64) -> Result<bool> {
        const LOOKED_AT: u64 = 100_000;
        let (order, mut sampler) = self.train_sampler()?;
        let times = self.validation_times(&order);
        let mut epoch_before = None;
        let mut before = Cursor { step: 0, samples: 0 };
        for step in 1..=max_steps.min(LOOKED_AT) {
            let epoch = order.epoch(before.samples);
            if epoch_before.replace(epoch) != Some(epoch) {
                (_, sampler) = self.train_sampler_of(self.accumulate_in(epoch)?)?;
            }
            let after = Cursor { step, samples: sampler.step_at(before.samples).end };
            if self.is_validated_in(epoch) && times.is_due(before, after) {
                return Ok(true);
            }
            before = after;
        }
        Ok(max_steps > LOOKED_AT)
    }

    /// Whether this epoch, counted from 0, has validations.
    fn is_validated_in(&self, epoch: u64) -> bool {
        (epoch + 1).is_multiple_of(self.parts.config.check_val_every_n_epoch)
    }

    /// The order of training samples of this rank, and its micro-batches of steps as they are now.
    fn train_sampler(&self) -> Result<(SampleOrder, TrainSampler)> {
        self.train_sampler_of(self.accumulate)
    }

    /// The same, of steps with this number of micro-batches.
    fn train_sampler_of(&self, accumulate: u64) -> Result<(SampleOrder, TrainSampler)> {
        let share = self.parts.fabric.sampler_share()?;
        let config = &self.parts.config;
        let shuffle = self.shuffle && !config.in_order();
        let order = self.runner.train_order(self.parts.fabric.seed(), shuffle)?;
        let (batch_size, ranks) = (self.batch_size, share.num_replicas);
        let batch = (batch_size as u64).saturating_mul(ranks as u64).max(1);
        let batches = order.epoch_len().div_ceil(batch);
        let limit = config.limit_train_batches.of(batches);
        let order = match limit < batches {
            true => order.limited(limit.saturating_mul(batch)),
            false => order,
        };
        let (samples, count) = (self.micro_batch_size(), self.micro_batches_in_step(accumulate));
        let sampler = TrainSampler::new(order.clone(), samples, ranks, share.rank, count)?
            .with_last_batch(config.last_batch)?;
        Ok((order, sampler))
    }

    /// Micro-batches of each rank in a step of this epoch.
    ///
    /// # Errors
    /// If a callback and the configuration both say it.
    fn accumulate_in(&self, epoch: u64) -> Result<u64> {
        let config = &self.parts.config;
        let by_epoch = self.parts.callbacks.accumulate_by_epoch();
        if let (Some(count), Some(_)) = (by_epoch.values().next(), config.global_batch_size) {
            return Err(Error::Config(format!(
                "a callback asks for {count} micro-batches in a step, but their number follows from \
                 `trainer.global_batch_size`: leave one of the two out"
            )));
        }
        let latest = by_epoch.range(..=epoch).next_back();
        Ok(latest.map_or(config.accumulate_grad_batches, |(_, count)| count.get()))
    }

    /// The place after the last step before `max_epochs`, and of at most `max_steps`; its samples are counted
    /// to the end of its epoch, but where steps go on into the next one. `None` if neither is set.
    fn end_of_run(
        &self,
        max_epochs: Option<u64>,
        max_steps: Option<u64>,
    ) -> Result<Option<Cursor>> {
        if max_epochs.is_none() && max_steps.is_none() {
            return Ok(None);
        }
        let (max_epochs, max_steps) =
            (max_epochs.unwrap_or(u64::MAX), max_steps.unwrap_or(u64::MAX));
        let by_epoch = self.parts.callbacks.accumulate_by_epoch();
        // From samples, since a run may resume with another global batch size.
        let mut cursor = self.cursor;
        loop {
            let (order, _) = self.train_sampler()?;
            let (len, epoch) = (order.epoch_len(), order.epoch(cursor.samples));
            let left = max_steps.saturating_sub(cursor.step);
            if epoch >= max_epochs || left == 0 {
                return Ok(Some(cursor));
            }
            let (_, sampler) = self.train_sampler_of(self.accumulate_in(epoch)?)?;
            let changes = by_epoch.range(epoch + 1..).next().map_or(u64::MAX, |(epoch, _)| *epoch);
            let end = changes.min(max_epochs).saturating_mul(len);
            let steps = sampler.steps_between(cursor.samples, end).min(left);
            cursor.step = cursor.step.saturating_add(steps);
            let before = cursor.samples;
            cursor.samples = match self.parts.config.last_batch {
                LastBatch::Wrap => {
                    let taken = steps.saturating_mul(sampler.global_batch_size());
                    cursor.samples.saturating_add(taken)
                }
                _ => {
                    let rest = (epoch + 1).saturating_mul(len);
                    let more = steps.saturating_sub(sampler.steps_between(cursor.samples, rest));
                    let epochs = more.div_ceil(sampler.steps_between(0, len).max(1));
                    rest.saturating_add(epochs.saturating_mul(len))
                }
            };
            // More samples than can be counted: the run has no end.
            if cursor.samples == before {
                return Ok(Some(cursor));
            }
        }
    }

    /// The number of steps at the end of the run, if it is known.
    pub(super) fn max_steps(&self) -> Result<Option<u64>> {
        let Limits { max_steps, max_epochs, .. } = self.parts.config.limits();
        let by_epochs = self.end_of_run(max_epochs, None)?.map(|end| end.step);
        Ok(match (max_steps, by_epochs) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        })
    }

    /// Tells schedules and hooks how long the run is.
    pub(super) fn set_length(&mut self, max_steps: Option<u64>) -> Result<()> {
        let epoch = self.train_sampler()?.0.epoch_len();
        let of_steps = self.end_of_run(None, max_steps)?.map(|end| end.samples.div_ceil(epoch));
        let max_epochs = match (self.parts.config.limits().max_epochs, of_steps) {
            (Some(epochs), Some(of_steps)) => Some(epochs.min(of_steps)),
            (epochs, of_steps) => epochs.or(of_steps),
        };
        self.length = (max_steps, max_epochs);
        for (_, optimizer) in training(&mut self.optimizers).iter_mut() {
            optimizer.set_max_steps(match optimizer.schedule_interval() {
                Interval::Step => max_steps,
                Interval::Epoch => max_epochs,
            });
        }
        Ok(())
    }
}
