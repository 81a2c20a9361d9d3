//! [`GgufAdapter`]: an adapter as a GGUF file, which llama.cpp applies to a model (`--lora`).

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use fulgurite_checkpoint::tools::Progress;
use fulgurite_checkpoint::{AdapterSource, TensorSource};
use fulgurite_engine::shard::Region;
use fulgurite_error::{Error, Result};

use super::dtype::{GgufDtype, encoded};
use super::file::{Metadata, TensorHeader, Value, Writer};
use super::model::{GgufModel, GgufOptions, GgufWritten};
use super::tensors::{Planned, Values, plan, reordered};
use crate::peft::base_directory;
use crate::weights::{View, WeightLayout};

/// The two matrices of a layer's adapter, and the factor of their product.
#[derive(Debug, Clone)]
struct Pair {
    /// `[rank, columns]`
    a: Tensor,
    /// `[rows, rank]`
    b: Tensor,
    scale: f64,
    /// The layer of the adapter's files: parts of one layer share `a`.
    layer: usize,
}

/// A LoRA adapter in PEFT's format that can be written as a GGUF file.
///
/// Fused projections get one pair of matrices. If the adapters of their parts have different first
/// matrices, the pair has the sum of their ranks, and blocks in the second matrix.
pub struct GgufAdapter {
    source: AdapterSource,
    base: GgufModel,
    options: GgufOptions,
}

impl GgufAdapter {
    /// Opens the adapter in a directory. Only `config.json` of the base is read: in the directory
    /// `base`, or where `adapter_config.json` says.
    ///
    /// # Errors
    /// If the directory has no adapter, or its base is not found. If it has magnitudes (DoRA),
    /// biases, modules trained whole or adapters of embeddings, which GGUF lacks.
    pub fn open(directory: &Path, base: Option<&Path>, options: GgufOptions) -> Result<Self> {
        let source = AdapterSource::open(directory)?;
        let config = source.config();
        let wrong = |message: &str| Err(Error::checkpoint(directory, message.to_owned()));
        let advice = "merge it instead: `--to gguf --adapter DIR` with the base as the input";
        if config.use_dora {
            return wrong(&format!("has magnitudes (DoRA), which GGUF lacks; {advice}"));
        }
        if config.lora_alpha == 0.0 {
            return wrong("has `lora_alpha` = 0, which llama.cpp takes for a missing number");
        }
        if let Some(other) = source.others().find(|name| !source.is_of_base(name)) {
            return wrong(&format!(
                "has `{other}` beside its adapters, and a GGUF adapter has no other tensors; {advice}"
            ));
        }
        if let Some(name) = source.names().iter().find(|name| name.contains(".lora_embedding_")) {
            return wrong(&format!(
                "has `{name}`, and adapters of embeddings are not written as GGUF; {advice}"
            ));
        }
        if options.dtype == Some(GgufDtype::Q4K) {
            return wrong(
                "is an adapter, which can be f32, f16, bf16 or q8_0; choose another `--dtype`",
            );
        }
        let base = base_directory(directory, base, config.base_model_name_or_path.as_deref())?;
        let without_tokenizer = GgufOptions { without_tokenizer: true, ..GgufOptions::default() };
        let base = GgufModel::of_directory(&base, without_tokenizer)?;
        Ok(Self { source, base, options })
    }

    /// Writes the file `path`. An existing file is replaced once the new one is complete. Not
    /// collective.
    ///
    /// # Errors
    /// If a layer is not in the base or has another shape there, a tensor is damaged, or the file
    /// cannot be written.
    pub fn write(&self, path: &Path, progress: &mut dyn FnMut(Progress)) -> Result<GgufWritten> {
        let (architecture, config, layout) = self.base.parts();
        let mut pairs = self.pairs(layout)?;
        let alpha = self.source.config().lora_alpha;
        let mut tensors = Vec::new();
        for planned in plan(architecture, config) {
            if let Some((a, b)) = matrices(&planned, &mut pairs, alpha)? {
                tensors.push((format!("{}.lora_a", planned.name), a));
                tensors.push((format!("{}.lora_b", planned.name), b));
            }
        }
        if let Some(name) = pairs.keys().next() {
            return Err(Error::checkpoint(
                self.source.location(),
                format!(
                    "has an adapter of `{name}`, which is no matrix of its own in the GGUF file of the base"
                ),
            ));
        }
        let dtype = self.options.dtype.unwrap_or(GgufDtype::F32);
        let header = |(name, values): &(String, Tensor)| {
            let shape = values.dims().to_vec();
            let dtype = dtype.of_matrix(shape[1], false);
            TensorHeader { name: name.clone(), shape, dtype }
        };
        let headers: Vec<TensorHeader> = tensors.iter().map(header).collect();
        let mut metadata = Metadata::default();
        metadata.set("general.architecture", architecture.name);
        metadata.set("general.type", "adapter");
        metadata.set("adapter.type", "lora");
        if let Some(name) = &self.options.name {
            metadata.set("general.name", name.as_str());
        }
        metadata.set("adapter.lora.alpha", Value::float(alpha));
        metadata.set("general.quantization_version", Value::U32(2));
        let mut writer = Writer::begin(path, &metadata, &headers)?;
        let total = headers.iter().map(|header| header.bytes() as u64).sum();
        let mut done = 0;
        for ((name, values), header) in tensors.iter().zip(&headers) {
            let bytes = encoded(name, values, header.dtype)?;
            writer.put(&bytes)?;
            writer.end_tensor()?;
            done += bytes.len() as u64;
            progress(Progress { done, total });
        }
        writer.finish()?;
        Ok(GgufWritten {
            path: path.to_owned(),
            architecture: architecture.name.to_owned(),
            tensors: tensors.len(),
            bytes: total,
            notes: Vec::new(),
        })
    }

