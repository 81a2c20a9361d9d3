//! A run in progress, and the training loop.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};

use super::callback::Callbacks;
use super::context::{HookParts, Requests};
use super::evaluation::{Evaluated, EvaluationStage};
use super::event::SharedSink;
use super::hooks::Hook;
use super::log_table::{LogTable, Stage};
use super::manual::Manual;
use super::meter::{Meter, peak_rss_mib};
use super::runner::{Loading, ModuleRunner};
use super::saving::Saving;
use super::{Event, HookContext, Stage as RunStage, StepContext};
use crate::fabric::{Fabric, FabricOptimizer, FabricOptimizers, NON_FINITE_HINT};
use crate::profiler::Profile;
use crate::run::{ClipAlgorithm, CountOrFraction, Limits, TrainerConfig};
use crate::{Error, Result};
use fulgurite_engine::autograd::detect_anomaly;
use fulgurite_engine::collective::{ReduceOp, all_gather_object};
use fulgurite_engine::data::{LastBatch, SampleOrder, StepSamples, TrainSampler, Workers};
use fulgurite_engine::execution::read;
use fulgurite_engine::mesh::DP_CP;
use fulgurite_engine::optim::Interval;
use fulgurite_engine::parallel::ContextParallel;
use fulgurite_engine::parallel::explain_shapes;
use fulgurite_launch::Interruption;

/// The position of a run: optimizer steps and samples.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Cursor {
    /// Optimizer steps done.
    pub(super) step: u64,
    /// Samples used by all ranks: the position in the endless stream of samples.
    pub(super) samples: u64,
}

/// The parts of a session that do not depend on the module.
pub(super) struct SessionParts {
    /// The first field, so that it is dropped first: a save under way needs the other ranks.
    pub(super) saving: Saving,
    pub(super) fabric: Fabric,
    pub(super) config: TrainerConfig,
    /// The run's directory.
    pub(super) run_dir: PathBuf,
    pub(super) resolved: toml::Table,
    pub(super) callbacks: Callbacks,
    pub(super) print: fn(&str),
    pub(super) sinks: Vec<SharedSink>,
    pub(super) meter: Meter,
    pub(super) strategy: String,
    pub(super) interrupted: fn() -> Option<Interruption>,
}

pub(super) struct Session {
    pub(super) parts: SessionParts,
    pub(super) runner: Box<dyn ModuleRunner>,
    /// Set while and after training.
    pub(super) optimizers: Option<FabricOptimizers>,
    pub(super) stage: RunStage,
    /// Micro-batches in a step.
    pub(super) accumulate: u64,
    /// The steps and the epochs that the run has, as far as they are known.
    pub(super) length: (Option<u64>, Option<u64>),
    /// What the losses of the last step counted, of all ranks.
    pub(super) items: f64,
    /// What hooks have asked for and was not done yet.
    pub(super) requests: Requests,
    pub(super) batch_size: usize,
    pub(super) shuffle: bool,
    /// [`DataModule::fingerprint`](fulgurite_engine::data::DataModule::fingerprint).
    pub(super) fingerprint: Option<String>,
    /// [`DataModule::items`](fulgurite_engine::data::DataModule::items).
    pub(super) items_name: &'static str,
    pub(super) cursor: Cursor,
    /// The epoch of the step that is being or was last computed, counted from 0.
    pub(super) epoch: u64,
    pub(super) metrics: BTreeMap<String, f64>,
    /// The step after which each was logged last.
    pub(super) metric_steps: BTreeMap<String, u64>,
    /// What the present epoch has logged.
    pub(super) epoch_table: LogTable,
    /// What a hook logs, while it runs.
    pub(super) hook_table: LogTable,
    /// The epoch whose start hook was called last; `None` before the first.
    pub(super) started_epoch: Option<u64>,
    /// Whether the validation due after the last step has not been run yet.
    pub(super) validation_due: bool,
}

/// What does not change from step to step.
struct LoopPlan {
    order: SampleOrder,
    sampler: TrainSampler,
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
        Some(Interruption::Preemption) => 2,
        Some(Interruption::Termination) => 3,
    }
}

