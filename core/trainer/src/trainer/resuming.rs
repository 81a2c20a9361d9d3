//! Resuming from a checkpoint.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::context::Stage as RunStage;
use super::log_table::SavedStates;
use super::restart::{restarted_job, runs_of_job};
use super::retention::Retention;
use super::saving::TrainerState;
use super::session::{Session, training};
use super::{Event, RunDir};
use crate::fabric::{Fabric, OptimizerState};
use crate::run::CkptPath;
use crate::{Error, Result};
use fulgurite_checkpoint_format::{
    self as checkpoint, CheckpointIO, DistributedCheckpoint, FULL_MANIFEST, LoadOptions, MANIFEST,
    TensorSource,
};
use fulgurite_engine::collective::broadcast_object;
use fulgurite_engine::optim::{Interval, WeightAverage};

/// Removes the unfinished saves and the lock of a run that was killed from its place, which nobody
/// saves to any more: its successor saves elsewhere.
fn clear_place(io: &dyn CheckpointIO) -> Result<()> {
    if !io.is_abandoned("")? {
        return Ok(());
    }
    let lock = io.lock("")?;
    let removed = checkpoint::remove_unfinished(io);
    drop(lock);
    removed.map(drop)
}

/// The checkpoint that a run resumes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum ResumeSource {
    /// At this local path.
    Local(PathBuf),
    /// The checkpoint `name` of the place that `checkpoint.io` opens at `dir`.
    Named { dir: PathBuf, name: String },
}

impl ResumeSource {
    /// Its path, for messages.
    fn path(&self) -> PathBuf {
        match self {
            Self::Local(path) => path.clone(),
            Self::Named { dir, name } => dir.join(name),
        }
    }
}

