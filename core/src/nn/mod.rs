//! Layers.

use crate::Result;
use crate::module::*;
use crate::parameter::*;
mod loss;
use candle_core::Tensor;
pub use loss::Loss;
/// Linear
#[derive(Debug)]
pub struct Linear {
    weight: Parameter,
}
impl Linear {
    /// new
    pub fn new(b: &ModuleBuilder, i: usize, o: usize) -> Result<Self> {
        b.declare("Linear")?;
        Ok(Self { weight: b.parameter("weight", [o, i], Init::kaiming_uniform(i))? })
    }
}
impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.broadcast_matmul(&self.weight.tensor()?.t()?)?)
    }
}
