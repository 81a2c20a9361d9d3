//! How a run saves, and how it goes on from what it saved.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::callback::CallbackState;
use super::hooks::Hook;
use super::retention::{RetainedCheckpoint, Retention};
use super::session::{Cursor, Parts, Session};
use super::{Event, RunDir};
use crate::fabric::FabricOptimizer;
use crate::run::{CheckpointConfig, CkptPath};
use crate::{Error, Result};
use fulgurite_checkpoint_format::{
    self as checkpoint, AsyncSaver, CheckpointIO, DistributedCheckpoint, FULL_MANIFEST, MANIFEST,
    SavedCheckpoint, TensorSource,
};
use fulgurite_engine::collective::{ProcessGroup, broadcast_object};
use fulgurite_engine::optim::Ema;

/// What the trainer adds to a checkpoint: with weights and optimizer state, all that a run needs to
/// go on as if it had never stopped.
#[derive(Debug, Serialize, Deserialize)]
struct SavedState {
    cursor: Cursor,
    seed: u64,
    /// The epoch of the last step; `None` before the first.
    #[serde(default)]
    epoch: Option<u64>,
    /// Whether the validation after the last step is still to be made.
    #[serde(default)]
    validation_due: bool,
    /// Rank 0's latest metrics; those that are not finite are `None`.
    #[serde(default)]
    metrics: BTreeMap<String, Option<f64>>,
    /// Rank 0's callbacks.
    #[serde(default)]
    callbacks: Vec<CallbackState>,
    /// The checkpoints that this run has kept, this one included.
    #[serde(default)]
    kept: Vec<RetainedCheckpoint>,
}

/// Where and how a run saves.
pub(super) struct Saving {
    pub(super) config: CheckpointConfig,
    /// What the place's root is called in the configuration.
    root: PathBuf,
    io: Arc<dyn CheckpointIO>,
    background: Option<AsyncSaver>,
    retention: Retention,
    /// The step whose result is saved already.
    saved: Option<u64>,
    warned: bool,
    is_torn_down: bool,
}

/// For a run that fails while it is set up.
impl Drop for Saving {
    fn drop(&mut self) {
        if let Err(error) = self.teardown() {
            tracing::error!("completing what checkpoints are still under way: {error}");
        }
    }
}

impl Saving {
    /// Saves to `config.dir`, or without that to `default`. Collective.
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
            background,
            retention,
            saved: None,
            warned: false,
            is_torn_down: false,
        })
    }

    /// The end of a run: waits for the save that is under way on this rank, and lets the place
    /// complete what it has. Does nothing the second time.
    pub(super) fn teardown(&mut self) -> Result<()> {
        // Dropping the saver waits for its thread; an error is one that ended the run before.
        drop(self.background.take());
        if std::mem::replace(&mut self.is_torn_down, true) { Ok(()) } else { self.io.teardown() }
    }

    /// Whether a save in the background is under way on this rank.
    pub(super) fn is_running(&self) -> bool {
        self.background.as_ref().is_some_and(AsyncSaver::is_running)
    }

    /// Whether the result of this step is saved, or is about to be.
    pub(super) fn has(&self, step: u64) -> bool {
        self.saved == Some(step)
    }

    /// The monitored metric, if there is one yet.
    fn score(&mut self, metrics: &BTreeMap<String, f64>, rank: usize) -> Result<Option<f64>> {
        let Some(monitor) = &self.config.monitor else { return Ok(None) };
        if let Some(score) = metrics.get(monitor) {
            return Ok(Some(*score));
        }
        // Metrics that modules log may be rank 0's alone.
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

/// The checkpoint that a run goes on from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Origin {
    /// At this local path.
    Local(PathBuf),
    /// The checkpoint `name` of the place that `checkpoint.io` opens at `root`.
    Kept { root: PathBuf, name: String },
}

