//! [`fingerprint`]: a description of weights that are not read whole.

use std::fs::File;
use std::hash::Hasher as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use twox_hash::XxHash3_64;

use crate::{Error, FULL_MANIFEST, MANIFEST, Result};
use fulgurite_error::files::open_regular;

/// Bytes at each end of a file that are part of its hash.
const SAMPLED: u64 = 64 << 10;
/// Extensions of files of tensors.
const TENSORS: [&str; 5] = ["safetensors", "bin", "pt", "pth", "ckpt"];

/// Describes the weights at `path`, by file: the size of each file of tensors, and a hash of its
/// beginning and its end. Other weights have another description, unless they differ in between alone.
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

/// The file itself, or the files of tensors directly in a folder, in order.
fn files(path: &Path) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path).map_err(Error::io("reading", path))? {
        let file = entry.map_err(Error::io("reading", path))?.path();
        let extension = file.extension().and_then(|extension| extension.to_str());
        let has_tensors = extension.is_some_and(|extension| TENSORS.contains(&extension));
        if (has_tensors || is_manifest(&file)) && file.is_file() {
            files.push(file);
        }
    }
    files.sort();
    Ok(files)
}

/// Whether a file has the digests of all others of a checkpoint.
fn is_manifest(file: &Path) -> bool {
    [MANIFEST, FULL_MANIFEST].iter().any(|name| file.ends_with(name))
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
    fn other_tensors_are_told_and_other_files_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let text = |path: &Path| format!("{:?}", fingerprint(path).unwrap());
        let file = dir.path().join("model.safetensors");
        std::fs::write(&file, [1; 300]).unwrap();
        let before = [text(dir.path()), text(&file)];
        std::fs::write(dir.path().join("README.md"), "notes").unwrap();
        assert_eq!(before, [text(dir.path()), text(&file)]);
        let mut other = [1; 300];
        other[299] = 2;
        std::fs::write(&file, other).unwrap();
        assert_ne!(before[0], text(dir.path()));
        assert_ne!(before[1], text(&file));
    }
}
