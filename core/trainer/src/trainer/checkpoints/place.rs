//! The location and schedule of a run's checkpoints.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::run::CheckpointConfig;
use crate::trainer::checkpoints::lookup::ResumeSource;
use crate::trainer::checkpoints::retention::{RetainedCheckpoint, Retention};
use crate::trainer::record::recorder::Recorder;
use crate::{Error, Result};
use fulgurite_checkpoint::{self as checkpoint, AsyncSaver, CheckpointIO, LAST, PlaceLock};
use fulgurite_engine::collective::ProcessGroup;

/// The state of a run's saving: location, schedule, and retention.
pub(crate) struct Saving {
    config: CheckpointConfig,
    /// The root of the location, as in the configuration.
    root: PathBuf,
    io: Arc<dyn CheckpointIO>,
    /// Held on rank 0 from before the first save until the end of the run.
    lock: Option<PlaceLock>,
    background: Option<AsyncSaver>,
    retention: Retention,
    /// The names of the checkpoints that this run has saved and not removed.
    names: BTreeSet<String>,
    /// The step of the last checkpoint that was saved, or is about to be.
    saved: Option<u64>,
    /// The state before the save under way, if it may fail.
    before: Option<Before>,
    failed: Failed,
    /// The step of the last checkpoint of the table `[checkpoint]` that was committed.
    committed: Option<u64>,
    /// What saves that failed after their commit have not removed.
    left: Vec<String>,
    /// How long training has waited for the save before the one under way.
    waited: Duration,
    /// Whether a checkpoint has had a score.
    has_scored: bool,
    warned: bool,
    warned_of_steps: bool,
    is_torn_down: bool,
    goes_on: bool,
}

/// The checkpoints of a run before a save.
pub(crate) struct Before {
    retention: Retention,
    names: BTreeSet<String>,
    saved: Option<u64>,
    /// The name of the new checkpoint.
    pub(crate) name: String,
    /// The names to remove after its commit.
    remove: Vec<String>,
}

/// Saves in a row that failed.
#[derive(Default)]
struct Failed {
    count: u64,
    last: Option<Error>,
}

/// Tears the location down after a run that failed during its setup.
impl Drop for Saving {
    fn drop(&mut self) {
        if let Err(error) = self.teardown() {
            tracing::error!("completing what checkpoints are still under way: {error}");
        }
    }
}

