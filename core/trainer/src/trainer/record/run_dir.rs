//! The directory of a run.

use std::collections::BTreeSet;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use toml::Table;

use crate::trainer::Stage;
use crate::{Error, Result};
use fulgurite_config::to_toml;

/// Prefix of the names of trainings' directories.
const TRAINING: &str = "version_";

/// The job that a training belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Job {
    pub(crate) id: String,
    /// The time of the last save in `checkpoint.dir` before this training began, by
    /// [`Manifest::saved_at`](fulgurite_checkpoint::Manifest::saved_at). That checkpoint
    /// belongs to another run.
    pub(crate) saved_before: Option<u64>,
}

/// The directory of one training: `version_N` under `trainer.default_root_dir`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RunDir {
    path: PathBuf,
    version: u64,
}

impl RunDir {
    /// Creates the next free directory under `root`, with the resolved configuration in
    /// `config.toml`.
    ///
    /// Called only on rank 0. The name is `version_N` for a training, and `test_N` and the like for
    /// other stages. Programs that call it at the same time get different directories.
    ///
    /// # Errors
    /// [`Error::Io`] if something cannot be created.
    pub(crate) fn create(root: &Path, stage: Stage, config: &Table) -> Result<Self> {
        std::fs::create_dir_all(root).map_err(Error::io("creating the directory", root))?;
        let prefix = match stage {
            Stage::Fit | Stage::SanityCheck => TRAINING,
            Stage::Validate => "validate_",
            Stage::Test => "test_",
            Stage::Predict => "predict_",
        };
        let newest = Self::with_prefix(root, prefix)?.first().map(|run| run.version);
        let mut version = newest.map_or(0, |newest| newest.saturating_add(1));
        loop {
            let path = root.join(format!("{prefix}{version}"));
            match std::fs::create_dir(&path) {
                Ok(()) => {
                    let file = path.join("config.toml");
                    std::fs::write(&file, to_toml(config)?)
                        .map_err(Error::io("writing the configuration", file))?;
                    return Ok(Self { path, version });
                }
                Err(error) if error.kind() == ErrorKind::AlreadyExists => version += 1,
                Err(error) => return Err(Error::io("creating the run's directory", path)(error)),
            }
        }
    }

    /// The file with the id of the job that a run belongs to.
    const JOB_FILE: &'static str = "job";

    /// Notes that the run in this directory trains as part of a job that a launcher has started.
    ///
    /// Called only on rank 0.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be written.
    pub(crate) fn set_job(path: &Path, job: &Job) -> Result<()> {
        let file = path.join(Self::JOB_FILE);
        let before = job.saved_before.map_or(String::new(), |time| format!("\n{time}"));
        std::fs::write(&file, format!("{}{before}", job.id))
            .map_err(Error::io("writing the id of the job", file))
    }

    /// Returns the job that this run [belongs to](Self::set_job).
    pub(crate) fn job(&self) -> Option<Job> {
        let text = std::fs::read_to_string(self.path.join(Self::JOB_FILE)).ok()?;
        let (id, before) = text.split_once('\n').unwrap_or((&text, ""));
        Some(Job { id: id.to_owned(), saved_before: before.trim().parse().ok() })
    }

    /// Lists the trainings under `root`, newest first.
    ///
    /// # Errors
    /// [`Error::Io`] if `root` cannot be listed.
    pub(crate) fn all(root: &Path) -> Result<Vec<Self>> {
        Self::with_prefix(root, TRAINING)
    }

    fn with_prefix(root: &Path, prefix: &str) -> Result<Vec<Self>> {
        let entries = std::fs::read_dir(root).map_err(Error::io("listing", root))?;
        let mut runs = Vec::new();
        for entry in entries {
            let entry = entry.map_err(Error::io("listing", root))?;
            let name = entry.file_name();
            let version = name.to_str().and_then(|name| name.strip_prefix(prefix));
            if let Some(version) = version.and_then(|version| version.parse().ok()) {
                runs.push(Self { path: entry.path(), version });
            }
        }
        runs.sort_unstable_by_key(|run| std::cmp::Reverse(run.version));
        Ok(runs)
    }

    /// Returns the default directory of the run's checkpoints.
    pub(crate) fn checkpoints(&self) -> PathBuf {
        Self::checkpoints_in(&self.path)
    }

