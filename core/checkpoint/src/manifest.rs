//! The manifest of a checkpoint, which is written last.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::ParameterFilter;
use super::checksum::Checksum;
use crate::{Error, Result};
use fulgurite_engine::checkpoint_io::MAX_MANIFEST;
use fulgurite_engine::shard::{Region, ShardSpec};

/// The manifest's file name.
pub const MANIFEST: &str = "manifest.json";

/// The format version that this library writes, and the newest that it reads.
///
/// Version 2 lacks [`digest`](Manifest::digest), `saved_at`, `headers` and `companions`. Version 1
/// equals version 2, with the key `boxes` for [`chunks`](TensorEntry::chunks).
pub const FORMAT_VERSION: u32 = 3;

/// The first version that has a digest.
const WITH_DIGEST: u32 = 3;

/// The manifest of a full checkpoint, which distinguishes it from other directories.
pub const FULL_MANIFEST: &str = "fulgurite.json";

const FORMAT: &str = "fulgurite-distributed-checkpoint";
const FULL_FORMAT: &str = "fulgurite-full-checkpoint";

/// One of the two parts of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Section {
    Model,
    Optimizer,
}

impl Section {
    /// The name in messages, and the prefix of a full checkpoint's file names.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Optimizer => "optimizer",
        }
    }
}

/// The metadata of a checkpoint to be saved: everything besides tensors.
#[derive(Debug, Clone, Default)]
pub struct SaveMeta {
    /// The optimizer step after which it is saved.
    pub step: u64,
    /// The mesh's dimensions, outermost first, and their sizes. For information only.
    pub mesh: Vec<(String, usize)>,
    /// Each parameter's sharding on the mesh. For information only; see
    /// [`shard_specs`](super::shard_specs).
    pub specs: BTreeMap<String, ShardSpec>,
    /// All other state for resuming: steps, data position, optimizer scalars. Rank 0's is saved.
    pub state: serde_json::Value,
    /// The run's resolved configuration. Rank 0's is saved.
    pub config: serde_json::Value,
    /// The parameters to save, with their optimizer state; `None` for all. Recorded in the
    /// manifest. Must be the same on every rank.
    pub filter: Option<ParameterFilter>,
    /// When it is saved, in microseconds since 1970; `None` if unknown. Rank 0's is saved.
    ///
    /// Of two checkpoints in a folder, the one with the larger number was saved later. So if the
    /// clock went back, a run counts on from the checkpoint that it resumed from.
    pub saved_at: Option<u64>,
}

/// The content of a distributed or a full checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// `fulgurite-distributed-checkpoint` or `fulgurite-full-checkpoint`.
    pub format: String,
    /// The format's version; see [`FORMAT_VERSION`].
    pub format_version: u32,
    /// The version of the library that wrote it.
    pub library_version: String,
    /// The optimizer step after which it was saved.
    pub step: u64,
    /// [`SaveMeta::saved_at`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub saved_at: Option<u64>,
    /// Number of ranks that saved it.
    pub world_size: usize,
    /// Their mesh: dimension names and sizes, outermost first.
    pub mesh: Vec<(String, usize)>,
    /// All shard files, relative to the checkpoint, and their lengths in bytes.
    pub files: BTreeMap<String, u64>,
    /// The headers of the shard files. With the chunks' checksums they cover every byte.
    #[serde(default)]
    pub headers: BTreeMap<String, FileDigest>,
    /// The checkpoint's other files, whole: the index of a full checkpoint, `config.json`.
    #[serde(default)]
    pub companions: BTreeMap<String, FileDigest>,
    /// The model's tensors, by FQN.
    pub model: BTreeMap<String, TensorEntry>,
    /// The optimizer's tensors, by `state.{fqn}.{name}`.
    pub optimizer: BTreeMap<String, TensorEntry>,
    /// Each parameter's sharding on the mesh.
    pub specs: BTreeMap<String, ShardSpec>,
    /// [`SaveMeta::state`].
    pub state: serde_json::Value,
    /// [`SaveMeta::config`].
    pub config: serde_json::Value,
    /// The description of [`SaveMeta::filter`]; `None` if everything was saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filter: Option<String>,
    /// XXH3-64 of the manifest's file, with zeros for these sixteen hexadecimal digits; `None`
    /// before format version 3. The last key of the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
}

