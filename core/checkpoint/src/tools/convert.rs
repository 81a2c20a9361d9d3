//! Converting checkpoints between formats.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use safetensors::Dtype;
use serde::Serialize;
use serde_json::Value;

use super::super::full::{FilePlan, FullWriter, TensorMeta, plan_files};
use super::super::manifest::Section;
use super::super::stored::loadable_dtype;
use super::super::tensor_file::FileKind;
use super::super::weights::MAX_COMPANION;
use super::super::{
    CheckpointIO, FileDigest, FullOptions, MergedModel, ModelConfig, PackedSource, Packing,
    ParameterFilter, SaveMeta, TensorSource, UnpackedSource, read_json,
};
use super::average::AveragedModel;
use super::progress::{Counter, Progress};
use super::{AnyCheckpoint, CheckpointKind, Rename, distribute, output};
use crate::{Error, Result};
use fulgurite_engine::shard::{Region, ShardSpec};
use fulgurite_error::files::read_regular;

/// A model's description in a Hugging Face directory.
const CONFIG: &str = "config.json";

/// The output format of a conversion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConvertTarget {
    /// A distributed checkpoint, sharded along the first dimension of each tensor.
    Distributed {
        /// Number of shards; at least one.
        shards: usize,
    },
    /// A full checkpoint.
    Full,
    /// The model and its `config.json`, as `transformers` writes them.
    HuggingFace,
}

/// A model's tensors as another program names and shapes them.
pub trait ForeignLayout: std::fmt::Debug + Send + Sync {
    /// Returns the tensors of `model` under the other names. Reads no values.
    ///
    /// # Errors
    /// If the model lacks a tensor that the layout needs.
    fn view<'a>(&self, model: &'a dyn TensorSource) -> Result<Box<dyn TensorSource + 'a>>;
}

/// Options of [`convert`].
#[derive(Debug, Clone)]
pub struct ConvertOptions {
    /// The format.
    pub to: ConvertTarget,
    /// The dtype that the model's floating-point tensors are converted to; `None` keeps their
    /// dtypes. The optimizer's tensors are never converted.
    pub dtype: Option<DType>,
    /// Whether the optimizer's state is left out. [`ConvertTarget::HuggingFace`] always leaves it
    /// out.
    pub model_only: bool,
    /// Whether the average of the weights that training kept replaces them. The optimizer's state
    /// does not belong to the average and is left out.
    pub average: bool,
    /// The directory of a PEFT adapter to merge into the model. The optimizer's state does not
    /// belong to the merged weights and is left out.
    pub adapter: Option<PathBuf>,
    /// How the tensors of a [`ConvertTarget::HuggingFace`] are named and shaped, before `rename`;
    /// `None` leaves them as they are.
    pub layout: Option<Arc<dyn ForeignLayout>>,
    /// Small files to write beside the weights, by name: a tokenizer's. They go before the input's.
    /// Not for [`ConvertTarget::Distributed`].
    pub files: Vec<(String, Vec<u8>)>,
    /// New names of the parameters.
    pub rename: Rename,
    /// As [`FullOptions::max_shard_bytes`]; not for [`ConvertTarget::Distributed`].
    pub max_shard_bytes: u64,
    /// The model's `config.json`, instead of the input's. Not for [`ConvertTarget::Distributed`].
    pub config: Option<ModelConfig>,
    /// Whether an existing checkpoint is replaced.
    pub overwrite: bool,
}

impl ConvertOptions {
    /// Converts the whole checkpoint, without other changes.
    pub fn new(to: ConvertTarget) -> Self {
        let FullOptions { max_shard_bytes, .. } = FullOptions::default();
        Self {
            to,
            dtype: None,
            model_only: false,
            average: false,
            adapter: None,
            layout: None,
            files: Vec::new(),
            rename: Rename::default(),
            max_shard_bytes,
            config: None,
            overwrite: false,
        }
    }

    /// Whether weights get other values or another dtype, which packed ones cannot have.
    fn changes(&self) -> bool {
        self.adapter.is_some() || self.dtype.is_some()
    }
}

