//! Which checkpoint to resume from.

use std::path::PathBuf;

use super::CheckpointIO;
use super::manifest::{MANIFEST, Stamp};
use super::naming::{is_temporary, replaced_base};
use crate::{Error, Result};

/// A checkpoint that was committed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// The optimizer step after which it was saved.
    pub step: u64,
    /// Its name in its [`CheckpointIO`].
    pub name: String,
    /// Where it is.
    pub path: PathBuf,
}

/// The newest committed checkpoint of `io`, by the step in its manifest; `None` if there is none.
/// Unfinished saves and directories without a valid manifest are not taken for one.
///
/// Not collective: where ranks must agree, one asks and tells the others.
///
/// # Errors
/// If the place cannot be listed or a manifest cannot be read.
pub fn latest(io: &dyn CheckpointIO) -> Result<Option<Committed>> {
    let mut newest: Option<(u64, bool, String)> = None;
    for entry in io.list("")? {
        if !entry.is_directory || is_temporary(&entry.name) {
            continue;
        }
        let path = format!("{}/{MANIFEST}", entry.name);
        let bytes = match io.load(&path) {
            Ok(bytes) => bytes,
            Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                continue;
            }
            Err(error) => return Err(error),
        };
        match Stamp::parse(&bytes, &io.location(&path)) {
            Ok(stamp) => {
                // Of two of one step, one may be about to be replaced by the other.
                let key = (stamp.step, replaced_base(&entry.name).is_none(), entry.name);
                newest = newest.max(Some(key));
            }
            Err(error) => tracing::warn!("not taken for a checkpoint: {error}"),
        }
    }
    Ok(newest.map(|(step, _, name)| Committed { step, path: io.location(&name), name }))
}
