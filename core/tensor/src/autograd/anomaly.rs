//! Finds the first value that is not finite, as `torch.autograd.set_detect_anomaly`.

use candle_core::{DType, Tensor};

use crate::execution::read;
use crate::execution::{self, ContextGuard};
use crate::{Result, counted};

/// Checks the inputs, outputs and gradients of every layer and unit on this thread, and each
/// parameter's gradient, until the guard is dropped. The first NaN or infinite value is an error
/// that names the layer. Each check reads from the device and slows the step, so use it only to
/// find a mistake.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use fulgurite_core::autograd::detect_anomaly;
/// # use fulgurite_core::module::{Module, Unit};
/// # use fulgurite_core::nn::Linear;
/// # fn forward(block: &Unit<Linear>, x: &Tensor) -> fulgurite_core::Result<Tensor> {
/// let _detecting = detect_anomaly();
/// block.forward(x) // an error if `x` or a result is not finite
/// # }
/// ```
#[must_use = "values are checked until the guard is dropped"]
pub fn detect_anomaly() -> ContextGuard {
    execution::detect_anomalies()
}

/// Whether [`detect_anomaly`] is in force on this thread.
pub fn is_on() -> bool {
    execution::detects_anomalies()
}

/// Describes the values that are not finite; `None` if all are finite.
pub fn anomaly(tensor: &Tensor) -> Result<Option<String>> {
    if !tensor.dtype().is_float() || tensor.elem_count() == 0 {
        return Ok(None);
    }
    // 0 for a finite element, NaN otherwise.
    let zeros = (tensor.detach() * 0.0)?.to_dtype(DType::F32)?;
    if read::scalar::<f32>(&zeros.sum_all()?, "detect_anomaly")? == 0.0 {
        return Ok(None);
    }
    let values = tensor.detach().flatten_all()?.to_dtype(DType::F64)?;
    let values = read::vec1::<f64>(&values, "detect_anomaly")?;
    let nan = values.iter().filter(|value| value.is_nan()).count();
    let infinite = values.iter().filter(|value| value.is_infinite()).count();
    let counts = match (nan, infinite) {
        (nan, 0) => format!("{nan} NaN"),
        (0, infinite) => counted(infinite, "infinite value"),
        (nan, infinite) => format!("{nan} NaN and {}", counted(infinite, "infinite value")),
    };
    Ok(Some(format!("{counts} among {}", values.len())))
}
