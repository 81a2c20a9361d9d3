//! [`TorchSource`]: a PyTorch state dict as a tensor source.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use candle_core::{DType, Device, Tensor};

use super::archive::{self, Archive, Record};
use super::state_dict::{NamedTensor, TensorView, tensors};
use super::{pickle, strided};
use crate::checksum::Expected;
use crate::chunks::check_bounds;
use crate::narrow::converted;
use crate::stored::{FileLocation, StoredChunk, is_undamaged, loadable_dtype};
use crate::weights::with_index;
use crate::{Error, Result};
use crate::{LocalFile, StoredTensors, TensorInfo, TensorSource};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::shard::Region;

/// A state dict in a file of `torch.save`.
///
/// The path is a `.pt`, `.pth` or `.bin` file, a Lightning `.ckpt`, or a Hugging Face directory
/// with `pytorch_model.bin` or its shards.
///
/// The state dict may be the saved object, or lie in it under `state_dict`, `model`, `module` or
/// `model_state_dict`, possibly nested. Other objects are ignored, and nothing is executed. Opening
/// reads the pickle; a read of a tensor reads only the bytes of the requested part. Names are as in
/// the file; see [`NameRules`](crate::NameRules). Not collective.
#[derive(Debug)]
pub struct TorchSource {
    /// Contiguous tensors: nearly all tensors are.
    stored: StoredTensors,
    views: BTreeMap<String, View>,
    /// The records of tensors that cover only a part of their record.
    shared: BTreeMap<String, Arc<SharedRecord>>,
    /// Tensors that cannot be read, with the reason.
    unreadable: BTreeMap<String, String>,
    /// Whether there are checksums.
    has_checksums: bool,
}

/// A record that several tensors may share.
///
/// It is compared with its CRC-32 before the first of its tensors is read whole. A tensor that
/// fills its record is compared while it is read.
#[derive(Debug)]
struct SharedRecord {
    file: PathBuf,
    record: Record,
    undamaged: OnceLock<bool>,
}

impl SharedRecord {
    fn check(&self, tensor: &str) -> Result<()> {
        let undamaged = match self.undamaged.get() {
            Some(undamaged) => *undamaged,
            None => {
                let Some(crc32) = self.record.crc32 else { return Ok(()) };
                let expected = Expected::Crc32(crc32);
                let reader = LocalFile::open(&self.file)?;
                let found = is_undamaged(&reader, self.record.bytes, expected, &mut Vec::new())
                    .map_err(Error::io("reading", &self.file))?;
                *self.undamaged.get_or_init(|| found)
            }
        };
        if undamaged {
            return Ok(());
        }
        let message = format!(
            "tensor `{tensor}`: the bytes of its storage do not match their CRC-32; the file is damaged"
        );
        Err(Error::checkpoint(&self.file, message))
    }
}

/// A tensor that is not contiguous.
#[derive(Debug)]
struct View {
    file: PathBuf,
    /// First byte of the storage.
    base: u64,
    view: TensorView,
}

impl TorchSource {
    /// The weights in a Hugging Face directory without safetensors.
    pub(crate) const SINGLE: &str = "pytorch_model.bin";
    /// The index of sharded weights.
    pub(crate) const INDEX: &str = "pytorch_model.bin.index.json";

    /// Whether a file with these first four bytes was written by `torch.save`.
    pub(crate) fn recognises(start: &[u8]) -> bool {
        archive::recognises(start)
    }

