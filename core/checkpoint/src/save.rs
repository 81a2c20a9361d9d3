//! Saving a distributed checkpoint.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::chunks::check_cover;
use super::latest::point_last;
use super::manifest::{FULL_MANIFEST, MANIFEST, Manifest, SaveMeta, TensorEntry};
use super::shard_file::{self, Piece};
use super::{CheckpointIO, Entry, Filter, ShardTensor};
use crate::{Error, Result};
use fulgurite_engine::checkpoint_io as naming;
use fulgurite_engine::collective::{ProcessGroup, all_gather_object, broadcast_object};
use fulgurite_engine::shard::Region;

/// What one rank wrote.
#[derive(Debug, Serialize, Deserialize)]
struct Written {
    files: BTreeMap<String, u64>,
    model: Vec<Piece>,
    optimizer: Vec<Piece>,
}

/// Writes the distributed checkpoint `name` of `io` and returns where it is.
///
/// Collective: every rank of `group` calls it with its parts ([`model_tensors`],
/// [`optimizer_tensors`]); rank 0's `meta` counts. Ranks need to see the same place. Each writes
/// straight from the tensors' memory; those on a device are copied one at a time.
///
/// With [`SaveMeta::filter`], only what it keeps is written, and the manifest says so: such a
/// checkpoint loads with the same filter, or not strictly.
///
/// The checkpoint appears under its name when everything is durable, in one step, replacing an
/// older one of that name. What earlier saves to this place left unfinished is removed first, so
/// only one save at a time may be under way in a place.
///
/// [`model_tensors`]: super::model_tensors
/// [`optimizer_tensors`]: super::optimizer_tensors
///
/// # Errors
/// On every rank if it fails on any: [`Error::PeerFailed`] on those where it did not. Nothing is
/// left then under `name` but what was there before.
pub fn save(
    io: &dyn CheckpointIO,
    group: &dyn ProcessGroup,
    name: &str,
    model: &[ShardTensor],
    optimizer: &[ShardTensor],
    meta: &SaveMeta,
) -> Result<PathBuf> {
    let write = |staged: &str| write(io, group.rank(), staged, model, optimizer, meta);
    transact(io, group, name, meta, write)
}

/// A checkpoint to be saved: what one rank contributes, and what follows.
#[derive(Debug, Clone)]
pub struct SaveRequest {
    /// The checkpoint's name.
    pub name: String,
    /// This rank's parts of the model ([`model_tensors`](super::model_tensors)).
    pub model: Vec<ShardTensor>,
    /// This rank's parts of the optimizer's state
    /// ([`optimizer_tensors`](super::optimizer_tensors)).
    pub optimizer: Vec<ShardTensor>,
    /// What is saved besides; rank 0's counts.
    pub meta: SaveMeta,
    /// Whether [`LAST`](super::LAST) is to name this checkpoint once it is committed. Rank 0's
    /// counts.
    pub point_last: bool,
    /// Older checkpoints to remove once this one is committed. One that cannot be removed is
    /// warned of. Rank 0's count.
    pub remove: Vec<String>,
}

impl SaveRequest {
    /// Saves it to `io`, as [`save`] does, and then does what is to follow. Collective.
    ///
    /// # Errors
    /// As [`save`], and if [`LAST`](super::LAST) cannot be written; the checkpoint is committed
    /// then, and nothing was removed.
    pub fn run(&self, io: &dyn CheckpointIO, group: &dyn ProcessGroup) -> Result<PathBuf> {
        self.run_if(io, group, Ok(()))
    }

    /// The same; fails, on all ranks, if this rank is not `ready`.
    pub(super) fn run_if(
        &self,
        io: &dyn CheckpointIO,
        group: &dyn ProcessGroup,
        ready: Result<()>,
    ) -> Result<PathBuf> {
        let Self { name, model, optimizer, meta, .. } = self;
        let path = transact(io, group, name, meta, |staged| {
            ready?;
            write(io, group.rank(), staged, model, optimizer, meta)
        })?;
        follow_up(io, group, name, self.point_last, &self.remove)?;
        Ok(path)
    }
}