impl Saving {
    /// Prepares saving to `config.dir`, by default to `default`. Collective.
    pub(crate) fn new(
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
            before: None,
            failed: Failed::default(),
            committed: None,
            left: Vec::new(),
            waited: Duration::ZERO,
            has_scored: false,
            warned: false,
            warned_of_steps: false,
            is_torn_down: false,
            goes_on: false,
        })
    }

    pub(crate) fn config(&self) -> &CheckpointConfig {
        &self.config
    }

    /// Makes a resume load the whole state, even with `checkpoint.weights_only`.
    ///
    /// Used if a restarted run resumes from its own checkpoint: the configuration names another
    /// one.
    pub(crate) fn resume_whole_state(&mut self) {
        self.config.weights_only = false;
    }

    /// Returns the root of the location, as in the configuration.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn io(&self) -> &Arc<dyn CheckpointIO> {
        &self.io
    }

    /// Continues after the checkpoint `name` of this location, whose run has `kept` these
    /// checkpoints.
    ///
    /// `saved` is the step of a checkpoint that need not be saved again.
    pub(crate) fn resume(
        &mut self,
        name: &str,
        kept: Vec<RetainedCheckpoint>,
        saved: Option<u64>,
        rank: usize,
    ) {
        self.retention.resume(name, kept);
        // The earlier run ended before it removed these checkpoints.
        for name in self.retention.take_expired() {
            if rank == 0
                && let Err(error) = self.io.remove(&name)
            {
                tracing::warn!("an old checkpoint stays: {error}");
            }
        }
        self.saved = saved;
    }

    /// Waits for the running save of this rank, and tears the location down, at the end of a run.
    ///
    /// A second call does nothing.
    pub(crate) fn teardown(&mut self) -> Result<()> {
        // Dropping the saver waits for its thread. An error of the thread has already ended the
        // run.
        drop(self.background.take());
        let torn_down = if std::mem::replace(&mut self.is_torn_down, true) {
            Ok(())
        } else {
            self.io.teardown()
        };
        drop(self.lock.take());
        torn_down
    }

    /// Locks the location on rank 0 until the run ends, so that no other run saves there.
    ///
    /// Does nothing if it is locked already.
    fn lock(&mut self, rank: usize) -> Result<()> {
        if rank == 0 && self.lock.is_none() {
            self.lock = self.io.lock("")?;
        }
        Ok(())
    }

    /// Locks the location of a run that will save, before any look-up in it.
    pub(crate) fn lock_for_run(&mut self, rank: usize) -> Result<()> {
        if self.will_save() { self.lock(rank) } else { Ok(()) }
    }

    /// Refuses to start a new run in a location that has checkpoints of another run. Checked on
    /// rank 0.
    ///
    /// The checkpoints would have the same names, and the best and the last could belong to either
    /// run.
    pub(crate) fn refuse_used_place(
        &self,
        source: Option<&ResumeSource>,
        rank: usize,
    ) -> Result<()> {
        let goes_on = match source {
            Some(ResumeSource::Named { dir, .. }) => *dir == self.root,
            Some(ResumeSource::Memory(_)) => true,
            _ => false,
        };
        if rank > 0 || goes_on || self.config.overwrite || !self.will_save() {
            return Ok(());
        }
        refuse_used(&*self.io)
    }

    /// Returns whether a run with this configuration saves anything.
    fn will_save(&self) -> bool {
        self.config.will_save()
    }

    /// Returns whether a background save is running on this rank.
    pub(crate) fn is_running(&self) -> bool {
        self.background.as_ref().is_some_and(AsyncSaver::is_running)
    }

    /// Continues in the same run after the loss of a rank. The run has `kept` these checkpoints,
    /// the last of which may not be committed, and has resumed from another in this location.
    pub(crate) fn go_on(
        &mut self,
        mut kept: Vec<RetainedCheckpoint>,
        resumed_from: Option<String>,
    ) -> Result<()> {
        let there: BTreeSet<String> =
            self.io.list("")?.into_iter().map(|entry| entry.name).collect();
        kept.retain(|kept| there.contains(&kept.name));
        self.retention.go_on(kept, resumed_from);
        self.goes_on = true;
        Ok(())
    }

    /// Returns whether the run goes on after the loss of a rank, from a state in memory.
    pub(crate) fn goes_on(&self) -> bool {
        self.goes_on
    }

    /// Returns whether a checkpoint was saved after this step, or is about to be.
    pub(crate) fn has_saved(&self, step: u64) -> bool {
        self.saved == Some(step)
    }

    /// Returns whether a checkpoint is due after `step`, and after its validation if it has one.
    ///
    /// With `checkpoint.monitor` and `save_top_k` but without an interval, each validation is
    /// followed by a checkpoint.
    pub(crate) fn is_due(&self, step: u64, validated: bool) -> bool {
        match self.config.every_n_steps {
            Some(n) => step.is_multiple_of(n),
            None => {
                let keeps_best = self.config.save_top_k.is_some_and(|k| k != 0);
                validated && keeps_best && self.config.monitor.is_some()
            }
        }
    }

    /// Ends a save whose checkpoint of this step was committed. Returns how long training has
    /// waited for the save before it.
    pub(crate) fn complete(&mut self, step: u64) -> Duration {
        // The saves of hooks do not count: they may be weights alone.
        if self.before.take().is_some() {
            self.failed = Failed::default();
            self.committed = Some(step);
        }
        std::mem::take(&mut self.waited)
    }

    /// Returns the step of the last checkpoint of the table `[checkpoint]` that was committed.
    pub(crate) fn committed(&self) -> Option<u64> {
        self.committed
    }

    /// Notes how long training has waited for the save before the one that begins.
    pub(crate) fn note_wait(&mut self, waited: Duration) {
        self.waited = waited;
    }

    /// Ends a save that failed. Returns the state before it, if the run may go on.
    pub(crate) fn take_before(&mut self) -> Option<Before> {
        let before = self.before.take();
        before.filter(|_| self.failed.count < self.config.max_failed_saves)
    }

    /// Goes on after a save that failed before or after its commit. Returns how many have failed in
    /// a row.
    pub(crate) fn go_on_after(&mut self, before: Before, error: Error, is_committed: bool) -> u64 {
        let Before { retention, names, saved, remove, .. } = before;
        match is_committed {
            true => self.left = remove,
            false => (self.retention, self.names, self.saved) = (retention, names, saved),
        }
        self.failed = Failed { count: self.failed.count + 1, last: Some(error) };
        self.failed.count
    }

    /// Returns the error of the last save, if it failed.
    pub(crate) fn take_failure(&mut self) -> Option<Error> {
        self.failed.last.take()
    }

    /// Begins to save the checkpoint `name` of `step`: adds it to the kept checkpoints.
    ///
    /// Returns the kept checkpoints, and the names to remove after the commit.
    pub(crate) fn keep(
        &mut self,
        step: u64,
        name: &str,
        recorder: &Recorder,
        rank: usize,
    ) -> Result<(Vec<RetainedCheckpoint>, Vec<String>)> {
        let score = self.score(step, recorder, rank)?;
        let (retention, names, saved) = (self.retention.clone(), self.names.clone(), self.saved);
        self.retention.add(step, name, score);
        self.saved = Some(step);
        // With the expired checkpoints, which a resumed run removes if this one is killed first.
        let kept = self.kept();
        let mut remove = std::mem::take(&mut self.left);
        remove.extend(self.retention.take_expired());
        let (name, remove_later) = (name.to_owned(), remove.clone());
        self.before = Some(Before { retention, names, saved, name, remove: remove_later });
        Ok((kept, remove))
    }

    /// Returns the checkpoints that the table `[checkpoint]` keeps.
    pub(crate) fn kept(&self) -> Vec<RetainedCheckpoint> {
        self.retention.kept().to_vec()
    }

    /// Takes a name for a checkpoint of this run, and frees the names in `remove`.
    ///
    /// The checkpoint that the run resumed from is never removed: its name is dropped from
    /// `remove`.
    pub(crate) fn take_name(
        &mut self,
        name: &str,
        remove: &mut Vec<String>,
        rank: usize,
    ) -> Result<()> {
        self.lock(rank)?;
        remove.retain(|old| self.resumed_from() != Some(old));
        self.names.retain(|name| !remove.contains(name));
        self.names.insert(name.to_owned());
        Ok(())
    }

    /// Returns the saver for background saves, if configured.
    pub(crate) fn background(&mut self) -> Option<&mut AsyncSaver> {
        self.background.as_mut()
    }

    /// Returns whether the run saves every few steps or after validations.
    pub(crate) fn is_periodic(&self) -> bool {
        self.config.every_n_steps.is_some() || self.config.save_top_k.is_some()
    }

    /// Returns the names that are taken: see
    /// [`HookContext::checkpoint_names`](crate::trainer::HookContext::checkpoint_names).
    pub(crate) fn names(&self) -> Result<BTreeSet<String>> {
        let there = self.io.list("")?.into_iter().map(|entry| entry.name);
        // The pointer's name is taken even before anything is saved.
        Ok(there.chain(self.names.iter().cloned()).chain([LAST.to_owned()]).collect())
    }

    /// Returns the name of the checkpoint that the run resumed from, if it lies in this location.
    pub(crate) fn resumed_from(&self) -> Option<&str> {
        self.retention.resumed_from()
    }

    /// Returns the best checkpoint so far by the monitored metric, and the newest.
    pub(crate) fn best_and_last(&self) -> [Option<PathBuf>; 2] {
        [self.retention.best_name(), self.retention.last_name()]
            .map(|name| name.map(|name| self.io.location(name)))
    }

    /// Returns the monitored metric, if it was logged in this step. A score of an earlier step does
    /// not count.
    fn score(&mut self, step: u64, recorder: &Recorder, rank: usize) -> Result<Option<f64>> {
        let Some(monitor) = &self.config.monitor else { return Ok(None) };
        let (metrics, scored_step) = (recorder.metrics(), recorder.metric_step(monitor));
        if let Some(score) = metrics.get(monitor) {
            let is_of_step = scored_step == Some(step);
            self.has_scored |= is_of_step;
            if let (false, Some(scored), 0) = (self.has_scored, scored_step, rank)
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
        // A module may log metrics only on rank 0.
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

/// Refuses a location that has a checkpoint.
pub(crate) fn refuse_used(io: &dyn CheckpointIO) -> Result<()> {
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
