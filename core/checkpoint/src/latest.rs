//! The newest checkpoint, and the one saved last.

use std::cmp::Reverse;
use std::io::ErrorKind;
use std::path::PathBuf;

use super::CheckpointIO;
use super::manifest::{FULL_MANIFEST, MANIFEST, Stamp};
use crate::{Error, Result};
use fulgurite_engine::checkpoint_io::{invalid_name, is_temporary, replaced_base};

/// The file that names the checkpoint saved last.
pub const LAST: &str = "last";

/// Longest content of [`LAST`] that is read, in bytes.
pub(super) const MAX_LAST: u64 = 4096;

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

/// Returns the committed checkpoint of `io` with the largest step in its manifest, if any.
///
/// The checkpoint may be distributed or full. Unfinished saves and directories without a valid
/// manifest are ignored.
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
        if let Some(Stamp { step, .. }) = committed(io, &entry.name)? {
            // Two have the same step while one is replacing the other.
            let key = (step, replaced_base(&entry.name).is_none(), entry.name);
            newest = newest.max(Some(key));
        }
    }
    Ok(newest.map(|(step, _, name)| CommittedCheckpoint { step, path: io.location(&name), name }))
}

/// Returns the checkpoint of `io` that was saved last.
///
/// The file [`LAST`] names it. A checkpoint that was committed later takes precedence: its save was
/// interrupted before it wrote [`LAST`]. If the file is missing or torn, or names no committed
/// checkpoint, the newest by [`saved_at`](super::Manifest::saved_at) and step is returned.
///
/// It differs from the [`latest`] one after a run resumed from an earlier checkpoint: older
/// checkpoints then have larger steps than the one saved last.
///
/// Not collective.
///
/// # Errors
/// As [`latest`], if [`LAST`] names no committed checkpoint.
pub fn last(io: &dyn CheckpointIO) -> Result<Option<CommittedCheckpoint>> {
    let pointed = match io.load_at_most(LAST, MAX_LAST) {
        Ok(bytes) => read_last(io, &bytes),
        Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => None,
        Err(error) => {
            tracing::warn!("looking for the newest checkpoint instead: {error}");
            None
        }
    };
    let newest = match saved_last(io) {
        Err(error) if pointed.is_some() => {
            tracing::warn!("whether a checkpoint is newer than the last one is not known: {error}");
            None
        }
        newest => newest?,
    };
    let found = match (pointed, newest) {
        (Some(pointed), Some(newest)) if newest.saved_at > pointed.saved_at => {
            tracing::warn!(
                "{} names {}, but {} was committed after it, which is taken; to go back to the other, \
                 name it by its path",
                io.location(LAST).display(),
                pointed.name,
                newest.name
            );
            Some(newest)
        }
        (Some(pointed), _) => Some(pointed),
        (None, newest) => newest,
    };
    Ok(found.map(|Saved { step, name, .. }| CommittedCheckpoint {
        step,
        path: io.location(&name),
        name,
    }))
}

/// A committed checkpoint, and when it was saved.
struct Saved {
    saved_at: Option<u64>,
    step: u64,
    name: String,
}

/// Returns the checkpoint with the largest `saved_at`, then the largest step.
fn saved_last(io: &dyn CheckpointIO) -> Result<Option<Saved>> {
    let mut newest: Option<Saved> = None;
    // If both are equal, the first one wins: a copy has a longer name than its original.
    let key = |saved: &Saved| {
        (
            saved.saved_at,
            saved.step,
            replaced_base(&saved.name).is_none(),
            Reverse(saved.name.clone()),
        )
    };
    for entry in io.list("")? {
        if entry.is_directory
            && !is_temporary(&entry.name)
            && let Some(Stamp { step, saved_at, .. }) = committed(io, &entry.name)?
        {
            let saved = Saved { saved_at, step, name: entry.name };
            newest = match newest {
                Some(newest) if key(&newest) >= key(&saved) => Some(newest),
                _ => Some(saved),
            };
        }
    }
    Ok(newest)
}

/// Returns the checkpoint that the content of [`LAST`] names; `None` if it was not committed.
fn read_last(io: &dyn CheckpointIO, bytes: &[u8]) -> Option<Saved> {
    // A complete file ends with a newline.
    let name = std::str::from_utf8(bytes).ok().and_then(|text| text.strip_suffix('\n'));
    let name = name.filter(|name| invalid_name(name).is_none());
    let found = match name.map(|name| committed(io, name)).transpose() {
        Ok(stamp) => stamp.flatten(),
        Err(error) => {
            tracing::warn!("{error}");
            None
        }
    };
    if let (Some(name), Some(Stamp { step, saved_at, .. })) = (name, found) {
        return Some(Saved { saved_at, step, name: name.to_owned() });
    }
    tracing::warn!(
        "{} names no checkpoint that is there; looking for the newest one instead",
        io.location(LAST).display()
    );
    None
}

/// Writes the file [`LAST`].
pub(super) fn write_last(io: &dyn CheckpointIO, name: &str) -> Result<()> {
    io.replace(LAST, format!("{name}\n").as_bytes())
}

/// Returns the stamp of the checkpoint `name`; `None` if it was not committed.
fn committed(io: &dyn CheckpointIO, name: &str) -> Result<Option<Stamp>> {
    for manifest in [MANIFEST, FULL_MANIFEST] {
        let path = format!("{name}/{manifest}");
        let bytes = match io.load(&path) {
            Ok(bytes) => bytes,
            Err(Error::Io { source, .. })
                if matches!(source.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) =>
            {
                continue;
            }
            // The file does not come from a save.
            Err(error) if is_no_manifest(&error) => {
                tracing::warn!("not taken for a checkpoint: {error}");
                continue;
            }
            Err(error) => return Err(error),
        };
        match Stamp::parse(&bytes, &io.location(&path)) {
            Ok(stamp) => return Ok(Some(stamp)),
            Err(error) => tracing::warn!("not taken for a checkpoint: {error}"),
        }
    }
    Ok(None)
}

/// Whether a manifest is unreadable by its kind: a directory, a pipe, far too long.
fn is_no_manifest(error: &Error) -> bool {
    use ErrorKind::{FileTooLarge, InvalidFilename, InvalidInput, IsADirectory};
    match error {
        Error::Io { source, .. } => {
            matches!(source.kind(), FileTooLarge | InvalidFilename | InvalidInput | IsADirectory)
        }
        _ => false,
    }
}