/// The checkpoint that was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Converted {
    /// Its path.
    pub path: PathBuf,
    /// Number of tensors.
    pub tensors: usize,
    /// Number of bytes of the tensors.
    pub bytes: u64,
    /// Number of safetensors files.
    pub files: usize,
}

/// Makes a full checkpoint from any checkpoint: [`convert`] to [`ConvertTarget::Full`].
///
/// # Errors
/// As [`convert`].
pub fn consolidate(
    input: &AnyCheckpoint,
    io: &dyn CheckpointIO,
    name: &str,
    progress: &mut dyn FnMut(Progress),
) -> Result<Converted> {
    convert(input, io, name, &ConvertOptions::new(ConvertTarget::Full), progress)
}

/// Makes a distributed checkpoint of `shards` shards from any checkpoint.
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
    convert(input, io, name, &ConvertOptions::new(ConvertTarget::Distributed { shards }), progress)
}

/// Writes `input` as the checkpoint `name` of `io`, in another format or dtype or with other names.
///
/// Holds one whole tensor at a time. Quantised weights are unpacked for a Hugging Face directory,
/// for another dtype, and for merging an adapter. Not collective.
///
/// Step, state and configuration are kept if both formats have them. The tokenizer's and other
/// small files are copied from weights into a full checkpoint or a Hugging Face directory.
///
/// # Errors
/// If `name` exists, and is not a checkpoint or `overwrite` is not set. If the input is damaged, or
/// lacks the requested average of the weights. If two tensors get the same name. If the output
/// cannot be written. Nothing is changed then.
pub fn convert(
    input: &AnyCheckpoint,
    io: &dyn CheckpointIO,
    name: &str,
    options: &ConvertOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<Converted> {
    if let ConvertTarget::Distributed { shards: 0 } = options.to {
        return Err(Error::other("a distributed checkpoint has at least one shard"));
    }
    if let Some(dtype) = options.dtype.filter(|dtype| !dtype.is_float()) {
        let message =
            format!("parameters cannot be converted to {dtype:?}; expected a float dtype");
        return Err(Error::other(message));
    }
    // Quantised weights are specific to Fulgurite, and cannot take adapters or other dtypes.
    let changes = options.changes();
    let choice = WeightChoice {
        average: options.average,
        adapter: options.adapter.as_deref(),
        unpacks: changes || options.to == ConvertTarget::HuggingFace,
        unpacks_published: changes,
    };
    with_weights(input, choice, |source| converted(input, source, io, name, options, progress))
}

/// Which weights of a checkpoint a tool takes.
#[derive(Debug, Clone, Copy, Default)]
pub struct WeightChoice<'a> {
    /// Whether the average of the weights that training kept replaces them.
    pub average: bool,
    /// The directory of a PEFT adapter to merge into them.
    pub adapter: Option<&'a Path>,
    /// Whether quantised weights are unpacked. Merging an adapter needs it.
    pub unpacks: bool,
    /// Whether weights in the formats of published models are unpacked ([`Packing`]).
    pub unpacks_published: bool,
}

/// Calls `use_weights` with the weights of a checkpoint's model. Not collective.
///
/// # Errors
/// If the checkpoint lacks the requested average, or the adapter does not fit; as `use_weights`.
pub fn with_weights<T>(
    input: &AnyCheckpoint,
    choice: WeightChoice<'_>,
    use_weights: impl FnOnce(&dyn TensorSource) -> Result<T>,
) -> Result<T> {
    let averaged = choice.average.then(|| AveragedModel::new(input)).transpose()?;
    let source = averaged.as_ref().map_or(input.model(), |averaged| averaged as _);
    let packing = if choice.unpacks_published { packing_of(input)? } else { None };
    let published = packing.map(|packing| PackedSource::new(source, Some(packing)));
    let source = published.as_ref().map_or(source, |published| published as _);
    let unpacked = choice.unpacks.then(|| UnpackedSource::new(source));
    let source = unpacked.as_ref().map_or(source, |unpacked| unpacked as _);
    let merged = choice.adapter.map(|dir| MergedModel::new(source, dir)).transpose()?;
    use_weights(merged.as_ref().map_or(source, |merged| merged as _))
}

