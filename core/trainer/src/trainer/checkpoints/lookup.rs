//! Finds the checkpoint that a run resumes from, or that an evaluation loads its weights from.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::fabric::Fabric;
use crate::run::CkptPath;
use crate::trainer::Stage;
use crate::trainer::checkpoints::place::Saving;
use crate::trainer::checkpoints::restart::{restarted_job, runs_of_job};
use crate::trainer::checkpoints::retention::Retention;
use crate::trainer::checkpoints::trainer_state::TrainerState;
use crate::trainer::record::run_dir::RunDir;
use crate::trainer::session::{Session, SessionSetup};
use crate::{Error, Result};
use fulgurite_checkpoint::{self as checkpoint, DistributedCheckpoint, FULL_MANIFEST, MANIFEST};
use fulgurite_engine::collective::broadcast_object;

/// The checkpoint that a run resumes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ResumeSource {
    /// A local path.
    Local(PathBuf),
    /// The checkpoint `name` in the location that `checkpoint.io` opens at `dir`.
    Named { dir: PathBuf, name: String },
    /// The name of a state of this run in the hosts' memory, from which an elastic training goes
    /// on.
    Memory(String),
}

impl ResumeSource {
    /// Returns its path, for messages.
    pub(crate) fn path(&self) -> PathBuf {
        match self {
            Self::Local(path) => path.clone(),
            Self::Memory(name) => PathBuf::from(name),
            Self::Named { dir, name } => dir.join(name),
        }
    }
}

/// Finds checkpoints by a session's configuration.
pub(crate) struct CheckpointLookup<'a> {
    setup: &'a SessionSetup,
    saving: &'a Saving,
    stage: Stage,
}

impl<'a> CheckpointLookup<'a> {
    pub(crate) fn of(session: &'a Session) -> Self {
        let Session { setup, saving, progress, .. } = session;
        Self { setup, saving, stage: progress.stage() }
    }

