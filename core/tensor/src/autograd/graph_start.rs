//! The start of a graph of its own, from a tensor outside of it.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Tensor, Var};

use super::{copy, function};
use crate::Result;

/// A copy of a tensor at which a graph begins, and the gradient that comes back to it.
///
/// It replaces a [`Var`]: candle would add the gradient of each user to zeros. Functions that take
/// it must give it a gradient. Without a graph ([`no_grad`](super::no_grad)) it is only a copy.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fulgurite_core::autograd::GraphStart;
///
/// let start = GraphStart::new(&Tensor::new(&[1f32, 2.], &Device::Cpu)?)?;
/// start.tensor().sqr()?.sum_all()?.backward()?;
/// assert_eq!(start.take_gradient().unwrap().to_vec1::<f32>()?, [2., 4.]);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct GraphStart {
    tensor: Tensor,
    gradient: Arc<Mutex<Option<Tensor>>>,
}

impl GraphStart {
    /// Copies `x`, a tensor of floating-point numbers.
    ///
    /// # Errors
    /// If candle cannot copy it.
    pub fn new(x: &Tensor) -> Result<Self> {
        let gradient = Arc::<Mutex<Option<Tensor>>>::default();
        let token = Var::zeros((), DType::F32, x.device())?;
        let to = gradient.clone();
        let tensor = function(&[&token], copy(x)?, move |_, grad| {
            *to.lock().unwrap_or_else(PoisonError::into_inner) = Some(grad.clone());
            Ok(vec![None])
        })?;
        Ok(Self { tensor, gradient })
    }

    /// The tensor to compute with.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Takes the gradient of the last backward, if it reached the tensor.
    pub fn take_gradient(&self) -> Option<Tensor> {
        self.gradient.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
