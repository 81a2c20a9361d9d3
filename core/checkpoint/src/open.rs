//! Opening model weights of any format.

use std::path::Path;

use super::{
    CheckpointReader, DistributedCheckpoint, FULL_MANIFEST, FullCheckpoint, LocalFile, MANIFEST,
    SafetensorsSource, TensorSource, TorchSource,
};
use crate::{Error, Result};

/// Opens the model weights at `path`, whose format it detects:
///
/// | at `path` | is opened as |
/// |---|---|
/// | a directory with `manifest.json` | [`DistributedCheckpoint`] |
/// | a directory with `fulgurite.json` | [`FullCheckpoint`] |
/// | a directory with `.safetensors` files: Hugging Face's, or shards written by PyTorch's `HuggingFaceStorageWriter` | [`SafetensorsSource`] |
/// | a `.safetensors` file, or the index of several | [`SafetensorsSource`] |
/// | a directory with `pytorch_model.bin`, or its shards and index | [`TorchSource`] |
/// | a file of `torch.save`: `.pt`, `.pth`, `.bin`, Lightning's `.ckpt` | [`TorchSource`] |
///
/// Reads headers only. Not collective.
///
/// # Errors
/// As the four types' `open`; if `path` has none of these formats.
pub fn open(path: impl AsRef<Path>) -> Result<Box<dyn TensorSource>> {
    let path = path.as_ref();
    if exists(path, MANIFEST) {
        return Ok(Box::new(DistributedCheckpoint::open(path)?));
    }
    if exists(path, FULL_MANIFEST) {
        return Ok(Box::new(FullCheckpoint::open(path)?));
    }
    let is_torch = if path.is_dir() {
        let names = names_in(path)?;
        let has = |test: fn(&str) -> bool| names.iter().any(|name| test(name));
        let safetensors =
            has(|n| n.ends_with(".safetensors") || n.ends_with(".safetensors.index.json"));
        if !safetensors && has(|n| n == ".metadata" || n.ends_with(".distcp")) {
            let message = "this is a checkpoint of torch.distributed.checkpoint in its own format, \
                           whose index is a pickled program. Make a state dict of it with `python -m \
                           torch.distributed.checkpoint.format_utils dcp_to_torch DIRECTORY FILE`, or \
                           save with `HuggingFaceStorageWriter`";
            return Err(Error::checkpoint(path, message));
        }
        !safetensors && has(|n| n == TorchSource::SINGLE || n == TorchSource::INDEX)
    } else {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let safetensors = name.ends_with(".safetensors") || name.ends_with(".json");
        let torch = [".pt", ".pth", ".bin", ".ckpt"].iter().any(|suffix| name.ends_with(suffix));
        name.ends_with(TorchSource::INDEX)
            || (path.is_file()
                && (torch || (!safetensors && TorchSource::recognises(&start_of(path)?))))
    };
    if is_torch {
        Ok(Box::new(TorchSource::open(path)?))
    } else {
        Ok(Box::new(SafetensorsSource::open(path)?))
    }
}

/// Whether the directory has a file of this name, of whatever kind.
pub(super) fn exists(directory: &Path, name: &str) -> bool {
    directory.join(name).symlink_metadata().is_ok()
}

fn names_in(path: &Path) -> Result<Vec<String>> {
    let failed = || Error::io("listing", path);
    std::fs::read_dir(path)
        .map_err(failed())?
        .map(|entry| entry.map(|e| e.file_name().to_string_lossy().into_owned()).map_err(failed()))
        .collect()
}

/// The first four bytes of a file; fewer if it is shorter.
fn start_of(path: &Path) -> Result<Vec<u8>> {
    let file = LocalFile::open(path)?;
    let mut bytes = vec![0; file.len().map_err(Error::io("reading", path))?.min(4) as usize];
    file.read_exact_at(&mut bytes, 0).map_err(Error::io("reading", path))?;
    Ok(bytes)
}
