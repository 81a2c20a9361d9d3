//! The checkpoints of a run.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::run::Run;

/// A saved checkpoint.
pub(super) struct Checkpoint {
    pub(super) step: Option<u64>,
    pub(super) path: PathBuf,
    /// Seconds for which the save blocked training.
    pub(super) blocked_s: Option<f64>,
    /// The checkpoint's state on disk.
    pub(super) on_disk: OnDisk,
}

/// Whether a checkpoint is still there.
pub(super) enum OnDisk {
    /// In the run's directory, with this many bytes.
    Bytes(u64),
    /// In another directory, which is not searched: anyone may have written the file with its name.
    Elsewhere,
    /// Removed.
    Gone,
}

/// The checkpoints of a run in the order of saving. Without `events.jsonl`, the existing ones.
pub(super) fn checkpoints(run: &Run) -> Vec<Checkpoint> {
    let own = run.path.join("checkpoints");
    let mut all: Vec<Checkpoint> = run
        .events_of("checkpoint")
        .map(|event| {
            let path = PathBuf::from(event["path"].as_str().unwrap_or_default());
            // The run's directory may have moved since.
            let moved = path.file_name().map(|name| own.join(name)).filter(|path| path.is_dir());
            let on_disk = match moved.as_deref().unwrap_or(&path) {
                found if !found.is_dir() => OnDisk::Gone,
                found if is_within(found, &run.path) => OnDisk::Bytes(size(found)),
                _ => OnDisk::Elsewhere,
            };
            let (step, blocked_s) = (event["step"].as_u64(), event["blocked_s"].as_f64());
            Checkpoint { step, path, blocked_s, on_disk }
        })
        .collect();
    if all.is_empty() {
        let entries = std::fs::read_dir(&own).into_iter().flatten().flatten();
        all.extend(entries.filter_map(|entry| {
            let name = entry.file_name();
            let step = name.to_str()?.strip_prefix("step-")?.parse().ok()?;
            let path = entry.path();
            let on_disk = OnDisk::Bytes(size(&path));
            Some(Checkpoint { step: Some(step), path, blocked_s: None, on_disk })
        }));
        all.sort_by_key(|checkpoint| checkpoint.step);
    }
    all
}

/// Whether a directory is below `root`, links resolved.
fn is_within(dir: &Path, root: &Path) -> bool {
    match (dir.canonicalize(), root.canonicalize()) {
        (Ok(dir), Ok(root)) => dir != root && dir.starts_with(root),
        _ => false,
    }
}

/// The bytes of the files in a directory. Links are not followed.
fn size(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let sizes = entries.map(|entry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => size(&entry.path()),
        Ok(metadata) => metadata.len(),
        Err(_) => 0,
    });
    sizes.sum()
}

/// The checkpoint that the run resumed from: its step and path.
pub(super) fn resumed_from(run: &Run) -> Option<(u64, String)> {
    let event: &Value = run.event("resume")?;
    Some((event["step"].as_u64()?, event["path"].as_str()?.to_owned()))
}