/// The packing of weights that `config.json` beside them names, if any.
fn packing_of(input: &AnyCheckpoint) -> Result<Option<Packing>> {
    let location = input.location();
    let path = match location.is_dir() {
        true => location.join(CONFIG),
        false => location.with_file_name(CONFIG),
    };
    if input.kind() != CheckpointKind::Weights || !path.is_file() {
        return Ok(None);
    }
    let config: Value = read_json(&path, MAX_COMPANION)?;
    let packing = config.get(Packing::KEY).filter(|value| !value.is_null());
    let packing = packing.map(Packing::of_config).transpose();
    packing.map_err(|message| Error::checkpoint(&path, format!("`{}`: {message}", Packing::KEY)))
}

/// Writes the weights `source` of a checkpoint as another checkpoint.
fn converted(
    input: &AnyCheckpoint,
    source: &dyn TensorSource,
    io: &dyn CheckpointIO,
    name: &str,
    options: &ConvertOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<Converted> {
    if options.to == ConvertTarget::HuggingFace
        && let Some(name) = source.names().into_iter().find(|name| name.contains(".lora_"))
    {
        let message = format!(
            "`{name}` is of an adapter that is not merged, and `transformers` would leave it out. Merge it \
             with `--adapter DIR`: `adapter` in the run's directory, or one of PEFT's"
        );
        return Err(Error::checkpoint(source.location(), message));
    }
    let foreign = match (&options.layout, options.to) {
        (Some(layout), ConvertTarget::HuggingFace) => Some(layout.view(source)?),
        _ => None,
    };
    let source = foreign.as_ref().map_or(source, |view| &**view);
    let model = OutputSection::model(source, options)?;
    let is_whole = !options.model_only && !options.average && options.adapter.is_none();
    let with_optimizer = is_whole && options.to != ConvertTarget::HuggingFace;
    let optimizer = input.optimizer().filter(|_| with_optimizer);
    let optimizer =
        optimizer.map(|source| OutputSection::optimizer(source, options)).transpose()?;
    let parts: Vec<&OutputSection<'_>> = [&model].into_iter().chain(&optimizer).collect();
    let bytes = parts.iter().flat_map(|part| &part.tensors).map(TensorMeta::bytes).sum();
    let tensors = parts.iter().map(|part| part.tensors.len()).sum();
    let mut counter = Counter::new(bytes, progress);
    let meta = meta(input, options);
    let world_size = input.manifest().map_or(1, |manifest| manifest.world_size);
    let files = output::transaction(io, name, options.overwrite, |staged| match options.to {
        ConvertTarget::Distributed { shards } => {
            distribute::write(io, staged, shards, &parts, meta, &mut counter)
        }
        to => {
            let none = Vec::new();
            let states = optimizer.as_ref().map_or(&none, |part| &part.tensors);
            let mut files = plan_files(Section::Model, &model.tensors, options.max_shard_bytes);
            files.extend(plan_files(Section::Optimizer, states, options.max_shard_bytes));
            let metas = (model.tensors.as_slice(), states.as_slice());
            let kind = match to {
                ConvertTarget::HuggingFace => FileKind::Plain,
                _ => FileKind::Full,
            };
            let mut writer = FullWriter::new(io, staged, metas, &files, (world_size, &meta), kind);
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
            writer.finish(&extra)?;
            Ok(files.len())
        }
    })?;
    Ok(Converted { path: io.location(name), tensors, bytes, files })
}

/// The tensors of a model or an optimizer, with their new names and dtypes.
pub(super) struct OutputSection<'a> {
    pub(super) section: Section,
    source: &'a dyn TensorSource,
    /// Name of each tensor in the source.
    names: Vec<String>,
    pub(super) tensors: Vec<TensorMeta>,
}

