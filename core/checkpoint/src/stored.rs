//! Tensors that are stored as chunks in files, and reading regions of them from the files.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Tensor};
use safetensors::Dtype;

use super::checksum::Expected;
use super::chunks::{ChunkIndex, check_bounds, format_region};
use super::narrow::converted;
use super::{CheckpointIO, CheckpointReader, LocalFile, TensorInfo, TensorSource};
use crate::{Error, Result};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::shard::Region;

/// Shorter byte ranges than this are read together with their neighbours.
const SHORT: usize = 64 << 10;
/// Largest gap that is read along: the disk reads whole pages anyway.
const GAP: usize = 4 << 10;
/// Maximum bytes that are read together, and that are verified at a time.
const WINDOW: usize = 4 << 20;
/// Maximum number of files that are kept open.
const MAX_OPEN: usize = 64;

/// The location of a checkpoint's files: a local directory, or a checkpoint of a [`CheckpointIO`].
#[derive(Debug, Clone)]
pub(super) enum FileLocation {
    Local(PathBuf),
    Io(Arc<dyn CheckpointIO>, String),
}

impl FileLocation {
    pub(super) fn location(&self, file: &str) -> PathBuf {
        match self {
            Self::Local(root) if file.is_empty() => root.clone(),
            Self::Local(root) => root.join(file),
            Self::Io(io, name) if file.is_empty() => io.location(name),
            Self::Io(io, name) => io.location(&format!("{name}/{file}")),
        }
    }

    pub(super) fn open(&self, file: &str) -> Result<Arc<dyn CheckpointReader>> {
        match self {
            Self::Local(root) => Ok(Arc::new(LocalFile::open(&root.join(file))?)),
            Self::Io(io, name) => io.open(&format!("{name}/{file}")),
        }
    }

    /// Returns the lengths of the files in a folder; empty if the folder does not exist.
    pub(super) fn lengths(&self, folder: &str) -> Result<BTreeMap<String, u64>> {
        match self {
            Self::Local(root) => {
                let path = root.join(folder);
                let failed = |e| Error::io("listing", &path)(e);
                let entries = match std::fs::read_dir(&path) {
                    Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                        return Ok(BTreeMap::new());
                    }
                    entries => entries.map_err(failed)?,
                };
                let mut lengths = BTreeMap::new();
                for entry in entries {
                    let path = entry.map_err(failed)?.path();
                    // Follows links: Hugging Face's cache consists of them. Dangling links are
                    // skipped.
                    let metadata = match std::fs::metadata(&path) {
                        Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
                        metadata => metadata.map_err(Error::io("reading", &path))?,
                    };
                    if let (true, Some(name)) = (metadata.is_file(), path.file_name()) {
                        lengths.insert(name.to_string_lossy().into_owned(), metadata.len());
                    }
                }
                Ok(lengths)
            }
            Self::Io(io, name) => {
                let path = format!("{name}/{folder}");
                let entries = io.list(path.trim_end_matches('/'))?;
                Ok(entries
                    .into_iter()
                    .filter(|e| !e.is_directory)
                    .map(|e| (e.name, e.bytes))
                    .collect())
            }
        }
    }
}

/// One chunk of a tensor.
#[derive(Debug, Clone)]
pub(super) struct StoredChunk {
    pub(super) region: Region,
    /// Index of the file.
    pub(super) file: usize,
    /// The chunk's bytes in the file.
    pub(super) bytes: (u64, u64),
    pub(super) checksum: Option<Expected>,
}

#[derive(Debug)]
struct StoredTensor {
    shape: Vec<usize>,
    dtype: Dtype,
    chunks: Vec<StoredChunk>,
    index: ChunkIndex,
}

/// The model's or the optimizer's tensors of a checkpoint in files.
pub struct StoredTensors {
    place: FileLocation,
    location: PathBuf,
    files: Vec<String>,
    tensors: BTreeMap<String, StoredTensor>,
    open: Mutex<VecDeque<(usize, Arc<dyn CheckpointReader>)>>,
    verify: bool,
    filtered: Option<String>,
}

impl StoredTensors {
    pub(super) fn new(place: FileLocation, location: PathBuf, files: Vec<String>) -> Self {
        let (tensors, open) = Default::default();
        Self { place, location, files, tensors, open, verify: true, filtered: None }
    }

    /// Adds a tensor whose chunks cover its shape and whose byte ranges are inside the files.
    pub(super) fn add(
        &mut self,
        name: String,
        shape: Vec<usize>,
        dtype: Dtype,
        chunks: Vec<StoredChunk>,
    ) {
        let index = ChunkIndex::new(chunks.iter().map(|chunk| chunk.region.clone()));
        self.tensors.insert(name, StoredTensor { shape, dtype, chunks, index });
    }

