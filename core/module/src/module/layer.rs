//! The [`Module`] trait.

use candle_core::Tensor;

use crate::Result;

/// A layer or block that maps one tensor to one tensor.
///
/// No type implements both this trait and candle's `Module`, so a program can import both.
/// [`CandleModule`] turns a type with candle's trait, such as every candle_nn layer, into this
/// trait.
#[diagnostic::on_unimplemented(
    note = "a layer with candle's trait `Module` has this one in a `fulgurite::core::module::CandleModule`"
)]
pub trait Module {
    /// Computes the output.
    fn forward(&self, x: &Tensor) -> Result<Tensor>;
}

/// Wraps a candle layer as a [`Module`], for example for a [`Unit`](super::Unit).
///
/// ```
/// use fulgurite_core::Result;
/// use fulgurite_core::module::{CandleModule, ModuleBuilder, Unit};
///
/// fn block(b: &ModuleBuilder) -> Result<Unit<CandleModule<candle_nn::Linear>>> {
///     b.unit("block", |b| Ok(CandleModule(candle_nn::linear(4, 4, b.var_builder())?)))
/// }
/// ```
#[derive(Debug, Clone)]
pub struct CandleModule<M>(pub M);

impl<M: candle_core::Module> Module for CandleModule<M> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(self.0.forward(x)?)
    }
}
