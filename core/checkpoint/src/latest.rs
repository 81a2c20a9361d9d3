//! The newest checkpoint, and the one saved last.

use std::io::ErrorKind;
use std::path::PathBuf;

use super::CheckpointIO;
use super::manifest::{FULL_MANIFEST, MANIFEST, Stamp};
use crate::{Error, Result};
use fulgurite_engine::checkpoint_io::{invalid_name, is_temporary, replaced_base};

/// The file with the name of the checkpoint that was saved last.
pub const LAST: &str = "last";

/// A checkpoint that was committed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommittedCheckpoint {
    /// The optimizer step after which it was saved.
    pub step: u64,
    /// Its name in its [`CheckpointIO`].
    pub name: String,
    /// Its path.
    pub path: PathBuf,
}

/// The committed checkpoint of `io`, distributed or full, with the largest step in its manifest;
/// `None` if there is none. Unfinished saves and directories without a valid manifest are ignored.
///
/// Not collective: ranks that need the same answer have one rank broadcast it.
///
/// # Errors
/// If the place cannot be listed or a manifest cannot be read.
pub fn latest(io: &dyn CheckpointIO) -> Result<Option<CommittedCheckpoint>> {
    let mut newest: Option<(u64, bool, String)> = None;
    for entry in io.list("")? {
        if !entry.is_directory || is_temporary(&entry.name) {
            continue;
        }
        if let Some(step) = committed_step(io, &entry.name)? {
            // Two with the same step: one is about to replace the other.
            let key = (step, replaced_base(&entry.name).is_none(), entry.name);
            newest = newest.max(Some(key));
        }
    }
    Ok(newest.map(|(step, _, name)| CommittedCheckpoint { step, path: io.location(&name), name }))
}

/// The checkpoint of `io` that was saved last: the one that the file [`LAST`] names or, if that is
/// missing, torn, or names no committed checkpoint, the [`latest`] one.
///
/// The two differ after a run that resumed from an earlier checkpoint: the checkpoints saved before
/// that have later steps than the one saved last.
///
/// Not collective.
///
/// # Errors
/// As [`latest`].
pub fn last(io: &dyn CheckpointIO) -> Result<Option<CommittedCheckpoint>> {
    let pointed = match io.load(LAST) {
        Ok(bytes) => read_last(io, &bytes)?,
        Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => None,
        Err(error) => {
            tracing::warn!("looking for the newest checkpoint instead: {error}");
            None
        }
    };
    match pointed {
        Some(committed) => Ok(Some(committed)),
        None => latest(io),
    }
}

/// The checkpoint that the content of [`LAST`] names; `None` if it was not committed.
fn read_last(io: &dyn CheckpointIO, bytes: &[u8]) -> Result<Option<CommittedCheckpoint>> {
    // A torn file has no end of line.
    let name = std::str::from_utf8(bytes).ok().and_then(|text| text.strip_suffix('\n'));
    let name = name.filter(|name| invalid_name(name).is_none());
    let step = name.map(|name| committed_step(io, name)).transpose()?.flatten();
    match (name, step) {
        (Some(name), Some(step)) => {
            Ok(Some(CommittedCheckpoint { step, name: name.to_owned(), path: io.location(name) }))
        }
        _ => {
            tracing::warn!(
                "{} names no checkpoint that is there; looking for the newest one instead",
                io.location(LAST).display()
            );
            Ok(None)
        }
    }
}

/// Writes the file [`LAST`].
pub(super) fn write_last(io: &dyn CheckpointIO, name: &str) -> Result<()> {
    io.replace(LAST, format!("{name}\n").as_bytes())
}

/// The step of the checkpoint `name`; `None` if it was not committed.
fn committed_step(io: &dyn CheckpointIO, name: &str) -> Result<Option<u64>> {
    for manifest in [MANIFEST, FULL_MANIFEST] {
        let path = format!("{name}/{manifest}");
        let bytes = match io.load(&path) {
            Ok(bytes) => bytes,
            Err(Error::Io { source, .. })
                if matches!(source.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) =>
            {
                continue;
            }
            Err(error) => return Err(error),
        };
        match Stamp::parse(&bytes, &io.location(&path)) {
            Ok(stamp) => return Ok(Some(stamp.step)),
            Err(error) => tracing::warn!("not taken for a checkpoint: {error}"),
        }
    }
    Ok(None)
}
