//! tmp
use crate::Result;
use candle_core::{DType, Tensor};
/// tmp
#[derive(Debug, Clone)]
pub struct Loss {
    sum: Tensor,
    count: f64,
}
impl Loss {
    /// tmp
    pub fn new(sum: Tensor, count: f64) -> Self {
        Self { sum, count }
    }
    /// tmp
    pub fn sum(&self) -> &Tensor {
        &self.sum
    }
    /// tmp
    pub fn count(&self) -> f64 {
        self.count
    }
    /// tmp
    pub fn sum_value(&self) -> Result<f64> {
        Ok(self.sum.detach().to_dtype(DType::F64)?.to_scalar::<f64>()?)
    }
}
