//! A logged number that stays on its device until it is read.

use candle_core::{DType, Tensor};

use crate::metric::{Merge, Metric};
use crate::trainer::Reduce;
use crate::{Error, Result};

/// The number and its reduction over batches and ranks.
#[derive(Debug)]
pub(crate) struct LoggedTensor {
    state: Tensor,
    reduce: Reduce,
}

impl LoggedTensor {
    /// Creates the metric of a tensor of one number, which stands for `weight` samples in a mean.
    ///
    /// # Errors
    /// If the tensor does not have one element.
    pub(crate) fn new(number: &Tensor, reduce: Reduce, weight: f64) -> Result<Self> {
        if number.elem_count() != 1 {
            return Err(Error::other(format!(
                "what is logged is one number, got a tensor of shape {:?}; sum or average it first",
                number.dims()
            )));
        }
        let number = number.flatten_all()?.to_dtype(DType::F64)?;
        let state = match reduce {
            // A value without samples does not count, not even if it is NaN.
            Reduce::Mean if weight == 0.0 => Tensor::zeros(2, DType::F64, number.device())?,
            Reduce::Mean => {
                let weights = Tensor::new(&[weight], number.device())?;
                Tensor::cat(&[(number * weight)?, weights], 0)?
            }
            _ => number,
        };
        Ok(Self { state, reduce })
    }
}

impl Metric for LoggedTensor {
    fn state(&self) -> Result<Tensor> {
        Ok(self.state.clone())
    }

    fn merge(&self) -> Merge {
        match self.reduce {
            Reduce::Mean | Reduce::Sum => Merge::Sum,
            Reduce::Min => Merge::Min,
            Reduce::Max => Merge::Max,
        }
    }

    fn compute(&self, state: &[f64]) -> f64 {
        match self.reduce {
            Reduce::Mean => state[0] / state[1],
            _ => state[0],
        }
    }
}
