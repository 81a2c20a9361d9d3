//! A run in progress: its state, its hooks, what it logs and its end.

use std::collections::BTreeMap;
use std::path::PathBuf;

use candle_core::Device;
use serde::{Deserialize, Serialize};

use super::callback::Callbacks;
use super::context::{HookParts, Requests};
use super::event::SharedSink;
use super::hooks::Hook;
use super::late::{Metrics, UnreadStep};
use super::log_table::{LogTable, Stage};
use super::meter::{Meter, peak_rss_mib};
use super::run_dir::RunDirGuard;
use super::runner::ModuleRunner;
use super::saving::Saving;
use super::training_loop::FitEnd;
use super::{Event, HookContext, ItemRate, Stage as RunStage};
use crate::fabric::{Fabric, FabricOptimizer, FabricOptimizers, SampleIdentity};
use crate::profiler::Profile;
use crate::run::TrainerConfig;
use crate::{Error, Result, counted};
use fulgurite_engine::collective::all_gather_object;
use fulgurite_engine::data::DataReport;
use fulgurite_engine::mesh::DP_CP;
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
    /// Of the run's directory, on rank 0. The last field, so that nothing is written there any
    /// more.
    pub(super) guard: Option<RunDirGuard>,
}

pub(super) struct Session {
    pub(super) parts: SessionParts,
    pub(super) runner: Box<dyn ModuleRunner>,
    /// Set while and after training.
    pub(super) optimizers: Option<FabricOptimizers>,
    pub(super) stage: RunStage,
    /// Batches of each rank in a step.
    pub(super) accumulate: u64,
    /// Into how many micro-batches each of them is split.
    pub(super) micro_batches_in_batch: usize,
    /// The steps and the epochs that the run has, as far as they are known.
    pub(super) length: (Option<u64>, Option<u64>),
    /// What the losses of the last step counted, of all ranks.
    pub(super) items: f64,
    /// What hooks have asked for and was not done yet.
    pub(super) requests: Requests,
    pub(super) batch_size: usize,
    pub(super) shuffle: bool,
    pub(super) samples: SampleIdentity,
    /// The [length](Self::length) that a resumed run had before.
    pub(super) length_before: Option<(Option<u64>, Option<u64>)>,
    /// [`DataModule::report`](fulgurite_engine::data::DataModule::report), until the sinks have it.
    pub(super) report: Option<DataReport>,
    /// [`DataModule::items`](fulgurite_engine::data::DataModule::items).
    pub(super) items_name: &'static str,
    pub(super) cursor: Cursor,
    /// The epoch of the step that is being or was last computed, counted from 0.
    pub(super) epoch: u64,
    /// The last step, if it has left its numbers on the device.
    pub(super) unread: Option<UnreadStep>,
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

impl Session {
    pub(super) fn world_size(&self) -> usize {
        self.parts.fabric.world_size()
    }

    pub(super) fn rank(&self) -> usize {
        self.parts.fabric.global_rank()
    }

    pub(super) fn emit(&mut self, event: &Event) -> Result<()> {
        let _phase = self.parts.fabric.phase("logging");
        let is_logged = !self.parts.config.loggers.is_empty() && event.is_logged();
        if is_logged || matches!(event, Event::Step { .. } | Event::Checkpoint { .. }) {
            self.keep_run_dir();
        }
        self.parts.sinks.iter().try_for_each(|sink| sink.lock().event(event))
    }

    /// Keeps the run's directory after the run, which has results, unless it is a trial of which
    /// nothing is kept.
    pub(super) fn keep_run_dir(&mut self) {
        let is_trial = self.parts.config.fast_dev_run.batches().is_some();
        if let Some(guard) = self.parts.guard.as_mut().filter(|_| !is_trial) {
            guard.keep();
        }
    }

    /// Whether what step `step` logs is wanted: the first, every `trainer.log_every_n_steps`, and
    /// the last if its number is known.
    pub(super) fn logs_step(&self, step: u64) -> bool {
        self.parts.config.logs_step(step) || Some(step) == self.length.0
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
            | Hook::BeforeZeroGrad => self.logs_step(self.cursor.step + 1),
            Hook::TrainStepEnd => self.logs_step(self.cursor.step),
            _ => true,
        };
        let fabric = &self.parts.fabric;
        let metrics = Metrics::new(&self.metrics, self.unread.as_ref());
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
            metrics: &metrics,
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
        self.record_of(self.cursor.step, values);
    }

