//! A run in progress: its parts, and the hooks, which see all of them.

use std::path::PathBuf;
use std::sync::Arc;

use candle_core::{Device, Tensor};

use super::checkpoints::place::Saving;
use super::elastic::Copies;
use super::module::callback::Callbacks;
use super::module::context::{HookParts, Requests};
use super::module::hooks::Hook;
use super::module::runner::ModuleRunner;
use super::progress::Progress;
use super::record::flight::Flight;
use super::record::recorder::Recorder;
use super::{Event, HookContext};
use crate::fabric::{Fabric, FabricOptimizer, FabricOptimizers, SampleIdentity};
use crate::run::TrainerConfig;
use crate::trainer::run_plan::Planned;
use crate::{Error, Result};
use fulgurite_engine::collective::{ProcessGroup, ReduceOp};
use fulgurite_engine::execution::read;
use fulgurite_launch::Interruption;

/// A run in progress.
pub(super) struct Session {
    /// The first field, so that it is dropped first: a running save needs the other ranks.
    pub(super) saving: Saving,
    pub(super) setup: SessionSetup,
    /// Copies of the ranks' shards in the host's memory, with `trainer.elastic.replicas`.
    pub(super) copies: Option<Copies>,
    /// The record of the last collectives, unless there is one rank.
    pub(super) flight: Option<Flight>,
    pub(super) runner: Box<dyn ModuleRunner>,
    /// Set during and after training.
    pub(super) optimizers: Option<FabricOptimizers>,
    pub(super) progress: Progress,
    /// Whether all ranks have loaded the state that the run goes on from, if there is one.
    pub(super) has_state: bool,
    /// Whether averages are in the weights' place, for a validation.
    pub(super) has_averages: bool,
    /// The buffers' values before the step that is under way, in an elastic training.
    pub(super) buffers_before: Vec<Tensor>,
    pub(super) callbacks: Callbacks,
    /// Pending requests from hooks.
    pub(super) requests: Requests,
    /// The last field: it removes the directory of a run without results.
    pub(super) recorder: Recorder,
}

/// The setup of a run, which never changes.
pub(super) struct SessionSetup {
    pub(super) fabric: Fabric,
    /// All ranks, for work in the background, whose bytes are not those of steps.
    pub(super) background: Arc<dyn ProcessGroup>,
    pub(super) config: TrainerConfig,
    /// The run's directory.
    pub(super) run_dir: PathBuf,
    /// When the run began, in microseconds since 1970: in the first generation of an elastic one.
    pub(super) begun_at: u64,
    /// The whole configuration.
    pub(super) resolved: toml::Table,
    /// The strategy's name.
    pub(super) strategy: String,
    /// Number of samples in a rank's batch.
    pub(super) batch_size: usize,
    /// Number of data-parallel ranks for whose batches a step has samples. Other than their number
    /// after the loss of a rank.
    pub(super) step_ranks: usize,
    pub(super) shuffle: bool,
    pub(super) samples: SampleIdentity,
    pub(super) plan: Option<Planned>,
    pub(super) print: fn(&str),
    pub(super) interrupted: fn() -> Option<Interruption>,
}

impl SessionSetup {
    pub(super) fn world_size(&self) -> usize {
        self.fabric.world_size()
    }

    pub(super) fn rank(&self) -> usize {
        self.fabric.global_rank()
    }

    pub(super) fn device(&self) -> Device {
        self.fabric.device().clone()
    }
}

/// The result of a [vote](Session::vote_on_stop), equal on all ranks.
pub(super) struct StopVote {
    /// Whether on some rank the time is up or a hook asked to stop.
    pub(super) stop: bool,
    /// The most urgent interruption on any rank.
    pub(super) interruption: Option<Interruption>,
    /// Whether no rank has a running save.
    pub(super) saved: bool,
}

impl Session {
    /// Sends an event to the sinks.
    pub(super) fn emit(&mut self, event: &Event) -> Result<()> {
        self.recorder.emit(&self.setup.fabric, event)
    }

    /// Calls a hook, and logs its values. Collective if any are synchronised.
    pub(super) fn hook(&mut self, hook: Hook) -> Result<()> {
        self.batch_hook(hook, 0)
    }

