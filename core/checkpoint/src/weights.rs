//! Model weights in other libraries' safetensors files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use serde::Deserialize;

use super::chunks::check_cover;
use super::json::read_json;
use super::open::{TORCH_SUFFIXES, exists};
use super::shard_file::{StoredPart, read_header};
use super::stored::{FileLocation, StoredChunk};
use super::{StoredTensors, TensorInfo, TensorSource};
use crate::{Error, Result};
use fulgurite_engine::shard::Region;

pub(super) const SUFFIX: &str = ".safetensors";
pub(super) const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// Longest index that is read, in bytes.
const MAX_INDEX: u64 = 256 << 20;

/// Longest companion file that is read, in bytes: `config.json`, a tokenizer.
pub(super) const MAX_COMPANION: u64 = 256 << 20;

/// Safetensors weights of Hugging Face or of sharded saves.
///
/// The path is a Hugging Face directory (`model.safetensors`, or shards with
/// `model.safetensors.index.json`), a single `.safetensors` file, or a directory of shards. The
/// shards are from PyTorch's `HuggingFaceStorageWriter` or from [`save`](super::save). As in
/// `transformers`, a single file takes precedence over an index. If several shards have a tensor,
/// the index selects the shard.
///
/// Opening reads the files' headers; nothing is collective.
#[derive(Debug)]
pub struct SafetensorsSource {
    tensors: StoredTensors,
    /// A manifest that a file names and that is missing.
    missing_manifest: Option<String>,
    /// Whether there is an index beside the single file that is read.
    ignores_index: bool,
}

#[derive(Deserialize)]
pub(super) struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Index {
    /// The file of a tensor.
    pub(super) fn file(&self, tensor: &str) -> Option<&str> {
        self.weight_map.get(tensor).map(String::as_str)
    }
}

impl SafetensorsSource {
    /// Opens a directory, a `.safetensors` file or an index file.
    ///
    /// # Errors
    /// If weights are missing, a shard is missing, truncated or damaged, or the parts of a tensor
    /// do not cover it; the message names file and tensor.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if !path.exists() {
            let message = match dangling(path) {
                Some(target) => format!("is a link to {}, which is not there", target.display()),
                None => "there is no such file or directory".to_owned(),
            };
            return Err(Error::checkpoint(path, message));
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut ignores_index = false;
        let (root, files, index) = if path.is_dir() {
            let names: Vec<String> =
                FileLocation::Local(path.to_owned()).lengths("")?.into_keys().collect();
            let has = |name: &str| names.iter().any(|n| n == name);
            if has(SINGLE) {
                ignores_index = has(INDEX);
                (path.to_owned(), vec![SINGLE.to_owned()], None)
            } else if has(INDEX) {
                with_index(path, &path.join(INDEX))?
            } else {
                let files: Vec<String> =
                    names.iter().filter(|name| name.ends_with(SUFFIX)).cloned().collect();
                if files.is_empty() {
                    return Err(no_weights(path, &names));
                }
                (path.to_owned(), files, None)
            }
        } else {
            let root = path.parent().unwrap_or(Path::new("")).to_owned();
            if name.ends_with(".index.json") {
                with_index(&root, path)?
            } else if name.ends_with(SUFFIX) {
                (root, vec![name], None)
            } else {
                return Err(no_weights(path, &[]));
            }
        };
        let read = Self::read(path, root, files, index)?;
        Ok(Self { ignores_index, ..read })
    }

    /// Returns the name of the manifest that these weights were saved with, if it is missing.
    pub(super) fn missing_manifest(&self) -> Option<&str> {
        self.missing_manifest.as_deref()
    }

    fn read(path: &Path, root: PathBuf, files: Vec<String>, index: Option<Index>) -> Result<Self> {
        let place = FileLocation::Local(root);
        let mut found: BTreeMap<String, Vec<(usize, StoredPart)>> = BTreeMap::new();
        let mut missing_manifest = None;
        for (i, file) in files.iter().enumerate() {
            let location = place.location(file);
            let reader =
                place.open(file).map_err(|e| missing(e, &location, file, index.as_ref()))?;
            let header =
                read_header(reader.as_ref()).map_err(|m| Error::checkpoint(location, m))?;
            let manifest = header.manifest.filter(|name| !name.contains('/'));
            missing_manifest =
                missing_manifest.or(manifest.filter(|name| !exists(&place.location(""), name)));
            for stored in header.parts {
                let parts = found.entry(stored.name.clone());
                parts.or_insert_with(|| Vec::with_capacity(1)).push((i, stored));
            }
        }
        if let Some(index) = &index {
            for (name, file) in &index.weight_map {
                let parts = found.get_mut(name).map_or(&mut [][..], |parts| parts);
                let Some(there) = parts.iter().position(|(i, _)| files[*i] == *file) else {
                    let message = format!("the index says that tensor `{name}` is here; it is not");
                    return Err(Error::checkpoint(place.location(file), message));
                };
                // Copies in other shards are leftovers of an earlier save.
                if parts.len() > 1
                    && !parts.iter().all(|(_, part)| part.is_shard)
                    && let Some(parts) = found.get_mut(name)
                {
                    *parts = vec![parts.swap_remove(there)];
                }
            }
        }
        let mut tensors = StoredTensors::new(place.clone(), path.to_owned(), files);
        for (name, parts) in found {
            match assemble(&parts) {
                Ok(shape) => {
                    let dtype = parts[0].1.dtype;
                    let chunks = parts.into_iter().map(|(file, stored)| StoredChunk {
                        region: stored.region,
                        file,
                        bytes: stored.bytes,
                        checksum: None,
                    });
                    let chunks = chunks.filter(|b| !b.region.is_empty()).collect();
                    tensors.add(name, shape, dtype, chunks);
                }
                Err(message) => {
                    return Err(Error::checkpoint(path, format!("tensor `{name}` {message}")));
                }
            }
        }
        Ok(Self { tensors, missing_manifest, ignores_index: false })
    }
}

