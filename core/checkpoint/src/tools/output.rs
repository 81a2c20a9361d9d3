//! The output of a tool.

use super::super::manifest::{FULL_MANIFEST, MANIFEST};
use super::super::save::remove_abandoned;
use crate::{Error, Result};
use fulgurite_engine::checkpoint_io::{self as naming, CheckpointIO};

/// Files that identify a directory as a checkpoint or a model, which may be overwritten.
const MARKER_FILES: [&str; 4] =
    [MANIFEST, FULL_MANIFEST, "model.safetensors", "model.safetensors.index.json"];

/// Calls `write` with a new directory, then commits the directory as `name`.
pub(super) fn transaction<T>(
    io: &dyn CheckpointIO,
    name: &str,
    overwrite: bool,
    write: impl FnOnce(&str) -> Result<T>,
) -> Result<T> {
    let fail = |message: &str| Err(Error::checkpoint(io.location(name), message));
    if let Some(complaint) = naming::invalid_name(name) {
        return fail(complaint);
    }
    let entries = io.list("")?;
    if entries.iter().any(|entry| entry.name == name) {
        if !overwrite {
            return fail("exists already; name another output, or say `--overwrite` to replace it");
        }
        if !io.list(name)?.iter().any(|entry| MARKER_FILES.contains(&entry.name.as_str())) {
            return fail(
                "there is something here that is no checkpoint; it is not overwritten. Move it \
                 away or name another output",
            );
        }
    }
    remove_abandoned(io, name, &entries)?;
    let staged = naming::staging_name(name);
    let _lock = io.lock(&staged)?;
    let written = write(&staged).and_then(|value| io.commit(&staged, name).map(|()| value));
    if written.is_err()
        && let Err(error) = io.remove(&staged)
    {
        tracing::warn!("an unfinished output is left: {error}");
    }
    written
}