/// The inverse of [`urgency`].
fn interruption(urgency: u8) -> Option<Interruption> {
    match urgency {
        0 => None,
        1 => Some(Interruption::CtrlC),
        2 => Some(Interruption::Preemption),
        _ => Some(Interruption::Termination),
    }
}

/// What came of a step.
struct UpdateOutcome {
    /// The mean loss.
    train_loss: f64,
    /// What the loss counted, of all ranks.
    count: f64,
    grad_norm: f64,
    lr: f64,
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
    pub(super) fn world_size(&self) -> usize {
        self.parts.fabric.world_size()
    }

    pub(super) fn rank(&self) -> usize {
        self.parts.fabric.global_rank()
    }

    pub(super) fn emit(&mut self, event: &Event) -> Result<()> {
        let _phase = self.parts.fabric.phase("logging");
        self.parts.sinks.iter().try_for_each(|sink| sink.lock().event(event))
    }

    /// Calls a hook, and logs what it has logged. Collective if that is to be synchronised.
    pub(super) fn hook(&mut self, hook: Hook) -> Result<()> {
        self.batch_hook(hook, 0)
    }

    /// Calls a hook of a batch, and logs what it has logged. Collective if that is to be synchronised.
    pub(super) fn batch_hook(&mut self, hook: Hook, batch_index: u64) -> Result<()> {
        let _phase = self.parts.fabric.phase("hooks");
        self.call_hook(hook, batch_index, false)?;
        self.log_hook_table()?;
        if self.parts.callbacks.decide_by_metrics() {
            self.call_hook(hook, batch_index, true)?;
            self.log_hook_table()?;
        }
        Ok(())
    }

    /// Calls a hook of the callbacks and the module, or of the callbacks that decide by metrics.
    pub(super) fn call_hook(&mut self, hook: Hook, batch_index: u64, deciding: bool) -> Result<()> {
        let config = &self.parts.config;
        let wanted = match hook {
            // Before the step is counted.
            Hook::TrainBatchStart
            | Hook::BeforeBackward(_)
            | Hook::AfterBackward
            | Hook::TrainBatchEnd
            | Hook::BeforeOptimizerStep
            | Hook::BeforeZeroGrad => config.logs_step(self.cursor.step + 1),
            Hook::TrainStepEnd => config.logs_step(self.cursor.step),
            _ => true,
        };
        let fabric = &self.parts.fabric;
        let mut ctx = HookContext {
            step: self.cursor.step,
            epoch: self.epoch,
            batch_index,
            stage: self.stage,
            accumulate_grad_batches: self.accumulate,
            max_steps: self.length.0,
            max_epochs: self.length.1,
            items: self.items,
            rank: fabric.global_rank(),
            world_size: fabric.world_size(),
            seed: fabric.seed(),
            fast_dev_run: config.fast_dev_run.batches().is_some(),
            metrics: &self.metrics,
            data: &(),
            parts: HookParts {
                fabric,
                optimizers: self.optimizers.as_mut(),
                runner: Some(&mut *self.runner),
                requests: &mut self.requests,
                saving: &self.parts.saving,
                metric_steps: &self.metric_steps,
                wanted,
                table: &mut self.hook_table,
            },
        };
        let mut result = self.parts.callbacks.call(hook, deciding, &mut ctx);
        if result.is_ok()
            && !deciding
            && let Some(runner) = ctx.parts.runner.take()
        {
            result = runner.call_hook(hook, &mut ctx);
        }
        for text in std::mem::take(&mut self.requests.printed) {
            (self.parts.print)(&text);
        }
        result
    }

    fn log_hook_table(&mut self) -> Result<()> {
        let mut table = std::mem::take(&mut self.hook_table);
        self.log_table(&mut table, Stage::Step)
    }

