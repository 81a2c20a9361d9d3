//! The trait of things with a forward.

use candle_core::Tensor;

use crate::Result;

/// A layer or block that maps one tensor to one tensor. Every layer of candle_nn is one.
pub trait Module {
    /// Computes the output.
    fn forward(&self, x: &Tensor) -> Result<Tensor>;
}

impl<M: candle_core::Module> Module for M {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(candle_core::Module::forward(self, x)?)
    }
}