/// One tensor of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TensorEntry {
    /// The global shape.
    pub shape: Vec<usize>,
    /// The dtype, in safetensors' spelling.
    pub dtype: safetensors::Dtype,
    /// The chunks of the tensor, which cover each element once. `boxes` in format version 1.
    #[serde(alias = "boxes")]
    pub chunks: Vec<ChunkEntry>,
}

/// One chunk of a stored tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChunkEntry {
    /// The shard file, relative to the checkpoint.
    pub file: String,
    /// Its region in the tensor.
    #[serde(flatten)]
    pub region: Region,
    /// The first byte in the file, and the one after the last.
    pub bytes: (u64, u64),
    /// XXH3-64 of those bytes, in hexadecimal.
    #[serde(with = "hex")]
    pub xxh3: u64,
}

/// Digest of bytes of a file that belong to no tensor: the first ones, or all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileDigest {
    /// Number of bytes.
    pub bytes: u64,
    /// XXH3-64 of the bytes, in hexadecimal.
    #[serde(with = "hex")]
    pub xxh3: u64,
}

impl FileDigest {
    pub(super) fn of(bytes: &[u8]) -> Self {
        let mut checksum = Checksum::default();
        checksum.update(bytes);
        Self { bytes: bytes.len() as u64, xxh3: checksum.digest() }
    }
}

impl Manifest {
    pub(super) fn new(world_size: usize, meta: &SaveMeta) -> Self {
        Self {
            format: FORMAT.to_owned(),
            format_version: FORMAT_VERSION,
            library_version: env!("CARGO_PKG_VERSION").to_owned(),
            step: meta.step,
            saved_at: meta.saved_at,
            world_size,
            mesh: meta.mesh.clone(),
            files: BTreeMap::new(),
            headers: BTreeMap::new(),
            companions: BTreeMap::new(),
            model: BTreeMap::new(),
            optimizer: BTreeMap::new(),
            specs: meta.specs.clone(),
            state: meta.state.clone(),
            config: meta.config.clone(),
            filter: meta.filter.as_ref().map(|filter| filter.what().to_owned()),
            digest: None,
        }
    }

    /// The manifest of a full checkpoint, saved by `world_size` ranks.
    pub(super) fn new_full(world_size: usize, meta: &SaveMeta) -> Self {
        Self { format: FULL_FORMAT.to_owned(), ..Self::new(world_size, meta) }
    }

    /// Reads a distributed checkpoint's manifest; `path` is for messages.
    ///
    /// # Errors
    /// If it is torn, of another kind, or of an unknown version.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self> {
        Self::parse_as(FORMAT, bytes, path)
    }

    /// Reads a full checkpoint's manifest, [`FULL_MANIFEST`], like [`parse`](Self::parse).
    pub(super) fn parse_full(bytes: &[u8], path: &Path) -> Result<Self> {
        Self::parse_as(FULL_FORMAT, bytes, path)
    }

    fn parse_as(format: &str, bytes: &[u8], path: &Path) -> Result<Self> {
        let stamp = Stamp::parse_as(format, bytes, path)?;
        if stamp.format_version > FORMAT_VERSION {
            return Err(Error::checkpoint(
                path,
                format!(
                    "is of format version {}, written by Fulgurite {}; this is Fulgurite {}, which \
                     reads up to version {FORMAT_VERSION}. Use that version or a newer one",
                    stamp.format_version,
                    stamp.library_version,
                    env!("CARGO_PKG_VERSION")
                ),
            ));
        }
        serde_json::from_slice(bytes).map_err(|e| torn(path, &e))
    }

    /// Sets the digest and returns the content of the manifest's file; `path` is for messages.
    pub(super) fn encode(&mut self, path: &Path) -> Result<Vec<u8>> {
        let fail = |message: String| Error::checkpoint(path, format!("encoding it: {message}"));
        self.digest = Some(NO_DIGEST.to_owned());
        let mut bytes = serde_json::to_vec_pretty(self).map_err(|e| fail(e.to_string()))?;
        if bytes.len() as u64 > MAX_MANIFEST {
            let len = bytes.len();
            let message = format!("it has {len} bytes; at most {MAX_MANIFEST} are read again");
            return Err(fail(message));
        }
        let (range, digest) =
            digest(&bytes).ok_or_else(|| fail("its end is not the digest".to_owned()))?;
        bytes[range].copy_from_slice(digest.as_bytes());
        self.digest = Some(digest);
        Ok(bytes)
    }

    /// A warning for the user who loads the checkpoint, if the manifest gives a reason.
    pub(super) fn warning(&self) -> Option<String> {
        self.digest.is_none().then(|| {
            format!(
                "its manifest is of format version {}, which has no digest: damage of step, state or \
                 configuration would not be found. Saved again it has one",
                self.format_version
            )
        })
    }
}