impl Session {
    /// Resumes from a checkpoint; with `checkpoint.weights_only` loads its weights only. In a session
    /// without an optimizer, to validate only, loads the moving average of the weights if `trainer.ema_decay`
    /// is set. Collective.
    pub(super) fn resume(&mut self, from: &ResumeSource) -> Result<()> {
        let training = self.optimizers.is_some();
        let (saving, rank) = (&self.parts.saving, self.rank());
        let io = match from {
            ResumeSource::Local(_) => None,
            ResumeSource::Named { dir, .. } if *dir == saving.root => Some(saving.io.clone()),
            ResumeSource::Named { dir, .. } => Some(saving.config.open(dir)?),
        };
        // A run that only validates must not remove unfinished saves: a training run may be saving
        // there.
        let saves_there =
            training && matches!(from, ResumeSource::Named { dir, .. } if *dir == saving.root);
        if let (Some(io), 0, true) = (&io, rank, saves_there)
            && let Err(error) = checkpoint::remove_unfinished(&**io)
        {
            tracing::warn!("what an earlier run left unfinished stays: {error}");
        }
        if let (Some(io), 0, true) = (&io, rank, training && !saves_there)
            && let Err(error) = clear_place(&**io)
        {
            tracing::warn!("what an earlier run left unfinished stays: {error}");
        }
        let open = || match (from, &io) {
            (ResumeSource::Named { name, .. }, Some(io)) => {
                DistributedCheckpoint::open_with(io, name)
            }
            (ResumeSource::Local(path) | ResumeSource::Named { dir: path, .. }, _) => {
                DistributedCheckpoint::open(path)
            }
        };
        // Weights of anybody can be evaluated.
        let is_foreign =
            |path: &Path| ![MANIFEST, FULL_MANIFEST].iter().any(|file| path.join(file).is_file());
        let foreign = matches!(from, ResumeSource::Local(path) if is_foreign(path));
        if saving.config.weights_only || (foreign && !training) {
            let path = match (from, &io) {
                (ResumeSource::Named { name, .. }, Some(io)) => io.location(name),
                (ResumeSource::Local(path) | ResumeSource::Named { dir: path, .. }, _) => {
                    path.clone()
                }
            };
            let open = || -> Result<Box<dyn TensorSource>> {
                match from {
                    ResumeSource::Named { .. } => Ok(Box::new(open()?)),
                    ResumeSource::Local(path) => checkpoint::open(path),
                }
            };
            self.parts.fabric.load_weights(open, &saving.config.load.options())?;
            return self.emit(&Event::Resume { step: 0, path });
        }
        let source = open()?;
        let optimizer =
            self.optimizers.as_mut().map(|optimizers| optimizers as &mut dyn OptimizerState);
        let advice = match training {
            true => {
                "Going on needs the configuration that it was saved with. To begin a training with those of \
                 its weights that fit this model, set `checkpoint.weights_only = true` and \
                 `checkpoint.load.strict = false`"
            }
            false => {
                "Use the configuration that it was saved with, or set `checkpoint.weights_only = true` and the \
                 keys of `checkpoint.load` to load a part of it, or under other names"
            }
        };
        let options = LoadOptions { advice: Some(advice), ..LoadOptions::default() };
        let (state, _): (serde_json::Value, _) =
            self.parts.fabric.load_with(&source, optimizer, &options)?;
        let state: TrainerState = match serde_json::from_value(state) {
            Ok(state) => state,
            // Saved by a program with a loop of its own, or after the training.
            Err(_) if !training => {
                return self.emit(&Event::Resume { step: 0, path: source.location().to_owned() });
            }
            Err(error) => {
                let message = format!("its training state cannot be read: {error}");
                return Err(Error::checkpoint(source.location(), message));
            }
        };
        if training {
            self.check_data(&source, &state)?;
        }
        if rank == 0 {
            self.warn_of_other_model(&source.manifest().config);
        }
        if state.seed != self.parts.fabric.seed() && rank == 0 {
            tracing::warn!(
                "the checkpoint was written with seed {}, this run has {}: the order of samples \
                 and dropout will differ from an uninterrupted run",
                state.seed,
                self.parts.fabric.seed()
            );
        }
        self.cursor = state.cursor;
        if let (false, Some(decay)) = (training, self.parts.config.ema_decay) {
            self.load_ema_weights(&source, decay)?;
        }
        if training {
            self.length_before = state.length;
            self.epoch = state.epoch.unwrap_or(0);
            self.started_epoch = state.epoch;
            self.validation_due = state.validation_due;
            let number = |value: Option<f64>| value.unwrap_or(f64::NAN);
            self.metrics = state.metrics.into_iter().map(|(k, v)| (k, number(v))).collect();
            if !state.epoch_metrics.is_empty() {
                let world_size = self.world_size();
                let states = SavedStates::of_rank(state.epoch_metrics, rank, world_size);
                self.epoch_table.load(states);
            }
            if !state.module.is_empty() {
                self.runner.load_state(&state.module)?;
            }
            self.parts.callbacks.load_states(state.callbacks)?;
            if let (ResumeSource::Named { name, .. }, true) = (from, saves_there) {
                let saving = &mut self.parts.saving;
                saving.retention.resume(name, state.kept);
                // The earlier run ended before it removed these.
                for name in saving.retention.take_expired() {
                    if rank == 0
                        && let Err(error) = saving.io.remove(&name)
                    {
                        tracing::warn!("an old checkpoint stays: {error}");
                    }
                }
                // A validation that is still due may change the state that is saved.
                saving.saved = (!state.validation_due).then_some(self.cursor.step);
            }
        }
        let path = source.location().to_owned();
        self.emit(&Event::Resume { step: self.cursor.step, path })
    }

    /// Warns if the model or its adapters were configured in another way where the checkpoint was saved: the
    /// weights may fit and compute something else.
    fn warn_of_other_model(&self, saved: &serde_json::Value) {
        let Ok(now) = serde_json::to_value(&self.parts.resolved) else { return };
        let differing: Vec<String> = ["/model", "/trainer/adapters"]
            .into_iter()
            .filter_map(|at| Some((at, saved.pointer(at)?, now.pointer(at)?)))
            .flat_map(|(at, saved, now)| differing_keys(&at[1..].replace('/', "."), saved, now))
            .collect();
        if !differing.is_empty() {
            tracing::warn!(
                "the checkpoint was saved with another configuration of the model, and its weights may not mean the \
                 same in this one: {}",
                differing.join("; ")
            );
        }
    }

    /// Checks that the checkpoint was trained on the samples that this run has.
    fn check_data(&self, source: &DistributedCheckpoint, trained: &TrainerState) -> Result<()> {
        let mut differing = Vec::new();
        if let (Some(before), Some(now)) = (&trained.data, &self.samples.fingerprint)
            && before != now
        {
            differing.push(format!("the data was {before} and is {now}"));
        }
        differing.extend(self.samples.differences(&trained.samples));
        if differing.is_empty() {
            return Ok(());
        }
        let what = format!("it was trained on other samples: {}", differing.join("; "));
        if self.parts.saving.config.allow_other_data {
            if self.rank() == 0 {
                tracing::warn!("{}: {what}", source.location().display());
            }
            return Ok(());
        }
        let message = format!(
            "{what}. The position in the data would be one in other samples. Give the run the data and the keys \
             of `[data]` of that checkpoint, or set `checkpoint.allow_other_data = true` to go on with these"
        );
        Err(Error::checkpoint(source.location(), message))
    }