    /// The location of the files.
    pub(super) fn place(&self) -> &FileLocation {
        &self.place
    }

    pub(super) fn set_verify(&mut self, verify: bool) {
        self.verify = verify;
    }

    pub(super) fn set_filtered(&mut self, filtered: Option<String>) {
        self.filtered = filtered;
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there are no tensors.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Reads every chunk that has a checksum and compares it. Takes 4 MiB of memory.
    ///
    /// # Errors
    /// If chunks are damaged or cannot be read, naming file and tensor of each.
    pub fn verify(&self) -> Result<()> {
        check_undamaged(&self.location, self.damages())
    }

    /// One line for each damaged chunk.
    pub(super) fn damages(&self) -> Vec<String> {
        let mut damages = Vec::new();
        let mut buffer = Vec::new();
        for (name, tensor) in &self.tensors {
            for stored in &tensor.chunks {
                let Some(expected) = stored.checksum else { continue };
                let checked = self.reader(stored.file).and_then(|reader| {
                    is_undamaged(reader.as_ref(), stored.bytes, expected, &mut buffer)
                        .map_err(|e| Error::other(reason(&e)))
                });
                let complaint = match checked {
                    Ok(true) => continue,
                    Ok(false) => wrong_bytes(stored),
                    Err(error) => error.to_string(),
                };
                let file = self.place.location(&self.files[stored.file]);
                damages.push(format!("{}: tensor `{name}`: {complaint}", file.display()));
            }
        }
        damages
    }

    fn reader(&self, file: usize) -> Result<Arc<dyn CheckpointReader>> {
        let mut open = self.open.lock().expect("no panic while opening");
        if let Some((_, reader)) = open.iter().find(|(index, _)| *index == file) {
            return Ok(reader.clone());
        }
        let reader = self.place.open(&self.files[file])?;
        open.truncate(MAX_OPEN - 1);
        open.push_front((file, reader.clone()));
        Ok(reader)
    }

    fn fail<T>(&self, name: &str, message: impl std::fmt::Display) -> Result<T> {
        Err(Error::checkpoint(&self.location, format!("tensor `{name}`: {message}")))
    }

    /// Finds the tensor `name` and the dtype to read it in. Checks that `region` is inside the
    /// tensor.
    fn find(&self, name: &str, region: &Region) -> Result<(&StoredTensor, DType)> {
        let tensor = self.part_of(name, region)?;
        match loadable_dtype(tensor.dtype) {
            Some(dtype) => Ok((tensor, dtype)),
            None => self.fail(name, format!("values of dtype {} cannot be loaded", tensor.dtype)),
        }
    }

    /// Finds the tensor `name`. Checks that `region` is inside it.
    fn part_of(&self, name: &str, region: &Region) -> Result<&StoredTensor> {
        let Some(tensor) = self.tensors.get(name) else {
            return self.fail(name, "there is none of this name");
        };
        match check_bounds(&tensor.shape, region) {
            Ok(()) => Ok(tensor),
            Err(message) => self.fail(name, message),
        }
    }

    /// Reads the stored bytes of `region` into `out`.
    fn read_bytes(
        &self,
        name: &str,
        tensor: &StoredTensor,
        region: &Region,
        out: &mut [u8],
        verify: bool,
    ) -> Result<()> {
        let width = tensor.dtype.bitsize() / 8;
        for (index, shared) in tensor.index.intersections(region) {
            let stored = &tensor.chunks[index];
            let reader = self.reader(stored.file)?;
            let copies = copies(&shared, &stored.region, region, width);
            let damaged = |complaint: String| {
                let file = self.place.location(&self.files[stored.file]);
                Error::checkpoint(file, format!("tensor `{name}`: {complaint}"))
            };
            let expected = stored.checksum.filter(|_| verify && shared == stored.region);
            let mut comparison = expected.map(Expected::comparison);
            let mut seen = |bytes: &[u8]| {
                if let Some(comparison) = &mut comparison {
                    comparison.update(bytes);
                }
            };
            read_copies(reader.as_ref(), stored.bytes.0, &copies, out, &mut seen).map_err(|e| {
                damaged(format!("reading {}: {}", format_region(&shared), reason(&e)))
            })?;
            if comparison.is_some_and(|comparison| !comparison.agrees()) {
                return Err(damaged(wrong_bytes(stored)));
            }
        }
        Ok(())
    }

    fn read_checked(
        &self,
        name: &str,
        region: &Region,
        dtype: DType,
        device: &Device,
        verify: bool,
    ) -> Result<Tensor> {
        let (tensor, stored) = self.find(name, region)?;
        let values = Tensor::zeros(region.elem_count(), stored, &Device::Cpu)?;
        let read = |out: &mut [u8]| self.read_bytes(name, tensor, region, out, verify);
        storage::with_bytes_mut(&values, read)??;
        let values = converted(&self.location, name, &values, dtype)?;
        Ok(values.to_device(device)?)
    }

    fn fill(&self, name: &str, region: &Region, target: &Tensor, verify: bool) -> Result<()> {
        let (tensor, stored) = self.find(name, region)?;
        if target.elem_count() != region.elem_count() {
            let n = target.elem_count();
            return self
                .fail(name, format!("{} does not fit into {n} elements", format_region(region)));
        }
        if target.dtype() == stored && target.device().is_cpu() && target.is_contiguous() {
            let read = |out: &mut [u8]| self.read_bytes(name, tensor, region, out, verify);
            return storage::with_bytes_mut(target, read)?;
        }
        let (dtype, device) = (target.dtype(), target.device());
        storage::copy_from(target, &self.read_checked(name, region, dtype, device, verify)?)
    }
}

impl TensorSource for StoredTensors {
    fn location(&self) -> &Path {
        &self.location
    }