impl Session {
    /// Saves a checkpoint of the present step, of the kind that the strategy says: in the background if
    /// that is configured and it is not to be done `at_once`. Collective.
    pub(super) fn save(&mut self, optimizer: &mut FabricOptimizer, at_once: bool) -> Result<()> {
        let begun = Instant::now();
        if at_once {
            self.finish_saving()?;
        }
        let (step, rank) = (self.cursor.step, self.rank());
        let name = checkpoint::step_name(step);
        let saving = &mut self.parts.saving;
        let score = saving.score(&self.metrics, rank)?;
        saving.retention.add(step, &name, score);
        let state = SavedState {
            cursor: self.cursor,
            seed: self.parts.fabric.seed(),
            epoch: (step > 0).then_some(self.epoch),
            validation_due: self.validation_due,
            metrics: self.metrics.iter().map(|(k, v)| (k.clone(), Some(*v))).collect(),
            callbacks: self.parts.callbacks.states(),
            kept: saving.retention.kept().to_vec(),
        };
        let config = serde_json::to_value(&self.parts.resolved)
            .map_err(|e| Error::other(format!("encoding the configuration: {e}")))?;
        let remove = saving.retention.take_superfluous();
        saving.saved = Some(step);
        let (fabric, io) = (&self.parts.fabric, &saving.io);
        let world = &**fabric.world();
        let distributed = fabric.runtime.saves_distributed_checkpoints()?;
        let path = if distributed {
            let mut request = fabric.save_request(&name, optimizer, &state, config)?;
            (request.update_last, request.remove) = (true, remove);
            if let (Some(background), false) = (&mut saving.background, at_once) {
                let earlier = background.start(request)?;
                return self.report_saved(earlier);
            }
            request.run(&**io, world)?
        } else {
            let path = fabric.save_full_with(io, &name, optimizer, &state, config)?;
            checkpoint::after_commit(&**io, world, &name, true, &remove)?;
            path
        };
        self.report_saved(Some(SavedCheckpoint { step, path, blocked: begun.elapsed() }))
    }

    /// Makes memory for saving in the background, if the run will do so. Collective.
    pub(super) fn prepare_saving(&mut self, optimizer: &mut FabricOptimizer) -> Result<()> {
        let Parts { fabric, saving, .. } = &mut self.parts;
        let is_periodic =
            saving.config.every_n_steps.is_some() || saving.config.save_top_k.is_some();
        if let Some(background) = saving.background.as_mut().filter(|_| is_periodic) {
            background.reserve(&fabric.save_request(
                "",
                optimizer,
                &(),
                serde_json::Value::Null,
            )?)?;
        }
        Ok(())
    }

    /// Waits for the save that is under way. Collective.
    pub(super) fn finish_saving(&mut self) -> Result<()> {
        let saved = match &mut self.parts.saving.background {
            Some(background) => background.wait()?,
            None => None,
        };
        self.report_saved(saved)
    }

    /// Tells sinks and callbacks of a checkpoint that was committed.
    fn report_saved(&mut self, saved: Option<SavedCheckpoint>) -> Result<()> {
        let Some(SavedCheckpoint { step, path, blocked }) = saved else { return Ok(()) };
        let blocked_s = blocked.as_secs_f64();
        self.emit(&Event::Checkpoint { step, path: path.clone(), blocked_s })?;
        self.hook(Hook::SaveCheckpoint(&path))
    }

