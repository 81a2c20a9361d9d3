//! The bytes of a checkpoint's files that belong to no tensor: headers and companions.

use super::checksum::Expected;
use super::manifest::{FileDigest, Manifest};
use super::stored::{FileLocation, is_undamaged};
use super::{CheckpointReader, Error};

/// A file whose bytes differ from the manifest, and the difference.
pub(super) struct FileDamage {
    pub(super) file: String,
    /// Whether the damage is in the header of a tensor file.
    pub(super) in_header: bool,
    pub(super) message: String,
}

/// Compares headers and companions with the manifest.
pub(super) fn damages(manifest: &Manifest, place: &FileLocation) -> Vec<FileDamage> {
    let headers = manifest.headers.iter().map(|(file, digest)| (file, digest, true));
    let companions = manifest.companions.iter().map(|(file, digest)| (file, digest, false));
    let mut damages = Vec::new();
    for (file, digest, is_header) in headers.chain(companions) {
        let complaint = match place.open(file) {
            Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                Some("is missing".to_owned())
            }
            // Reading the tensors reports a tensor file that cannot be opened.
            Err(_) if is_header => None,
            Err(error) => Some(error.to_string()),
            Ok(reader) => compare(reader.as_ref(), *digest, is_header).err(),
        };
        damages.extend(complaint.map(|message| FileDamage {
            file: file.clone(),
            in_header: is_header,
            message,
        }));
    }
    damages
}

fn compare(
    reader: &dyn CheckpointReader,
    digest: FileDigest,
    is_header: bool,
) -> Result<(), String> {
    let failed = |e: std::io::Error| format!("reading it: {e}");
    let len = reader.len().map_err(failed)?;
    if len < digest.bytes || (!is_header && len > digest.bytes) {
        return Err(format!("has {len} bytes instead of {}", digest.bytes));
    }
    let expected = Expected::Xxh3(digest.xxh3);
    let same =
        is_undamaged(reader, (0, digest.bytes), expected, &mut Vec::new()).map_err(failed)?;
    match (same, is_header) {
        (true, _) => Ok(()),
        (false, true) => Err("its header does not match its checksum".to_owned()),
        (false, false) => {
            Err("does not match its checksum; it was damaged, or changed after the save".to_owned())
        }
    }
}
