//! A model with an adapter merged into it.

use std::path::Path;

use candle_core::{DType, Device, Tensor};

use super::super::{TensorInfo, TensorSource, same_values};
use super::load::apart;
use super::source::layer_of;
use super::{ADAPTER_CONFIG, AdapterSource};
use crate::chunks::blocks;
use crate::json::read_json;
use crate::narrow::converted;
use crate::source::loaded_bytes;
use crate::stored::loadable_dtype;
use crate::weights::MAX_COMPANION;
use crate::{Error, Result};
use fulgurite_engine::autograd::storage::with_bytes;
use fulgurite_engine::module::expert_path;
use fulgurite_engine::shard::Region;

/// Suffix of an adapter's magnitudes, after the layer's path.
const MAGNITUDE: &str = "lora_magnitude_vector";

/// Suffixes of an adapter's two matrices, for a linear layer and for an embedding.
const PAIRS: [(&str, &str); 2] =
    [("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B")];

/// The tensors of a base model, with an adapter merged into them.
///
/// A merged weight is `V = W + scale B A`; with magnitudes (DoRA) it is `magnitude / norm(V) V`,
/// row by row. Computed in f32 (f64 for f64). Modules that were trained beside the adapters, and
/// weights in the adapter's files, replace the base's.
pub struct MergedModel<'a> {
    base: &'a dyn TensorSource,
    adapter: AdapterSource,
    tied: TiedHead,
}

impl<'a> MergedModel<'a> {
    /// Merges the adapter in the directory `adapter` into `base`.
    ///
    /// # Errors
    /// If the directory is not an adapter, has another scale for some layers, or does not fit the
    /// base. If a module that it changes shares its weight with another module of the base.
    pub fn new(base: &'a dyn TensorSource, adapter: &Path) -> Result<Self> {
        let is_stack = |name: &str| base.info(name).is_some_and(|info| info.shape.len() == 3);
        let source = AdapterSource::open(adapter)?.with_stacks(is_stack)?;
        source.config().bias(&adapter.join(ADAPTER_CONFIG))?;
        let merged = Self { base, adapter: source, tied: TiedHead::of(base)? };
        for name in merged.adapter.names() {
            match layer_of(name) {
                Some(layer) => merged.check_adapter(layer, name, &merged.tied)?,
                None => merged.check_other(name, &merged.tied)?,
            }
            merged.warn_of_infinite(name)?;
            merged.check_own_adapter(name)?;
        }
        let missing = merged.missing_layers();
        if !missing.is_empty() {
            tracing::warn!(
                "{}: has no tensors for {} of the layers in `target_modules`, which stay as in the base: {}",
                merged.adapter.location().display(),
                missing.len(),
                missing.join(", ")
            );
        }
        Ok(merged)
    }

    /// Returns the matrices of the base that `target_modules` names, but that lack an adapter.
    fn missing_layers(&self) -> Vec<&str> {
        let (config, layers) = (self.adapter.config(), self.adapter.layers());
        let names = self.base.names();
        let is_matrix =
            |name: &&str| self.base.info(name).is_some_and(|info| info.shape.len() == 2);
        let paths = names.into_iter().filter(is_matrix).filter_map(|n| n.strip_suffix(".weight"));
        paths
            .filter(|path| config.targets(path) == Some(true))
            .filter(|path| config.saved_module(path).is_none() && !layers.contains(path))
            .collect()
    }

    /// Checks a base that is a checkpoint of the run that trained the adapter.
    ///
    /// Such a base has the adapter's tensors too, and they must equal the merged ones.
    fn check_own_adapter(&self, name: &str) -> Result<()> {
        let (Some(own), Some(info)) = (self.base.info(name), self.adapter.info(name)) else {
            return Ok(());
        };
        if layer_of(name).is_none() {
            return Ok(());
        }
        let region = Region::full(&info.shape);
        let read = |source: &dyn TensorSource| source.read(name, &region, DType::F32, &Device::Cpu);
        let differs = own.shape != info.shape || {
            let (own, adapter) = (read(self.base)?, read(&self.adapter)?);
            with_bytes(&own, |own| with_bytes(&adapter, |adapter| own != adapter))??
        };
        if !differs {
            return Ok(());
        }
        self.fail(format!(
            "has another `{name}` than {}, such as that of another step. To merge the adapter of that checkpoint, \
             write it first: `fit` with `trainer.ckpt_path` = the checkpoint, `trainer.max_steps` = its step and \
             another `checkpoint.dir` leaves it in `adapter` in its run's directory",
            self.base.location().display()
        ))
    }