    /// Reduces and reports what a table holds, if anything. Collective.
    pub(super) fn log_table(&mut self, table: &mut LogTable, stage: Stage) -> Result<()> {
        let values = self.reduce(table, stage)?;
        if !values.is_empty() {
            self.record(&values);
            self.emit(&Event::Metrics { step: self.cursor.step, metrics: values })?;
        }
        self.log_media(table)
    }

    /// Reports the texts and histograms that a table holds, if any. Collective if there are histograms.
    pub(super) fn log_media(&mut self, table: &mut LogTable) -> Result<()> {
        let mut media = std::mem::take(&mut table.media);
        let histograms = media.reduce_histograms(&**self.parts.fabric.world())?;
        let step = self.cursor.step;
        for (name, text) in media.texts {
            self.emit(&Event::Text { step, name, text })?;
        }
        for (name, histogram) in histograms {
            self.emit(&Event::Histogram { step, name, histogram })?;
        }
        Ok(())
    }

    /// Remembers metrics.
    pub(super) fn record(&mut self, values: &BTreeMap<String, f64>) {
        self.parts.saving.note(values);
        for (name, value) in values {
            self.metrics.insert(name.clone(), *value);
            self.metric_steps.insert(name.clone(), self.cursor.step);
        }
    }

    /// The values of a table over all ranks. Collective if there are any to be synchronised.
    pub(super) fn reduce(
        &self,
        table: &mut LogTable,
        stage: Stage,
    ) -> Result<BTreeMap<String, f64>> {
        let mesh = self.parts.fabric.device_mesh();
        table.reduce(stage, &**mesh.group(DP_CP)?)
    }

    /// Reports what was logged by the epoch that ends, and calls its hook. Collective.
    fn end_epoch(&mut self) -> Result<()> {
        let mut table = std::mem::take(&mut self.epoch_table);
        self.log_table(&mut table, Stage::Epoch)?;
        self.hook(Hook::TrainEpochEnd)
    }

    pub(super) fn device(&self) -> Result<Device> {
        let tree = self.parts.fabric.module_tree()?;
        Ok(tree.parameters().first().map_or(Device::Cpu, |p| p.device().clone()))
    }

    /// The order of training samples of this rank.
    fn train_sampler(&self) -> Result<(SampleOrder, TrainSampler)> {
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
        let accumulate = self.accumulate as usize;
        let sampler = TrainSampler::new(order.clone(), batch_size, ranks, share.rank, accumulate)?
            .with_last_batch(config.last_batch)?;
        Ok((order, sampler))
    }