    fn names(&self) -> Vec<&str> {
        self.tensors.keys().map(String::as_str).collect()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        let tensor = self.tensors.get(name)?;
        Some(TensorInfo { shape: tensor.shape.clone(), dtype: tensor.dtype })
    }

    fn read(&self, name: &str, region: &Region, dtype: DType, device: &Device) -> Result<Tensor> {
        self.read_checked(name, region, dtype, device, self.verify)
    }

    fn read_into(&self, name: &str, region: &Region, target: &Tensor) -> Result<()> {
        self.fill(name, region, target, self.verify)
    }

    fn read_into_unverified(&self, name: &str, region: &Region, target: &Tensor) -> Result<()> {
        self.fill(name, region, target, false)
    }

    fn read_codes(&self, name: &str, region: &Region) -> Result<Vec<u8>> {
        let tensor = self.part_of(name, region)?;
        if tensor.dtype.bitsize() != 8 {
            return self.fail(name, format!("values of dtype {} are no bytes", tensor.dtype));
        }
        let mut bytes = vec![0; region.elem_count()];
        self.read_bytes(name, tensor, region, &mut bytes, self.verify)?;
        Ok(bytes)
    }

    fn read_stored(&self, name: &str) -> Result<Vec<u8>> {
        let Some(tensor) = self.tensors.get(name) else {
            return self.fail(name, "there is none of this name");
        };
        let bits = tensor.dtype.bitsize();
        let whole = Region::full(&tensor.shape);
        let mut bytes = vec![0; whole.elem_count() * bits / 8];
        if bits % 8 == 0 {
            self.read_bytes(name, tensor, &whole, &mut bytes, self.verify)?;
            return Ok(bytes);
        }
        // An element may be smaller than a byte here. So the chunks must be slabs of the first
        // dimension, whose bytes are concatenated.
        let mut chunks: Vec<&StoredChunk> = tensor.chunks.iter().collect();
        chunks.sort_by_key(|chunk| chunk.region.offsets.first().copied());
        let is_slab = |chunk: &&StoredChunk| chunk.region.sizes.get(1..) == tensor.shape.get(1..);
        let len: u64 = chunks.iter().map(|chunk| chunk.bytes.1 - chunk.bytes.0).sum();
        if !chunks.iter().all(is_slab) || len != bytes.len() as u64 {
            let message = format!("parts of dtype {} cannot be put together", tensor.dtype);
            return self.fail(name, message);
        }
        let mut rest = &mut bytes[..];
        for stored in chunks {
            let failed = |complaint: String| {
                let file = self.place.location(&self.files[stored.file]);
                Error::checkpoint(file, format!("tensor `{name}`: {complaint}"))
            };
            let (part, after) = rest.split_at_mut((stored.bytes.1 - stored.bytes.0) as usize);
            rest = after;
            self.reader(stored.file)?
                .read_exact_at(part, stored.bytes.0)
                .map_err(|e| failed(format!("reading it: {}", reason(&e))))?;
            if let Some(expected) = stored.checksum.filter(|_| self.verify) {
                let mut comparison = expected.comparison();
                comparison.update(part);
                if !comparison.agrees() {
                    return Err(failed(wrong_bytes(stored)));
                }
            }
        }
        Ok(bytes)
    }

    fn filtered(&self) -> Option<&str> {
        self.filtered.as_deref()
    }
}

impl std::fmt::Debug for StoredTensors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoredTensors")
            .field("location", &self.location)
            .field("files", &self.files)
            .field("tensors", &self.tensors.len())
            .finish_non_exhaustive()
    }
}