    /// Warns if a tensor of the adapter has values that are NaN or infinite.
    fn warn_of_infinite(&self, name: &str) -> Result<()> {
        let Some(info) = self.adapter.info(name) else { return Ok(()) };
        if loadable_dtype(info.dtype).is_none_or(|dtype| !dtype.is_float()) {
            return Ok(());
        }
        for region in blocks(&info.shape, size_of::<f32>()) {
            let values = self.adapter.read(name, &region, DType::F32, &Device::Cpu)?;
            let infinite = |x: &[u8]| !f32::from_le_bytes([x[0], x[1], x[2], x[3]]).is_finite();
            if with_bytes(&values, |bytes| bytes.chunks_exact(4).any(infinite))? {
                tracing::warn!(
                    "{}: `{name}` has values that are NaN or infinite, and so will the merged model; \
                     merge an adapter of an earlier step",
                    self.adapter.location().display()
                );
                return Ok(());
            }
        }
        Ok(())
    }

    fn fail<T>(&self, message: String) -> Result<T> {
        Err(Error::checkpoint(self.adapter.location(), message))
    }

    /// Checks a tensor of an adapter, and that the base has its layer.
    fn check_adapter(&self, layer: &str, name: &str, tied: &TiedHead) -> Result<()> {
        let target = format!("{layer}.weight");
        if tied.shares(&target) {
            return self.fail(format!(
                "changes `{target}`, which in {} is one weight with the embedding or head \
                 (`tie_word_embeddings`): merged, it would change the other, too. Keep the adapter apart",
                self.base.location().display()
            ));
        }
        let Some(base) = self.base.info(&target) else { return self.no_such(name, &target) };
        if loadable_dtype(base.dtype).is_none_or(|dtype| !dtype.is_float()) {
            return self.fail(format!(
                "changes `{target}`, whose dtype {} is none that it can be added to; merge it into the base \
                 before that is quantised",
                base.dtype
            ));
        }
        // Those of all experts are stacks.
        let (experts, rows, columns) = match base.shape[..] {
            [rows, columns] => (None, rows, columns),
            [experts, rows, columns] if self.adapter.is_stack(name) => {
                (Some(experts), rows, columns)
            }
            _ => {
                let shape = base.shape;
                return self.fail(format!(
                    "changes `{target}`, of the shape {shape:?}; only matrices take adapters here"
                ));
            }
        };
        let is_embedding = name.contains(".lora_embedding_");
        let magnitude = format!("{layer}.{MAGNITUDE}");
        let has_magnitude = self.adapter.info(&magnitude).is_some();
        if has_magnitude != self.adapter.config().use_dora && !is_embedding {
            let has = if has_magnitude { "has" } else { "has no" };
            return self.fail(format!(
                "{has} `{magnitude}`, and `use_dora` in {ADAPTER_CONFIG} is {}; set it right",
                !has_magnitude
            ));
        }
        if is_embedding && self.adapter.info(&magnitude).is_some() {
            return self.fail(format!(
                "has magnitudes (DoRA) of the embedding `{target}`; only those of linear layers can be merged"
            ));
        }
        if experts.is_some() && (is_embedding || has_magnitude) {
            return self.fail(format!(
                "has `{name}`; for `{target}`, the weights of all experts, only plain LoRA can be merged"
            ));
        }
        let is_transposed = is_embedding || self.has_transposed(layer);
        if is_transposed && has_magnitude {
            return self.fail(format!(
                "has magnitudes (DoRA) of `{target}`, whose matrix is transposed in the base; merge it in PEFT \
                 (`merge_and_unload`)"
            ));
        }
        // A weight is [outputs, inputs]; an embedding's is [inputs, outputs].
        let (outputs, inputs) = if is_transposed { (columns, rows) } else { (rows, columns) };
        let pair = PAIRS[usize::from(is_embedding)];
        let part = |part: &str| self.adapter.info(&format!("{layer}.{part}")).map(|i| i.shape);
        let (Some(a), Some(b)) = (part(pair.0), part(pair.1)) else {
            return self.fail(format!(
                "has `{name}`, and not both of `{layer}.{}` and `{layer}.{}`",
                pair.0, pair.1
            ));
        };
        let rank = a.iter().rev().nth(1).copied().unwrap_or(0);
        let stack = |sizes: [usize; 2]| experts.into_iter().chain(sizes).collect::<Vec<_>>();
        let fits = a == stack([rank, inputs]) && b == stack([outputs, rank]);
        let config = self.adapter.config();
        if !fits || rank == 0 || (rank != config.r && !config.has_rank_pattern()) {
            return self.fail(format!(
                "has `{layer}.{}` of the shape {a:?} and `{layer}.{}` of the shape {b:?} for `{target}` of \
                 {outputs} outputs and {inputs} inputs; its configuration says rank {}",
                pair.0,
                pair.1,
                config.r
            ));
        }
        let known = [pair.0, pair.1, MAGNITUDE].iter().any(|p| name == format!("{layer}.{p}"));
        let in_file = experts.map_or_else(|| layer.to_owned(), |_| expert_path(layer, 0));
        if known && config.targets(&in_file) == Some(false) {
            return self.fail(format!(
                "has `{name}`, and `target_modules` in {ADAPTER_CONFIG} names no layer `{in_file}`, so that PEFT \
                 leaves it out; add the layer there, or remove the tensor"
            ));
        }
        match known {
            true => Ok(()),
            false => {
                self.fail(format!("has a tensor `{name}`, which is of no LoRA or DoRA adapter"))
            }
        }
    }

