//! The plan of a training: sample order, division into steps, validations, and length.

use candle_core::Device;

use crate::run::{CountOrFraction, Limits};
use crate::trainer::module::callback::Callbacks;
use crate::trainer::module::runner::{Loading, ModuleRunner};
use crate::trainer::progress::{Cursor, Progress, RunLength};
use crate::trainer::session::{Session, SessionSetup};
use crate::{Error, Result, counted};
use fulgurite_engine::data::{LastBatch, SampleOrder, TrainSampler, Workers};
use fulgurite_engine::parallel::ContextParallel;

/// The part of a training that stays the same from step to step.
pub(crate) struct LoopPlan {
    pub(crate) order: SampleOrder,
    pub(crate) sampler: TrainSampler,
    validation: ValidationTimes,
    device: Device,
    /// The ranks that share sequences with this one; `None` if sequences are whole.
    context: Option<ContextParallel>,
}

impl LoopPlan {
    /// Returns the epoch of the next sample.
    pub(crate) fn epoch(&self, cursor: Cursor) -> u64 {
        self.order.epoch(cursor.samples)
    }

    /// Returns whether validation is due after a step from `before` to `after`.
    pub(crate) fn validates(&self, before: Cursor, after: Cursor) -> bool {
        self.validation.is_due(before, after)
    }

    /// Returns the micro-batches of this rank from `cursor` on.
    pub(crate) fn loading(&self, cursor: Cursor, workers: Workers) -> Loading {
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
    /// Whenever the number of samples passes a multiple of this value.
    EverySamples(f64),
}

impl ValidationTimes {
    /// Returns whether validation is due after a step from `before` to `after`.
    fn is_due(self, before: Cursor, after: Cursor) -> bool {
        match self {
            Self::EverySteps(n) => after.step.is_multiple_of(n),
            Self::EverySamples(n) => {
                // Guards against rounding where the boundary is met exactly.
                let passed = |cursor: Cursor| (cursor.samples as f64 / n + 1e-9).floor();
                passed(after) > passed(before)
            }
        }
    }
}

/// Computes plans and lengths from a session.
pub(crate) struct StepPlanner<'a> {
    setup: &'a SessionSetup,
    runner: &'a dyn ModuleRunner,
    callbacks: &'a Callbacks,
    progress: &'a Progress,
}

impl<'a> StepPlanner<'a> {
    pub(crate) fn of(session: &'a Session) -> Self {
        let Session { setup, runner, callbacks, progress, .. } = session;
        Self { setup, runner: &**runner, callbacks, progress }
    }

    /// Returns the plan of the next steps.
    pub(crate) fn plan(&self) -> Result<LoopPlan> {
        let (order, sampler) = self.train_sampler()?;
        let validation = self.validation_times(&order);
        let (samples, step) = (order.epoch_len(), sampler.global_batch_size());
        let wraps = self.setup.config.last_batch == LastBatch::Wrap;
        if samples < step && wraps && self.setup.rank() == 0 {
            tracing::warn!(
                "the training data has {} and a step takes {step}: each is in a step more \
                 than once, and a step is {:.1} epochs; give more data, lower the batch size, \
                 `trainer.accumulate_grad_batches` or the number of ranks, or set `trainer.last_batch` = \
                 \"partial\"",
                counted(samples, "sample"),
                step as f64 / samples as f64
            );
        }
        let device = self.setup.device();
        let context = self.setup.fabric.context_parallel();
        Ok(LoopPlan { order, sampler, validation, device, context })
    }

    /// Returns the epoch of the next sample.
    pub(crate) fn epoch(&self) -> Result<u64> {
        Ok(self.train_sampler()?.0.epoch(self.progress.samples()))
    }

    /// Returns the number of batches per rank in a step of this epoch.
    ///
    /// # Errors
    /// If both a callback and the configuration set it.
    pub(crate) fn accumulate_in(&self, epoch: u64) -> Result<u64> {
        let config = &self.setup.config;
        let by_epoch = self.callbacks.accumulate_by_epoch();
        if let (Some(count), Some(_)) = (by_epoch.values().next(), config.global_batch_size) {
            return Err(Error::Config(format!(
                "a callback asks for {count} micro-batches in a step, but their number follows from \
                 `trainer.global_batch_size`: leave one of the two out"
            )));
        }
        let latest = by_epoch.range(..=epoch).next_back();
        Ok(latest.map_or(config.accumulate_grad_batches, |(_, count)| count.get()))
    }