    /// The number of steps at the end of the run, if it is known.
    pub(super) fn max_steps(&self) -> Result<Option<u64>> {
        let Limits { max_steps, max_epochs, .. } = self.parts.config.limits();
        let (order, sampler) = self.train_sampler()?;
        let by_epochs = max_epochs.map(|epochs| {
            // Computed from samples, since a run may resume with another global batch size.
            let end = epochs.saturating_mul(order.epoch_len());
            self.cursor.step.saturating_add(sampler.steps_between(self.cursor.samples, end))
        });
        Ok(match (max_steps, by_epochs) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        })
    }

    /// The training loop. Collective.
    pub(super) fn fit(&mut self) -> Result<FitEnd> {
        let mut plan = self.loop_plan()?;
        let mut max_steps = self.max_steps()?;
        let max_time = self.parts.config.limits().max_time;
        if let Some(why) = self.sanity_check()? {
            return Ok(FitEnd::Interrupted(why));
        }
        let workers = self.parts.config.workers();
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
                if let Some(accumulate) = self.requests.accumulate_grad_batches.take() {
                    self.accumulate = accumulate;
                    (plan, max_steps) = (self.loop_plan()?, self.max_steps()?);
                    self.runner.load_training(plan.loading(self.cursor, workers))?;
                    self.set_length(max_steps)?;
                }
                let before = self.cursor;
                self.train_step(&plan)?;
                let n = self.parts.config.check_val_every_n_epoch;
                self.validation_due = (self.epoch + 1).is_multiple_of(n)
                    && plan.validation.is_due(before, self.cursor);
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
        self.runner.stop_loading(true);
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
        // The machine may be taken soon, so the save is waited for at once.
        if end == FitEnd::Finished { Ok(()) } else { self.finish_saving() }
    }

    /// The values that do not change from step to step.
    fn loop_plan(&self) -> Result<LoopPlan> {
        let (order, sampler) = self.train_sampler()?;
        let validation = match self.parts.config.val_check_interval {
            CountOrFraction::Count(steps) => ValidationTimes::EverySteps(steps),
            CountOrFraction::Fraction(part) => {
                ValidationTimes::EverySamples(order.epoch_len() as f64 * part)
            }
        };
        let (samples, step) = (order.epoch_len(), sampler.global_batch_size());
        let wraps = self.parts.config.last_batch == LastBatch::Wrap;
        if samples < step && wraps && self.rank() == 0 {
            tracing::warn!(
                "the training data has {samples} sample(s) and a step takes {step}: each is in a step more \
                 than once, and a step is {:.1} epochs; give more data, lower the batch size, \
                 `trainer.accumulate_grad_batches` or the number of ranks, or set `trainer.last_batch` = \
                 \"partial\"",
                step as f64 / samples as f64
            );
        }
        let device = self.device()?;
        let context = self.parts.fabric.context_parallel();
        Ok(LoopPlan { order, sampler, validation, device, context })
    }

    /// Exchanges whether the run ends: if it does on one rank, it does on all. Collective.
    pub(super) fn vote_on_stop(&self, out_of_time: bool) -> Result<StopVote> {
        let stop = out_of_time || self.requests.stop;
        let saving = self.parts.saving.is_running();
        let votes = [u8::from(stop), urgency((self.parts.interrupted)()), u8::from(saving)];
        let votes = Tensor::new(&votes, &Device::Cpu)?;
        self.parts.fabric.all_reduce(&votes, ReduceOp::Max)?;
        let votes = read::host::<u8>(&votes)?;
        let (stop, interruption) = (votes[0] == 1, interruption(votes[1]));
        Ok(StopVote { stop, interruption, saved: votes[2] == 0 })
    }

    /// One optimizer step: micro-batches, reduction, clipping, update. Collective.
    fn train_step(&mut self, plan: &LoopPlan) -> Result<()> {
        self.parts.meter.begin_step();
        let step = self.cursor.step + 1;
        let of_step = plan.sampler.step_at(self.cursor.samples);
        let ranks = (self.rank(), self.world_size());
        let wanted = self.parts.config.logs_step(step);
        let mut logged = StepContext::training((step, self.epoch), ranks, wanted);
        self.set_schedules_position();
        let UpdateOutcome { train_loss, count, grad_norm, lr } =
            if self.runner.automatic_optimization() {
                for micro_batch in 0..of_step.micro_batches {
                    self.micro_batch(plan, (&of_step, micro_batch), &mut logged)?;
                }
                self.update()?
            } else {
                self.manual_step(plan, &of_step, &mut logged)?
            };
        let samples = of_step.end;
        self.cursor = Cursor { step, samples };
        self.items = count;
        let tokens_per_s = self.parts.meter.end_step(train_loss, count);
        logged.table.add_to_epoch(&mut self.epoch_table, wanted)?;
        let metrics = self.reduce(&mut logged.table, Stage::Step)?;
        self.record(&metrics);
        let own = [("train_loss", train_loss), ("grad_norm", grad_norm), ("lr", lr)];
        self.record(&own.map(|(name, value)| (name.to_owned(), value)).into());
        let epoch_done = samples as f64 / plan.order.epoch_len() as f64;
        self.emit(&Event::Step {
            step,
            epoch: epoch_done,
            train_loss,
            grad_norm,
            lr,
            tokens_per_s,
            metrics,
        })?;
        self.log_media(&mut logged.table)?;
        self.hook(Hook::TrainStepEnd)
    }

    /// Clips the gradients and updates the parameters. Collective.
    fn update(&mut self) -> Result<UpdateOutcome> {
        let optimizer = only(&mut self.optimizers);
        let totals = optimizer.step_totals(&[])?;
        let train_loss = optimizer.check_loss(&totals)?;
        let grad_norm = match self.parts.config.clipping() {
            None => optimizer.gradient_norm()?,
            Some((limit, ClipAlgorithm::Norm)) => optimizer.clip_gradients_norm(limit)?,
            Some((limit, ClipAlgorithm::Value)) => optimizer.clip_gradients_value(limit)?,
        };
        self.hook(Hook::BeforeOptimizerStep)?;
        let optimizer = only(&mut self.optimizers);
        let lr = optimizer.learning_rate()?;
        optimizer.update()?;
        self.hook(Hook::BeforeZeroGrad)?;
        only(&mut self.optimizers).finish_step()?;
        Ok(UpdateOutcome { train_loss, count: totals.count, grad_norm, lr })
    }

    /// A step of a module that optimizes by itself. Collective.
    fn manual_step(
        &mut self,
        plan: &LoopPlan,
        of_step: &StepSamples,
        logged: &mut StepContext,
    ) -> Result<UpdateOutcome> {
        self.hook(Hook::TrainBatchStart)?;
        let data = self.parts.fabric.phase("data");
        let samples = self.runner.next_training_batch()?;
        drop(data);
        let is_padding = plan.sampler.is_padding(of_step, 0);
        let first_sample = plan.sampler.first_sample(of_step, 0);
        logged.begin_batch(0, samples.indices().len(), is_padding);
        let fabric = &self.parts.fabric;
        let runtime = fabric.runtime.clone();
        let step = logged.step;
        let _detecting = self.parts.config.detect_anomaly.then(detect_anomaly);
        let optimizers = std::mem::take(training(&mut self.optimizers));
        let clip = self.parts.config.clipping();
        logged.manual = Some(Manual { optimizers, runtime: runtime.clone(), clip });
        let loss = self.runner.training_step(logged, &mut |forward| {
            let _scope = fabric.forward_scope(true, step, first_sample);
            let _phase = fabric.phase("forward");
            forward().map_err(|error| {
                explain_shapes(error).during(format_args!("in training_step of step {step}"))
            })
        });
        // Also after an error: hooks at the end of a run may save.
        self.optimizers = logged.manual.take().map(|manual| manual.optimizers);
        let loss = if is_padding { loss?.ignored()? } else { loss? };
        let totals = runtime.totals_of(&loss)?;
        if !totals.loss_sum.is_finite() {
            return Err(Error::NonFinite {
                what: "loss",
                value: totals.mean(),
                step,
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
        Ok(UpdateOutcome { train_loss: totals.mean(), count: totals.count, grad_norm, lr })
    }

    /// Tells schedules where the next step is, unless they count steps of an optimizer that does one each time.
    fn set_schedules_position(&mut self) {
        let automatic = self.runner.automatic_optimization();
        for (_, optimizer) in training(&mut self.optimizers).iter_mut() {
            match optimizer.schedule_interval() {
                Interval::Epoch => optimizer.set_schedule_position(self.epoch),
                Interval::Step if automatic => {}
                Interval::Step => optimizer.set_schedule_position(self.cursor.step),
            }
        }
    }

    /// Tells schedules and hooks how long the run is.
    pub(super) fn set_length(&mut self, max_steps: Option<u64>) -> Result<()> {
        let (order, sampler) = self.train_sampler()?;
        let epoch = order.epoch_len();
        let of_steps = max_steps.map(|steps| match self.parts.config.last_batch {
            LastBatch::Wrap => steps.saturating_mul(sampler.global_batch_size()).div_ceil(epoch),
            _ => steps.div_ceil(sampler.steps_between(0, epoch).max(1)),
        });
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

    /// Forward and backward of one micro-batch. Collective.
    fn micro_batch(
        &mut self,
        plan: &LoopPlan,
        (of_step, micro_batch): (&StepSamples, usize),
        logged: &mut StepContext,
    ) -> Result<()> {
        let index = micro_batch as u64;
        self.batch_hook(Hook::TrainBatchStart, index)?;
        let data = self.parts.fabric.phase("data");
        let samples = self.runner.next_training_batch()?;
        drop(data);
        let is_padding = plan.sampler.is_padding(of_step, micro_batch);
        logged.begin_batch(index, samples.indices().len(), is_padding);
        let first_sample = plan.sampler.first_sample(of_step, micro_batch);
        let fabric = &self.parts.fabric;
        let step = logged.step;
        let _detecting = self.parts.config.detect_anomaly.then(detect_anomaly);
        let loss = self.runner.training_step(logged, &mut |forward| {
            let _scope = fabric.forward_scope(true, step, first_sample);
            let _phase = fabric.phase("forward");
            forward().map_err(|error| {
                explain_shapes(error).during(format_args!("in training_step of step {step}"))
            })
        })?;
        let loss = if is_padding { loss.ignored()? } else { loss };
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

    /// Validates during training, with the moving average of the weights if there is one.
    /// Collective.
    fn validate_training(&mut self) -> Result<Evaluated> {
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

    /// Calls the hooks for the end of the run, and emits the summary. Collective.
    pub(super) fn finish_fit(&mut self, end: FitEnd) -> Result<()> {
        let idle = training(&mut self.optimizers).iter().all(|(_, own)| own.steps() == 0);
        if idle && self.cursor.step > 0 && self.rank() == 0 {
            tracing::warn!(
                "no optimizer has stepped in {} step(s): `training_step` optimizes by itself \
                 (`automatic_optimization`), and is to call `StepContext::optimize`, or `optimizer_step` \
                 after its backwards",
                self.cursor.step
            );
        }
        // An interrupted run ends without further delay.
        if end == FitEnd::Finished {
            self.hook(Hook::FitEnd)?;
        }
        self.summary()
    }

    /// Reports where the time went, and writes the trace.
    fn report_profile(&mut self, (profile, trace): (Profile, Option<String>)) -> Result<()> {
        if let (Some(trace), 0) = (trace, self.rank()) {
            let path = self.parts.run_dir.join("trace.json");
            std::fs::write(&path, trace).map_err(Error::io("writing the trace", &path))?;
        }
        self.emit(&Event::Profile(profile))
    }

    /// After an error reports where the time of rank 0 went until then: the others cannot be asked any more.
    pub(super) fn profile_on_exception(&mut self) {
        let reported = match self.parts.fabric.own_profile() {
            Ok(Some(profile)) if self.rank() == 0 => self.report_profile(profile),
            Ok(_) => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = reported {
            tracing::error!("reporting where the time went: {error}");
        }
    }

    /// Emits the summary, and where the time went if that was measured. Collective.
    pub(super) fn summary(&mut self) -> Result<()> {
        if let Some(profile) = self.parts.fabric.profile()? {
            self.report_profile(profile)?;
        }
        let peak_rss_mib = all_gather_object(&**self.parts.fabric.world(), &peak_rss_mib())?
            .into_iter()
            .map(|mib| mib.unwrap_or(f64::NAN))
            .collect();
        let meter = &self.parts.meter;
        let event = Event::Summary {
            steps: self.cursor.step,
            world_size: self.world_size(),
            strategy: self.parts.strategy.clone(),
            first_loss: meter.first_loss(),
            last_loss: meter.last_loss(),
            step_s_median: meter.median_step_secs(),
            tokens_per_s: meter.counts_per_sec(),
            startup_s: meter.startup_secs(),
            peak_rss_mib,
        };
        self.emit(&event)
    }
}

/// The optimizers of a session that trains.
pub(super) fn training(optimizers: &mut Option<FabricOptimizers>) -> &mut FabricOptimizers {
    optimizers.as_mut().expect("set up before the loop")
}

/// The only optimizer of a session whose trainer optimizes; otherwise the first one.
fn only(optimizers: &mut Option<FabricOptimizers>) -> &mut FabricOptimizer {
    training(optimizers).first_mut().expect("there is one: it was checked")
}
