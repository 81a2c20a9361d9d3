//! Saving a distributed checkpoint.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::chunks::check_cover;
use super::latest::write_last;
use super::manifest::{FULL_MANIFEST, MANIFEST, Manifest, SaveMeta, TensorEntry};
use super::shard_file::{self, WrittenPart};
use super::{CheckpointIO, Entry, FileDigest, ParameterFilter, PlaceLock, ShardTensor};
use crate::{Error, Result};
use fulgurite_engine::checkpoint_io as naming;
use fulgurite_engine::collective::{ProcessGroup, all_gather_object, broadcast_object};
use fulgurite_engine::shard::Region;

/// The files and tensors that one rank wrote.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Written {
    pub(super) files: BTreeMap<String, (u64, FileDigest)>,
    pub(super) model: Vec<WrittenPart>,
    pub(super) optimizer: Vec<WrittenPart>,
}

/// Writes the distributed checkpoint `name` of `io` and returns its path.
///
/// Collective: every rank of `group` calls it with its parts ([`model_tensors`],
/// [`optimizer_tensors`]); rank 0's `meta` is saved. All ranks must reach the same storage. Tensors
/// on the CPU are written without a copy; tensors on a device are copied one at a time.
///
/// With a [`SaveMeta::filter`] only the parameters that it keeps are written, and the manifest says
/// so. Such a checkpoint loads with the same filter, or not strictly.
///
/// The checkpoint appears under its name in one step, when everything is durable, and replaces an
/// older one of that name. Unfinished saves of `io` are removed first, so only one save at a time
/// may be under way there.
///
/// [`model_tensors`]: super::model_tensors
/// [`optimizer_tensors`]: super::optimizer_tensors
///
/// # Errors
/// On every rank, if it fails on any: [`Error::PeerFailed`] on ranks that did not fail. An earlier
/// checkpoint under `name` is still there then.
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

/// A checkpoint to be saved: one rank's parts, and the actions after the commit.
#[derive(Debug, Clone)]
pub struct SaveRequest {
    /// The checkpoint's name.
    pub name: String,
    /// This rank's parts of the model ([`model_tensors`](super::model_tensors)).
    pub model: Vec<ShardTensor>,
    /// This rank's parts of the optimizer's state
    /// ([`optimizer_tensors`](super::optimizer_tensors)).
    pub optimizer: Vec<ShardTensor>,
    /// The metadata; rank 0's is used.
    pub meta: SaveMeta,
    /// Whether [`LAST`](super::LAST) names this checkpoint after the commit; rank 0's value is
    /// used.
    pub update_last: bool,
    /// Older checkpoints to remove after the commit; rank 0's list is used. A failed removal is
    /// only a warning.
    pub remove: Vec<String>,
}

impl SaveRequest {
    /// Bytes of this rank's parts.
    pub fn bytes(&self) -> u64 {
        let tensors = self.model.iter().chain(&self.optimizer);
        let bytes = tensors.map(|t| t.values.elem_count() * t.values.dtype().size_in_bytes());
        bytes.sum::<usize>() as u64
    }

    /// Saves to `io`, as [`save`] does, then updates [`LAST`](super::LAST) and removes old
    /// checkpoints. Collective.
    ///
    /// # Errors
    /// As [`save`], and if [`LAST`](super::LAST) cannot be written; then the checkpoint is
    /// committed and nothing was removed.
    pub fn run(&self, io: &dyn CheckpointIO, group: &dyn ProcessGroup) -> Result<PathBuf> {
        self.run_if(io, group, Ok(()))
    }

    /// Runs as [`run`](Self::run), but fails on all ranks if `ready` is an error on one.
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
        after_commit(io, group, name, self.update_last, &self.remove)?;
        Ok(path)
    }
}

/// Completes the save of `name` after its commit.
///
/// Rank 0 writes [`LAST`](super::LAST) if `is_last`, and removes the checkpoints `remove`.
/// Collective; rank 0's arguments are used.
pub fn after_commit(
    io: &dyn CheckpointIO,
    group: &dyn ProcessGroup,
    name: &str,
    is_last: bool,
    remove: &[String],
) -> Result<()> {
    on_rank_zero(group, || {
        if is_last {
            write_last(io, name)?;
        }
        for old in remove.iter().filter(|old| *old != name) {
            if let Err(error) = io.remove(old) {
                tracing::warn!("an old checkpoint stays: {error}");
            }
        }
        Ok(())
    })
}

/// Runs the transaction of a save; `write` writes this rank's files. Collective.
fn transact(
    io: &dyn CheckpointIO,
    group: &dyn ProcessGroup,
    name: &str,
    meta: &SaveMeta,
    write: impl FnOnce(&str) -> Result<Written>,
) -> Result<PathBuf> {
    let mut lock = None;
    let staged = on_rank_zero(group, || {
        let (staged, held) = prepare(io, name)?;
        lock = held;
        Ok(staged)
    })?;
    let mut own_error = None;
    let written = write(&staged).map_err(|error| {
        let message = error.to_string();
        own_error = Some(error);
        message
    });
    let reports = all_gather_object(group, &written)?;
    let committed = on_rank_zero(group, || {
        let committed =
            successes(group, reports).and_then(|written| finish(io, &staged, name, meta, written));
        if committed.is_err()
            && let Err(error) = io.remove(&staged)
        {
            tracing::warn!("the next save will remove what this one leaves: {error}");
        }
        committed
    });
    drop(lock);
    // The rank that failed returns its own error.
    committed.map_err(|error| own_error.unwrap_or(error))?;
    Ok(io.location(name))
}

/// The result of a closure that rank 0 runs for all.
#[derive(Serialize, Deserialize)]
enum Outcome<T> {
    /// On ranks other than 0, before the broadcast.
    Unknown,
    Done(T),
    Failed {
        rank: usize,
        message: String,
    },
}