/// Placeholder for the digest while it is computed.
const NO_DIGEST: &str = "0000000000000000";

/// Finds the digest in a manifest's file and computes the expected one.
///
/// Returns `None` if the file does not end with a digest.
fn digest(bytes: &[u8]) -> Option<(Range<usize>, String)> {
    const BEFORE: &[u8] = b"\n  \"digest\": \"";
    const AFTER: &[u8] = b"\"\n}";
    let end = bytes.len().checked_sub(AFTER.len())?;
    let start = end.checked_sub(NO_DIGEST.len())?;
    if !bytes.ends_with(AFTER) || !bytes[..start].ends_with(BEFORE) {
        return None;
    }
    let mut checksum = Checksum::default();
    [&bytes[..start], NO_DIGEST.as_bytes(), AFTER].iter().for_each(|part| checksum.update(part));
    Some((start..end, format!("{:016x}", checksum.digest())))
}

/// The keys of a manifest that every version has.
#[derive(Debug, Deserialize)]
pub(super) struct Stamp {
    format: String,
    format_version: u32,
    #[serde(default)]
    library_version: String,
    pub(super) step: u64,
    pub(super) saved_at: Option<u64>,
    digest: Option<String>,
}

impl Stamp {
    /// Reads the stamp of a distributed or a full checkpoint.
    pub(super) fn parse(bytes: &[u8], path: &Path) -> Result<Self> {
        let full = path.file_name().is_some_and(|name| name == FULL_MANIFEST);
        Self::parse_as(if full { FULL_FORMAT } else { FORMAT }, bytes, path)
    }

    fn parse_as(format: &str, bytes: &[u8], path: &Path) -> Result<Self> {
        let stamp: Self = serde_json::from_slice(bytes).map_err(|e| torn(path, &e))?;
        if stamp.format != format {
            let message =
                format!("is no manifest of a checkpoint: its format is `{}`", stamp.format);
            return Err(Error::checkpoint(path, message));
        }
        // The bytes that the digest covers in later versions are not known.
        if stamp.format_version <= FORMAT_VERSION {
            stamp.check_digest(bytes).map_err(|message| Error::checkpoint(path, message))?;
        }
        Ok(stamp)
    }

    /// Compares the digest with the manifest's file.
    fn check_digest(&self, bytes: &[u8]) -> Result<(), String> {
        match (&self.digest, digest(bytes)) {
            (None, _) if self.format_version < WITH_DIGEST => Ok(()),
            (Some(found), Some((_, expected))) if *found == expected => Ok(()),
            (None, _) => Err(format!(
                "the manifest is damaged: it has no digest, as format version {} has",
                self.format_version
            )),
            (Some(_), _) => Err(
                "the manifest is damaged, or was changed after it was saved: it does not match its \
                 digest"
                    .to_owned(),
            ),
        }
    }
}

fn torn(path: &Path, error: &serde_json::Error) -> Error {
    Error::checkpoint(path, format!("the manifest is damaged or incomplete: {error}"))
}

mod hex {
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(value: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{value:016x}"))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        let text = String::deserialize(deserializer)?;
        u64::from_str_radix(&text, 16).map_err(serde::de::Error::custom)
    }
}
