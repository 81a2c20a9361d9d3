//! The trait of things with a forward.

use candle_core::Tensor;

use crate::Result;

/// A layer or block that maps one tensor to one tensor.
///
/// No type has this trait and candle's of the same name, so a program can use both, and `forward` is
/// that of the one which the layer has. What has candle's trait (every layer of candle_nn) becomes a
/// module of this one in a [`CandleModule`].
#[diagnostic::on_unimplemented(
    note = "a layer with candle's trait `Module` has this one in a `fulgurite::core::module::CandleModule`"
)]
pub trait Module {
    /// Computes the output.
    fn forward(&self, x: &Tensor) -> Result<Tensor>;
}

/// A layer of candle, as a [`Module`]: in a [`Unit`](super::Unit) or wherever else one is expected.
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
