//! How an embedding looks up its rows.

use std::fmt;

use candle_core::Tensor;

use super::kernels::embedding;
use crate::Result;
use fulgurite_engine::parameter::Parameter;

/// The rows of an embedding. An adapter is another lookup, around the table;
/// [`lookup`](super::adapter::lookup) chooses.
pub(super) trait Lookup: fmt::Debug + Send + Sync {
    /// Returns the table, without the adapter.
    fn weight(&self) -> &Parameter;

    /// Returns all parameters, the table first.
    fn parameters(&self) -> Vec<&Parameter>;

    /// Returns the rows of these local ids, `[ids, width]`.
    fn forward(&self, ids: &[u32]) -> Result<Tensor>;

    /// Adds the parameters' gradients for the rows' gradient and ends their uses.
    fn backward(&self, ids: &[u32], grad: &Tensor) -> Result<()>;
}

/// A table without an adapter.
#[derive(Debug)]
pub(super) struct Table(pub(super) Parameter);

impl Lookup for Table {
    fn weight(&self) -> &Parameter {
        &self.0
    }

    fn parameters(&self) -> Vec<&Parameter> {
        vec![&self.0]
    }

    fn forward(&self, ids: &[u32]) -> Result<Tensor> {
        embedding::lookup(ids, &self.0.value()?)
    }

    fn backward(&self, ids: &[u32], grad: &Tensor) -> Result<()> {
        embedding::lookup_grad(&self.0, ids, grad)?;
        self.0.end_use()
    }
}