/// Does what is to follow once the checkpoint `name` is committed: see [`SaveRequest`]. Collective,
/// whatever the other ranks than 0 were told.
pub fn follow_up(
    io: &dyn CheckpointIO,
    group: &dyn ProcessGroup,
    name: &str,
    is_last: bool,
    remove: &[String],
) -> Result<()> {
    on_root(group, || {
        if is_last {
            point_last(io, name)?;
        }
        for old in remove.iter().filter(|old| *old != name) {
            if let Err(error) = io.remove(old) {
                tracing::warn!("an old checkpoint stays: {error}");
            }
        }
        Ok(())
    })
}

/// Runs a save in which this rank's files are written by `write`. Collective.
fn transact(
    io: &dyn CheckpointIO,
    group: &dyn ProcessGroup,
    name: &str,
    meta: &SaveMeta,
    write: impl FnOnce(&str) -> Result<Written>,
) -> Result<PathBuf> {
    let staged = on_root(group, || prepare(io, name))?;
    let mut own_error = None;
    let written = write(&staged).map_err(|error| {
        let message = error.to_string();
        own_error = Some(error);
        message
    });
    let reports = all_gather_object(group, &written)?;
    on_root(group, || {
        let committed =
            successes(group, reports).and_then(|written| finish(io, &staged, name, meta, written));
        if committed.is_err()
            && let Err(error) = io.remove(&staged)
        {
            tracing::warn!("the next save will remove what this one leaves: {error}");
        }
        committed
    })
    // A rank's own failure says more than that it failed.
    .map_err(|error| own_error.unwrap_or(error))?;
    Ok(io.location(name))
}

/// What came of something that rank 0 does for all.
#[derive(Serialize, Deserialize)]
enum Outcome<T> {
    /// Rank 0 has not said.
    Unknown,
    Done(T),
    Failed {
        rank: usize,
        message: String,
    },
}

/// Runs `f` on rank 0 and gives its result to all.
pub(super) fn on_root<T: Serialize + DeserializeOwned>(
    group: &dyn ProcessGroup,
    f: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let mut own_error = None;
    let mut outcome = Outcome::Unknown;
    if group.rank() == 0 {
        outcome = match f() {
            Ok(value) => Outcome::Done(value),
            Err(error) => {
                let (rank, message) = match &error {
                    Error::PeerFailed { rank, message } => (*rank, message.clone()),
                    error => (group.global_ranks()[0], error.to_string()),
                };
                own_error = Some(error);
                Outcome::Failed { rank, message }
            }
        };
    }
    match broadcast_object(group, &outcome, 0)? {
        Outcome::Done(value) => Ok(value),
        Outcome::Failed { rank, message } => {
            Err(own_error.unwrap_or(Error::PeerFailed { rank, message }))
        }
        Outcome::Unknown => Err(Error::other("rank 0 sent no result")),
    }
}

/// Removes what earlier saves left, and names the directory to write in.
fn prepare(io: &dyn CheckpointIO, name: &str) -> Result<String> {
    if let Some(complaint) = naming::complaint(name) {
        return Err(Error::checkpoint(io.location(name), complaint));
    }
    check_replaceable(io, name, &remove_unfinished(io)?)?;
    Ok(naming::staging_name(name))
}

/// Checks that what a checkpoint `name` would replace is one too, distributed or full. `entries` are
/// those of the place.
pub(super) fn check_replaceable(
    io: &dyn CheckpointIO,
    name: &str,
    entries: &[Entry],
) -> Result<()> {
    let exists = entries.iter().any(|entry| entry.name == name);
    let is_checkpoint = |entry: &Entry| [MANIFEST, FULL_MANIFEST].contains(&&*entry.name);
    if exists && !io.list(name)?.iter().any(is_checkpoint) {
        let message = "there is something here already that is no checkpoint; it is not overwritten. \
                       Move it away or save to another place";
        return Err(Error::checkpoint(io.location(name), message));
    }
    Ok(())
}

/// Removes what saves and removals that were cut short have left in a place, and returns what else
/// is there. Not collective: one rank does it, while no save to the place is under way. Every save
/// begins with it.
///
/// # Errors
/// If the place cannot be listed, or something cannot be removed.
pub fn remove_unfinished(io: &dyn CheckpointIO) -> Result<Vec<Entry>> {
    let entries = io.list("")?;
    let exists = |name: &str| entries.iter().any(|entry| entry.name == name);
    let is_left = |entry: &Entry| {
        naming::is_temporary(&entry.name) || naming::replaced_base(&entry.name).is_some_and(exists)
    };
    let (left, rest): (Vec<_>, Vec<_>) = entries.iter().cloned().partition(is_left);
    for Entry { name, .. } in left {
        tracing::info!("removing an unfinished checkpoint, {}", io.location(&name).display());
        io.remove(&name)?;
    }
    Ok(rest)
}

