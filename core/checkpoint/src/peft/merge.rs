//! A model with an adapter merged into it.

use std::path::Path;

use candle_core::{DType, Device, Tensor};

use super::super::weights::MAX_COMPANION;
use super::super::{TensorInfo, TensorSource};
use super::AdapterSource;
use crate::{Error, Result};
use fulgurite_engine::shard::Region;
use fulgurite_error::files::read_regular;

/// The magnitudes of an adapter, relative to its layer.
const MAGNITUDE: &str = "lora_magnitude_vector";

/// The tensors of a base model, with those of an adapter added: `V = W + scale B A`, and of one with magnitudes
/// (DoRA) `magnitude / norm(V) V`, row by row. Computed in f32 (f64 for f64).
/// What was trained beside the adapters takes the place of the base's.
pub struct MergedModel<'a> {
    base: &'a dyn TensorSource,
    adapter: AdapterSource,
    scale: f64,
}

impl<'a> MergedModel<'a> {
    /// `base` with the adapter in the directory `adapter`.
    ///
    /// # Errors
    /// If that is no adapter, or the base has not the layers that it is for, or shares the weight of one with
    /// another layer.
    pub fn new(base: &'a dyn TensorSource, adapter: &Path) -> Result<Self> {
        let source = AdapterSource::open(adapter)?;
        let scale = source.config().adapters(adapter)?.scale();
        for name in source.names() {
            let layer = name.rfind(".lora_").map(|at| &name[..at]);
            let target = layer.map_or_else(|| name.to_owned(), |layer| format!("{layer}.weight"));
            if base.info(&target).is_none() {
                let message = format!(
                    "has `{name}`, and {} has no `{target}`: it is an adapter of another model",
                    base.location().display()
                );
                return Err(Error::checkpoint(adapter, message));
            }
            if name.ends_with(".lora_embedding_A")
                && layer.is_some_and(|layer| source.info(&format!("{layer}.{MAGNITUDE}")).is_some())
            {
                let message = format!(
                    "has magnitudes (DoRA) of the embedding `{target}`; only those of linear layers can be merged"
                );
                return Err(Error::checkpoint(adapter, message));
            }
            if name.ends_with(".lora_embedding_A") && is_tied(base.location()) {
                return Err(Error::checkpoint(
                    adapter,
                    format!(
                        "changes the embedding `{target}`, which {} shares with its output head \
                         (`tie_word_embeddings`): merged, it would change the head, too. Keep the adapter apart",
                        base.location().display()
                    ),
                ));
            }
        }
        Ok(Self { base, adapter: source, scale })
    }

    /// What the adapter adds to a part of a weight, in `dtype`; `None` for other tensors.
    fn added(&self, name: &str, region: &Region, dtype: DType) -> Result<Option<Tensor>> {
        let Some(layer) = name.strip_suffix(".weight") else { return Ok(None) };
        let pairs = [("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B")];
        for (embedding, (a, b)) in [false, true].into_iter().zip(pairs) {
            let (a, b) = (format!("{layer}.{a}"), format!("{layer}.{b}"));
            let Some(of_a) = self.adapter.info(&a) else { continue };
            let rank = of_a.shape[0];
            // The weight is [outputs, inputs]; an embedding's is [inputs, outputs].
            let (outputs, inputs) = if embedding { (1, 0) } else { (0, 1) };
            let part = |name: &str, sizes: [usize; 2], offsets: [usize; 2]| {
                let region = Region { offsets: offsets.to_vec(), sizes: sizes.to_vec() };
                let values = self.adapter.read(name, &region, dtype, &Device::Cpu)?;
                Ok::<_, Error>(values.reshape(&sizes[..])?)
            };
            let a = part(&a, [rank, region.sizes[inputs]], [0, region.offsets[inputs]])?;
            let b = part(&b, [region.sizes[outputs], rank], [region.offsets[outputs], 0])?;
            let product = (b.matmul(&a)? * self.scale)?;
            let product = if embedding { product.t()?.contiguous()? } else { product };
            return Ok(Some(product.flatten_all()?));
        }
        Ok(None)
    }

    /// What the rows of a part of an adapted weight are multiplied by, `[rows, 1]`: their magnitudes, divided by the
    /// norms of the whole rows. `None` for an adapter without magnitudes.
    fn factor(&self, name: &str, region: &Region, dtype: DType) -> Result<Option<Tensor>> {
        let Some(layer) = name.strip_suffix(".weight") else { return Ok(None) };
        let magnitude = format!("{layer}.{MAGNITUDE}");
        let Some(of_base) = self.base.info(name) else { return Ok(None) };
        if self.adapter.info(&magnitude).is_none() {
            return Ok(None);
        }
        let (start, n, inputs) = (region.offsets[0], region.sizes[0], of_base.shape[1]);
        let rows = Region { offsets: vec![start, 0], sizes: vec![n, inputs] };
        let whole = self.base.read(name, &rows, dtype, &Device::Cpu)?;
        let whole = match self.added(name, &rows, dtype)? {
            Some(added) => (whole + added)?,
            None => whole,
        };
        let norms = whole.reshape((n, inputs))?.sqr()?.sum(1)?.sqrt()?;
        // A row of zeros stays one.
        let inverse = norms.gt(0.0)?.where_cond(&norms.recip()?, &norms.zeros_like()?)?;
        let rows = Region { offsets: vec![start], sizes: vec![n] };
        let magnitude = self.adapter.read(&magnitude, &rows, dtype, &Device::Cpu)?;
        Ok(Some((magnitude.flatten_all()? * inverse)?.reshape((n, 1))?))
    }
}

/// Whether the model in this directory has one tensor for embedding and head.
fn is_tied(base: &Path) -> bool {
    let config = read_regular(base.join("config.json"), MAX_COMPANION).ok();
    let config = config.and_then(|bytes| serde_json::from_slice::<serde_json::Value>(&bytes).ok());
    config.is_some_and(|config| config["tie_word_embeddings"] == true)
}

impl TensorSource for MergedModel<'_> {
    fn location(&self) -> &Path {
        self.base.location()
    }

    fn names(&self) -> Vec<&str> {
        // A checkpoint of the run that trained the adapter has it, too.
        let merged = |name: &&str| !(name.contains(".lora_") && self.adapter.info(name).is_some());
        self.base.names().into_iter().filter(merged).collect()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.base.info(name)
    }

    fn read(&self, name: &str, region: &Region, dtype: DType, device: &Device) -> Result<Tensor> {
        if self.adapter.info(name).is_some() {
            return self.adapter.read(name, region, dtype, device);
        }
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        match self.added(name, region, wide)? {
            None => self.base.read(name, region, dtype, device),
            Some(added) => {
                let base = self.base.read(name, region, wide, &Device::Cpu)?;
                let merged = (base + added)?;
                let merged = match self.factor(name, region, wide)? {
                    None => merged,
                    Some(factor) => {
                        merged.reshape(&region.sizes[..])?.broadcast_mul(&factor)?.flatten_all()?
                    }
                };
                Ok(merged.to_dtype(dtype)?.to_device(device)?)
            }
        }
    }
}