    /// Opens a file, a Hugging Face directory with `pytorch_model.bin`, or its index.
    ///
    /// # Errors
    /// If the file is not from `torch.save`, is damaged, or has no state dict; the message says
    /// what to do. Quantized, sparse and distributed tensors are refused when they are read.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_at(path, &[])
    }

    /// Opens the state dict under these nested keys, such as `["ema", "state_dict"]`.
    ///
    /// # Errors
    /// As [`open`](Self::open); if a key does not exist, naming the existing keys.
    pub fn open_at(path: impl AsRef<Path>, keys: &[&str]) -> Result<Self> {
        let path = path.as_ref();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let (root, files, index) = if path.is_dir() {
            // As in `transformers`, a single file takes precedence over an index.
            if !path.join(Self::SINGLE).is_file() && path.join(Self::INDEX).is_file() {
                with_index(path, &path.join(Self::INDEX))?
            } else {
                (path.to_owned(), vec![Self::SINGLE.to_owned()], None)
            }
        } else {
            let root = path.parent().unwrap_or(Path::new("")).to_owned();
            if name.ends_with(".index.json") {
                with_index(&root, path)?
            } else {
                (root, vec![name], None)
            }
        };
        let place = FileLocation::Local(root);
        let mut source =
            Self::empty(StoredTensors::new(place.clone(), path.to_owned(), files.clone()));
        for (number, name) in files.iter().enumerate() {
            let file = place.location(name);
            let fail = |message: String| Error::checkpoint(&file, message);
            let archive = Archive::read(&file)?;
            let heap = pickle::parse(&archive.pickle).map_err(fail)?;
            let mut tensors = tensors(&heap, keys).map_err(fail)?;
            // Copies in other shards are leftovers of an earlier save.
            let elsewhere = |tensor: &str| {
                index.as_ref().and_then(|i| i.file(tensor)).is_some_and(|file| file != name)
            };
            tensors.retain(|(tensor, _)| !elsewhere(tensor));
            source.add(number, &file, &archive, tensors)?;
        }
        Ok(source)
    }

    /// Creates a source of these tensors of a file that was read.
    pub(super) fn of_views(
        path: &Path,
        archive: &Archive,
        tensors: Vec<(String, TensorView)>,
    ) -> Result<Self> {
        let tensors = tensors.into_iter().map(|(name, view)| (name, Ok(view))).collect();
        let place = FileLocation::Local(path.parent().unwrap_or(Path::new("")).to_owned());
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut source = Self::empty(StoredTensors::new(place, path.to_owned(), vec![name]));
        source.add(0, path, archive, tensors)?;
        Ok(source)
    }

    fn empty(stored: StoredTensors) -> Self {
        let (views, shared, unreadable) = Default::default();
        Self { stored, views, shared, unreadable, has_checksums: false }
    }

    /// Adds tensors of the file `index`.
    fn add(
        &mut self,
        index: usize,
        file: &Path,
        archive: &Archive,
        tensors: Vec<NamedTensor>,
    ) -> Result<()> {
        let fail = |message: String| Error::checkpoint(file, message);
        self.has_checksums |= archive.storages.values().any(|record| record.crc32.is_some());
        let mut records = BTreeMap::new();
        for (tensor, view) in tensors {
            if self.info(&tensor).is_some() || self.unreadable.contains_key(&tensor) {
                return Err(fail(format!("tensor `{tensor}` is stored twice")));
            }
            let view = match view {
                Ok(view) => view,
                Err(reason) => {
                    self.unreadable.insert(tensor, reason);
                    continue;
                }
            };
            let place = archive.storages.get(&view.storage);
            let needed = view.bytes_needed();
            let (base, needed) = match (place, needed) {
                (Some(Record { bytes: (start, end), .. }), Some(needed))
                    if needed <= end - start =>
                {
                    (*start, needed)
                }
                // An empty storage may be missing.
                (None, Some(_)) if view.shape.contains(&0) => (0, 0),
                _ => {
                    return Err(fail(format!(
                        "is damaged: tensor `{tensor}` lies outside of its storage `{}`",
                        view.storage
                    )));
                }
            };
            let fills = place.filter(|record| {
                view.is_contiguous() && view.offset == 0 && record.bytes.1 - base == needed
            });
            if let (Some(record), None) = (place, fills) {
                let new = || {
                    let (file, undamaged) = (file.to_owned(), OnceLock::new());
                    Arc::new(SharedRecord { file, record: *record, undamaged })
                };
                let record = records.entry(view.storage.clone()).or_insert_with(new);
                self.shared.insert(tensor.clone(), record.clone());
            }
            if view.is_contiguous() {
                let region = Region::full(&view.shape);
                let first = base + (view.offset * view.dtype.bitsize() / 8) as u64;
                let bytes = (first, base + needed);
                let checksum = fills.and_then(|record| record.crc32.map(Expected::Crc32));
                let part = StoredChunk { region, file: index, bytes, checksum };
                let parts = if part.region.is_empty() { vec![] } else { vec![part] };
                self.stored.add(tensor, view.shape, view.dtype, parts);
            } else {
                self.views.insert(tensor, View { file: file.to_owned(), base, view });
            }
        }
        Ok(())
    }

    /// Whether values are compared with checksums when they are read whole.
    pub(crate) fn has_checksums(&self) -> bool {
        self.has_checksums
    }

    fn check_readable(&self, name: &str) -> Result<()> {
        match self.unreadable.get(name) {
            None => Ok(()),
            Some(reason) => {
                Err(Error::checkpoint(self.location(), format!("tensor `{name}` {reason}")))
            }
        }
    }

    /// Compares the record of a tensor that is read whole with its CRC-32.
    fn check_shared(&self, name: &str, region: &Region) -> Result<()> {
        let is_whole = || self.info(name).is_some_and(|info| info.shape == region.sizes);
        match self.shared.get(name).filter(|_| is_whole()) {
            Some(record) => record.check(name),
            None => Ok(()),
        }
    }
}