    /// Whether a linear layer's weight is `[inputs, outputs]` in the base, as GPT-2's are.
    fn has_transposed(&self, layer: &str) -> bool {
        let shape = |source: &dyn TensorSource, name: &str| {
            source.info(&format!("{layer}.{name}")).map(|info| info.shape)
        };
        let [a, b] = [PAIRS[0].0, PAIRS[0].1].map(|part| shape(&self.adapter, part));
        let (Some(a), Some(b)) = (a, b) else { return false };
        // Layers of other kinds may stand beside such layers.
        let transposed = [a.last(), b.first()].map(|size| size.copied().unwrap_or(0));
        self.adapter.config().has_transposed_base()
            && shape(self.base, "weight").is_some_and(|base| base == transposed)
    }

    /// Checks a tensor that replaces a tensor of the base.
    fn check_other(&self, name: &str, tied: &TiedHead) -> Result<()> {
        let target = match self.base.info(name) {
            None if tied.shares(name) => tied.other(name),
            _ => name,
        };
        if let Some(base) = self.base.info(target) {
            let found = self.adapter.info(name).map(|info| info.shape).unwrap_or_default();
            if found != base.shape {
                return self.fail(format!(
                    "has `{name}` of the shape {found:?}, and `{target}` in {} has the shape {:?}; \
                     if the vocabulary was resized, resize the base's, too (`resize_token_embeddings`)",
                    self.base.location().display(),
                    base.shape
                ));
            }
        } else {
            return self.no_such(name, name);
        }
        if !tied.shares(name) {
            return Ok(());
        }
        let Some(other) = self.adapter.others().find(|other| *other != name && tied.shares(other))
        else {
            let alone =
                self.adapter.is_of_base(name) || self.adapter.config().ensures_weight_tying();
            return if alone { Ok(()) } else { self.fail(apart(name, tied.other(name))) };
        };
        match same_values(&self.adapter, name, other)? {
            true => Ok(()),
            false => self.fail(format!(
                "has `{name}` and `{other}`, which differ, and are one weight in {} (`tie_word_embeddings`); untie \
                 the base first: save it with `tie_word_embeddings = false`",
                self.base.location().display()
            )),
        }
    }

