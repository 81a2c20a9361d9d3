//! A model with two optimizers.

use candle_core::{DType, Tensor};
use fulgurite_core::Result;
use fulgurite_core::module::{Module as _, ModuleBuilder, Unit};
use fulgurite_core::nn::{Linear, Loss};

/// Tokens per sample.
const WIDTH: usize = 5;

/// A generator that learns to double its input, and a critic that predicts the generator's error.
pub(crate) struct Pair {
    generator: Unit<Linear>,
    critic: Linear,
}

impl Pair {
    /// The optimizers' names, in step order. Each name is its parameters' prefix.
    pub(crate) const OPTIMIZERS: [&'static str; 2] = ["critic", "generator"];

    pub(crate) fn new(b: &ModuleBuilder) -> Result<Self> {
        Ok(Self {
            generator: b.unit("generator", |b| Linear::with_bias(b, WIDTH, WIDTH))?,
            critic: Linear::with_bias(&b.pp("critic"), 2 * WIDTH, 1)?,
        })
    }

    /// Returns the loss that the named optimizer minimises.
    pub(crate) fn loss(&self, optimizer: &str, ids: &Tensor) -> Result<Loss> {
        let x = (ids.to_dtype(DType::F32)? * 0.1)?;
        let y = self.generator.forward(&x)?;
        let judged = self.critic.forward(&Tensor::cat(&[&x, &y], 1)?)?;
        let off = (y - (&x * 2.0)?)?;
        let error = match optimizer {
            "critic" => (judged - off.sum_keepdim(1)?)?.sqr()?,
            _ => (judged.sqr()? + off.sqr()?.sum_keepdim(1)?)?,
        };
        Ok(Loss::new(error.sum_all()?, x.dim(0)? as f64))
    }
}