    /// Warns if a schedule depends on the run's length, which is another one than before, so that the
    /// learning rate jumps.
    pub(super) fn warn_of_other_length(&mut self) -> Result<()> {
        let (Some(before), now) = (self.length_before, self.length) else { return Ok(()) };
        self.set_schedules_position();
        let rank = self.rank();
        for (_, optimizer) in training(&mut self.optimizers).iter_mut() {
            let (before, now, what, key) = match optimizer.schedule_interval() {
                Interval::Step => (before.0, now.0, "steps", "trainer.max_steps"),
                Interval::Epoch => (before.1, now.1, "epochs", "trainer.max_epochs"),
            };
            let rate = optimizer.learning_rate()?;
            optimizer.set_max_steps(before);
            let rate_before = optimizer.learning_rate();
            optimizer.set_max_steps(now);
            let (Ok(rate_before), Some(before), Some(now)) = (rate_before, before, now) else {
                continue;
            };
            if (rate - rate_before).abs() > 1e-9 * rate.abs().max(rate_before.abs()) && rank == 0 {
                tracing::warn!(
                    "the learning rate jumps: the next step has {rate:e}, and would have {rate_before:e} in the run \
                     that is resumed. The schedule depends on the run's length (`{key}`), which was {before} {what} and \
                     is {now} now. To go on with the old schedule, set its length to {before} in `[scheduler]`: \
                     `total_steps` where it has that key, or `decay_steps`"
                );
            }
        }
        Ok(())
    }

    /// Replaces the weights by the moving average in a checkpoint. Collective.
    fn load_ema_weights(&self, source: &DistributedCheckpoint, decay: f64) -> Result<()> {
        let tree = self.parts.fabric.module_tree()?;
        let mut averages = WeightAverage::exponential(tree.parameters(), decay)?;
        let states = averages.state()?;
        // Not strictly, since the rest of the optimizer's state is not loaded.
        let report = checkpoint::load_optimizer(source.optimizer(), tree, &states, false)?;
        let unfit = report.mismatched.iter().map(|mismatch| &mismatch.name);
        if let Some(name) = report.missing.iter().chain(unfit).next() {
            let message = format!(
                "it has no average of the weights that would fit this model (`{name}`); leave out \
                 `trainer.ema_decay` to validate the weights themselves"
            );
            return Err(Error::checkpoint(source.location(), message));
        }
        averages.swap()?;
        self.parts.fabric.runtime.prepare_forward()
    }

    /// The checkpoint that `trainer.ckpt_path` names. A training whose job was started again takes the job's last
    /// one instead, if there is one. Says whether it is of the job. Collective: rank 0 looks it up.
    pub(super) fn checkpoint_to_resume(&self) -> Result<Option<(ResumeSource, bool)>> {
        let config = &self.parts.config;
        let restarted = restarted_job(config).filter(|_| self.stage == RunStage::Fit);
        let named = || {
            Ok::<_, Error>(match &config.ckpt_path {
                None => None,
                Some(CkptPath::Path(path)) => {
                    Some(self.resume_source(&checkpoint::resolve_last(path)?))
                }
                Some(CkptPath::Last) => self.last_checkpoint()?,
                Some(CkptPath::Best) => self.best_checkpoint()?,
            })
        };
        let found = match restarted {
            None if config.ckpt_path.is_none() => return Ok(None),
            _ if self.rank() > 0 => None,
            Some(job) => match self.last_checkpoint_of_job(job)? {
                Some(own) => Some((own, true)),
                None => named()?.map(|source| (source, false)),
            },
            None => named()?.map(|source| (source, false)),
        };
        // In a restarted job without the key, the look-up has said so itself.
        let fits = self.stage == RunStage::Fit;
        if fits && self.rank() == 0 && found.is_none() && config.ckpt_path.is_some() {
            let dir = self.parts.saving.config.dir.as_ref();
            let looked_in = dir.unwrap_or(&config.default_root_dir).display();
            tracing::warn!(
                "`trainer.ckpt_path`: there is no checkpoint in {looked_in} yet, so training starts at \
                 step 0"
            );
        }
        broadcast_object(&**self.parts.fabric.world(), &found, 0)
    }