/// Returns the global shape of a tensor that is stored in these parts.
fn assemble(parts: &[(usize, StoredPart)]) -> Result<Vec<usize>, String> {
    let first = &parts[0].1;
    let same =
        |s: &StoredPart| s.dtype == first.dtype && s.region.sizes.len() == first.region.sizes.len();
    if !parts.iter().all(|(_, stored)| same(stored)) {
        return Err("has parts of different dtypes or numbers of dimensions".to_owned());
    }
    if parts.len() > 1 && !parts.iter().all(|(_, stored)| stored.is_shard) {
        return Err("is in more than one file".to_owned());
    }
    let end = |r: &Region, d: usize| r.offsets[d] + r.sizes[d];
    let shape: Vec<usize> = (0..first.region.sizes.len())
        .map(|d| parts.iter().map(|(_, s)| end(&s.region, d)).max().unwrap_or(0))
        .collect();
    let regions: Vec<Region> =
        parts.iter().map(|(_, s)| s.region.clone()).filter(|r| !r.is_empty()).collect();
    check_cover(&shape, &regions)?;
    Ok(shape)
}

pub(super) fn with_index(
    root: &Path,
    path: &Path,
) -> Result<(PathBuf, Vec<String>, Option<Index>)> {
    let index: Index = read_json(path, MAX_INDEX)?;
    let mut files: Vec<String> = index.weight_map.values().cloned().collect();
    files.sort();
    files.dedup();
    match files
        .iter()
        .find(|file| file.starts_with('/') || file.split('/').any(|part| part == ".."))
    {
        Some(file) => {
            let message = format!("the index names a file outside its directory: `{file}`");
            Err(Error::checkpoint(path, message))
        }
        None => Ok((root.to_owned(), files, Some(index))),
    }
}

/// Returns the target of a dangling link.
fn dangling(path: &Path) -> Option<PathBuf> {
    std::fs::read_link(path).ok().filter(|_| !path.exists())
}