    fn no_such<T>(&self, name: &str, target: &str) -> Result<T> {
        self.fail(format!(
            "has `{name}`, and {} has no `{target}`: it is an adapter of another model",
            self.base.location().display()
        ))
    }

    /// Reads a part of a weight, without its adapter.
    fn weight(&self, name: &str, region: &Region, dtype: DType, device: &Device) -> Result<Tensor> {
        let other = || self.adapter.others().find(|other| self.tied.shares(other));
        let replacing = match self.adapter.info(name) {
            Some(_) => Some(name),
            None if self.tied.shares(name) => other(),
            None => None,
        };
        match replacing {
            Some(replacing) => self.adapter.read(replacing, region, dtype, device),
            None => self.base.read(name, region, dtype, device),
        }
    }

    /// Returns the adapter's contribution to a part of a weight, in `dtype`; `None` for other
    /// tensors.
    fn added(&self, name: &str, region: &Region, dtype: DType) -> Result<Option<Tensor>> {
        let Some(layer) = name.strip_suffix(".weight") else { return Ok(None) };
        for (embedding, (a, b)) in [false, true].into_iter().zip(PAIRS) {
            let (a, b) = (format!("{layer}.{a}"), format!("{layer}.{b}"));
            let Some(of_a) = self.adapter.info(&a) else { continue };
            // Stacks of experts have another dimension in front.
            let first = of_a.shape.len() - 2;
            let rank = of_a.shape[first];
            // The weight is [outputs, inputs]; an embedding's is [inputs, outputs].
            let is_transposed = embedding || self.has_transposed(layer);
            let (outputs, inputs) = if is_transposed { (1, 0) } else { (first, first + 1) };
            let part = |name: &str, sizes: [usize; 2], offsets: [usize; 2]| {
                let region = Region {
                    offsets: [&region.offsets[..first], &offsets].concat(),
                    sizes: [&region.sizes[..first], &sizes].concat(),
                };
                let values = self.adapter.read(name, &region, dtype, &Device::Cpu)?;
                Ok::<_, Error>(values.reshape(region.sizes)?)
            };
            let a = part(&a, [rank, region.sizes[inputs]], [0, region.offsets[inputs]])?;
            let b = part(&b, [region.sizes[outputs], rank], [region.offsets[outputs], 0])?;
            let in_file = if first == 0 { layer.to_owned() } else { expert_path(layer, 0) };
            let product = (b.matmul(&a)? * self.adapter.config().scale(&in_file, rank))?;
            let product = if is_transposed { product.t()?.contiguous()? } else { product };
            return Ok(Some(product.flatten_all()?));
        }
        Ok(None)
    }

    /// Returns the factors of the rows of a part of an adapted weight, `[rows, 1]`.
    ///
    /// They are the rows' magnitudes divided by the norms of the whole rows. Returns `None` for an
    /// adapter without magnitudes.
    fn factor(&self, name: &str, region: &Region, dtype: DType) -> Result<Option<Tensor>> {
        let Some(layer) = name.strip_suffix(".weight") else { return Ok(None) };
        let magnitude = format!("{layer}.{MAGNITUDE}");
        let Some(of_base) = self.base.info(name) else { return Ok(None) };
        if self.adapter.info(&magnitude).is_none() {
            return Ok(None);
        }
        let (start, n, inputs) = (region.offsets[0], region.sizes[0], of_base.shape[1]);
        let rows = Region { offsets: vec![start, 0], sizes: vec![n, inputs] };
        let whole = self.weight(name, &rows, dtype, &Device::Cpu)?;
        let whole = match self.added(name, &rows, dtype)? {
            Some(added) => (whole + added)?,
            None => whole,
        };
        let norms = whole.reshape((n, inputs))?.sqr()?.sum(1)?.sqrt()?;
        // A row of zeros stays zero.
        let inverse = norms.gt(0.0)?.where_cond(&norms.recip()?, &norms.zeros_like()?)?;
        let rows = Region { offsets: vec![start], sizes: vec![n] };
        let magnitude = self.adapter.read(&magnitude, &rows, dtype, &Device::Cpu)?;
        Ok(Some((magnitude.flatten_all()? * inverse)?.reshape((n, 1))?))
    }
}

