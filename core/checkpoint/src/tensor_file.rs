//! Writing a safetensors file tensor by tensor: its header depends only on shapes and dtypes.

use std::io::Write as _;

use candle_core::Tensor;
use safetensors::Dtype;
use serde_json::json;

use super::checksum::Checksum;
use super::manifest::{FULL_MANIFEST, FileDigest, Manifest};
use super::shard_file::{BLOCK, MANIFEST_KEY, MAX_HEADER, SHARDING_INFO, on_host};
use super::{CheckpointIO, CheckpointWriter, ChunkEntry};
use crate::{Error, Result};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::shard::Region;

/// A whole tensor, or a part of a tensor, in a file to be written.
#[derive(Debug, Clone)]
pub(super) struct TensorSlot {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    /// The region in the tensor; the whole tensor in files of whole tensors.
    pub(super) region: Region,
}

impl TensorSlot {
    /// Returns the length in the file in bytes.
    pub(super) fn bytes(&self) -> u64 {
        (self.region.elem_count() * self.dtype.bitsize() / 8) as u64
    }
}

/// Sorts tensors so that each is aligned to its element size in a file.
///
/// Larger elements come first; otherwise the order stays.
pub(super) fn sort_by_alignment<T>(things: &mut [T], dtype: impl Fn(&T) -> Dtype) {
    things.sort_by_key(|thing| std::cmp::Reverse(dtype(thing).bitsize()));
}

/// The kind of checkpoint that a file belongs to, which its header states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FileKind {
    /// A distributed checkpoint. As in PyTorch's, the header has the region of each part.
    Shard,
    /// A full checkpoint. The header names its manifest, so that a missing manifest is noticed.
    Full,
    /// Weights for other programs.
    Plain,
}

/// A file that is being written.
pub(super) struct TensorFile<'a> {
    io: &'a dyn CheckpointIO,
    path: String,
    /// The file's name in the manifest.
    file: String,
    writer: Box<dyn CheckpointWriter>,
    slots: std::vec::IntoIter<TensorSlot>,
    position: u64,
    header: FileDigest,
}

impl<'a> TensorFile<'a> {
    /// Creates the file `path` of `io` and writes its header.
    pub(super) fn create(
        io: &'a dyn CheckpointIO,
        path: String,
        file: String,
        slots: Vec<TensorSlot>,
        kind: FileKind,
    ) -> Result<Self> {
        let header = header(&slots, kind)?;
        let mut writer = io.create(&path)?;
        writer.write_all(&header).map_err(|e| {
            Error::checkpoint(io.location(&path), format!("writing the header: {e}"))
        })?;
        let position = header.len() as u64;
        let header = FileDigest::of(&header);
        Ok(Self { io, path, file, writer, slots: slots.into_iter(), position, header })
    }

    /// Whether all tensors are written.
    pub(super) fn is_complete(&self) -> bool {
        self.slots.len() == 0
    }

    /// Writes the values of the next slot, which have the slot's region and dtype.
    ///
    /// Returns their chunk; `None` if the region is empty.
    pub(super) fn put(&mut self, values: &Tensor) -> Result<Option<ChunkEntry>> {
        let location = || self.io.location(&self.path);
        let Some(slot) = self.slots.next() else {
            return Err(Error::checkpoint(location(), "more tensors than the header has"));
        };
        let bytes = slot.bytes();
        let end = self.position + bytes;
        let mut hash = Checksum::default();
        let written = storage::with_bytes(&on_host(values)?, |values| {
            if values.len() as u64 != bytes {
                let message = format!("{} bytes of values for {bytes}", values.len());
                return Err(std::io::Error::other(message));
            }
            values.chunks(BLOCK).try_for_each(|block| {
                hash.update(block);
                self.writer.write_all(block)
            })
        })?;
        written.map_err(|e| {
            Error::checkpoint(location(), format!("writing tensor `{}`: {e}", slot.name))
        })?;
        let start = std::mem::replace(&mut self.position, end);
        Ok((bytes > 0).then(|| ChunkEntry {
            file: self.file.clone(),
            region: slot.region,
            bytes: (start, end),
            xxh3: hash.digest(),
        }))
    }

    /// Makes the file durable and enters it into the manifest.
    pub(super) fn finish(self, manifest: &mut Manifest) -> Result<()> {
        if let Some(slot) = self.slots.as_slice().first() {
            let message = format!("tensor `{}` was not written", slot.name);
            return Err(Error::checkpoint(self.io.location(&self.path), message));
        }
        self.writer.finish()?;
        manifest.files.insert(self.file.clone(), self.position);
        manifest.headers.insert(self.file, self.header);
        Ok(())
    }
}

/// Returns the header of a file; the tensors follow without gaps.
pub(super) fn header(slots: &[TensorSlot], kind: FileKind) -> Result<Vec<u8>> {
    let mut offset = 0;
    let mut entries = serde_json::Map::new();
    let mut offsets = serde_json::Map::new();
    for slot in slots {
        let end = offset + slot.bytes();
        entries.insert(
            slot.name.clone(),
            json!({ "dtype": slot.dtype, "shape": slot.region.sizes, "data_offsets": [offset, end] }),
        );
        offsets.insert(slot.name.clone(), json!({ "saved_offsets": slot.region.offsets }));
        offset = end;
    }
    let metadata = match kind {
        FileKind::Shard => json!({
            SHARDING_INFO: serde_json::Value::Object(offsets).to_string(),
            "DCP_VERSION": "1.0",
            "format": "pt",
        }),
        FileKind::Full => json!({ MANIFEST_KEY: FULL_MANIFEST, "format": "pt" }),
        FileKind::Plain => json!({ "format": "pt" }),
    };
    entries.insert("__metadata__".to_owned(), metadata);
    let mut json = serde_json::Value::Object(entries).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    if json.len() as u64 > MAX_HEADER {
        return Err(Error::other("a file's header exceeds the 100 MB that safetensors allows"));
    }
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut json);
    Ok(bytes)
}
