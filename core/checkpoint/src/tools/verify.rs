//! Verifying checksums.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Serialize;

use super::super::checksum::Expected;
use super::super::manifest::{ChunkEntry, TensorEntry};
use super::super::shard_file::{StoredPart, read_header};
use super::super::stored::{FileLocation, is_undamaged};
use super::super::{TensorSource, TorchSource, chunks, coverage};
use super::progress::{Counter, Progress};
use super::{AnyCheckpoint, CheckpointKind};
use crate::Error;

/// The result of [`verify`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Verification {
    /// Its path.
    pub path: PathBuf,
    /// Its kind.
    pub kind: CheckpointKind,
    /// Number of tensors, including the optimizer's.
    pub tensors: usize,
    /// Bytes that were compared with checksums; 0 without checksums.
    pub bytes: u64,
    /// A note on bytes that could not be compared, since they were saved without a checksum.
    pub warning: Option<String>,
    /// All damages.
    pub damages: Vec<Damage>,
}

/// A damaged file or tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Damage {
    /// The file.
    pub file: PathBuf,
    /// The tensor; `None` if the damage does not belong to a single tensor.
    pub tensor: Option<String>,
    /// The damage.
    pub message: String,
}

impl std::fmt::Display for Damage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let file = self.file.display();
        match &self.tensor {
            Some(tensor) => write!(f, "{file}: tensor `{tensor}`: {}", self.message),
            None => write!(f, "{file}: {}", self.message),
        }
    }
}

/// Compares all bytes of a checkpoint with their checksums, and its files' headers with the
/// manifest.
///
/// Of bare weights, only files of `torch.save` have checksums; they are read one whole tensor at a
/// time. [`AnyCheckpoint::open`] has checked the headers and lengths of other files. Otherwise
/// takes 4 MiB of memory. Not collective.
pub fn verify(checkpoint: &AnyCheckpoint, progress: &mut dyn FnMut(Progress)) -> Verification {
    let tensors = checkpoint.sections().iter().map(|(_, source)| source.names().len()).sum();
    let mut verification = Verification {
        path: checkpoint.location().to_owned(),
        kind: checkpoint.kind(),
        tensors,
        bytes: 0,
        warning: checkpoint.warning(),
        damages: Vec::new(),
    };
    if let Some(name) = checkpoint.missing_manifest() {
        let directory = checkpoint.location();
        let directory =
            if directory.is_dir() { directory } else { directory.parent().unwrap_or(directory) };
        verification.damages.push(Damage {
            file: directory.join(name),
            tensor: None,
            message: "is missing; these are files of a full checkpoint, which is saved with it"
                .to_owned(),
        });
    }
    if let AnyCheckpoint::Torch(source) = checkpoint {
        verify_torch(source, &mut verification, progress);
    }
    let Some(manifest) = checkpoint.manifest() else { return verification };
    let length = |stored: &ChunkEntry| stored.bytes.1 - stored.bytes.0;
    let all = || manifest.model.iter().chain(&manifest.optimizer);
    let total = all().flat_map(|(_, tensor)| &tensor.chunks).map(length).sum();
    verification.bytes = total;
    let mut counter = Counter::new(total, progress);
    let place = FileLocation::Local(checkpoint.location().to_owned());
    let (mut headers, companions): (Vec<_>, Vec<_>) =
        coverage::damages(manifest, &place).into_iter().partition(|damage| damage.in_header);
    for damage in companions {
        let (file, message) = (place.location(&damage.file), damage.message);
        verification.damages.push(Damage { file, tensor: None, message });
    }
    let mut buffer = Vec::new();
    for file in manifest.files.keys() {
        let location = place.location(file);
        let mut report = |tensor: Option<&str>, message: String| {
            let tensor = tensor.map(str::to_owned);
            verification.damages.push(Damage { file: location.clone(), tensor, message });
        };
        let reader = match place.open(file) {
            Ok(reader) => reader,
            Err(error) => {
                report(None, error.to_string());
                continue;
            }
        };
        let header: Option<BTreeMap<String, StoredPart>> = match read_header(reader.as_ref()) {
            Ok(header) => Some(header.parts.into_iter().map(|s| (s.name.clone(), s)).collect()),
            Err(message) => {
                // This message says more than the report of a different checksum.
                headers.retain(|damage| damage.file != *file);
                report(None, message);
                None
            }
        };
        let mut inside: Vec<_> = all()
            .flat_map(|(name, tensor)| tensor.chunks.iter().map(move |b| (name, tensor, b)))
            .filter(|(_, _, stored)| stored.file == *file)
            .collect();
        inside.sort_by_key(|(_, _, stored)| stored.bytes);
        for (name, tensor, stored) in &inside {
            if let Some(header) = &header
                && !is_listed(header.get(*name), tensor, stored)
            {
                headers.retain(|damage| damage.file != *file);
                report(Some(name), "the file's header says something else of it".to_owned());
            }
            let expected = Expected::Xxh3(stored.xxh3);
            match is_undamaged(reader.as_ref(), stored.bytes, expected, &mut buffer) {
                Ok(true) => {}
                Ok(false) => {
                    let region = chunks::format_region(&stored.region);
                    let message = format!("the bytes of {region} do not match their checksum");
                    report(Some(name), message);
                }
                Err(error) => report(Some(name), format!("reading it: {error}")),
            }
            counter.add(length(stored));
        }
    }
    for damage in headers {
        let (file, message) = (place.location(&damage.file), damage.message);
        verification.damages.push(Damage { file, tensor: None, message });
    }
    verification
}

/// Reads the tensors of `torch.save` one by one, whole, which compares them with their CRC-32.
fn verify_torch(
    source: &TorchSource,
    verification: &mut Verification,
    progress: &mut dyn FnMut(Progress),
) {
    let length = |name: &str| {
        let info = source.info(name)?;
        let elements = chunks::checked_elem_count(&info.shape)?;
        Some((elements * info.dtype.bitsize() / 8) as u64)
    };
    let total = source.names().into_iter().filter_map(length).sum();
    let mut counter = Counter::new(total, progress);
    for name in source.names() {
        let Some(bytes) = length(name) else { continue };
        if let Err(error) = source.read_stored(name) {
            // The message names the tensor.
            let (file, message) = match error {
                Error::Checkpoint { path, message } => (path, message),
                error => (source.location().to_owned(), error.to_string()),
            };
            verification.damages.push(Damage { file, tensor: None, message });
        }
        counter.add(bytes);
    }
    if source.has_checksums() {
        verification.bytes = total;
    }
}

/// Whether a file's header and the manifest agree on a chunk.
fn is_listed(found: Option<&StoredPart>, tensor: &TensorEntry, stored: &ChunkEntry) -> bool {
    found.is_some_and(|found| {
        found.bytes == stored.bytes && found.dtype == tensor.dtype && found.region == stored.region
    })
}
