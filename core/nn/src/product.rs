//! The product of a linear layer with its weight.

use std::fmt;

use candle_core::Tensor;

use super::kernels::matmul::{self, InputGrad};
use super::weight::Weight;
use crate::Result;
use fulgurite_engine::parameter::Parameter;

/// The product of a linear layer's input and weight. An adapter is another product, around the
/// weight; [`product`](super::adapter::product) chooses.
pub(super) trait Product: fmt::Debug + Send + Sync {
    /// Returns the weight, without the adapter.
    fn weight(&self) -> &Weight;

    /// Returns all parameters, the weight's first.
    fn parameters(&self) -> Vec<&Parameter>;

    /// Whether rows of the input can be computed separately, independent of their position in the
    /// batch.
    fn computes_rows_apart(&self) -> bool;

    /// Computes the output for `x`, plus `bias`, outside the graph.
    fn forward(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<(Tensor, ProductBackward)>;
}

/// The backward of a product, for the input and the output's gradient. Returns the input's
/// gradient and adds the parameters' gradients, without ending their uses.
pub(super) type ProductBackward =
    Box<dyn Fn(&Tensor, &Tensor, InputGrad) -> Result<Option<Tensor>> + Send + Sync>;

impl Product for Weight {
    fn weight(&self) -> &Weight {
        self
    }

    fn parameters(&self) -> Vec<&Parameter> {
        self.parameters().collect()
    }

    fn computes_rows_apart(&self) -> bool {
        true
    }

    fn forward(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<(Tensor, ProductBackward)> {
        let y = matmul::linear(x, &self.value()?, bias)?;
        let weight = self.clone();
        Ok((y, Box::new(move |x, grad, into| weight.backward(x, grad, into))))
    }
}
