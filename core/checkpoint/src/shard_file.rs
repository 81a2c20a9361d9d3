//! Shard files: safetensors files with parts of tensors.

use std::collections::HashMap;
use std::io::Write;

use candle_core::{Device, Tensor};
use safetensors::Dtype;
use serde::{Deserialize, Serialize};

use super::checksum::Checksum;
use super::chunks::{check_bounds, format_region};
use super::file_header::FileHeader;
use super::tensor_file::{self, FileKind, TensorSlot, sort_by_alignment};
use super::{CheckpointIO, CheckpointReader, ChunkEntry, FileDigest, ShardTensor, TorchSource};
use crate::{Error, Result};
use fulgurite_engine::autograd::storage;
use fulgurite_error::files::foreign_content;

/// PyTorch's key of the [`ShardingInfo`] in a file's metadata.
pub(super) const SHARDING_INFO: &str = "DCP_SHARDING_INFO";

/// The metadata key that names the manifest beside a file.
pub(super) const MANIFEST_KEY: &str = "fulgurite_manifest";

/// Maximum number of dimensions of a tensor, as in PyTorch.
pub(super) const MAX_DIMS: usize = 64;

/// Bytes that are hashed and then written, few enough to stay in the cache.
pub(super) const BLOCK: usize = 1 << 20;

/// The longest header that readers of safetensors accept.
pub(super) const MAX_HEADER: u64 = 100_000_000;

/// The offsets of a file's tensors in the global tensors, by name.
type ShardingInfo = HashMap<String, SavedOffsets>;

#[derive(Debug, Serialize, Deserialize)]
struct SavedOffsets {
    saved_offsets: Vec<usize>,
}

/// First byte in a file, and the byte after the last.
type ByteRange = (u64, u64);

/// The part of a tensor that a rank wrote.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct WrittenPart {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) dtype: Dtype,
    /// `None` if the rank has no part of the tensor.
    pub(super) part: Option<ChunkEntry>,
}

/// Returns the name of the file that `rank` writes, as in PyTorch's writer.
pub(super) fn file_name(rank: usize) -> String {
    format!("shard-{:05}-model-00001-of-00001.safetensors", rank + 1)
}

/// Checks the tensors of this rank, and lists them without their parts.
pub(super) fn describe(tensors: &[ShardTensor]) -> Result<Vec<WrittenPart>> {
    let mut names = std::collections::HashSet::new();
    tensors
        .iter()
        .map(|tensor| {
            let fail = |message: String| {
                Err(Error::other(format!("saving tensor `{}`: {message}", tensor.name)))
            };
            if !names.insert(&tensor.name) {
                return fail("another one has the same name".to_owned());
            }
            let dtype = tensor.values.dtype();
            let dtype = match Dtype::from(dtype) {
                stored if super::stored::loadable_dtype(stored) == Some(dtype) => stored,
                _ => return fail(format!("values of dtype {dtype:?} cannot be saved")),
            };
            if !tensor.region.is_empty() {
                if let Err(message) = check_bounds(&tensor.shape, &tensor.region) {
                    return fail(message);
                }
                if tensor.region.elem_count() != tensor.values.elem_count() {
                    let (region, n) = (format_region(&tensor.region), tensor.values.elem_count());
                    return fail(format!("there are {n} values for the part {region}"));
                }
                if storage::is_released(&tensor.values) {
                    return fail("its values are not in memory".to_owned());
                }
            }
            Ok(WrittenPart {
                name: tensor.name.clone(),
                shape: tensor.shape.clone(),
                dtype,
                part: None,
            })
        })
        .collect()
}

/// Writes the non-empty parts of `tensors` to the file `path` of `io`.
///
/// Sets them in `pieces`; `file` is the file's name in the manifest. Returns the file's length and
/// the digest of its header. If all parts are empty, it writes no file and returns `None`.
pub(super) fn write(
    io: &dyn CheckpointIO,
    path: &str,
    file: &str,
    tensors: &[ShardTensor],
    pieces: &mut [WrittenPart],
) -> Result<Option<(u64, FileDigest)>> {
    let mut order: Vec<usize> =
        (0..tensors.len()).filter(|&i| !tensors[i].region.is_empty()).collect();
    if order.is_empty() {
        return Ok(None);
    }
    // Tensors of equal alignment keep the order of the list, in which a load reads them.
    sort_by_alignment(&mut order, |&i| pieces[i].dtype);
    let (header, ranges) = header(&order, tensors, pieces)?;
    let failed = |what: &str, e: &dyn std::fmt::Display| {
        Error::checkpoint(io.location(path), format!("writing {what}: {e}"))
    };
    let mut writer = io.create(path)?;
    writer.write_all(&header).map_err(|e| failed("the header", &e))?;
    for (&i, range) in order.iter().zip(&ranges) {
        let tensor = &tensors[i];
        let values = on_host(&tensor.values)?;
        let mut hash = Checksum::default();
        storage::with_bytes(&values, |bytes| {
            bytes.chunks(BLOCK).try_for_each(|block| {
                hash.update(block);
                writer.write_all(block)
            })
        })?
        .map_err(|e| failed(&format!("tensor `{}`", tensor.name), &e))?;
        pieces[i].part = Some(ChunkEntry {
            file: file.to_owned(),
            region: tensor.region.clone(),
            bytes: *range,
            xxh3: hash.digest(),
        });
    }
    writer.finish()?;
    Ok(ranges.last().map(|range| (range.1, FileDigest::of(&header))))
}