impl<'a> OutputSection<'a> {
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
            if let Some(reason) = source.unreadable(name) {
                let message = format!("tensor `{name}` {reason}");
                return Err(Error::checkpoint(source.location(), message));
            }
            let Some(info) = source.info(name) else { continue };
            let renamed = rename(name);
            if let Some(other) = taken.insert(renamed.clone(), name) {
                let message = format!("`{other}` and `{name}` would both be called `{renamed}`");
                return Err(Error::checkpoint(source.location(), message));
            }
            // The factors of values that stay as they are: FP8 in the format of `transformers`.
            let scaled = name.strip_suffix("_scale_inv").and_then(|scaled| source.info(scaled));
            let is_scale = scaled.is_some_and(|scaled| loadable_dtype(scaled.dtype).is_none());
            let dtype = match (dtype, loadable_dtype(info.dtype)) {
                (Some(wanted), Some(stored)) if stored.is_float() && !is_scale => {
                    Dtype::from(wanted)
                }
                _ => info.dtype,
            };
            names.push(name.to_owned());
            tensors.push(TensorMeta { name: renamed, shape: info.shape, dtype });
        }
        Ok(Self { section, source, names, tensors })
    }

    /// Returns the flat values of tensor `i` in the new dtype.
    ///
    /// If candle does not support the dtype, they are bytes.
    pub(super) fn read(&self, i: usize) -> Result<Tensor> {
        let (name, tensor) = (&self.names[i], &self.tensors[i]);
        let Some(dtype) = loadable_dtype(tensor.dtype) else {
            let bytes = self.source.read_stored(name)?;
            let len = bytes.len();
            return Ok(Tensor::from_vec(bytes, len, &Device::Cpu)?);
        };
        self.source.read(name, &Region::full(&tensor.shape), dtype, &Device::Cpu)
    }
}

/// Returns everything besides tensors. A distributed output gets its own mesh and specs.
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
        // The input has only the tensors that the filter kept.
        filter: manifest.filter.as_ref().map(|what| ParameterFilter::new(what.clone(), |_| true)),
        // A copy is not a later point of the training.
        saved_at: manifest.saved_at,
    }
}

/// Returns `config.json` and the other files of a model that `transformers` needs.
fn companions(input: &AnyCheckpoint, options: &ConvertOptions) -> Result<Vec<(String, Vec<u8>)>> {
    let mut files = Vec::new();
    if let Some(config) = &options.config {
        files.push((CONFIG.to_owned(), config.bytes()?));
    }
    files.extend(options.files.iter().cloned());
    let directory = input.location();
    if input.kind() == CheckpointKind::Distributed || !directory.is_dir() {
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
        let is_given = files.iter().any(|(given, _)| *given == name);
        if is_companion(&name) && !is_given {
            let bytes = read_regular(path, MAX_COMPANION)?;
            let digest = input.manifest().and_then(|manifest| manifest.companions.get(&name));
            if digest.is_some_and(|digest| *digest != FileDigest::of(&bytes)) {
                let message = "does not match its checksum in the manifest; it was damaged, or changed \
                               after the save. To take it as it is, name it with `--config`, or move it \
                               away";
                return Err(Error::checkpoint(path, message));
            }
            let is_unpacked = name == CONFIG && options.changes() && packing_of(input)?.is_some();
            let bytes = if is_unpacked { without_packing(path)? } else { bytes };
            files.push((name, bytes));
        }
    }
    Ok(files)
}

/// The `config.json` at `path` for weights that are plain.
fn without_packing(path: &Path) -> Result<Vec<u8>> {
    let mut config: serde_json::Map<String, Value> = read_json(path, MAX_COMPANION)?;
    config.remove(Packing::KEY);
    serde_json::to_vec_pretty(&config).map_err(Error::other)
}

/// Whether a file belongs to a model but does not hold weights.
fn is_companion(name: &str) -> bool {
    let kind = Path::new(name).extension().and_then(|e| e.to_str());
    matches!(kind, Some("json" | "txt" | "model" | "jinja"))
        && !name.ends_with(".index.json")
        && name != super::super::FULL_MANIFEST
}
