//! Directories for what the ranks of an elastic job keep in this host's memory.
//!
//! They outlive the ranks. The supervisor makes and removes them.

use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use super::rank::membership;
use super::rank_env::is_running;

const PREFIX: &str = "fulgurite-elastic-";
/// Part of a file system that stays free.
const MARGIN_BYTES: u64 = 16 << 20;

/// Where directories may be, the best first: memory, then the directory of temporary files.
fn roots() -> [PathBuf; 2] {
    [PathBuf::from("/dev/shm"), std::env::temp_dir()]
}

fn directory(root: &Path, supervisor: i32) -> PathBuf {
    root.join(format!("{PREFIX}{supervisor}"))
}

/// The directories of a supervisor's job. Dropping it removes them.
pub(super) struct JobMemory(Vec<PathBuf>);

impl JobMemory {
    /// Makes the directories of this supervisor, and removes those that killed ones have left.
    pub(super) fn new() -> Self {
        let own = std::process::id().cast_signed();
        let mut made = Vec::new();
        for root in roots() {
            remove_abandoned(&root);
            let path = directory(&root, own);
            // Without the directory in memory, the other one is used.
            if std::fs::DirBuilder::new().mode(0o700).create(&path).is_ok() {
                made.push(path);
            }
        }
        Self(made)
    }
}

impl Drop for JobMemory {
    fn drop(&mut self) {
        for path in &self.0 {
            let _ = std::fs::remove_dir_all(path);
        }
    }
}

fn remove_abandoned(root: &Path) {
    let entries = std::fs::read_dir(root).into_iter().flatten().flatten();
    for entry in entries {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.parse::<i32>().ok());
        if pid.is_some_and(|pid| !is_running(pid)) {
            // An error means that it belongs to another user.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Returns the directory for `bytes` that ranks of this job share and that outlives them: in memory
/// if there is room. `None` without a supervisor that makes one
/// ([`LaunchOptions::elastic`](crate::LaunchOptions::elastic)), or without room.
pub fn job_memory(bytes: u64) -> Option<PathBuf> {
    let supervisor = membership()?.supervisor?;
    let wanted = bytes.saturating_add(MARGIN_BYTES);
    let dirs = roots().map(|root| directory(&root, supervisor));
    dirs.into_iter().find(|dir| free_bytes(dir).is_some_and(|free| free >= wanted))
}

fn free_bytes(path: &Path) -> Option<u64> {
    let found = rustix::fs::statvfs(path).ok()?;
    Some(found.f_bavail.saturating_mul(found.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_ended_supervisors_are_removed() {
        let root = tempfile::tempdir().unwrap();
        let make = |name: &str| {
            std::fs::create_dir_all(root.path().join(name).join("step")).unwrap();
            root.path().join(name)
        };
        let own = make(&format!("{PREFIX}{}", std::process::id()));
        let ended = std::process::Command::new("true").spawn().unwrap();
        let pid = ended.id();
        ended.wait_with_output().unwrap();
        let abandoned = make(&format!("{PREFIX}{pid}"));
        let foreign = make("fulgurite-elastic-notes");
        remove_abandoned(root.path());
        assert!(own.is_dir() && foreign.is_dir() && !abandoned.exists());
    }
}
