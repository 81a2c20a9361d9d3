//! Saving checkpoints in a run.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::callback::CallbackState;
use super::hooks::Hook;
use super::log_table::SavedStates;
use super::resuming::ResumeSource;
use super::retention::{RetainedCheckpoint, Retention};
use super::saved_state::SavedState;
use super::session::{Cursor, Session, SessionParts, training};
use super::{Event, SaveRequest};
use crate::fabric::OptimizerState;
use crate::run::CheckpointConfig;
use crate::{Error, Result};
use fulgurite_checkpoint_format::{
    self as checkpoint, AsyncSaver, CheckpointIO, LAST, PlaceLock, SavedCheckpoint,
};
use fulgurite_engine::checkpoint_io::invalid_name;
use fulgurite_engine::collective::{ProcessGroup, all_gather_object};

/// The trainer's state in a checkpoint. With weights and optimizer state it is all that a resumed
/// run needs to continue like an uninterrupted one.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct TrainerState {
    pub(super) cursor: Cursor,
    pub(super) seed: u64,
    /// The epoch of the last step; `None` before the first.
    #[serde(default)]
    pub(super) epoch: Option<u64>,
    /// Whether the validation due after the last step has not been run yet.
    #[serde(default)]
    pub(super) validation_due: bool,
    /// The latest metrics of rank 0; `None` for values that are not finite.
    #[serde(default)]
    pub(super) metrics: BTreeMap<String, Option<f64>>,
    /// What the present epoch has logged so far, by rank; empty if nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) epoch_metrics: Vec<SavedStates>,
    /// What the module of rank 0 saves of itself.
    #[serde(default, skip_serializing_if = "SavedState::is_empty")]
    pub(super) module: SavedState,
    /// The states of the callbacks of rank 0.
    #[serde(default)]
    pub(super) callbacks: Vec<CallbackState>,
    /// The checkpoints that this run keeps, including this one.
    #[serde(default)]
    pub(super) kept: Vec<RetainedCheckpoint>,
    /// The fingerprint of the data; `None` if it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) data: Option<String>,
    /// What defines the training samples besides the data, by name; empty in checkpoints of versions that
    /// did not record it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) samples: BTreeMap<String, String>,
    /// The steps and the epochs that the run has, as schedules see them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) length: Option<(Option<u64>, Option<u64>)>,
}

/// How and where a run saves checkpoints.
pub(super) struct Saving {
    pub(super) config: CheckpointConfig,
    /// The root of the place, as in the configuration.
    pub(super) root: PathBuf,
    pub(super) io: Arc<dyn CheckpointIO>,
    /// Held on rank 0 from before the first save until the end of the run.
    lock: Option<PlaceLock>,
    background: Option<AsyncSaver>,
    pub(super) retention: Retention,
    /// The names of what this run has saved and not removed.
    names: BTreeSet<String>,
    /// The step after which the last checkpoint was saved, or is about to be.
    pub(super) saved: Option<u64>,
    /// The step that the monitored metric was last logged of.
    scored_step: Option<u64>,
    /// Whether a checkpoint has had a score.
    has_scored: bool,
    warned: bool,
    warned_of_steps: bool,
    is_torn_down: bool,
}

/// Tears down after a run that failed during its setup.
impl Drop for Saving {
    fn drop(&mut self) {
        if let Err(error) = self.teardown() {
            tracing::error!("completing what checkpoints are still under way: {error}");
        }
    }
}

impl Saving {
    /// For saving to `config.dir`, by default to `default`. Collective.
    pub(super) fn new(
        config: &CheckpointConfig,
        default: PathBuf,
        world: &dyn ProcessGroup,
    ) -> Result<Self> {
        let root = config.dir.clone().unwrap_or(default);
        let io = config.open(&root)?;
        let background =
            config.async_save.then(|| AsyncSaver::new(io.clone(), world)).transpose()?;
        let retention = Retention::new(config);
        let config = config.clone();
        Ok(Self {
            config,
            root,
            io,
            lock: None,
            background,
            retention,
            names: BTreeSet::new(),
            saved: None,
            scored_step: None,
            has_scored: false,
            warned: false,
            warned_of_steps: false,
            is_torn_down: false,
        })
    }

    /// Called at the end of a run: waits for the save under way on this rank, and tears the place
    /// down. Does nothing the second time.
    pub(super) fn teardown(&mut self) -> Result<()> {
        // Dropping the saver waits for its thread; an error of it has ended the run already.
        drop(self.background.take());
        let torn_down = if std::mem::replace(&mut self.is_torn_down, true) {
            Ok(())
        } else {
            self.io.teardown()
        };
        drop(self.lock.take());
        torn_down
    }