    /// Finds the checkpoint that `trainer.ckpt_path` names, on rank 0. Collective.
    ///
    /// The training of a restarted job takes the job's own last checkpoint instead, if there is
    /// one. The flag is true in that case.
    pub(crate) fn checkpoint_to_resume(&self) -> Result<Option<(ResumeSource, bool)>> {
        let config = &self.setup.config;
        let restarted = restarted_job(config).filter(|_| self.stage == Stage::Fit);
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
            _ if self.setup.rank() > 0 => None,
            Some(job) => match self.last_checkpoint_of_job(job)? {
                Some(own) => Some((own, true)),
                None => named()?.map(|source| (source, false)),
            },
            None => named()?.map(|source| (source, false)),
        };
        // For a restarted job without the key, `last_checkpoint_of_job` has warned already.
        let fits = self.stage == Stage::Fit;
        if fits && self.setup.rank() == 0 && found.is_none() && config.ckpt_path.is_some() {
            let dir = self.saving.config().dir.as_ref();
            let looked_in = dir.unwrap_or(&config.default_root_dir).display();
            tracing::warn!(
                "`trainer.ckpt_path`: there is no checkpoint in {looked_in} yet, so training starts at \
                 step 0"
            );
        }
        broadcast_object(&**self.setup.fabric.world(), &found, 0)
    }

    /// Finds the checkpoint that this run has saved last, on rank 0. Collective.
    pub(crate) fn own_last_checkpoint(&self) -> Result<Option<ResumeSource>> {
        let mut found = match self.setup.rank() {
            0 => self.last_checkpoint_in([self.saving.root().to_owned()])?,
            _ => None,
        };
        // Before, the place may have been another run's.
        if let Some(source) = &found
            && self.saved_at(source)? < Some(self.setup.begun_at)
        {
            found = None;
        }
        broadcast_object(&**self.setup.fabric.world(), &found, 0)
    }

    /// Finds the checkpoint for an evaluation without `trainer.ckpt_path`.
    ///
    /// It is the best checkpoint if `checkpoint.monitor` is set and any has a score, else the last.
    pub(crate) fn trained_checkpoint(&self) -> Result<Option<(ResumeSource, String)>> {
        let config = self.saving.config();
        if config.dir.is_none() && !self.setup.config.default_root_dir.is_dir() {
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

    /// Returns the checkpoint `path`: on this machine if it exists there, else in the configured
    /// location.
    fn resume_source(&self, path: &Path) -> ResumeSource {
        let saving = &self.saving;
        let named = |name: &str| ResumeSource::Named {
            dir: saving.root().to_owned(),
            name: name.to_owned(),
        };
        if path.exists() {
            // However the path is written, it may be a checkpoint in this run's location.
            let same = |a: &Path, b: &Path| {
                let real = |path: &Path| path.canonicalize().ok();
                real(a).is_some() && real(a) == real(b)
            };
            let name = path.file_name().and_then(|name| name.to_str());
            let is_ours = [MANIFEST, FULL_MANIFEST].iter().any(|file| path.join(file).is_file());
            return match name {
                Some(name) if is_ours && same(&saving.io().location(name), path) => named(name),
                _ => ResumeSource::Local(path.to_owned()),
            };
        }
        // `path` is either the full location, as in messages and events, or just the name.
        let inside = path.strip_prefix(saving.io().location("")).unwrap_or(path).to_str();
        match inside {
            Some(name) if saving.config().dir.is_some() && !name.contains('/') => named(name),
            _ => ResumeSource::Local(path.to_owned()),
        }
    }

    /// Finds the last checkpoint in `checkpoint.dir`, or without that key in the newest run that
    /// has a checkpoint.
    fn last_checkpoint(&self) -> Result<Option<ResumeSource>> {
        match &self.saving.config().dir {
            Some(dir) => self.last_checkpoint_in([dir.clone()]),
            None => self.last_checkpoint_of(&RunDir::all(&self.setup.config.default_root_dir)?),
        }
    }

    /// Like [`last_checkpoint`](Self::last_checkpoint), for earlier attempts of this job.
    fn last_checkpoint_of_job(&self, job: &str) -> Result<Option<ResumeSource>> {
        let root = &self.setup.config.default_root_dir;
        let runs = runs_of_job(root, job)?;
        let found = match (&self.saving.config().dir, runs.last().and_then(RunDir::job)) {
            // Checkpoints from before the first attempt belong to another run.
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
            let start = match &self.setup.config.ckpt_path {
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

    /// Returns the time when a checkpoint was saved, if known.
    fn saved_at(&self, source: &ResumeSource) -> Result<Option<u64>> {
        let checkpoint = match source {
            ResumeSource::Named { dir, name } => {
                DistributedCheckpoint::open_with(&self.saving.config().open(dir)?, name)?
            }
            ResumeSource::Local(_) | ResumeSource::Memory(_) => {
                DistributedCheckpoint::open(source.path())?
            }
        };
        Ok(checkpoint.manifest().saved_at)
    }

    /// Returns the time when the last checkpoint in `checkpoint.dir` was saved, if any.
    pub(crate) fn last_saved_at(&self) -> Result<Option<u64>> {
        match &self.saving.config().dir {
            Some(_) => self.last_checkpoint()?.map_or(Ok(None), |last| self.saved_at(&last)),
            None => Ok(None),
        }
    }

    /// Finds the last checkpoint of the newest of these runs that has any.
    fn last_checkpoint_of(&self, runs: &[RunDir]) -> Result<Option<ResumeSource>> {
        self.last_checkpoint_in(runs.iter().map(RunDir::checkpoints))
    }

    /// Finds the last checkpoint of the first of these directories that has any.
    fn last_checkpoint_in(
        &self,
        dirs: impl IntoIterator<Item = PathBuf>,
    ) -> Result<Option<ResumeSource>> {
        for dir in dirs {
            if let Some(committed) = checkpoint::last(&*self.saving.config().open(&dir)?)? {
                return Ok(Some(ResumeSource::Named { dir, name: committed.name }));
            }
        }
        Ok(None)
    }

    /// Finds the best of the checkpoints that the last checkpoint lists.
    fn best_checkpoint(&self) -> Result<Option<ResumeSource>> {
        let Some(last) = self.last_checkpoint()? else { return Ok(None) };
        if let Some(best) = self.best_of(&last)? {
            return Ok(Some(best));
        }
        let dir = match last {
            ResumeSource::Named { dir, .. } => dir,
            other => other.path(),
        };
        Err(Error::Config(format!(
            "`trainer.ckpt_path`: no checkpoint in {} has a score, so none is the best; train with \
             `checkpoint.monitor`, or take \"last\"",
            self.saving.config().open(&dir)?.location("").display()
        )))
    }

    /// Finds the best of the checkpoints that `last` lists, if any has a score.
    fn best_of(&self, last: &ResumeSource) -> Result<Option<ResumeSource>> {
        let ResumeSource::Named { dir, name } = last else { return Ok(None) };
        let io = self.saving.config().open(dir)?;
        let last = DistributedCheckpoint::open_with(&io, name)?;
        let state: TrainerState = Fabric::saved_state(&last)?;
        let mut retention = Retention::new(self.saving.config());
        retention.resume(name, state.kept);
        let named = |best: &str| ResumeSource::Named { dir: dir.clone(), name: best.to_owned() };
        Ok(retention.best_name().map(named))
    }
}