/// Returns the error about a path without weights, which points to files that may have been meant.
///
/// `names` are the names of a directory's files.
fn no_weights(path: &Path, names: &[String]) -> Error {
    let mut message = format!(
        "there are no weights here: expected {SINGLE}, {INDEX} with its shards, or a {SUFFIX} file"
    );
    let of_torch = |name: &&String| TORCH_SUFFIXES.iter().any(|suffix| name.ends_with(suffix));
    let others: Vec<&str> = names.iter().filter(of_torch).take(5).map(String::as_str).collect();
    if !others.is_empty() {
        message += &format!(". It has {}; name one of them", others.join(", "));
    }
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    let mut links: Vec<PathBuf> =
        entries.map(|entry| entry.path()).filter(|path| dangling(path).is_some()).collect();
    // Links to weights come first.
    let is_config = |link: &PathBuf| link.extension().is_some_and(|e| e == "json" || e == "txt");
    links.sort_by_key(|link| (is_config(link), link.clone()));
    if let Some((link, target)) = links.first().and_then(|link| Some((link, dangling(link)?))) {
        let more = match links.len() - 1 {
            0 => String::new(),
            more => format!(", and so are {more} more"),
        };
        message += &format!(
            ". {} is a link to {}, which is not there{more}: was the cache that it points to removed, or the \
             folder copied without what its links stand for (`cp -L` follows them)?",
            link.file_name().unwrap_or_default().display(),
            target.display()
        );
    }
    Error::checkpoint(path, message)
}

fn missing(error: Error, location: &Path, file: &str, index: Option<&Index>) -> Error {
    match (&error, index) {
        (Error::Io { source, .. }, Some(index))
            if source.kind() == std::io::ErrorKind::NotFound =>
        {
            let mut names =
                index.weight_map.iter().filter(|(_, f)| *f == file).map(|(name, _)| name);
            let first = names.next().cloned().unwrap_or_default();
            let count = names.count() + 1;
            let message = format!(
                "this shard is missing; the index puts {count} tensors there, such as `{first}`"
            );
            Error::checkpoint(location, message)
        }
        _ => error,
    }
}

/// Returns the warning about files of a full checkpoint without this manifest.
pub(super) fn without_manifest(manifest: &str) -> String {
    format!(
        "it was saved as a full checkpoint, and its manifest {manifest} is missing: nothing says which \
         step it is of, and there are no checksums. Copy {manifest} along, or make plain weights of a \
         checkpoint with `fulgurite checkpoint convert --to hugging-face`"
    )
}

impl TensorSource for SafetensorsSource {
    fn location(&self) -> &Path {
        self.tensors.location()
    }

    fn names(&self) -> Vec<&str> {
        // Older Llama files have this table, which programs compute.
        let computed = |name: &&str| !name.ends_with(".rotary_emb.inv_freq");
        self.tensors.names().into_iter().filter(computed).collect()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.tensors.info(name)
    }

    fn read(&self, name: &str, region: &Region, dtype: DType, device: &Device) -> Result<Tensor> {
        self.tensors.read(name, region, dtype, device)
    }

    fn read_into(&self, name: &str, region: &Region, target: &Tensor) -> Result<()> {
        self.tensors.read_into(name, region, target)
    }

    fn read_into_unverified(&self, name: &str, region: &Region, target: &Tensor) -> Result<()> {
        self.tensors.read_into_unverified(name, region, target)
    }

    fn read_codes(&self, name: &str, region: &Region) -> Result<Vec<u8>> {
        self.tensors.read_codes(name, region)
    }

    fn read_stored(&self, name: &str) -> Result<Vec<u8>> {
        self.tensors.read_stored(name)
    }

    fn warning(&self) -> Option<String> {
        if self.ignores_index {
            return Some(format!(
                "there is {INDEX}, too; {SINGLE} is read, as `transformers` does. Remove the one that is old"
            ));
        }
        self.missing_manifest.as_deref().map(without_manifest)
    }
}
