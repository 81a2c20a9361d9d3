//! [`fingerprint`]: identifies weights without reading them whole.

use std::fs::File;
use std::hash::Hasher as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use twox_hash::XxHash3_64;

use super::TorchSource;
use super::open::{Format, format_of};
use super::stored::FileLocation;
use super::weights::{INDEX, SINGLE, SUFFIX, with_index};
use crate::{Error, FULL_MANIFEST, MANIFEST, Result};
use fulgurite_error::files::open_regular;

/// Bytes at each end of a file that are hashed.
const SAMPLED: u64 = 64 << 10;

/// Describes the weights at `path`, by file.
///
/// A file's description is its size and a hash of its beginning and its end, for each file that
/// [`open`](crate::open) reads. Other files in the folder do not count. Different weights have
/// different descriptions, unless they differ only between the hashed ends.
///
/// # Errors
/// If the weights cannot be read.
pub fn fingerprint(path: &Path) -> Result<Vec<(String, String)>> {
    let describe = |file: PathBuf| {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok((name, describe(&file).map_err(Error::io("reading", &file))?))
    };
    files(path)?.into_iter().map(describe).collect()
}

/// The files that [`open`](crate::open) reads at `path`, in order.
fn files(path: &Path) -> Result<Vec<PathBuf>> {
    let (path, format) = format_of(path)?;
    if !path.is_dir() {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        return match name.ends_with(".index.json") {
            true => indexed(path.parent().unwrap_or(Path::new("")), &path),
            false => Ok(vec![path]),
        };
    }
    let there = |name: &str| Some(path.join(name)).filter(|file| file.is_file());
    // The manifest of a distributed checkpoint has the digests of all its files.
    let manifest = there(MANIFEST).or(there(FULL_MANIFEST));
    let (single, index) = match format {
        Format::Distributed => return Ok(manifest.into_iter().collect()),
        Format::Torch => (TorchSource::SINGLE, TorchSource::INDEX),
        Format::Full | Format::Safetensors => (SINGLE, INDEX),
    };
    let mut files: Vec<PathBuf> = manifest.into_iter().collect();
    match (there(single), there(index)) {
        (Some(single), _) => files.push(single),
        (None, Some(index)) => files.extend(indexed(&path, &index)?),
        (None, None) => files.extend(shards(&path)?),
    }
    Ok(files)
}

/// Returns an index and the files that it names.
fn indexed(root: &Path, index: &Path) -> Result<Vec<PathBuf>> {
    let (root, files, _) = with_index(root, index)?;
    let files = files.iter().map(|file| root.join(file));
    Ok([index.to_owned()].into_iter().chain(files).collect())
}

/// Returns the safetensors files directly in a folder, in order.
fn shards(folder: &Path) -> Result<Vec<PathBuf>> {
    let names = FileLocation::Local(folder.to_owned()).lengths("")?.into_keys();
    Ok(names.filter(|name| name.ends_with(SUFFIX)).map(|name| folder.join(name)).collect())
}

/// `1024 bytes (0123456789abcdef)`.
fn describe(path: &Path) -> std::io::Result<String> {
    let file: File = open_regular(path).map_err(std::io::Error::other)?;
    let bytes = file.metadata()?.len();
    let sampled = bytes.min(SAMPLED);
    let mut buffer = vec![0; sampled as usize];
    let mut hasher = XxHash3_64::default();
    for start in [0, bytes - sampled] {
        file.read_exact_at(&mut buffer, start)?;
        hasher.write(&buffer);
    }
    Ok(format!("{bytes} bytes ({:016x})", hasher.finish()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fingerprint_covers_only_tensor_files() {
        let dir = tempfile::tempdir().unwrap();
        let text = |path: &Path| format!("{:?}", fingerprint(path).unwrap());
        let file = dir.path().join("model.safetensors");
        std::fs::write(&file, [1; 300]).unwrap();
        let before = [text(dir.path()), text(&file)];
        std::fs::write(dir.path().join("README.md"), "notes").unwrap();
        for other in
            ["rng_state_0.pth", "optimizer.pt", "consolidated.00.pth", "adapter.safetensors"]
        {
            std::fs::write(dir.path().join(other), "of one host").unwrap();
        }
        assert_eq!(before, [text(dir.path()), text(&file)]);
        let mut other = [1; 300];
        other[299] = 2;
        std::fs::write(&file, other).unwrap();
        assert_ne!(before[0], text(dir.path()));
        assert_ne!(before[1], text(&file));
    }

    #[test]
    fn fingerprint_covers_indexed_shards() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        let names = || -> Vec<String> {
            fingerprint(dir.path()).unwrap().into_iter().map(|(name, _)| name).collect()
        };
        write("pytorch_model-1.bin", "a");
        write("pytorch_model.bin.index.json", r#"{"weight_map": {"w": "pytorch_model-1.bin"}}"#);
        write("training_args.bin", "b");
        assert_eq!(names(), ["pytorch_model.bin.index.json", "pytorch_model-1.bin"]);
        write("model-1.safetensors", "c");
        write("left.safetensors", "d");
        write(INDEX, r#"{"weight_map": {"w": "model-1.safetensors"}}"#);
        assert_eq!(names(), [INDEX, "model-1.safetensors"]);
    }
}
