//! The embedding layer.

use candle_core::Tensor;

use super::kernels::embedding::{checked_ids, local_ids, lookup, lookup_grad};
use super::lora::Lora;
use super::sizes::check_sizes;
use super::styles::EmbeddingStyles;
use crate::Result;
use fulgurite_engine::module::{Module, ModuleBuilder};
use fulgurite_engine::parallel::LayerHandle;
use fulgurite_engine::parameter::{Init, Parameter};

/// An embedding table of `[rows, width]`.
///
/// `ids` are u32 or i64 of any shape; the output appends the dimension `width`.
///
/// A plan may make it [`Rowwise`](fulgurite_engine::parallel::Rowwise), which shards the rows (the
/// vocabulary), or [`Colwise`](fulgurite_engine::parallel::Colwise).
/// [`Adapters`](fulgurite_engine::module::Adapters) may target it.
#[derive(Debug, Clone)]
pub struct Embedding {
    weight: Parameter,
    lora: Option<Lora>,
    layer: LayerHandle,
}

impl Embedding {
    /// A table with normally distributed initial values of standard deviation 1.
    ///
    /// # Errors
    /// If a size is 0, or the builder's path has a layer already.
    pub fn new(b: &ModuleBuilder, rows: usize, width: usize) -> Result<Self> {
        Self::with_init(b, rows, width, Init::Normal { mean: 0.0, std: 1.0 })
    }

    /// A table with these initial values.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_init(b: &ModuleBuilder, rows: usize, width: usize, init: Init) -> Result<Self> {
        check_sizes(b, &[("rows", rows), ("width", width)])?;
        let layer = b.declare(EmbeddingStyles { width })?;
        let weight = b.parameter("weight", [rows, width], init)?;
        let lora = Lora::of_embedding(b, &layer, rows, width)?;
        Ok(Self { weight, lora, layer })
    }

    /// The table, `[rows, width]`; [`Linear::tied`](super::Linear::tied) shares it.
    pub fn weight(&self) -> &Parameter {
        &self.weight
    }
}

impl Module for Embedding {
    /// # Errors
    /// If an id is not below the number of rows, or candle reports an error.
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let weight = self.weight.value()?;
        let (rows, width) = weight.dims2()?;
        let all = self.layer.run(|| checked_ids(ids, self.weight.global_shape()[0]))?;
        let host_ids = local_ids(all, self.weight.compute_region().offsets[0], rows);
        let mut shape = ids.dims().to_vec();
        shape.push(width);
        let y = lookup(&host_ids, &weight)?;
        let y = match &self.lora {
            None => y,
            Some(lora) => self.layer.run(|| lora.look_up(&host_ids, y))?,
        };
        let y = y.reshape(shape)?;
        let (y, output) = self.layer.redistribute_output(y)?;
        let (weight, lora) = (self.weight.clone(), self.lora.clone());
        let parameters: Vec<&Parameter> = std::iter::once(&self.weight)
            .chain(self.lora.iter().flat_map(Lora::parameters))
            .collect();
        self.layer.record(&[], &parameters, y, move |_, grad| {
            let grad = output.backward(grad)?;
            lookup_grad(&weight, &host_ids, &grad)?;
            if let Some(lora) = &lora {
                lora.look_up_backward(&host_ids, &grad)?;
            }
            weight.end_use()?;
            Ok(vec![])
        })
    }
}