    /// Loads the weights for an evaluation whose configuration names none: those that the newest run
    /// has saved, which a warning names. Weights that the module or `trainer.adapters.from` names
    /// stay; without any, a warning says that the model has those that it was set up with.
    /// Collective.
    pub(super) fn load_trained(&mut self) -> Result<()> {
        let adapters = self.parts.config.adapters.as_ref();
        if self.parts.fabric.base_model.is_some() || adapters.is_some_and(|a| a.from.is_some()) {
            if self.rank() == 0
                && let Some((source, which)) = self.trained_checkpoint()?
            {
                tracing::warn!(
                    "the weights are those that the configuration names, not those of the {which} checkpoint \
                     of the newest run, {}; take these with `--set trainer.ckpt_path={which}`",
                    source.path().display()
                );
            }
            return Ok(());
        }
        let found = match self.rank() {
            0 => self.trained_checkpoint()?,
            _ => None,
        };
        let found = broadcast_object(&**self.parts.fabric.world(), &found, 0)?;
        let what = match self.stage {
            RunStage::Test => "test",
            RunStage::Predict => "predict",
            _ => "validate",
        };
        let Some((source, which)) = found else {
            if self.rank() == 0 {
                tracing::warn!(
                    "{what}: the weights are those that the model was set up with, since no checkpoint is \
                     there to be taken (`checkpoint.dir`, or the newest run); name one with `--set \
                     trainer.ckpt_path=PATH`"
                );
            }
            return Ok(());
        };
        if self.rank() == 0 {
            tracing::warn!(
                "{what}: the weights are those of the {which} checkpoint of the newest run, {}, since \
                 `trainer.ckpt_path` names none",
                source.path().display()
            );
        }
        self.resume(&source).map_err(|error| match error {
            Error::Checkpoint { path, message } => {
                let message = format!(
                    "{message}. It was taken since `trainer.ckpt_path` is not set and it is the {which} one; name \
                     another"
                );
                Error::Checkpoint { path, message }
            }
            error => error,
        })
    }

    /// What an evaluation takes by itself: the best checkpoint, if there are scores, or else the
    /// last.
    fn trained_checkpoint(&self) -> Result<Option<(ResumeSource, String)>> {
        let config = &self.parts.saving.config;
        if config.dir.is_none() && !self.parts.config.default_root_dir.is_dir() {
            return Ok(None);
        }
        let Some(last) = self.last_checkpoint()? else { return Ok(None) };
        let best = match config.monitor {
            Some(_) => self.best_of(&last)?,
            None => None,
        };
        Ok(Some(match best {
            Some(best) => (best, "best".to_owned()),
            None => (last, "last".to_owned()),
        }))
    }

    /// The checkpoint `path`: on this machine if it exists there, else in the configured place.
    fn resume_source(&self, path: &Path) -> ResumeSource {
        let saving = &self.parts.saving;
        let named =
            |name: &str| ResumeSource::Named { dir: saving.root.clone(), name: name.to_owned() };
        if path.exists() {
            // However the path is written, it may be a checkpoint in this run's place.
            let same = |a: &Path, b: &Path| {
                let real = |path: &Path| path.canonicalize().ok();
                real(a).is_some() && real(a) == real(b)
            };
            let name = path.file_name().and_then(|name| name.to_str());
            let is_ours = [MANIFEST, FULL_MANIFEST].iter().any(|file| path.join(file).is_file());
            return match name {
                Some(name) if is_ours && same(&saving.io.location(name), path) => named(name),
                _ => ResumeSource::Local(path.to_owned()),
            };
        }
        // Its location, as in messages and events, or its name alone.
        let inside = path.strip_prefix(saving.io.location("")).unwrap_or(path).to_str();
        match inside {
            Some(name) if saving.config.dir.is_some() && !name.contains('/') => named(name),
            _ => ResumeSource::Local(path.to_owned()),
        }
    }

    /// The checkpoint saved last in the configured directory; without one, that of the newest run
    /// that has any.
    fn last_checkpoint(&self) -> Result<Option<ResumeSource>> {
        match &self.parts.saving.config.dir {
            Some(dir) => self.last_checkpoint_in([dir.clone()]),
            None => self.last_checkpoint_of(&RunDir::all(&self.parts.config.default_root_dir)?),
        }
    }