    /// Remembers metrics of a step.
    pub(super) fn record_of(&mut self, step: u64, values: &BTreeMap<String, f64>) {
        self.parts.saving.note(step, values);
        for (name, value) in values {
            self.metrics.insert(name.clone(), *value);
            self.metric_steps.insert(name.clone(), step);
        }
    }

    /// The values of a table over all ranks. Collective as [`LogTable::reduce`].
    pub(super) fn reduce(
        &self,
        table: &mut LogTable,
        stage: Stage,
    ) -> Result<BTreeMap<String, f64>> {
        let fabric = &self.parts.fabric;
        let (world, group) = (fabric.world(), fabric.device_mesh().group(DP_CP)?);
        let counts = group.global_ranks().contains(&world.global_ranks()[0]);
        table.reduce(stage, &**world, counts)
    }

    pub(super) fn device(&self) -> Device {
        self.parts.fabric.device().clone()
    }

    /// Calls the hooks for the end of the run, and emits the summary. Collective.
    pub(super) fn finish_fit(&mut self, end: FitEnd) -> Result<()> {
        let idle = training(&mut self.optimizers).iter().all(|(_, own)| own.steps() == 0);
        if idle && self.cursor.step > 0 && self.rank() == 0 {
            tracing::warn!(
                "no optimizer has stepped in {}: `training_step` optimizes by itself \
                 (`automatic_optimization`), and is to call `StepContext::optimize`, or `optimizer_step` \
                 after its backwards",
                counted(self.cursor.step, "step")
            );
        }
        let skipped = |own: &FabricOptimizer| own.skipped_steps() == own.steps();
        let finished = end == FitEnd::Finished;
        if finished && !idle && training(&mut self.optimizers).iter().all(|(_, own)| skipped(own)) {
            return Err(Error::Data(format!(
                "nothing has counted in any of {}, so that no parameter was changed: every target is ignored \
                 (`ignore_index`), or `Loss::new` is given a count of 0",
                counted(self.cursor.step, "step")
            )));
        }
        // An interrupted run ends without further delay.
        if finished {
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
        let peak_device_mib = self.peak_device_mib()?;
        let meter = &self.parts.meter;
        let event = Event::Summary {
            steps: self.cursor.step,
            world_size: self.world_size(),
            strategy: self.parts.strategy.clone(),
            first_loss: meter.first_loss(),
            last_loss: meter.last_loss(),
            step_s_median: meter.median_step_secs(),
            rate: ItemRate::new(self.items_name, meter.counts_per_sec()),
            startup_s: meter.startup_secs(),
            skipped_steps: self.skipped_steps(),
            peak_rss_mib,
            peak_device_mib,
        };
        self.emit(&event)
    }

    /// Optimizer steps in which nothing counted, so that they changed nothing, of all optimizers.
    pub(super) fn skipped_steps(&self) -> u64 {
        let optimizers = self.optimizers.iter().flat_map(FabricOptimizers::iter);
        optimizers.map(|(_, own)| own.skipped_steps()).sum()
    }

    /// The peak memory of the devices of all ranks, in MiB; empty if they are the host's. Collective.
    fn peak_device_mib(&self) -> Result<Vec<f64>> {
        let fabric = &self.parts.fabric;
        // All ranks have the same kind of device.
        let Some(memory) = fabric.device_memory()? else { return Ok(Vec::new()) };
        let peaks = all_gather_object(&**fabric.world(), &(memory.peak_bytes as f64))?;
        Ok(peaks.into_iter().map(|peak| peak / f64::from(1 << 20)).collect())
    }
}

/// The optimizers of a session that trains.
pub(super) fn training(optimizers: &mut Option<FabricOptimizers>) -> &mut FabricOptimizers {
    optimizers.as_mut().expect("set up before the loop")
}