/// Returns the values contiguously in host memory, copied only if they are not there yet.
pub(super) fn on_host(values: &Tensor) -> Result<Tensor> {
    if values.device().is_cpu() {
        return Ok(values.flatten_all()?.contiguous()?);
    }
    // `to_device` of a view copies its whole storage, so the view is copied first.
    Ok(values.flatten_all()?.force_contiguous()?.to_device(&Device::Cpu)?)
}

/// Returns the header, and the byte range of each tensor of `order` in the file.
fn header(
    order: &[usize],
    tensors: &[ShardTensor],
    pieces: &[WrittenPart],
) -> Result<(Vec<u8>, Vec<ByteRange>)> {
    let slots: Vec<TensorSlot> = order
        .iter()
        .map(|&i| TensorSlot {
            name: tensors[i].name.clone(),
            dtype: pieces[i].dtype,
            region: tensors[i].region.clone(),
        })
        .collect();
    let bytes = tensor_file::header(&slots, FileKind::Shard)?;
    let mut end = bytes.len() as u64;
    let ranges = slots
        .iter()
        .map(|slot| {
            let start = end;
            end += slot.bytes();
            (start, end)
        })
        .collect();
    Ok((bytes, ranges))
}

/// A whole tensor, or a part of a tensor, in a file.
#[derive(Debug)]
pub(super) struct StoredPart {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    /// The part's region in the tensor; the whole tensor unless the file says otherwise.
    pub(super) region: fulgurite_engine::shard::Region,
    /// The part's bytes in the file.
    pub(super) bytes: ByteRange,
    /// Whether the file states the region.
    pub(super) is_shard: bool,
}

/// The header of a file.
pub(super) struct Header {
    pub(super) parts: Vec<StoredPart>,
    /// The manifest that belongs beside the file, if the file names one.
    pub(super) manifest: Option<String>,
}

/// Recognises weights of another format in a safetensors file, and returns advice.
fn other_weights(start: &[u8]) -> Option<&'static str> {
    let is_text = |byte: &u8| byte.is_ascii_graphic() || byte.is_ascii_whitespace();
    if TorchSource::recognises(start.get(..4)?) {
        Some("it was written by `torch.save`; give it a name that ends with `.bin`")
    } else if start.starts_with(b"GGUF") {
        Some("it is a GGUF file, which is not read here")
    } else if start.starts_with(b"\x89HDF") {
        Some("it is an HDF5 file, which is not read here")
    } else if start.len() >= 8 && start[..8].iter().all(is_text) {
        Some("it is a text")
    } else {
        None
    }
}

/// Reads a file's header. The error is a message without the file's name.
pub(super) fn read_header(reader: &dyn CheckpointReader) -> Result<Header, String> {
    let failed = |e: std::io::Error| format!("reading the header: {e}");
    let len = reader.len().map_err(failed)?;
    let mut size = [0; 8];
    let mut start = vec![0; len.min(512) as usize];
    reader.read_exact_at(&mut start, 0).map_err(failed)?;
    if let Some(what) = foreign_content(&start).or_else(|| other_weights(&start)) {
        return Err(format!("is no safetensors file: {what}"));
    }
    if len < 8 {
        return Err(format!("is no safetensors file: it has {len} bytes"));
    }
    reader.read_exact_at(&mut size, 0).map_err(failed)?;
    let size = u64::from_le_bytes(size);
    if size > MAX_HEADER || size > len - 8 {
        return Err(format!(
            "is truncated or no safetensors file: its header would have {size} bytes, the file has \
             {len}"
        ));
    }
    let mut json = vec![0; size as usize];
    reader.read_exact_at(&mut json, 8).map_err(failed)?;
    let header: FileHeader =
        serde_json::from_slice(&json).map_err(|e| format!("has a damaged header: {e}"))?;
    drop(json);
    let data = 8 + size;
    let mut sharding: ShardingInfo = match header.metadata.get(SHARDING_INFO) {
        Some(text) => {
            serde_json::from_str(text).map_err(|e| format!("has a damaged {SHARDING_INFO}: {e}"))?
        }
        None => ShardingInfo::new(),
    };
    let manifest = header.metadata.get(MANIFEST_KEY).cloned();
    let parts = header
        .tensors
        .into_iter()
        .map(|(name, info)| {
            if info.shape.len() > MAX_DIMS {
                let dims = info.shape.len();
                return Err(format!(
                    "has tensor `{name}` of {dims} dimensions; {MAX_DIMS} are the most"
                ));
            }
            let bytes = (data + info.data_offsets.0 as u64, data + info.data_offsets.1 as u64);
            if bytes.1 > len {
                return Err(format!(
                    "is truncated: tensor `{name}` is in bytes {}..{}, the file has {len}",
                    bytes.0, bytes.1
                ));
            }
            let saved = sharding.remove(&name);
            let is_shard = saved.is_some();
            let offsets = saved.map_or_else(|| vec![0; info.shape.len()], |s| s.saved_offsets);
            let region = fulgurite_engine::shard::Region { offsets, sizes: info.shape };
            let in_range = region.offsets.len() == region.sizes.len()
                && region
                    .offsets
                    .iter()
                    .zip(&region.sizes)
                    .all(|(o, s)| o.checked_add(*s).is_some());
            if !in_range {
                return Err(format!("has damaged offsets for tensor `{name}`"));
            }
            Ok(StoredPart { name, dtype: info.dtype, region, bytes, is_shard })
        })
        .collect::<Result<_, String>>()?;
    Ok(Header { parts, manifest })
}