/// Runs `f` on rank 0 and returns its result on all ranks. Collective.
pub(super) fn on_rank_zero<T: Serialize + DeserializeOwned>(
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

/// Removes unfinished saves. Returns the directory to write in, and its lock.
fn prepare(io: &dyn CheckpointIO, name: &str) -> Result<(String, Option<PlaceLock>)> {
    if let Some(complaint) = naming::invalid_name(name) {
        return Err(Error::checkpoint(io.location(name), complaint));
    }
    check_replaceable(io, name, &remove_unfinished(io)?)?;
    let staged = naming::staging_name(name);
    let lock = io.lock(&staged)?;
    Ok((staged, lock))
}

/// Checks that an existing entry `name`, which the checkpoint would replace, is a checkpoint too.
///
/// `entries` are all entries of `io`.
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

/// Removes the remains of interrupted saves and removals, and returns the other entries.
///
/// Directories that a living process has locked stay. Without [locks](CheckpointIO::lock) no other
/// save to `io` may be under way. Not collective: one rank calls it. Every save begins with it.
///
/// # Errors
/// If `io` cannot be listed, or an entry cannot be removed.
pub fn remove_unfinished(io: &dyn CheckpointIO) -> Result<Vec<Entry>> {
    let entries = io.list("")?;
    let exists = |name: &str| entries.iter().any(|entry| entry.name == name);
    let is_left = |entry: &Entry| {
        naming::is_temporary(&entry.name) || naming::replaced_base(&entry.name).is_some_and(exists)
    };
    let (left, rest): (Vec<_>, Vec<_>) = entries.iter().cloned().partition(is_left);
    for Entry { name, .. } in left {
        if naming::is_temporary(&name) && io.is_locked(&name)? == Some(true) {
            continue;
        }
        tracing::info!("removing an unfinished checkpoint, {}", io.location(&name).display());
        io.remove(&name)?;
    }
    Ok(rest)
}

/// Does [`remove_unfinished`] for the save of `name`, while other saves may be under way.
///
/// It removes temporary directories that a killed process had locked. Of those that nobody has
/// locked, it removes only remains of an earlier save of `name`.
pub(super) fn remove_abandoned(io: &dyn CheckpointIO, name: &str, entries: &[Entry]) -> Result<()> {
    for entry in entries.iter().filter(|entry| naming::is_temporary(&entry.name)) {
        let is_abandoned = match io.is_locked(&entry.name)? {
            Some(is_locked) => !is_locked,
            None => naming::is_temporary_of(&entry.name, name),
        };
        if is_abandoned {
            io.remove(&entry.name)?;
        }
    }
    Ok(())
}

/// Writes this rank's files.
pub(super) fn write(
    io: &dyn CheckpointIO,
    rank: usize,
    staged: &str,
    model: &[ShardTensor],
    optimizer: &[ShardTensor],
    meta: &SaveMeta,
) -> Result<Written> {
    let (model, optimizer) = &ParameterFilter::apply(meta.filter.as_ref(), model, optimizer);
    let mut files = BTreeMap::new();
    let mut pieces = Vec::new();
    for (folder, tensors) in [("model", model), ("optimizer", optimizer)] {
        let mut described = shard_file::describe(tensors)?;
        let file = format!("{folder}/{}", shard_file::file_name(rank));
        let path = format!("{staged}/{file}");
        if let Some(written) = shard_file::write(io, &path, &file, tensors, &mut described)? {
            files.insert(file, written);
        }
        if rank > 0 {
            // Rank 0 lists all tensors; the others list only tensors that they have a part of.
            described.retain(|piece| piece.part.is_some());
        }
        pieces.push(described);
    }
    let (optimizer, model) = (pieces.pop().unwrap_or_default(), pieces.pop().unwrap_or_default());
    Ok(Written { files, model, optimizer })
}

/// Returns the reports of all ranks, or the error of the first rank that failed.
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
    let mut manifest = combine(io, name, meta, written)?;
    check_visible(io, staged, &manifest, |_| true)?;
    let path = format!("{staged}/{MANIFEST}");
    io.save(&path, &manifest.encode(&io.location(&path))?)?;
    io.commit(staged, name)
}

/// Returns the manifest of the parts that ranks wrote.
pub(super) fn combine(
    io: &dyn CheckpointIO,
    name: &str,
    meta: &SaveMeta,
    written: Vec<Written>,
) -> Result<Manifest> {
    let mut manifest = Manifest::new(written.len(), meta);
    let fail = |message: String| Err(Error::checkpoint(io.location(name), message));
    for rank in written {
        for (file, (len, header)) in rank.files {
            manifest.files.insert(file.clone(), len);
            manifest.headers.insert(file, header);
        }
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
    Ok(manifest)
}

/// Checks that this rank sees those files of all ranks that should be here.
pub(super) fn check_visible(
    io: &dyn CheckpointIO,
    staged: &str,
    manifest: &Manifest,
    should_be: impl Fn(&String) -> bool,
) -> Result<()> {
    let mut seen = BTreeMap::new();
    for folder in ["model", "optimizer"] {
        for entry in io.list(&format!("{staged}/{folder}"))? {
            seen.insert(format!("{folder}/{}", entry.name), entry.bytes);
        }
    }
    let mut files = manifest.files.iter().filter(|(file, _)| should_be(file));
    match files.find(|(file, len)| seen.get(*file) != Some(len)) {
        None => Ok(()),
        Some((file, _)) => Err(Error::checkpoint(
            io.location(&format!("{staged}/{file}")),
            "rank 0 does not see this file as it was written by another rank; checkpoints need a \
             directory that all ranks share",
        )),
    }
}
