//! From one format to another.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use safetensors::Dtype;
use serde::Serialize;

use super::super::full::{FilePlan, FullWriter, Section, TensorMeta, plan};
use super::super::stored::loadable;
use super::super::{CheckpointIO, Filter, FullOptions, ModelConfig, SaveMeta, TensorSource};
use super::progress::{Counter, Progress};
use super::{AnyCheckpoint, Kind, Rename, distribute, output};
use crate::{Error, Result};
use fulgurite_engine::shard::{Region, ShardSpec};

/// What a checkpoint is made into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// Shards as this many ranks write them, each tensor cut along its first dimension, and a
    /// manifest.
    Distributed {
        /// Number of shards; at least one.
        shards: usize,
    },
    /// A full checkpoint.
    Full,
    /// What `transformers` writes: the model and its `config.json`, nothing of Fulgurite's.
    HuggingFace,
}

/// How a checkpoint is converted.
#[derive(Debug, Clone)]
pub struct ConvertOptions {
    /// What into.
    pub to: Target,
    /// What the model's floating-point tensors are converted to. The optimizer's never are.
    pub dtype: Option<DType>,
    /// Whether the optimizer's state is left out. [`Target::HuggingFace`] never has it.
    pub model_only: bool,
    /// Other names.
    pub rename: Rename,
    /// As [`FullOptions::max_shard_bytes`]; not for [`Target::Distributed`].
    pub max_shard_bytes: u64,
    /// The model's `config.json`, instead of the one that the input has. Not for
    /// [`Target::Distributed`].
    pub config: Option<ModelConfig>,
    /// Whether a checkpoint that is there already is replaced.
    pub overwrite: bool,
}

impl ConvertOptions {
    /// Everything, as it is.
    pub fn new(to: Target) -> Self {
        let FullOptions { max_shard_bytes, .. } = FullOptions::default();
        Self {
            to,
            dtype: None,
            model_only: false,
            rename: Rename::default(),
            max_shard_bytes,
            config: None,
            overwrite: false,
        }
    }
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Converted {
    /// Where.
    pub path: PathBuf,
    /// Number of tensors.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Number of safetensors files.
    pub files: usize,
}

/// Makes a full checkpoint of any; [`convert`] to [`Target::Full`] with everything as it is.
///
/// # Errors
/// As [`convert`].
pub fn consolidate(
    input: &AnyCheckpoint,
    io: &dyn CheckpointIO,
    name: &str,
    progress: &mut dyn FnMut(Progress),
) -> Result<Converted> {
    convert(input, io, name, &ConvertOptions::new(Target::Full), progress)
}

/// Makes a distributed checkpoint of `shards` shards of any.
///
/// # Errors
/// As [`convert`].
pub fn reshard(
    input: &AnyCheckpoint,
    io: &dyn CheckpointIO,
    name: &str,
    shards: usize,
    progress: &mut dyn FnMut(Progress),
) -> Result<Converted> {
    convert(input, io, name, &ConvertOptions::new(Target::Distributed { shards }), progress)
}

/// Writes `input` as `name` of `io`, in another format, dtype or with other names. Holds one whole
/// tensor at a time. Not collective.
///
/// Step, state and configuration are kept where both formats have them. From weights into a full
/// checkpoint or a Hugging Face directory, the tokenizer's and other small files come along.
///
/// # Errors
/// If there is something under `name` already and `overwrite` is not set, or it is no checkpoint;
/// if the input is damaged, or two tensors get the same name; if the output cannot be written.
/// Nothing is changed then.
pub fn convert(
    input: &AnyCheckpoint,
    io: &dyn CheckpointIO,
    name: &str,
    options: &ConvertOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<Converted> {
    if let Target::Distributed { shards: 0 } = options.to {
        return Err(Error::other("a distributed checkpoint has at least one shard"));
    }
    if let Some(dtype) = options.dtype.filter(|dtype| !dtype.is_float()) {
        let message =
            format!("parameters cannot be converted to {dtype:?}; expected a float dtype");
        return Err(Error::other(message));
    }
    let model = Part::model(input.model(), options)?;
    let with_optimizer = !options.model_only && options.to != Target::HuggingFace;
    let optimizer = input.optimizer().filter(|_| with_optimizer);
    let optimizer = optimizer.map(|source| Part::optimizer(source, options)).transpose()?;
    let parts: Vec<&Part<'_>> = [&model].into_iter().chain(&optimizer).collect();
    let bytes = parts.iter().flat_map(|part| &part.tensors).map(TensorMeta::bytes).sum();
    let tensors = parts.iter().map(|part| part.tensors.len()).sum();
    let mut counter = Counter::new(bytes, progress);
    let meta = meta(input, options);
    let world_size = input.manifest().map_or(1, |manifest| manifest.world_size);
    let files = output::transaction(io, name, options.overwrite, |staged| match options.to {
        Target::Distributed { shards } => {
            distribute::write(io, staged, shards, &parts, meta, &mut counter)
        }
        to => {
            let none = Vec::new();
            let states = optimizer.as_ref().map_or(&none, |part| &part.tensors);
            let mut files = plan(Section::Model, &model.tensors, options.max_shard_bytes);
            files.extend(plan(Section::Optimizer, states, options.max_shard_bytes));
            let metas = (model.tensors.as_slice(), states.as_slice());
            let mut writer = FullWriter::new(io, staged, metas, &files, (world_size, &meta));
            for FilePlan { section, tensors, .. } in &files {
                let part = match (section, &optimizer) {
                    (Section::Optimizer, Some(part)) => part,
                    _ => &model,
                };
                for &i in tensors {
                    writer.put(&part.read(i)?)?;
                    counter.add(part.tensors[i].bytes());
                }
            }
            let extra = companions(input, options)?;
            writer.finish(&extra, to == Target::Full)?;
            Ok(files.len())
        }
    })?;
    Ok(Converted { path: io.location(name), tensors, bytes, files })
}

/// The tensors of a model or an optimizer, under the names and in the dtypes that they will have.
pub(super) struct Part<'a> {
    pub(super) section: Section,
    source: &'a dyn TensorSource,
    /// What each is called in the source.
    names: Vec<String>,
    pub(super) tensors: Vec<TensorMeta>,
}

impl<'a> Part<'a> {
    fn model(source: &'a dyn TensorSource, options: &ConvertOptions) -> Result<Self> {
        let rename = |name: &str| options.rename.apply(name);
        Self::new(Section::Model, source, rename, options.dtype)
    }