    /// Locks the place on rank 0, unless it is locked already: no other run saves there until this one
    /// ends.
    fn lock(&mut self, rank: usize) -> Result<()> {
        if rank == 0 && self.lock.is_none() {
            self.lock = self.io.lock("")?;
        }
        Ok(())
    }

    /// Locks the place of a run that will save, before anything is looked for in it.
    pub(super) fn lock_for_run(&mut self, rank: usize) -> Result<()> {
        if self.will_save() { self.lock(rank) } else { Ok(()) }
    }

    /// Refuses to save to a place that has checkpoints of another run, for a run that starts anew: the names
    /// would be the same, and which checkpoint is the best or the last would be a mixture. Looked at on rank
    /// 0.
    pub(super) fn refuse_used_place(
        &self,
        source: Option<&ResumeSource>,
        rank: usize,
    ) -> Result<()> {
        let goes_on = matches!(source, Some(ResumeSource::Named { dir, .. }) if *dir == self.root);
        if rank > 0 || goes_on || self.config.overwrite || !self.will_save() {
            return Ok(());
        }
        refuse_used(&*self.io)
    }

    /// Whether a run with this configuration saves anything.
    fn will_save(&self) -> bool {
        self.config.will_save()
    }

    /// Whether a save in the background is under way on this rank.
    pub(super) fn is_running(&self) -> bool {
        self.background.as_ref().is_some_and(AsyncSaver::is_running)
    }

    /// Whether a checkpoint was saved after this step, or is about to be.
    pub(super) fn has_saved(&self, step: u64) -> bool {
        self.saved == Some(step)
    }

    /// Whether a checkpoint is due after `step`, and perhaps a validation of it. With a metric and no interval
    /// each validation is followed by one.
    pub(super) fn is_due(&self, step: u64, validated: bool) -> bool {
        match self.config.every_n_steps {
            Some(n) => step.is_multiple_of(n),
            None => {
                let keeps_best = self.config.save_top_k.is_some_and(|k| k != 0);
                validated && keeps_best && self.config.monitor.is_some()
            }
        }
    }

    /// Takes notice of metrics that were logged of a step.
    pub(super) fn note(&mut self, step: u64, values: &BTreeMap<String, f64>) {
        if self.config.monitor.as_ref().is_some_and(|monitor| values.contains_key(monitor)) {
            self.scored_step = Some(step);
        }
    }

    /// The names that are taken in the place: see
    /// [`HookContext::checkpoint_names`](super::HookContext::checkpoint_names).
    pub(super) fn names(&self) -> Result<BTreeSet<String>> {
        let there = self.io.list("")?.into_iter().map(|entry| entry.name);
        // Also before anything is saved, the name of the pointer.
        Ok(there.chain(self.names.iter().cloned()).chain([LAST.to_owned()]).collect())
    }

    /// The name of the checkpoint that the run goes on from, if it lies in this place.
    pub(super) fn resumed_from(&self) -> Option<&str> {
        self.retention.resumed_from()
    }

    /// The best checkpoint so far by the monitored metric, and the newest.
    pub(super) fn best_and_last(&self) -> [Option<PathBuf>; 2] {
        [self.retention.best_name(), self.retention.last_name()]
            .map(|name| name.map(|name| self.io.location(name)))
    }

    /// The monitored metric, if it was logged of this step: the score of an earlier state says nothing of
    /// this one.
    fn score(
        &mut self,
        step: u64,
        metrics: &BTreeMap<String, f64>,
        rank: usize,
    ) -> Result<Option<f64>> {
        let Some(monitor) = &self.config.monitor else { return Ok(None) };
        if let Some(score) = metrics.get(monitor) {
            let is_of_step = self.scored_step == Some(step);
            self.has_scored |= is_of_step;
            if let (false, Some(scored), 0) = (self.has_scored, self.scored_step, rank)
                && !std::mem::replace(&mut self.warned_of_steps, true)
            {
                tracing::warn!(
                    "`checkpoint.monitor`: the checkpoint after step {step} is not among the best, as the last \
                     `{monitor}` is of step {scored}. Save where the metric is computed: with \
                     `checkpoint.every_n_steps` a multiple of the steps between two validations, or without it, \
                     for a checkpoint after each validation"
                );
            }
            return Ok(is_of_step.then_some(*score));
        }
        // A module may log metrics on rank 0 alone.
        if rank > 0 {
            return Ok(None);
        }
        if metrics.contains_key("val_loss") {
            let known = metrics.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            return Err(Error::Config(format!(
                "`checkpoint.monitor`: there is no metric `{monitor}`; there are: {known}"
            )));
        }
        if !std::mem::replace(&mut self.warned, true) {
            tracing::warn!(
                "`checkpoint.monitor`: there is no metric `{monitor}` yet, as nothing was \
                 validated; checkpoints until then are not among the best"
            );
        }
        Ok(None)
    }
}

