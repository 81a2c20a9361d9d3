//! The embedding layer.

use candle_core::Tensor;

use super::kernels::embedding::{checked_ids, local_ids, lookup, lookup_grad};
use super::styles::EmbeddingStyles;
use crate::Result;
use fulgurite_engine::module::{Module, ModuleBuilder};
use fulgurite_engine::parallel::LayerHandle;
use fulgurite_engine::parameter::{Init, Parameter};

/// An embedding table of `[rows, width]`.
///
/// `ids` are u32 or i64 of any shape; the output has `width` as one more dimension.
///
/// A plan may make it [`Rowwise`](fulgurite_engine::parallel::Rowwise), which cuts the rows (a
/// vocabulary), or [`Colwise`](fulgurite_engine::parallel::Colwise).
#[derive(Debug, Clone)]
pub struct Embedding {
    weight: Parameter,
    layer: LayerHandle,
}

impl Embedding {
    /// A table with normally distributed initial values of standard deviation 1.
    ///
    /// # Errors
    /// If there is a layer at the builder's path already.
    pub fn new(b: &ModuleBuilder, rows: usize, width: usize) -> Result<Self> {
        Self::with_init(b, rows, width, Init::Normal { mean: 0.0, std: 1.0 })
    }

    /// A table with these initial values.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_init(b: &ModuleBuilder, rows: usize, width: usize, init: Init) -> Result<Self> {
        let layer = b.declare(EmbeddingStyles { width })?;
        Ok(Self { weight: b.parameter("weight", [rows, width], init)?, layer })
    }

    /// The table, `[rows, width]`; [`Linear::tied`](super::Linear::tied) shares it.
    pub fn weight(&self) -> &Parameter {
        &self.weight
    }
}

impl Module for Embedding {
    /// # Errors
    /// Besides those of candle, if an id is not below the number of rows.
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let weight = self.weight.value()?;
        let (rows, width) = weight.dims2()?;
        let all = self.layer.run(|| checked_ids(ids, self.weight.global_shape()[0]))?;
        let host_ids = local_ids(all, self.weight.compute_region().offsets[0], rows);
        let mut shape = ids.dims().to_vec();
        shape.push(width);
        let y = lookup(&host_ids, &weight)?.reshape(shape)?;
        let (y, output) = self.layer.redistribute_output(y)?;
        let weight = self.weight.clone();
        self.layer.record(&[], &[&self.weight], y, move |_, grad| {
            lookup_grad(&weight, &host_ids, &output.backward(grad)?)?;
            weight.end_use()?;
            Ok(vec![])
        })
    }
}