    fn optimizer(source: &'a dyn TensorSource, options: &ConvertOptions) -> Result<Self> {
        let rename = |name: &str| options.rename.apply_to_key(name);
        Self::new(Section::Optimizer, source, rename, None)
    }

    fn new(
        section: Section,
        source: &'a dyn TensorSource,
        rename: impl Fn(&str) -> String,
        dtype: Option<DType>,
    ) -> Result<Self> {
        let mut taken = BTreeMap::new();
        let (mut names, mut tensors) = (Vec::new(), Vec::new());
        for name in source.names() {
            let Some(info) = source.info(name) else { continue };
            let renamed = rename(name);
            if let Some(other) = taken.insert(renamed.clone(), name) {
                let message = format!("`{other}` and `{name}` would both be called `{renamed}`");
                return Err(Error::checkpoint(source.location(), message));
            }
            let dtype = match (dtype, loadable(info.dtype)) {
                (Some(wanted), Some(stored)) if stored.is_float() => Dtype::from(wanted),
                _ => info.dtype,
            };
            names.push(name.to_owned());
            tensors.push(TensorMeta { name: renamed, shape: info.shape, dtype });
        }
        Ok(Self { section, source, names, tensors })
    }

    /// All values of tensor `i`, flat, in the dtype they will have.
    pub(super) fn read(&self, i: usize) -> Result<Tensor> {
        let (name, tensor) = (&self.names[i], &self.tensors[i]);
        // A dtype that cannot be loaded is complained about by reading, whatever it is asked for.
        let dtype = loadable(tensor.dtype).unwrap_or(DType::U8);
        self.source.read(name, &Region::full(&tensor.shape), dtype, &Device::Cpu)
    }
}

/// What is kept besides tensors. Mesh and specs are those of the output, if it is distributed.
fn meta(input: &AnyCheckpoint, options: &ConvertOptions) -> SaveMeta {
    let Some(manifest) = input.manifest() else { return SaveMeta::default() };
    let specs: BTreeMap<String, ShardSpec> = manifest
        .specs
        .iter()
        .map(|(fqn, spec)| (options.rename.apply(fqn), spec.clone()))
        .collect();
    SaveMeta {
        step: manifest.step,
        mesh: manifest.mesh.clone(),
        specs,
        state: manifest.state.clone(),
        config: manifest.config.clone(),
        // What is there was kept already.
        filter: manifest.filter.as_ref().map(|what| Filter::new(what.clone(), |_| true)),
    }
}

/// `config.json`, and the other files of a model that `transformers` needs.
fn companions(input: &AnyCheckpoint, options: &ConvertOptions) -> Result<Vec<(String, Vec<u8>)>> {
    const CONFIG: &str = "config.json";
    let mut files = Vec::new();
    if let Some(config) = &options.config {
        files.push((CONFIG.to_owned(), config.bytes()?));
    }
    let directory = input.location();
    if input.kind() == Kind::Distributed || !directory.is_dir() {
        return Ok(files);
    }
    let entries = std::fs::read_dir(directory).map_err(Error::io("listing", directory))?;
    let mut paths = Vec::new();
    for entry in entries {
        paths.push(entry.map_err(Error::io("listing", directory))?.path());
    }
    paths.sort();
    for path in paths.iter().filter(|path| path.is_file()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if is_companion(&name) && !(name == CONFIG && options.config.is_some()) {
            files.push((name, std::fs::read(path).map_err(Error::io("reading", path))?));
        }
    }
    Ok(files)
}

/// Whether a file belongs to a model without being of its weights.
fn is_companion(name: &str) -> bool {
    let kind = Path::new(name).extension().and_then(|e| e.to_str());
    matches!(kind, Some("json" | "txt" | "model" | "jinja"))
        && !name.ends_with(".index.json")
        && name != super::super::FULL_MANIFEST
}
