//! Reading a distributed checkpoint.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::checksum::Expected;
use super::chunks::check_cover;
use super::coverage;
use super::manifest::{FULL_MANIFEST, MANIFEST, Manifest, TensorEntry};
use super::shard_file::MAX_DIMS;
use super::stored::{FileLocation, StoredChunk, check_undamaged};
use super::{CheckpointIO, StoredTensors, TensorInfo, TensorSource};
use crate::{Error, Result};
use fulgurite_engine::checkpoint_io::MAX_MANIFEST;
use fulgurite_engine::shard::Region;
use fulgurite_error::files::read_regular;

/// A checkpoint written by [`save`](super::save), on any number of ranks.
///
/// As a [`TensorSource`] it is the [model](Self::model). Opening reads the manifest and the lengths
/// of the shards; nothing is collective.
#[derive(Debug)]
pub struct DistributedCheckpoint {
    manifest: Manifest,
    model: StoredTensors,
    optimizer: StoredTensors,
}

impl DistributedCheckpoint {
    /// Opens the checkpoint in the local directory `path`.
    ///
    /// # Errors
    /// If the manifest is missing, torn or of a newer version, or a shard that it names is missing
    /// or has another length.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let load = |manifest: &str| read_regular(path.join(manifest), MAX_MANIFEST);
        Self::from_manifest(load, FileLocation::Local(path.to_owned()))
    }

    /// Opens the checkpoint `name` of `io`.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(io: &Arc<dyn CheckpointIO>, name: &str) -> Result<Self> {
        let load = |manifest: &str| io.load(&format!("{name}/{manifest}"));
        Self::from_manifest(load, FileLocation::Io(io.clone(), name.to_owned()))
    }

    fn from_manifest(load: impl Fn(&str) -> Result<Vec<u8>>, place: FileLocation) -> Result<Self> {
        let missing = |error: &Error| match error {
            Error::Io { source, .. } => source.kind() == std::io::ErrorKind::NotFound,
            _ => false,
        };
        let (file, bytes) = match load(MANIFEST) {
            Err(error) if missing(&error) => match load(FULL_MANIFEST) {
                Err(error) if missing(&error) => {
                    return Err(Error::checkpoint(
                        place.location(""),
                        format!(
                            "there is no checkpoint here: it has no {MANIFEST}. Name the directory \
                             of one step, such as `step-00000010`; one without a manifest was never \
                             completed"
                        ),
                    ));
                }
                bytes => (FULL_MANIFEST, bytes?),
            },
            bytes => (MANIFEST, bytes?),
        };
        let location = place.location(file);
        let manifest = match file {
            FULL_MANIFEST => Manifest::parse_full(&bytes, &location)?,
            _ => Manifest::parse(&bytes, &location)?,
        };
        let (mut model, mut optimizer) = contents(&manifest, &place, file)?;
        model.set_filtered(manifest.filter.clone());
        optimizer.set_filtered(manifest.filter.clone());
        Ok(Self { manifest, model, optimizer })
    }

    /// Sets whether a chunk that is read whole is compared with its checksum. The default is
    /// `true`.
    #[must_use]
    pub fn verify_on_load(mut self, verify: bool) -> Self {
        self.model.set_verify(verify);
        self.optimizer.set_verify(verify);
        self
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The model's tensors, by FQN.
    pub fn model(&self) -> &StoredTensors {
        &self.model
    }

    /// The optimizer's tensors, by [`optimizer_key`](super::optimizer_key).
    pub fn optimizer(&self) -> &StoredTensors {
        &self.optimizer
    }

    /// Reads the whole checkpoint and compares it with the checksums.
    ///
    /// # Errors
    /// If anything is damaged, naming file and tensor of each damage.
    pub fn verify(&self) -> Result<()> {
        let mut damages = self.model.damages();
        damages.append(&mut self.optimizer.damages());
        for damage in coverage::damages(&self.manifest, self.model.place()) {
            let file = self.model.place().location(&damage.file);
            damages.push(format!("{}: {}", file.display(), damage.message));
        }
        check_undamaged(self.location(), damages)
    }
}

impl TensorSource for DistributedCheckpoint {
    fn location(&self) -> &Path {
        self.model.location()
    }

    fn names(&self) -> Vec<&str> {
        self.model.names()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.model.info(name)
    }

    fn read(&self, name: &str, region: &Region, dtype: DType, device: &Device) -> Result<Tensor> {
        self.model.read(name, region, dtype, device)
    }

    fn read_into(&self, name: &str, region: &Region, target: &Tensor) -> Result<()> {
        self.model.read_into(name, region, target)
    }

