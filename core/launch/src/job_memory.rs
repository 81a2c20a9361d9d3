//! Directories for what the ranks of an elastic job keep in this host's memory.
//!
//! They outlive the ranks. The supervisor, or the host's agent, makes and removes them.

use std::fs::File;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use super::rank::membership;

const PREFIX: &str = "fulgurite-elastic-";
/// Locked by the supervisor as long as it lives.
const LOCK: &str = "lock";
/// Part of a file system that stays free.
const MARGIN_BYTES: u64 = 16 << 20;

/// Where directories may be, the best first: memory, then the directory of temporary files.
fn roots() -> [PathBuf; 2] {
    [PathBuf::from("/dev/shm"), std::env::temp_dir()]
}

/// The directory of the job whose supervisor started at this time, in seconds since 1970. Process
/// ids alone are not unique: containers that share a directory may have their own.
fn directory(root: &Path, supervisor: i32, started: f64) -> PathBuf {
    // With as many digits as ranks read in their variables.
    root.join(format!("{PREFIX}{supervisor}-{started:.6}"))
}

/// The directories of a supervisor's job. Dropping it removes them.
pub(super) struct JobMemory(Vec<(PathBuf, File)>);

impl JobMemory {
    /// Makes the directories of this supervisor, and removes directories of killed ones.
    pub(super) fn new(started: f64) -> Self {
        let own = std::process::id().cast_signed();
        let make = |root: PathBuf| {
            remove_abandoned(&root);
            make(directory(&root, own, started))
        };
        // Without the directory in memory, the other one is used.
        Self(roots().into_iter().filter_map(|root| make(root).ok()).collect())
    }
}

impl Drop for JobMemory {
    fn drop(&mut self) {
        for (path, _) in &self.0 {
            let _ = std::fs::remove_dir_all(path);
        }
    }
}

fn make(path: PathBuf) -> std::io::Result<(PathBuf, File)> {
    std::fs::DirBuilder::new().mode(0o700).create(&path)?;
    // The file is locked before others see it: an unlocked one belongs to an ended supervisor.
    let unseen = path.join("locking");
    let lock = File::create(&unseen)?;
    flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
    std::fs::rename(unseen, path.join(LOCK))?;
    Ok((path, lock))
}

fn remove_abandoned(root: &Path) {
    let entries = std::fs::read_dir(root).into_iter().flatten().flatten();
    for entry in entries {
        if entry.file_name().to_str().is_none_or(|name| !name.starts_with(PREFIX)) {
            continue;
        }
        // Without a lock its supervisor is just making it; other users' cannot be opened.
        let Ok(lock) = File::open(entry.path().join(LOCK)) else { continue };
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Returns the directories that this job's ranks on this host share and that outlive them, the best
/// first. None in a job that is not [elastic](crate::LaunchOptions::elastic).
pub fn job_memories() -> Vec<PathBuf> {
    let Some(membership) = membership() else { return Vec::new() };
    let Some((starter, started)) = membership.link.starter() else { return Vec::new() };
    let own = rustix::process::geteuid().as_raw();
    let is_own = |path: &PathBuf| path.metadata().is_ok_and(|found| found.uid() == own);
    let dirs = roots().map(|root| directory(&root, starter, started));
    dirs.into_iter().filter(is_own).collect()
}

/// Returns a name of this host's [`job_memories`], which no other host of the job has; `None` in a
/// job that is not elastic.
pub fn job_memory_id() -> Option<String> {
    let (starter, started) = membership()?.link.starter()?;
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    Some(format!("{host} {starter} {started:.6}"))
}

/// Whether this rank is the first of this job on its host. True without a job.
pub fn is_first_on_host() -> bool {
    membership().is_none_or(|membership| membership.info.local_rank == 0)
}

/// Returns the first of [`job_memories`] with room for `bytes`: in memory if possible.
pub fn job_memory(bytes: u64) -> Option<PathBuf> {
    let wanted = bytes.saturating_add(MARGIN_BYTES);
    job_memories().into_iter().find(|dir| free_bytes(dir).is_some_and(|free| free >= wanted))
}

fn free_bytes(path: &Path) -> Option<u64> {
    let found = rustix::fs::statvfs(path).ok()?;
    Some(found.f_bavail.saturating_mul(found.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn supervisor_and_ranks_name_one_directory() {
        for micros in 0..10_000 {
            let started = 1_795_837_451.0 + f64::from(micros) * 1.37e-5;
            let read: f64 = format!("{started:.6}").parse().unwrap();
            assert_eq!(directory(Path::new("/"), 7, started), directory(Path::new("/"), 7, read));
        }
    }

    #[test]
    fn directories_of_ended_supervisors_are_removed() {
        let root = tempfile::tempdir().unwrap();
        let living = make(directory(root.path(), 7, 1.5)).unwrap();
        let (abandoned, lock) = make(directory(root.path(), 7, 2.5)).unwrap();
        drop(lock);
        std::fs::create_dir(abandoned.join("copies")).unwrap();
        let unlocked = root.path().join("fulgurite-elastic-8-1");
        std::fs::create_dir(&unlocked).unwrap();
        remove_abandoned(root.path());
        assert!(living.0.is_dir() && unlocked.is_dir() && !abandoned.exists());
    }
}