/// Writes this rank's files.
fn write(
    io: &dyn CheckpointIO,
    rank: usize,
    staged: &str,
    model: &[ShardTensor],
    optimizer: &[ShardTensor],
    meta: &SaveMeta,
) -> Result<Written> {
    let (model, optimizer) = &Filter::apply(meta.filter.as_ref(), model, optimizer);
    let mut files = BTreeMap::new();
    let mut pieces = Vec::new();
    for (folder, tensors) in [("model", model), ("optimizer", optimizer)] {
        let mut described = shard_file::describe(tensors)?;
        let file = format!("{folder}/{}", shard_file::file_name(rank));
        let path = format!("{staged}/{file}");
        if let Some(len) = shard_file::write(io, &path, &file, tensors, &mut described)? {
            files.insert(file, len);
        }
        if rank > 0 {
            // Rank 0 names all tensors; the others need only tell what they hold.
            described.retain(|piece| piece.part.is_some());
        }
        pieces.push(described);
    }
    let (optimizer, model) = (pieces.pop().unwrap_or_default(), pieces.pop().unwrap_or_default());
    Ok(Written { files, model, optimizer })
}

/// What all ranks wrote, or the first one's error.
fn successes(
    group: &dyn ProcessGroup,
    reports: Vec<Result<Written, String>>,
) -> Result<Vec<Written>> {
    let ranks = group.global_ranks();
    let reports = reports.into_iter().zip(ranks);
    reports
        .map(|(report, &rank)| report.map_err(|message| Error::PeerFailed { rank, message }))
        .collect()
}

/// Writes the manifest and commits.
fn finish(
    io: &dyn CheckpointIO,
    staged: &str,
    name: &str,
    meta: &SaveMeta,
    written: Vec<Written>,
) -> Result<()> {
    let mut manifest = Manifest::new(written.len(), meta);
    let fail = |message: String| Err(Error::checkpoint(io.location(name), message));
    for rank in written {
        manifest.files.extend(rank.files);
        for (entries, pieces) in
            [(&mut manifest.model, rank.model), (&mut manifest.optimizer, rank.optimizer)]
        {
            for piece in pieces {
                let entry = entries.entry(piece.name.clone()).or_insert_with(|| TensorEntry {
                    shape: piece.shape.clone(),
                    dtype: piece.dtype,
                    chunks: Vec::new(),
                });
                if (&entry.shape, entry.dtype) != (&piece.shape, piece.dtype) {
                    return fail(format!(
                        "tensor `{}` has shape {:?} and dtype {} on one rank, {:?} and {} on another",
                        piece.name, entry.shape, entry.dtype, piece.shape, piece.dtype
                    ));
                }
                entry.chunks.extend(piece.part);
            }
        }
    }
    for (tensor, entry) in manifest.model.iter().chain(&manifest.optimizer) {
        let regions: Vec<Region> = entry.chunks.iter().map(|b| b.region.clone()).collect();
        if let Err(message) = check_cover(&entry.shape, &regions) {
            return fail(format!("tensor `{tensor}` {message}"));
        }
    }
    check_visible(io, staged, &manifest)?;
    let bytes = serde_json::to_vec_pretty(&manifest)
        .map_err(|e| Error::checkpoint(io.location(name), format!("encoding the manifest: {e}")))?;
    io.save(&format!("{staged}/{MANIFEST}"), &bytes)?;
    io.commit(staged, name)
}

/// Checks that this rank sees the files of all.
fn check_visible(io: &dyn CheckpointIO, staged: &str, manifest: &Manifest) -> Result<()> {
    let mut seen = BTreeMap::new();
    for folder in ["model", "optimizer"] {
        for entry in io.list(&format!("{staged}/{folder}"))? {
            seen.insert(format!("{folder}/{}", entry.name), entry.bytes);
        }
    }
    match manifest.files.iter().find(|(file, len)| seen.get(*file) != Some(len)) {
        None => Ok(()),
        Some((file, _)) => Err(Error::checkpoint(
            io.location(&format!("{staged}/{file}")),
            "rank 0 does not see this file as it was written by another rank; checkpoints need a \
             directory that all ranks share",
        )),
    }
}