    /// Goes on from a checkpoint, or with `checkpoint.weights_only` starts from its weights. Without
    /// an optimizer, only to validate, it takes the averages of the weights if there are to be any.
    /// Collective.
    pub(super) fn resume(
        &mut self,
        origin: &Origin,
        optimizer: Option<&mut FabricOptimizer>,
    ) -> Result<()> {
        let (saving, rank) = (&self.parts.saving, self.rank());
        let io = match origin {
            Origin::Local(_) => None,
            Origin::Kept { root, .. } if *root == saving.root => Some(saving.io.clone()),
            Origin::Kept { root, .. } => Some(saving.config.open(root)?),
        };
        // A run that only looks leaves to the one that saves what is under way there.
        let saves_there = optimizer.is_some()
            && matches!(origin, Origin::Kept { root, .. } if *root == saving.root);
        if let (Some(io), 0, true) = (&io, rank, saves_there)
            && let Err(error) = checkpoint::remove_unfinished(&**io)
        {
            tracing::warn!("what an earlier run left unfinished stays: {error}");
        }
        let open = || match (origin, &io) {
            (Origin::Kept { name, .. }, Some(io)) => DistributedCheckpoint::open_with(io, name),
            (Origin::Local(path) | Origin::Kept { root: path, .. }, _) => {
                DistributedCheckpoint::open(path)
            }
        };
        if saving.config.weights_only {
            let source: Box<dyn TensorSource> = match origin {
                Origin::Kept { .. } => Box::new(open()?),
                Origin::Local(path) => checkpoint::open(path)?,
            };
            let tree = self.parts.fabric.module_tree()?;
            checkpoint::load_into(&*source, &tree, true)?;
            self.parts.fabric.finish_load()?;
            return self.emit(&Event::Resume { step: 0, path: source.location().to_owned() });
        }
        let source = open()?;
        let training = optimizer.is_some();
        let state: SavedState = self.parts.fabric.load_from(&source, optimizer)?;
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
            self.take_averages(&source, decay)?;
        }
        if training {
            self.epoch = state.epoch.unwrap_or(0);
            self.begun = state.epoch;
            self.validation_due = state.validation_due;
            let number = |value: Option<f64>| value.unwrap_or(f64::NAN);
            self.metrics = state.metrics.into_iter().map(|(k, v)| (k, number(v))).collect();
            self.parts.callbacks.load_states(state.callbacks)?;
            if let (Origin::Kept { name, .. }, true) = (origin, saves_there) {
                let saving = &mut self.parts.saving;
                saving.retention.resume(name, state.kept);
                // What the run before was about to remove when it ended.
                for name in saving.retention.take_superfluous() {
                    if rank == 0
                        && let Err(error) = saving.io.remove(&name)
                    {
                        tracing::warn!("an old checkpoint stays: {error}");
                    }
                }
                // What a validation that is still to be made changes is not saved yet.
                saving.saved = (!state.validation_due).then_some(self.cursor.step);
            }
        }
        let path = source.location().to_owned();
        self.emit(&Event::Resume { step: self.cursor.step, path })
    }

    /// Puts the averages that a checkpoint holds in the place of the weights, for good. Collective.
    fn take_averages(&self, source: &DistributedCheckpoint, decay: f64) -> Result<()> {
        let tree = self.parts.fabric.module_tree()?;
        let mut averages = Ema::new(tree.parameters(), decay)?;
        let states = averages.state()?;
        // Not strictly: the rest of the optimizer's state is of no use here.
        let report = checkpoint::load_optimizer(source.optimizer(), &tree, &states, false)?;
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

    /// The checkpoint that `ckpt_path` names, on every rank. Collective.
    pub(super) fn checkpoint_to_resume(&self) -> Result<Option<Origin>> {
        let found = match &self.parts.config.ckpt_path {
            None => return Ok(None),
            _ if self.rank() > 0 => None,
            Some(CkptPath::Path(path)) => Some(self.origin(path)),
            Some(CkptPath::Last) => self.last_checkpoint()?,
        };
        broadcast_object(&**self.parts.fabric.world(), &found, 0)
    }

    /// Where the checkpoint `path` is: on this machine, or if there is nothing in the configured
    /// place.
    fn origin(&self, path: &Path) -> Origin {
        let saving = &self.parts.saving;
        let kept = |name: &str| Origin::Kept { root: saving.root.clone(), name: name.to_owned() };
        if path.exists() {
            // By whatever way it is written, it may be one of those that this run keeps.
            let same = |a: &Path, b: &Path| {
                let real = |path: &Path| path.canonicalize().ok();
                real(a).is_some() && real(a) == real(b)
            };
            let name = path.file_name().and_then(|name| name.to_str());
            let is_ours = [MANIFEST, FULL_MANIFEST].iter().any(|file| path.join(file).is_file());
            return match name {
                Some(name) if is_ours && same(&saving.io.location(name), path) => kept(name),
                _ => Origin::Local(path.to_owned()),
            };
        }
        // As messages and events call it, or by its name alone.
        let inside = path.strip_prefix(saving.io.location("")).unwrap_or(path).to_str();
        match inside {
            Some(name) if saving.config.dir.is_some() && !name.contains('/') => kept(name),
            _ => Origin::Local(path.to_owned()),
        }
    }

    /// The last checkpoint of the configured directory, or without one of the newest run that has
    /// any.
    fn last_checkpoint(&self) -> Result<Option<Origin>> {
        let config = &self.parts.saving.config;
        let roots = match &config.dir {
            Some(dir) => vec![dir.clone()],
            None => RunDir::all(&self.parts.config.default_root_dir)?
                .iter()
                .map(RunDir::checkpoints)
                .collect(),
        };
        for root in roots {
            if let Some(committed) = checkpoint::last(&*config.open(&root)?)? {
                return Ok(Some(Origin::Kept { root, name: committed.name }));
            }
        }
        Ok(None)
    }
}