    /// Like [`hook`](Self::hook), in a batch.
    pub(super) fn batch_hook(&mut self, hook: Hook, batch_index: u64) -> Result<()> {
        let _phase = self.setup.fabric.measurements().phase("hooks");
        self.call_hook(hook, batch_index, false)?;
        self.recorder.log_hook(&self.setup.fabric, self.progress.step())?;
        if self.callbacks.decide_by_metrics() {
            self.call_hook(hook, batch_index, true)?;
            self.recorder.log_hook(&self.setup.fabric, self.progress.step())?;
        }
        Ok(())
    }

    /// Calls a hook of the callbacks and the module, or of the callbacks that decide by metrics.
    pub(super) fn call_hook(&mut self, hook: Hook, batch_index: u64, deciding: bool) -> Result<()> {
        let wanted = match hook {
            // Before the step is counted.
            Hook::TrainBatchStart
            | Hook::BeforeBackward(_)
            | Hook::AfterBackward
            | Hook::TrainBatchEnd
            | Hook::BeforeOptimizerStep
            | Hook::BeforeZeroGrad => self.logs_step(self.progress.step() + 1),
            Hook::TrainStepEnd => self.logs_step(self.progress.step()),
            _ => true,
        };
        let (SessionSetup { fabric, config, print, .. }, progress) = (&self.setup, &self.progress);
        let (max_steps, max_epochs) = progress.length();
        let (metrics, metric_steps, table) = self.recorder.for_hook();
        let mut ctx = HookContext {
            step: progress.step(),
            epoch: progress.epoch(),
            batch_index,
            stage: progress.stage(),
            accumulate_grad_batches: progress.accumulate(),
            max_steps,
            max_epochs,
            items: progress.items(),
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
                saving: &self.saving,
                metric_steps,
                wanted,
                table,
            },
        };
        let mut result = self.callbacks.call(hook, deciding, &mut ctx);
        if result.is_ok()
            && !deciding
            && let Some(runner) = ctx.parts.runner.take()
        {
            result = runner.call_hook(hook, &mut ctx);
        }
        for text in std::mem::take(&mut self.requests.printed) {
            print(&text);
        }
        result
    }

    /// Returns whether values of step `step` are logged: the first, every
    /// `trainer.log_every_n_steps`, and the last if known.
    pub(super) fn logs_step(&self, step: u64) -> bool {
        self.setup.config.logs_step(step) || Some(step) == self.progress.length().0
    }

    /// Returns the optimizers of a training session.
    pub(super) fn optimizers_mut(&mut self) -> &mut FabricOptimizers {
        self.optimizers.as_mut().expect("set up before the loop")
    }

    /// Returns the only optimizer under automatic optimization; otherwise the first one.
    pub(super) fn sole_optimizer(&mut self) -> &mut FabricOptimizer {
        self.optimizers_mut().first_mut().expect("there is one: it was checked")
    }

    /// Returns the number of steps of all optimizers that changed nothing, because nothing counted.
    pub(super) fn skipped_steps(&self) -> u64 {
        let optimizers = self.optimizers.iter().flat_map(FabricOptimizers::iter);
        optimizers.map(|(_, own)| own.skipped_steps()).sum()
    }

    /// Exchanges whether the run ends: if any rank ends, all do. Collective.
    pub(super) fn vote_on_stop(&self, out_of_time: bool) -> Result<StopVote> {
        let stop = out_of_time || self.requests.stop;
        let saving = self.saving.is_running();
        let votes = [u8::from(stop), urgency((self.setup.interrupted)()), u8::from(saving)];
        let votes = Tensor::new(&votes, &Device::Cpu)?;
        self.setup.fabric.all_reduce(&votes, ReduceOp::Max).map_err(|error| match error {
            // The other ranks are in another collective, or wait for this rank in another group.
            Error::Collective { rank, group, op, message } => {
                let logged: Vec<&str> =
                    self.recorder.metrics().keys().map(String::as_str).collect();
                let message = format!(
                    "{message} (the vote after step {}. A rank that is elsewhere may have logged a metric that this \
                     one has not: it knows {}. All ranks must log the same names, or log with \
                     `LogOptions::default().sync(false)` what is rank 0's own)",
                    self.progress.step(),
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