impl TensorSource for TorchSource {
    fn location(&self) -> &Path {
        self.stored.location()
    }

    fn names(&self) -> Vec<&str> {
        let mut names = self.stored.names();
        names.extend(self.views.keys().chain(self.unreadable.keys()).map(String::as_str));
        names.sort_unstable();
        names
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        match self.views.get(name) {
            Some(View { view, .. }) => {
                Some(TensorInfo { shape: view.shape.clone(), dtype: view.dtype })
            }
            None => self.stored.info(name),
        }
    }

    fn unreadable(&self, name: &str) -> Option<&str> {
        self.unreadable.get(name).map(String::as_str)
    }

    fn read_stored(&self, name: &str) -> Result<Vec<u8>> {
        let Some(View { file, base, view }) = self.views.get(name) else {
            self.check_readable(name)?;
            if let Some(info) = self.info(name) {
                self.check_shared(name, &Region::full(&info.shape))?;
            }
            return self.stored.read_stored(name);
        };
        let region = Region::full(&view.shape);
        self.check_shared(name, &region)?;
        let mut bytes = vec![0; region.elem_count() * view.dtype.bitsize() / 8];
        let reader = LocalFile::open(file)?;
        strided::read_region(&reader, *base, view, &region, &mut bytes)
            .map_err(|e| Error::checkpoint(file, format!("tensor `{name}`: reading it: {e}")))?;
        Ok(bytes)
    }

    fn read(&self, name: &str, region: &Region, dtype: DType, device: &Device) -> Result<Tensor> {
        self.check_readable(name)?;
        self.check_shared(name, region)?;
        let Some(View { file, base, view }) = self.views.get(name) else {
            return self.stored.read(name, region, dtype, device);
        };
        let fail = |message: String| Error::checkpoint(file, format!("tensor `{name}`: {message}"));
        check_bounds(&view.shape, region).map_err(fail)?;
        let stored = loadable_dtype(view.dtype)
            .ok_or_else(|| fail(format!("values of dtype {} cannot be loaded", view.dtype)))?;
        let values = Tensor::zeros(region.elem_count(), stored, &Device::Cpu)?;
        let reader = LocalFile::open(file)?;
        storage::with_bytes_mut(&values, |out| {
            strided::read_region(&reader, *base, view, region, out)
        })?
        .map_err(|e| fail(format!("reading it: {e}")))?;
        Ok(converted(file, name, &values, dtype)?.to_device(device)?)
    }

    fn read_into(&self, name: &str, region: &Region, target: &Tensor) -> Result<()> {
        if self.views.contains_key(name) {
            let values = self.read(name, region, target.dtype(), target.device())?;
            storage::copy_from(target, &values)
        } else {
            self.check_shared(name, region)?;
            self.stored.read_into(name, region, target)
        }
    }

    fn read_into_unverified(&self, name: &str, region: &Region, target: &Tensor) -> Result<()> {
        if self.views.contains_key(name) {
            self.read_into(name, region, target)
        } else {
            self.stored.read_into_unverified(name, region, target)
        }
    }
}