/// A checkpoint to be written.
struct Write {
    name: String,
    /// Those that the table `[checkpoint]` keeps.
    kept: Vec<RetainedCheckpoint>,
    /// What is removed when it is committed.
    remove: Vec<String>,
    weights_only: bool,
    blocking: bool,
}

impl Session {
    /// Saves a checkpoint of the present step, of the kind that the strategy supports: in the
    /// background if configured, unless `blocking`. Collective.
    pub(super) fn save(&mut self, blocking: bool) -> Result<()> {
        self.catch_up()?;
        let (step, rank) = (self.cursor.step, self.rank());
        let name = checkpoint::step_name(step);
        let saving = &mut self.parts.saving;
        let score = saving.score(step, &self.metrics, rank)?;
        saving.retention.add(step, &name, score);
        let kept = saving.retention.kept().to_vec();
        let remove = saving.retention.take_expired();
        saving.saved = Some(step);
        self.write(Write { name, kept, remove, weights_only: false, blocking })
    }

    /// Saves the checkpoints that hooks have asked for. Collective.
    pub(super) fn save_as_requested(&mut self) -> Result<()> {
        if !self.requests.saves.is_empty() {
            self.catch_up()?;
        }
        for request in std::mem::take(&mut self.requests.saves) {
            let SaveRequest { name, weights_only, remove } = request;
            let step_name = checkpoint::step_name(self.cursor.step);
            let name = name.unwrap_or_else(|| step_name.clone());
            if let Some(why) = invalid_name(&name) {
                return Err(Error::other(format!(
                    "a hook has asked for a checkpoint with the name `{name}`, which {why}"
                )));
            }
            // Saved in this step already.
            if name == step_name && self.parts.saving.has_saved(self.cursor.step) {
                continue;
            }
            let kept = self.parts.saving.retention.kept().to_vec();
            self.write(Write { name, kept, remove, weights_only, blocking: false })?;
        }
        Ok(())
    }

    /// Saves after an error, if a hook has asked for it and there is a whole step to save. What goes wrong is only
    /// shown: the run has its error.
    pub(super) fn save_on_exception(&mut self) {
        let Some(request) = self.requests.save_on_exception.take() else { return };
        if let Err(error) = self.catch_up() {
            tracing::warn!("no checkpoint is saved after the error: {error}");
            return;
        }
        let (step, saving) = (self.cursor.step, &self.parts.saving);
        if step == 0 || saving.has_saved(step) || self.world_size() > 1 {
            return;
        }
        if !self.is_between_updates() {
            tracing::warn!(
                "no checkpoint is saved after the error, which came amid an update of the weights or a validation \
                 of their averages"
            );
            return;
        }
        let kept = saving.retention.kept().to_vec();
        let name = request.name.unwrap_or_else(|| checkpoint::step_name(step));
        let SaveRequest { weights_only, remove, .. } = request;
        if let Err(error) = self.write(Write { name, kept, remove, weights_only, blocking: true }) {
            tracing::error!("saving after the error failed: {error}");
        }
    }

    /// Whether the weights are those after the last whole step.
    fn is_between_updates(&self) -> bool {
        let averages = self.validation_due && self.parts.config.ema_decay.is_some();
        let mut optimizers = self.optimizers.iter().flat_map(|all| all.iter());
        let done = self.cursor.step;
        self.runner.automatic_optimization()
            && !averages
            && optimizers.all(|(_, o)| o.steps() == done)
    }

    /// Writes a checkpoint of the present step. Collective.
    fn write(&mut self, write: Write) -> Result<()> {
        self.try_to_write(write).map_err(|error| unwritable(error, self.cursor.step))
    }

