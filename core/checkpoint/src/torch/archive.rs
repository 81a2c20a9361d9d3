//! The zip archive that `torch.save` writes.

use std::collections::HashMap;
use std::path::Path;

use crate::{CheckpointReader, LocalFile};
use crate::{Error, Result};
use fulgurite_error::files::{check_len, foreign_content};

/// First bytes of a file of PyTorch before 1.6, which is not a zip archive.
const LEGACY: [u8; 4] = [0x80, 0x02, 0x8a, 0x0a];

const ZIP: [u8; 4] = *b"PK\x03\x04";

/// Whether a file with these first bytes was written by `torch.save`.
pub(super) fn recognises(start: &[u8]) -> bool {
    start == ZIP || start == LEGACY
}

/// The pickle of a file, and the byte ranges of its tensor data.
#[derive(Debug)]
pub(super) struct Archive {
    pub(super) pickle: Vec<u8>,
    /// By storage key.
    pub(super) storages: HashMap<String, Record>,
}

/// A record of the archive.
#[derive(Debug, Clone, Copy)]
pub(super) struct Record {
    /// First byte in the file, and the byte after the last.
    pub(super) bytes: (u64, u64),
    /// `None` if it was disabled by `torch.serialization.set_crc32_options(False)`.
    pub(super) crc32: Option<u32>,
}

/// Longest pickle that is read, in bytes. It has names and shapes of tensors, but not their values.
const MAX_PICKLE: u64 = 256 << 20;

impl Archive {
    pub(super) fn read(path: &Path) -> Result<Self> {
        let fail = |message: String| Error::checkpoint(path, message);
        let reader = LocalFile::open(path)?;
        let len = reader.len().map_err(Error::io("reading", path))?;
        let mut start = vec![0; len.min(512) as usize];
        reader.read_exact_at(&mut start, 0).map_err(Error::io("reading", path))?;
        if start.starts_with(&LEGACY) {
            let message = "was saved by PyTorch before 1.6, or with \
                           `_use_new_zipfile_serialization=False`, in a format that cannot be read \
                           in parts. Load it in Python and save it again";
            return Err(fail(message.to_owned()));
        }
        if !start.starts_with(&ZIP) {
            let what = foreign_content(&start).unwrap_or("it is no zip archive");
            return Err(fail(format!("is no file of `torch.save`: {what}")));
        }
        let file = LocalFile::open(path)?.into_file();
        let damaged =
            |error: zip::result::ZipError| fail(format!("is truncated or damaged: {error}"));
        let mut zip = zip::ZipArchive::new(std::io::BufReader::new(file)).map_err(damaged)?;
        let mut entries = HashMap::new();
        for index in 0..zip.len() {
            let entry = zip.by_index_raw(index).map_err(damaged)?;
            let name = entry.name().map_err(damaged)?.into_owned();
            if entry.compression() != zip::CompressionMethod::Stored {
                return Err(fail(format!(
                    "`{name}` in it is compressed, which `torch.save` never does; unpack it and \
                     archive it again without compression"
                )));
            }
            let range = entry.data_start().and_then(|s| Some((s, s.checked_add(entry.size())?)));
            match range {
                Some(bytes) if bytes.1 <= len => {
                    let crc32 = Some(entry.crc32()).filter(|crc32| *crc32 != 0);
                    entries.insert(name, Record { bytes, crc32 })
                }
                _ => {
                    return Err(fail(format!("is truncated: `{name}` in it ends beyond the file")));
                }
            };
        }
        let pickle = entries.keys().find(|name| *name == "data.pkl" || name.ends_with("/data.pkl"));
        let Some(pickle) = pickle.cloned() else {
            return Err(fail(
                "is no file of `torch.save`: there is no `data.pkl` in it".to_owned(),
            ));
        };
        let prefix = pickle.strip_suffix("data.pkl").unwrap_or_default();
        let load = |Record { bytes: (start, end), crc32 }: Record| {
            check_len(end - start, MAX_PICKLE).map_err(Error::io("reading the pickle in", path))?;
            let mut bytes = vec![0; (end - start) as usize];
            reader.read_exact_at(&mut bytes, start).map_err(Error::io("reading", path))?;
            if crc32.is_none_or(|crc32| crc32fast::hash(&bytes) == crc32) {
                Ok(bytes)
            } else {
                let message = "is damaged: its pickle does not match its CRC-32".to_owned();
                Err(fail(message))
            }
        };
        if entries.contains_key(&format!("{prefix}constants.pkl")) {
            let message = "is a TorchScript program, not a state dict. Save its `state_dict()`";
            return Err(fail(message.to_owned()));
        }
        if let Some(&order) = entries.get(&format!("{prefix}byteorder"))
            && order.bytes.1 - order.bytes.0 != 6
        {
            return Err(fail("was saved on a machine of the other byte order".to_owned()));
        }
        let data = format!("{prefix}data/");
        let storages = entries
            .iter()
            .filter_map(|(name, range)| Some((name.strip_prefix(&data)?.to_owned(), *range)))
            .collect();
        Ok(Self { pickle: load(entries[&pickle])?, storages })
    }
}
