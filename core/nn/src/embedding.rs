//! The embedding layer.

use std::sync::Arc;

use candle_core::Tensor;

use super::adapter;
use super::kernels::embedding::{checked_ids, local_ids};
use super::lookup::Lookup;
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
    table: Arc<dyn Lookup>,
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
        Ok(Self { table: adapter::lookup(b, &layer, weight)?, layer })
    }

    /// The table, `[rows, width]`; [`Linear::tied`](super::Linear::tied) shares it.
    pub fn weight(&self) -> &Parameter {
        self.table.weight()
    }
}

impl Module for Embedding {
    /// # Errors
    /// If an id is not below the number of rows, or candle reports an error.
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let weight = self.weight();
        let [rows, width] = [weight.compute_shape()[0], weight.compute_shape()[1]];
        let all = self.layer.run(|| checked_ids(ids, weight.global_shape()[0]))?;
        let host_ids = local_ids(all, weight.compute_region().offsets[0], rows);
        let mut shape = ids.dims().to_vec();
        shape.push(width);
        let y = self.layer.run(|| self.table.forward(&host_ids))?.reshape(shape)?;
        let (y, output) = self.layer.redistribute_output(y)?;
        let table = self.table.clone();
        self.layer.record(&[], &self.table.parameters(), y, move |_, grad| {
            table.backward(&host_ids, &output.backward(grad)?)?;
            Ok(vec![])
        })
    }
}
