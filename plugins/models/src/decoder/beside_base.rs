//! A decoder with adapters, beside the model that they change.

use candle_core::Tensor;
use fulgurite_engine::module::stage::StageTensors;
use fulgurite_engine::module::{ForwardScope, stage, without_adapters};
use fulgurite_error::{Error, Result};

use super::decoder::Decoder;
use super::layer::DecoderLayer;

/// Hidden states with and without adapters. Both pass each layer before the next one computes, so
/// that a pipeline can cut the model, and FSDP gathers each layer once.
pub(crate) struct BesideBase {
    pub(crate) adapted: Tensor,
    /// Without a gradient, and computed without dropout.
    pub(crate) base: Tensor,
}

impl StageTensors for BesideBase {
    fn tensors(&self) -> Vec<Tensor> {
        vec![self.adapted.clone(), self.base.clone()]
    }

    fn of_tensors(tensors: Vec<Tensor>) -> Result<Self> {
        match <[Tensor; 2]>::try_from(tensors) {
            Ok([adapted, base]) => Ok(Self { adapted, base }),
            Err(_) => Err(Error::other("a stage gives two hidden states")),
        }
    }
}

/// Calls `f` with adapters and gradients off, as in an evaluation: without dropout.
pub(crate) fn as_base<R>(f: impl FnOnce() -> R) -> R {
    without_adapters(|| {
        let _scope = ForwardScope { training: false, ..ForwardScope::current() }.enter();
        f()
    })
}

impl Decoder {
    /// The [hidden](Self::hidden) states, and those of the model with adapters off.
    ///
    /// # Errors
    /// As [`hidden`](Self::hidden).
    pub(crate) fn hidden_beside_base(&self, ids: &Tensor) -> Result<BesideBase> {
        let embed = self.embedding(ids)?;
        let each = |base: Result<Tensor>, adapted: Result<Tensor>| {
            Ok(BesideBase { base: base?, adapted: adapted? })
        };
        let first = || each(as_base(&embed), embed());
        let last = stage::through(self.layers(), first, |layer, before: &BesideBase| {
            let forward = |x| Ok(layer.call(x, DecoderLayer::forward)?.0);
            each(as_base(|| forward(&before.base)), forward(&before.adapted))
        })?;
        let norm = |x| self.norm().forward(x);
        each(as_base(|| norm(&last.base)), norm(&last.adapted))
    }
}
