//! A summary of a checkpoint.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Serialize;

use super::super::TensorSource;
use super::super::chunks::checked_elem_count;
use super::{AnyCheckpoint, CheckpointKind};

/// A summary of a checkpoint, without values.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CheckpointSummary {
    /// Its path.
    pub path: PathBuf,
    /// Its kind.
    pub kind: CheckpointKind,
    /// The format's version. This field and the following ones up to `mesh` are `None` for bare
    /// weights.
    pub format_version: Option<u32>,
    /// The version of the library that wrote it.
    pub library_version: Option<String>,
    /// The optimizer step after which it was saved.
    pub step: Option<u64>,
    /// Number of ranks that saved it.
    pub world_size: Option<usize>,
    /// Their mesh: dimension names and sizes, outermost first.
    pub mesh: Option<Vec<(String, usize)>>,
    /// Number of safetensors files.
    pub files: Option<usize>,
    /// The model's tensors.
    pub model: TensorSet,
    /// The optimizer's tensors, if there are any.
    pub optimizer: Option<TensorSet>,
}

/// The tensors of a model or an optimizer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TensorSet {
    /// Number of elements of all tensors.
    pub elements: u64,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// Number of tensors of each dtype.
    pub dtypes: BTreeMap<String, usize>,
    /// Each tensor, by name.
    pub tensors: BTreeMap<String, TensorSummary>,
    /// Tensors that cannot be read, such as sparse ones, with the reason.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub unreadable: BTreeMap<String, String>,
}

/// A tensor without its values.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TensorSummary {
    /// The global shape.
    pub shape: Vec<usize>,
    /// The dtype, in safetensors' spelling.
    pub dtype: String,
    /// Number of bytes.
    pub bytes: u64,
    /// Number of chunks of the tensor, if there is a manifest.
    pub parts: Option<usize>,
}

/// Summarises a checkpoint. Reads no values. Not collective.
pub fn inspect(checkpoint: &AnyCheckpoint) -> CheckpointSummary {
    let manifest = checkpoint.manifest();
    let parts = |name: &str, optimizer: bool| {
        let manifest = manifest?;
        let entries = if optimizer { &manifest.optimizer } else { &manifest.model };
        Some(entries.get(name)?.chunks.len())
    };
    let optimizer = checkpoint.optimizer();
    CheckpointSummary {
        path: checkpoint.location().to_owned(),
        kind: checkpoint.kind(),
        format_version: manifest.map(|m| m.format_version),
        library_version: manifest.map(|m| m.library_version.clone()),
        step: manifest.map(|m| m.step),
        world_size: manifest.map(|m| m.world_size),
        mesh: manifest.map(|m| m.mesh.clone()),
        files: manifest.map(|m| m.files.len()),
        model: summarize(checkpoint.model(), |name| parts(name, false)),
        optimizer: optimizer.map(|source| summarize(source, |name| parts(name, true))),
    }
}

fn summarize(source: &dyn TensorSource, parts: impl Fn(&str) -> Option<usize>) -> TensorSet {
    let (mut elements, mut bytes) = (0, 0);
    let (mut dtypes, mut tensors) = (BTreeMap::new(), BTreeMap::new());
    let mut unreadable = BTreeMap::new();
    for name in source.names() {
        if let Some(reason) = source.unreadable(name) {
            unreadable.insert(name.to_owned(), reason.to_owned());
        }
        let Some(info) = source.info(name) else { continue };
        let n = checked_elem_count(&info.shape).unwrap_or(0) as u64;
        let size = n * info.dtype.bitsize() as u64 / 8;
        let dtype = info.dtype.to_string();
        elements += n;
        bytes += size;
        *dtypes.entry(dtype.clone()).or_insert(0) += 1;
        let tensor = TensorSummary { shape: info.shape, dtype, bytes: size, parts: parts(name) };
        tensors.insert(name.to_owned(), tensor);
    }
    TensorSet { elements, bytes, dtypes, tensors, unreadable }
}