    fn try_to_write(&mut self, write: Write) -> Result<()> {
        let _phase = self.parts.fabric.phase("checkpoint");
        let Write { name, kept, mut remove, weights_only, blocking } = write;
        let start = Instant::now();
        if blocking {
            self.finish_saving()?;
        }
        let (step, rank) = (self.cursor.step, self.rank());
        let epoch_metrics = match self.epoch_table.is_empty() {
            true => Vec::new(),
            false => all_gather_object(&**self.parts.fabric.world(), &self.epoch_table.states()?)?,
        };
        let saving = &mut self.parts.saving;
        saving.lock(rank)?;
        remove.retain(|old| saving.resumed_from() != Some(old));
        saving.names.retain(|name| !remove.contains(name));
        saving.names.insert(name.clone());
        // Callbacks before the module, as everywhere.
        let callbacks = self.parts.callbacks.states()?;
        let state = TrainerState {
            cursor: self.cursor,
            seed: self.parts.fabric.seed(),
            epoch: (step > 0).then_some(self.epoch),
            validation_due: self.validation_due,
            metrics: self.metrics.iter().map(|(k, v)| (k.clone(), Some(*v))).collect(),
            epoch_metrics,
            module: self.runner.save_state()?,
            callbacks,
            kept,
            data: self.samples.fingerprint.clone(),
            samples: self.samples.definition.clone(),
            length: Some(self.length),
        };
        let config = serde_json::to_value(&self.parts.resolved)
            .map_err(|e| Error::other(format!("encoding the configuration: {e}")))?;
        let (fabric, io) = (&self.parts.fabric, &saving.io);
        let world = &**fabric.world();
        let distributed = fabric.runtime.saves_distributed_checkpoints()?;
        let optimizers = Some(training(&mut self.optimizers)).filter(|_| !weights_only);
        let optimizer = optimizers.map(|optimizers| optimizers as &mut dyn OptimizerState);
        let path = if distributed {
            let mut request = fabric.save_request(&name, optimizer, &state, config)?;
            (request.update_last, request.remove) = (!weights_only, remove);
            if let (Some(background), false) = (&mut saving.background, blocking) {
                let earlier = background.start(request)?;
                return self.report_saved(earlier);
            }
            request.run(&**io, world)?
        } else {
            let path = fabric.save_full_with(io, &name, optimizer, &state, config)?;
            checkpoint::after_commit(&**io, world, &name, !weights_only, &remove)?;
            path
        };
        self.report_saved(Some(SavedCheckpoint { step, path, blocked: start.elapsed() }))
    }

    /// Allocates memory for saving in the background, if the run will save so. Collective.
    pub(super) fn prepare_saving(&mut self) -> Result<()> {
        let SessionParts { fabric, saving, .. } = &mut self.parts;
        let is_periodic =
            saving.config.every_n_steps.is_some() || saving.config.save_top_k.is_some();
        if let Some(background) = saving.background.as_mut().filter(|_| is_periodic) {
            background.reserve(&fabric.save_request(
                "",
                Some(training(&mut self.optimizers)),
                &(),
                serde_json::Value::Null,
            )?)?;
        }
        Ok(())
    }

    /// Waits for the save under way. Collective.
    pub(super) fn finish_saving(&mut self) -> Result<()> {
        let _phase = self.parts.fabric.phase("checkpoint");
        let saved = match &mut self.parts.saving.background {
            Some(background) => {
                background.wait().map_err(|error| unwritable(error, self.cursor.step))?
            }
            None => None,
        };
        self.report_saved(saved)
    }

    /// Reports a committed checkpoint to sinks and callbacks.
    fn report_saved(&mut self, saved: Option<SavedCheckpoint>) -> Result<()> {
        let Some(SavedCheckpoint { step, path, blocked }) = saved else { return Ok(()) };
        let blocked_s = blocked.as_secs_f64();
        self.emit(&Event::Checkpoint { step, path: path.clone(), blocked_s })?;
        self.hook(Hook::AfterSaveCheckpoint(&path))
    }
}

/// Refuses a place that has a checkpoint.
pub(super) fn refuse_used(io: &dyn CheckpointIO) -> Result<()> {
    match checkpoint::last(io)? {
        None => Ok(()),
        Some(last) => Err(Error::Config(format!(
            "`checkpoint.dir`: {} has checkpoints of another run, the newest after step {}. Go on \
             from it with `trainer.ckpt_path = \"last\"`, name another directory, remove them, or set \
             `checkpoint.overwrite = true` to save among them",
            io.location("").display(),
            last.step
        ))),
    }
}

/// Says what is left of a run whose place of checkpoints could be written at first and cannot any
/// more.
fn unwritable(error: Error, step: u64) -> Error {
    match error {
        Error::Io { action, path, source }
            if matches!(
                source.kind(),
                ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem
            ) =>
        {
            let message = format!(
                "{action} it after step {step}: {source}. Nothing can be written there any more, and the checkpoints \
                 that were saved before are whole: make the place writable, or set another `checkpoint.dir`, and go \
                 on from the last one with `trainer.ckpt_path`"
            );
            Error::checkpoint(path, message)
        }
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_that_becomes_read_only_is_explained() {
        let error = |kind: ErrorKind| Error::io("replacing", "kept/last")(kind.into());
        insta::assert_snapshot!(unwritable(error(ErrorKind::ReadOnlyFilesystem), 5), @"checkpoint kept/last: replacing it after step 5: read-only filesystem or storage medium. Nothing can be written there any more, and the checkpoints that were saved before are whole: make the place writable, or set another `checkpoint.dir`, and go on from the last one with `trainer.ckpt_path`");
        insta::assert_snapshot!(unwritable(error(ErrorKind::StorageFull), 5), @"replacing kept/last: no storage space");
    }
}
