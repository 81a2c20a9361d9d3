//! Opening model weights of any format.

use std::path::{Path, PathBuf};

use super::latest::MAX_LAST;
use super::{
    CheckpointReader, DistributedCheckpoint, FULL_MANIFEST, FullCheckpoint, LAST, LocalFile,
    MANIFEST, SafetensorsSource, TensorSource, TorchSource,
};
use crate::{Error, Result};
use fulgurite_engine::checkpoint_io::invalid_name;
use fulgurite_error::files::read_regular;

/// Opens the model weights at `path`, and detects their format:
///
/// | at `path` | is opened as |
/// |---|---|
/// | a directory with `manifest.json` | [`DistributedCheckpoint`] |
/// | a directory with `fulgurite.json` | [`FullCheckpoint`] |
/// | a directory of `.safetensors` files, also of PyTorch's shards | [`SafetensorsSource`] |
/// | a `.safetensors` file, or the index of several | [`SafetensorsSource`] |
/// | a directory with `pytorch_model.bin`, or its shards and index | [`TorchSource`] |
/// | a file of `torch.save`: `.pt`, `.pth`, `.bin`, Lightning's `.ckpt` | [`TorchSource`] |
/// | the file [`last`](super::LAST) of a training | the checkpoint that it names |
///
/// Reads headers only. Not collective.
///
/// # Errors
/// As the four types' `open`; if `path` has none of these formats.
pub fn open(path: impl AsRef<Path>) -> Result<Box<dyn TensorSource>> {
    let (path, format) = format_of(path.as_ref())?;
    Ok(match format {
        Format::Distributed => Box::new(DistributedCheckpoint::open(path)?),
        Format::Full => Box::new(FullCheckpoint::open(path)?),
        Format::Torch => Box::new(TorchSource::open(path)?),
        Format::Safetensors => Box::new(SafetensorsSource::open(path)?),
    })
}

/// A format of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Distributed,
    Full,
    Torch,
    /// Also for a path without any weights.
    Safetensors,
}

/// Suffixes of files that `torch.save` writes.
pub(super) const TORCH_SUFFIXES: [&str; 4] = [".pt", ".pth", ".bin", ".ckpt"];

/// Returns the path and format of the weights at `path`; a file [`LAST`] is resolved.
pub(super) fn format_of(path: &Path) -> Result<(PathBuf, Format)> {
    let path = resolve_last(path)?;
    if exists(&path, MANIFEST) {
        return Ok((path, Format::Distributed));
    }
    if exists(&path, FULL_MANIFEST) {
        return Ok((path, Format::Full));
    }
    let format = if is_torch(&path)? { Format::Torch } else { Format::Safetensors };
    Ok((path, format))
}

/// Returns the checkpoint that `path` names if it is a file [`LAST`], and else `path` itself.
///
/// # Errors
/// If the file does not name a checkpoint beside it.
pub fn resolve_last(path: &Path) -> Result<PathBuf> {
    match path.file_name().is_some_and(|name| name == LAST) && path.is_file() {
        true => pointed_to(path),
        false => Ok(path.to_owned()),
    }
}

/// Returns the checkpoint that the file [`LAST`] beside it names.
fn pointed_to(last: &Path) -> Result<PathBuf> {
    let bytes = read_regular(last, MAX_LAST)?;
    let name = std::str::from_utf8(&bytes).unwrap_or_default().trim_end_matches('\n');
    let named = last.with_file_name(name);
    if invalid_name(name).is_none() && [MANIFEST, FULL_MANIFEST].iter().any(|m| exists(&named, m)) {
        return Ok(named);
    }
    Err(Error::checkpoint(
        last,
        format!("names no checkpoint beside it, but {name:?}; name a checkpoint's directory"),
    ))
}

fn is_torch(path: &Path) -> Result<bool> {
    Ok(if path.is_dir() {
        let names = names_in(path)?;
        let has = |test: fn(&str) -> bool| names.iter().any(|name| test(name));
        let safetensors =
            has(|n| n.ends_with(".safetensors") || n.ends_with(".safetensors.index.json"));
        let model = has(|n| n == "model.safetensors" || n == "model.safetensors.index.json");
        if !safetensors && has(|n| n == ".metadata" || n.ends_with(".distcp")) {
            let message = "this is a checkpoint of torch.distributed.checkpoint in its own format, \
                           whose index is a pickled program. Make a state dict of it with `python -m \
                           torch.distributed.checkpoint.format_utils dcp_to_torch DIRECTORY FILE`, or \
                           save with `HuggingFaceStorageWriter`";
            return Err(Error::checkpoint(path, message));
        }
        // Torch files of another kind, such as an adapter's, may lie beside the model's.
        !model && has(|n| n == TorchSource::SINGLE || n == TorchSource::INDEX)
    } else {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let safetensors = name.ends_with(".safetensors") || name.ends_with(".json");
        let torch = TORCH_SUFFIXES.iter().any(|suffix| name.ends_with(suffix));
        name.ends_with(TorchSource::INDEX)
            || (path.is_file()
                && (torch || (!safetensors && TorchSource::recognises(&start_of(path)?))))
    })
}

/// Whether the directory has an entry of this name, of any kind.
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