    /// Returns whether this epoch, counted from 0, has validations.
    pub(crate) fn is_validated_in(&self, epoch: u64) -> bool {
        (epoch + 1).is_multiple_of(self.setup.config.check_val_every_n_epoch)
    }

    /// Returns whether any of the first `max_steps` steps has a validation.
    ///
    /// Checks the first 100,000 steps. If none of them has one, a longer run is assumed to have
    /// validations.
    pub(crate) fn is_ever_validated(&self, max_steps: u64) -> Result<bool> {
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

    /// Returns the number of steps at the end of the run, if known.
    pub(crate) fn max_steps(&self) -> Result<Option<u64>> {
        let Limits { max_steps, max_epochs, .. } = self.setup.config.limits();
        let by_epochs = self.end_of_run(max_epochs, None)?.map(|end| end.step);
        Ok(match (max_steps, by_epochs) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        })
    }

    /// Returns the length of a run of `max_steps` steps.
    pub(crate) fn length(&self, max_steps: Option<u64>) -> Result<RunLength> {
        let epoch = self.train_sampler()?.0.epoch_len();
        let of_steps = self.end_of_run(None, max_steps)?.map(|end| end.samples.div_ceil(epoch));
        let max_epochs = match (self.setup.config.limits().max_epochs, of_steps) {
            (Some(epochs), Some(of_steps)) => Some(epochs.min(of_steps)),
            (epochs, of_steps) => epochs.or(of_steps),
        };
        Ok((max_steps, max_epochs))
    }

    fn validation_times(&self, order: &SampleOrder) -> ValidationTimes {
        match self.setup.config.val_check_interval {
            CountOrFraction::Count(steps) => ValidationTimes::EverySteps(steps),
            CountOrFraction::Fraction(part) => {
                ValidationTimes::EverySamples(order.epoch_len() as f64 * part)
            }
        }
    }

    /// Returns this rank's order of training samples, and its division into steps as they are now.
    fn train_sampler(&self) -> Result<(SampleOrder, TrainSampler)> {
        self.train_sampler_of(self.progress.accumulate())
    }

    /// Like [`train_sampler`](Self::train_sampler), for steps of `accumulate` batches.
    fn train_sampler_of(&self, accumulate: u64) -> Result<(SampleOrder, TrainSampler)> {
        let SessionSetup { fabric, config, batch_size, step_ranks, shuffle, .. } = self.setup;
        let share = fabric.sampler_share()?;
        let order = self.runner.train_order(fabric.seed(), *shuffle && !config.in_order())?;
        let ranks = share.num_replicas;
        let batch = (*batch_size as u64).saturating_mul(*step_ranks as u64).max(1);
        let batches = order.epoch_len().div_ceil(batch);
        let limit = config.limit_train_batches.of(batches);
        let order = match limit < batches {
            true => order.limited(limit.saturating_mul(batch)),
            false => order,
        };
        let in_batch = self.progress.micro_batches_in_batch();
        let (samples, count) = (batch_size / in_batch, accumulate as usize * in_batch);
        let sampler = TrainSampler::new(order.clone(), samples, ranks, share.rank, count)?
            .with_step_ranks(*step_ranks)
            .with_last_batch(config.last_batch)?;
        Ok((order, sampler))
    }

    /// Returns the position at the end of the run: after `max_epochs` or `max_steps`, whichever is
    /// first.
    ///
    /// Its samples are counted to the end of its epoch, unless steps continue into the next epoch.
    /// `None` if neither limit is set.
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
        let by_epoch = self.callbacks.accumulate_by_epoch();
        // Counted from samples, because a run may resume with another global batch size.
        let mut cursor = self.progress.cursor();
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
            cursor.samples = match self.setup.config.last_batch {
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
            // The number of samples overflows: the run is endless.
            if cursor.samples == before {
                return Ok(Some(cursor));
            }
        }
    }
}