    /// As [`last_checkpoint`](Self::last_checkpoint), of what earlier attempts of this job have saved.
    fn last_checkpoint_of_job(&self, job: &str) -> Result<Option<ResumeSource>> {
        let root = &self.parts.config.default_root_dir;
        let runs = runs_of_job(root, job)?;
        let found = match (&self.parts.saving.config.dir, runs.last().and_then(RunDir::job)) {
            // Another run saved the checkpoints from before the first attempt.
            (Some(dir), Some(first)) => {
                let found = self.last_checkpoint_in([dir.clone()])?;
                match (&found, first.saved_before) {
                    (Some(last), Some(before)) if self.saved_at(last)? <= Some(before) => None,
                    _ => found,
                }
            }
            (Some(_), None) => None,
            (None, _) => self.last_checkpoint_of(&runs)?,
        };
        if found.is_none() {
            let start = match &self.parts.config.ckpt_path {
                Some(CkptPath::Path(path)) => format!("from {}", path.display()),
                _ => "at step 0".to_owned(),
            };
            tracing::warn!(
                "the job {job} was started again, but it has no checkpoint yet (no run under {} is of this \
                 job, or none has saved), so training starts {start}",
                root.display()
            );
        }
        Ok(found)
    }

    /// When a checkpoint was saved, if it is known.
    fn saved_at(&self, source: &ResumeSource) -> Result<Option<u64>> {
        let (ResumeSource::Named { dir, .. } | ResumeSource::Local(dir)) = source;
        let checkpoint = match source {
            ResumeSource::Named { name, .. } => {
                DistributedCheckpoint::open_with(&self.parts.saving.config.open(dir)?, name)?
            }
            ResumeSource::Local(path) => DistributedCheckpoint::open(path)?,
        };
        Ok(checkpoint.manifest().saved_at)
    }

    /// When the last checkpoint in `checkpoint.dir` was saved, if there is one.
    pub(super) fn last_saved_at(&self) -> Result<Option<u64>> {
        match &self.parts.saving.config.dir {
            Some(_) => self.last_checkpoint()?.map_or(Ok(None), |last| self.saved_at(&last)),
            None => Ok(None),
        }
    }

    /// The last checkpoint of the newest of these runs that has any.
    fn last_checkpoint_of(&self, runs: &[RunDir]) -> Result<Option<ResumeSource>> {
        self.last_checkpoint_in(runs.iter().map(RunDir::checkpoints))
    }

    /// The last checkpoint of the first of these directories that has any.
    fn last_checkpoint_in(
        &self,
        dirs: impl IntoIterator<Item = PathBuf>,
    ) -> Result<Option<ResumeSource>> {
        for dir in dirs {
            if let Some(committed) = checkpoint::last(&*self.parts.saving.config.open(&dir)?)? {
                return Ok(Some(ResumeSource::Named { dir, name: committed.name }));
            }
        }
        Ok(None)
    }

    /// The best of the checkpoints that the one saved last knows.
    fn best_checkpoint(&self) -> Result<Option<ResumeSource>> {
        let Some(last) = self.last_checkpoint()? else { return Ok(None) };
        if let Some(best) = self.best_of(&last)? {
            return Ok(Some(best));
        }
        let (ResumeSource::Named { dir, .. } | ResumeSource::Local(dir)) = last;
        Err(Error::Config(format!(
            "`trainer.ckpt_path`: no checkpoint in {} has a score, so none is the best; train with \
             `checkpoint.monitor`, or take \"last\"",
            self.parts.saving.config.open(&dir)?.location("").display()
        )))
    }

    /// The best of the checkpoints that `last` knows, if any has a score.
    fn best_of(&self, last: &ResumeSource) -> Result<Option<ResumeSource>> {
        let ResumeSource::Named { dir, name } = last else { return Ok(None) };
        let io = self.parts.saving.config.open(dir)?;
        let last = DistributedCheckpoint::open_with(&io, name)?;
        let state: TrainerState = Fabric::saved_state(&last)?;
        let mut retention = Retention::new(&self.parts.saving.config);
        retention.resume(name, state.kept);
        let named = |best: &str| ResumeSource::Named { dir: dir.clone(), name: best.to_owned() };
        Ok(retention.best_name().map(named))
    }
}

/// The keys under a path whose values differ, with both.
fn differing_keys(at: &str, saved: &serde_json::Value, now: &serde_json::Value) -> Vec<String> {
    use serde_json::Value;
    match (saved, now) {
        (Value::Object(saved), Value::Object(now)) => {
            let both = saved.iter().filter_map(|(key, value)| Some((key, value, now.get(key)?)));
            both.flat_map(|(key, a, b)| differing_keys(&format!("{at}.{key}"), a, b)).collect()
        }
        (saved, now) if saved == now => Vec::new(),
        // A folder may have been moved.
        _ if at == "model.from_pretrained" || at == "trainer.adapters.from" => Vec::new(),
        (saved, now) => vec![format!("`{at}` was {saved} and is {now}")],
    }
}