    /// Like [`checkpoints`](Self::checkpoints), for the run with this directory.
    pub(crate) fn checkpoints_in(path: &Path) -> PathBuf {
        path.join("checkpoints")
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// On rank 0, removes a run's directory at the end of the run if it has only the initial files.
///
/// For example after a training that did not finish its first step, or an evaluation that logged
/// nothing.
pub(crate) struct RunDirGuard {
    path: PathBuf,
    /// The initial files, which exist before the run does anything.
    beginning: BTreeSet<PathBuf>,
    keeps: bool,
}

impl RunDirGuard {
    /// Guards a directory, whose present files count as initial.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be listed.
    pub(crate) fn new(path: &Path) -> Result<Self> {
        let mut beginning = files(path).map_err(Error::io("listing", path))?;
        beginning.insert(path.join(RunDir::JOB_FILE));
        Ok(Self { path: path.to_owned(), beginning, keeps: false })
    }

    /// Adds all files that exist now to the initial files.
    ///
    /// # Errors
    /// [`Error::Io`] if the directory cannot be listed.
    pub(crate) fn with_present_files(mut self) -> Result<Self> {
        self.beginning.extend(files(&self.path).map_err(Error::io("listing", &self.path))?);
        Ok(self)
    }

    /// Notes that the run has results.
    pub(crate) fn keep(&mut self) {
        self.keeps = true;
    }

    fn remove_if_idle(&self) -> io::Result<()> {
        match files(&self.path)?.is_subset(&self.beginning) {
            true => std::fs::remove_dir_all(&self.path),
            false => Ok(()),
        }
    }
}

impl Drop for RunDirGuard {
    fn drop(&mut self) {
        if !self.keeps
            && let Err(error) = self.remove_if_idle()
        {
            let path = self.path.display();
            tracing::warn!("the directory {path} of a run without results stays: {error}");
        }
    }
}

/// Lists the files, including links, in and below a directory.
fn files(dir: &Path) -> io::Result<BTreeSet<PathBuf>> {
    let mut all = BTreeSet::new();
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => all.extend(files(&entry.path())?),
            false => all.extend([entry.path()]),
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_count_up_and_contain_the_config() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().join("logs");
        let config = toml::toml! { seed = 7 };
        assert_eq!(RunDir::create(&root, Stage::Fit, &config).unwrap().version, 0);
        std::fs::create_dir(root.join("version_10")).unwrap();
        std::fs::create_dir(root.join("version_x")).unwrap();
        let run = RunDir::create(&root, Stage::Fit, &config).unwrap();
        assert_eq!(run.path(), root.join("version_11"));
        let versions: Vec<_> = RunDir::all(&root).unwrap().iter().map(|run| run.version).collect();
        assert_eq!(versions, [11, 10, 0]);
        let test = RunDir::create(&root, Stage::Test, &config).unwrap();
        assert_eq!(test.path(), root.join("test_0"));
        let written = std::fs::read_to_string(run.path().join("config.toml")).unwrap();
        assert_eq!(written, "seed = 7\n");
    }

    #[test]
    fn a_root_that_is_a_file_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = RunDir::create(file.path(), Stage::Fit, &Table::new()).unwrap_err().to_string();
        assert!(error.contains(&file.path().display().to_string()), "{error}");
    }

    #[test]
    fn directory_without_results_is_removed() {
        let root = tempfile::tempdir().unwrap();
        let make = |stage| RunDir::create(root.path(), stage, &Table::new()).unwrap();
        let idle = make(Stage::Fit);
        let guard = RunDirGuard::new(idle.path()).unwrap();
        let job = Job { id: "slurm-7.0".to_owned(), saved_before: None };
        RunDir::set_job(idle.path(), &job).unwrap();
        std::fs::create_dir(idle.checkpoints()).unwrap();
        drop(guard);
        assert!(!idle.path().exists());
        // A user's own file, and a run with results.
        let (foreign, kept) = (make(Stage::Fit), make(Stage::Test));
        let guard = RunDirGuard::new(foreign.path()).unwrap();
        std::fs::write(foreign.path().join("notes"), "mine").unwrap();
        drop(guard);
        let mut guard = RunDirGuard::new(kept.path()).unwrap();
        guard.keep();
        drop(guard);
        assert!(foreign.path().exists() && kept.path().exists());
    }
}