    /// Reads all adapters, by the weights of the model that they change.
    fn pairs(&self, layout: Option<&WeightLayout>) -> Result<BTreeMap<String, Pair>> {
        let source = &self.source;
        let wrong = |message: String| Error::checkpoint(source.location(), message);
        let read = |name: &str| -> Result<Tensor> {
            let Some(info) = source.info(name) else {
                return Err(wrong(format!("there is no tensor `{name}`")));
            };
            if info.shape.len() != 2 {
                return Err(wrong(format!(
                    "tensor `{name}` has the shape {:?}, expected a matrix",
                    info.shape
                )));
            }
            let values = source.read(name, &Region::full(&info.shape), DType::F32, &Device::Cpu)?;
            Ok(values.reshape(info.shape)?)
        };
        let config = source.config();
        let names = source.names();
        let layers = names.iter().filter_map(|name| name.strip_suffix(".lora_A.weight"));
        let mut pairs = BTreeMap::new();
        for (layer, path) in layers.enumerate() {
            let a = read(&format!("{path}.lora_A.weight"))?;
            let b = read(&format!("{path}.lora_B.weight"))?;
            let rank = a.dims()[0];
            if b.dims()[1] != rank {
                return Err(wrong(format!("the matrices of `{path}` have different ranks")));
            }
            let scale = config.scale(path, rank);
            let weight = format!("{path}.weight");
            let parts = match layout {
                Some(layout) => layout.of_file(&weight),
                None => vec![(weight.clone(), View::WHOLE)],
            };
            for (name, view) in parts {
                // A row of the second matrix is an output of the layer.
                let view = View { transposed: false, ..view };
                let shape = view.shape(b.dims()).ok_or_else(|| {
                    wrong(format!("the adapter of `{path}` does not fit `{name}` of the base"))
                })?;
                let rows = view.regions(&Region::full(&shape)).into_iter();
                let rows = rows.map(|rows| b.narrow(0, rows.offsets[0], rows.sizes[0]));
                let rows = rows.collect::<candle_core::Result<Vec<_>>>()?;
                let b = Tensor::cat(&rows, 0)?;
                pairs.insert(name, Pair { a: a.clone(), b, scale, layer });
            }
        }
        Ok(pairs)
    }
}

/// Takes the adapters of a tensor's parts out of `pairs` and makes one of them.
fn matrices(
    planned: &Planned,
    pairs: &mut BTreeMap<String, Pair>,
    alpha: f64,
) -> Result<Option<(Tensor, Tensor)>> {
    let parts: Vec<Option<Pair>> =
        planned.sources.iter().map(|(source, _)| pairs.remove(source)).collect();
    let found: Vec<&Pair> = parts.iter().flatten().collect();
    let Some(first) = found.first() else { return Ok(None) };
    let wrong = |shape: &[usize]| {
        Error::Config(format!(
            "an adapter of `{}` has the shape {shape:?}, and the base has {:?} there; is it an adapter of this base?",
            planned.name, planned.shape
        ))
    };
    if let Some(pair) = found.iter().find(|pair| pair.a.dims()[1] != planned.shape[1]) {
        return Err(wrong(pair.a.dims()));
    }
    let shares = found.len() == parts.len() && found.iter().all(|pair| pair.layer == first.layer);
    let (a, blocks) = match shares {
        true => (first.a.clone(), found.iter().map(|pair| pair.b.clone()).collect()),
        false => apart(planned, &parts)?,
    };
    let rank = a.dims()[0];
    // llama.cpp multiplies by alpha / rank, with the rank of these matrices.
    let scaled = |(b, pair): (Tensor, Option<&Pair>)| -> Result<Tensor> {
        let own = pair.map_or(1.0, |pair| pair.scale / (alpha / rank as f64));
        Ok(if (own - 1.0).abs() < 1e-12 { b } else { (b * own)? })
    };
    let pairs = parts.iter().map(Option::as_ref);
    let blocks = blocks.into_iter().zip(pairs).map(scaled).collect::<Result<Vec<_>>>()?;
    let b = Tensor::cat(&blocks, 0)?;
    if b.dims()[0] != planned.shape[0] {
        return Err(wrong(b.dims()));
    }
    let b = match planned.values {
        Values::Reordered { heads } => reordered(&b, heads)?,
        _ => b,
    };
    Ok(Some((a, b)))
}

/// Stacks first matrices, and places the second ones in columns of their own.
fn apart(planned: &Planned, parts: &[Option<Pair>]) -> Result<(Tensor, Vec<Tensor>)> {
    let found: Vec<&Pair> = parts.iter().flatten().collect();
    let a = Tensor::cat(&found.iter().map(|pair| pair.a.clone()).collect::<Vec<_>>(), 0)?;
    let rank = a.dims()[0];
    let mut at = 0;
    let block = |(part, (_, rows)): (&Option<Pair>, &(String, usize))| -> Result<Tensor> {
        let Some(pair) = part else {
            return Ok(Tensor::zeros((*rows, rank), DType::F32, &Device::Cpu)?);
        };
        let own = pair.b.dims()[1];
        let block = pair.b.pad_with_zeros(1, at, rank - at - own)?;
        at += own;
        Ok(block)
    };
    Ok((a, parts.iter().zip(&planned.sources).map(block).collect::<Result<Vec<_>>>()?))
}
