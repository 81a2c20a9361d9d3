//! Where an elastic training keeps states that its next generation may begin with.

use std::path::{Path, PathBuf};

use fulgurite_launch::{job_memories, job_memory};

/// The directory in a run's own for states, where ranks may be on several hosts.
const SHARED: &str = "elastic";

/// Where states of a training may be.
pub(super) enum Places<'a> {
    /// The memory of the host on which all ranks are.
    Host,
    /// The directory of the run, which several hosts share.
    Run(&'a Path),
}

impl<'a> Places<'a> {
    pub(super) fn of(run_dir: &'a Path) -> Self {
        match job_memories().is_empty() {
            true => Self::Run(run_dir),
            false => Self::Host,
        }
    }

    /// The directories, the best first.
    pub(super) fn all(&self) -> Vec<PathBuf> {
        match self {
            Self::Host => job_memories(),
            Self::Run(dir) => vec![dir.join(SHARED)],
        }
    }

    /// A directory with room for `bytes`.
    pub(super) fn with_room_for(&self, bytes: u64) -> Option<PathBuf> {
        match self {
            Self::Host => job_memory(bytes),
            Self::Run(dir) => {
                let place = dir.join(SHARED);
                std::fs::create_dir_all(&place).ok().map(|()| place)
            }
        }
    }

    /// For messages, after `the copies in`.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Host => "the host's memory",
            Self::Run(_) => "the run's directory",
        }
    }
}

/// Removes what an elastic training has kept in its run's directory. Called on rank 0 at its end.
pub(crate) fn remove_kept_states(run_dir: &Path) {
    let path = run_dir.join(SHARED);
    if path.is_dir()
        && let Err(error) = std::fs::remove_dir_all(&path)
    {
        tracing::warn!("{} is of no use any more, and cannot be removed: {error}", path.display());
    }
}