    fn read_into_unverified(&self, name: &str, region: &Region, target: &Tensor) -> Result<()> {
        self.model.read_into_unverified(name, region, target)
    }

    fn read_stored(&self, name: &str) -> Result<Vec<u8>> {
        self.model.read_stored(name)
    }

    fn filtered(&self) -> Option<&str> {
        self.model.filtered()
    }

    fn warning(&self) -> Option<String> {
        self.manifest.warning()
    }
}

/// Returns the model's and the optimizer's tensors of a manifest, read from the file `name`.
pub(super) fn contents(
    manifest: &Manifest,
    place: &FileLocation,
    name: &str,
) -> Result<(StoredTensors, StoredTensors)> {
    check_files(manifest, place, name)?;
    let stored = |entries| stored(entries, &manifest.files, place, name);
    Ok((stored(&manifest.model)?, stored(&manifest.optimizer)?))
}

/// Checks that all shards exist, with the lengths in the manifest.
fn check_files(manifest: &Manifest, place: &FileLocation, name: &str) -> Result<()> {
    let folders: BTreeSet<&str> = manifest
        .files
        .keys()
        .map(|file| file.rsplit_once('/').map_or("", |(folder, _)| folder))
        .collect();
    let mut found = BTreeMap::new();
    for folder in folders {
        if folder.split('/').any(|part| part == "..") || folder.starts_with('/') {
            let message = format!("the manifest names a folder outside the checkpoint: `{folder}`");
            return Err(Error::checkpoint(place.location(name), message));
        }
        for (file, len) in place.lengths(folder)? {
            found.insert(if folder.is_empty() { file } else { format!("{folder}/{file}") }, len);
        }
    }
    for (file, expected) in &manifest.files {
        let complaint = match found.get(file) {
            Some(len) if len == expected => continue,
            Some(len) if len < expected => {
                format!("is truncated: it has {len} bytes of {expected}")
            }
            Some(len) => format!("is not what was saved: it has {len} bytes instead of {expected}"),
            None => "is missing".to_owned(),
        };
        let (count, first) = tensors_in(manifest, file);
        return Err(Error::checkpoint(
            place.location(file),
            format!("this shard {complaint}; it holds parts of {count} tensors, such as `{first}`"),
        ));
    }
    Ok(())
}

fn tensors_in<'a>(manifest: &'a Manifest, file: &str) -> (usize, &'a str) {
    let mut names = manifest
        .model
        .iter()
        .chain(&manifest.optimizer)
        .filter(|(_, tensor)| tensor.chunks.iter().any(|b| b.file == file))
        .map(|(name, _)| name.as_str());
    let first = names.next();
    (names.count() + usize::from(first.is_some()), first.unwrap_or_default())
}

fn stored(
    entries: &BTreeMap<String, TensorEntry>,
    lengths: &BTreeMap<String, u64>,
    place: &FileLocation,
    manifest: &str,
) -> Result<StoredTensors> {
    let files: Vec<String> = lengths.keys().cloned().collect();
    let mut tensors = StoredTensors::new(place.clone(), place.location(""), files.clone());
    for (name, entry) in entries {
        let damaged = |message: String| {
            let message = format!("the manifest is damaged: tensor `{name}` {message}");
            Err(Error::checkpoint(place.location(manifest), message))
        };
        if entry.shape.len() > MAX_DIMS {
            let dims = entry.shape.len();
            return damaged(format!("has {dims} dimensions; {MAX_DIMS} are the most"));
        }
        let regions: Vec<Region> = entry.chunks.iter().map(|b| b.region.clone()).collect();
        if let Err(message) = check_cover(&entry.shape, &regions) {
            return damaged(message);
        }
        let mut chunks = Vec::with_capacity(entry.chunks.len());
        for stored in &entry.chunks {
            let Ok(file) = files.binary_search(&stored.file) else {
                return damaged(format!("is in `{}`, which is not listed", stored.file));
            };
            let (start, end) = stored.bytes;
            let bits = stored.region.elem_count().checked_mul(entry.dtype.bitsize());
            let fits = start <= end
                && end <= lengths[&stored.file]
                && bits.is_some_and(|bits| (bits / 8) as u64 == end - start);
            if !fits {
                return damaged(format!(
                    "has a wrong byte range in `{}`: {start}..{end}",
                    stored.file
                ));
            }
            chunks.push(StoredChunk {
                region: stored.region.clone(),
                file,
                bytes: stored.bytes,
                checksum: Some(Expected::Xxh3(stored.xxh3)),
            });
        }
        tensors.add(name.clone(), entry.shape.clone(), entry.dtype, chunks);
    }
    Ok(tensors)
}