/// The weight that a base's embedding and head share.
struct TiedHead {
    /// Its names in the base: one name, or two for equal values. Empty if the base shares no
    /// weight.
    names: Vec<String>,
}

impl TiedHead {
    /// The head's name in models of `transformers`.
    const HEAD: &str = "lm_head.weight";

    fn of(base: &dyn TensorSource) -> Result<Self> {
        let none = Self { names: Vec::new() };
        let path = base.location().join("config.json");
        if !path.is_file() {
            return Ok(none);
        }
        let config: serde_json::Value = read_json(&path, MAX_COMPANION)?;
        let text = config.get("text_config").unwrap_or(&config);
        let rows = text["vocab_size"].as_u64();
        let has_rows = |name: &&str| {
            let shape = base.info(name).map(|info| info.shape).unwrap_or_default();
            shape.len() == 2 && Some(shape[0] as u64) == rows
        };
        let names: Vec<String> =
            base.names().into_iter().filter(has_rows).map(str::to_owned).collect();
        let says = |config: &serde_json::Value| config["tie_word_embeddings"].as_bool();
        let is_tied = match (says(&config).or(says(text)), &names[..]) {
            // For many language models the default of the key is true.
            (said, [_]) => said.unwrap_or_else(|| has_head(&config)),
            // As in transformers, two different weights are not tied.
            (Some(true), [a, b]) => same_values(base, a, b)?,
            _ => false,
        };
        Ok(if is_tied { Self { names } } else { none })
    }

    fn shares(&self, name: &str) -> bool {
        let is_head = name == Self::HEAD || name.ends_with(".lm_head.weight");
        !self.names.is_empty() && (is_head || self.names.iter().any(|shared| shared == name))
    }

    /// Returns another name of the weight.
    fn other(&self, name: &str) -> &str {
        self.names.iter().map(String::as_str).find(|other| *other != name).unwrap_or(Self::HEAD)
    }
}

/// Whether a model has an output head over the vocabulary, judged by its configuration.
fn has_head(config: &serde_json::Value) -> bool {
    let names = config["architectures"].as_array();
    let has_head = |name: &serde_json::Value| {
        name.as_str().is_some_and(|name| name.contains("LM") || name.contains("Generation"))
    };
    names.is_none_or(|names| names.iter().any(has_head))
}

impl TensorSource for MergedModel<'_> {
    fn location(&self) -> &Path {
        self.base.location()
    }

    fn names(&self) -> Vec<&str> {
        // A checkpoint of the run that trained the adapter has the adapter's tensors too.
        let merged = |name: &&str| !(name.contains(".lora_") && self.adapter.info(name).is_some());
        self.base.names().into_iter().filter(merged).collect()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.base.info(name)
    }

    fn read(&self, name: &str, region: &Region, dtype: DType, device: &Device) -> Result<Tensor> {
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        match self.added(name, region, wide)? {
            None => self.weight(name, region, dtype, device),
            Some(added) => {
                let base = self.weight(name, region, wide, &Device::Cpu)?;
                let merged = (base + added)?;
                let merged = match self.factor(name, region, wide)? {
                    None => merged,
                    Some(factor) => {
                        merged.reshape(&region.sizes[..])?.broadcast_mul(&factor)?.flatten_all()?
                    }
                };
                Ok(converted(self.location(), name, &merged, dtype)?.to_device(device)?)
            }
        }
    }

    fn read_stored(&self, name: &str) -> Result<Vec<u8>> {
        // A tensor that an adapter changes has a dtype that candle supports.
        match self.info(name).is_some_and(|info| loadable_dtype(info.dtype).is_some()) {
            true => loaded_bytes(self, name),
            false => self.base.read_stored(name),
        }
    }

    fn unreadable(&self, name: &str) -> Option<&str> {
        self.base.unreadable(name)
    }
}