/// Whether the bytes of a file in this range have the expected checksum.
///
/// Reads a few megabytes at a time into `buffer`.
pub(super) fn is_undamaged(
    reader: &dyn CheckpointReader,
    (mut position, end): (u64, u64),
    expected: Expected,
    buffer: &mut Vec<u8>,
) -> std::io::Result<bool> {
    let mut comparison = expected.comparison();
    while position < end {
        buffer.resize((end - position).min(WINDOW as u64) as usize, 0);
        reader.read_exact_at(buffer, position)?;
        comparison.update(buffer);
        position += buffer.len() as u64;
    }
    Ok(comparison.agrees())
}

fn reason(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::UnexpectedEof => "the file ends before; it is truncated".to_owned(),
        _ => error.to_string(),
    }
}

fn wrong_bytes(stored: &StoredChunk) -> String {
    format!(
        "the bytes of {} do not match their checksum; the file is damaged",
        format_region(&stored.region)
    )
}

/// Returns one error that lists all damages; `Ok` if the list is empty.
pub(super) fn check_undamaged(location: &Path, damages: Vec<String>) -> Result<()> {
    if damages.is_empty() {
        return Ok(());
    }
    Err(Error::checkpoint(location, format!("is damaged:\n  {}", damages.join("\n  "))))
}

/// Returns candle's dtype for stored values; `None` if candle does not support them.
pub(super) fn loadable_dtype(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::BOOL | Dtype::U8 => DType::U8,
        Dtype::U32 => DType::U32,
        Dtype::I16 => DType::I16,
        Dtype::I32 => DType::I32,
        Dtype::I64 => DType::I64,
        Dtype::BF16 => DType::BF16,
        Dtype::F16 => DType::F16,
        Dtype::F32 => DType::F32,
        Dtype::F64 => DType::F64,
        _ => return None,
    })
}

/// A copy of bytes that are contiguous in both the stored chunk and the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ContiguousCopy {
    /// Offset in the chunk.
    from: usize,
    /// Offset in the target.
    to: usize,
    len: usize,
}

/// Returns the copies of the intersection `shared` of the chunk `stored` and the target `wanted`.
///
/// They are in the order of the chunk. `width` is an element's size in bytes.
fn copies(shared: &Region, stored: &Region, wanted: &Region, width: usize) -> Vec<ContiguousCopy> {
    let sources = shared.relative_to(stored).runs(&stored.sizes);
    let targets = shared.relative_to(wanted).runs(&wanted.sizes);
    let (mut s, mut t, mut at) = (0, 0, 0);
    let mut copies = Vec::with_capacity(sources.len().max(targets.len()));
    while s < sources.len() && t < targets.len() {
        let (source, target) = (sources[s], targets[t]);
        let end = (source.inner + source.len).min(target.inner + target.len);
        copies.push(ContiguousCopy {
            from: (source.outer + at - source.inner) * width,
            to: (target.outer + at - target.inner) * width,
            len: (end - at) * width,
        });
        at = end;
        s += usize::from(source.inner + source.len == at);
        t += usize::from(target.inner + target.len == at);
    }
    copies
}

/// Carries out copies into `out` from the chunk that starts at byte `base`.
///
/// Long copies are read one by one, neighbouring short ones together. `seen` is called with the
/// bytes, in order.
fn read_copies(
    reader: &dyn CheckpointReader,
    base: u64,
    copies: &[ContiguousCopy],
    out: &mut [u8],
    seen: &mut dyn FnMut(&[u8]),
) -> std::io::Result<()> {
    let mut scratch = Vec::new();
    let mut rest = copies;
    while let Some(first) = rest.first() {
        let mut end = first.from + first.len;
        let mut count = 1;
        if first.len < SHORT {
            for next in &rest[1..] {
                let next_end = next.from + next.len;
                if next.len >= SHORT || next.from - end > GAP || next_end - first.from > WINDOW {
                    break;
                }
                end = next_end;
                count += 1;
            }
        }
        let (group, tail) = rest.split_at(count);
        rest = tail;
        let start = base + first.from as u64;
        if count == 1 {
            reader.read_exact_at_with(&mut out[first.to..first.to + first.len], start, seen)?;
            continue;
        }
        scratch.resize(end - first.from, 0);
        reader.read_exact_at(&mut scratch, start)?;
        for copy in group {
            let from = copy.from - first.from;
            let bytes = &scratch[from..from + copy.len];
            out[copy.to..copy.to + copy.len].copy_from_slice(bytes);
            seen(bytes);
        }
    }
    Ok(())
}
