//! Adding gradients: to parameters, and to each other.

use candle_core::Tensor;

use super::host::Float;
use crate::Result;
use fulgurite_engine::autograd::{self, storage};
use fulgurite_engine::parameter::Parameter;

/// Calls `write` with the parameter's gradient buffer as a slice of `T`. `write` stores a gradient
/// there (`false`) or adds one (`true`). If the buffer has another dtype, the slice is a temporary.
/// For CPU parameters only.
pub(super) fn accumulate_host<T: Float>(
    parameter: &Parameter,
    write: impl FnOnce(&mut [T], bool) -> Result<()>,
) -> Result<()> {
    parameter.accumulate_with(|buffer, add| {
        if buffer.dtype() == T::DTYPE {
            return storage::with_host_mut(buffer, |out: &mut [T]| write(out, add))?;
        }
        let mut fresh = vec![T::ZERO; buffer.elem_count()];
        write(&mut fresh, false)?;
        let mut sum = super::host::tensor(fresh, buffer.elem_count())?;
        if add {
            sum = (buffer.to_dtype(T::DTYPE)? + sum)?;
        }
        storage::copy_from(buffer, &sum)
    })
}

/// Adds a gradient to the parameter's buffer and ends one use of the parameter.
pub(super) fn accumulate_and_end_use(parameter: &Parameter, grad: &Tensor) -> Result<()> {
    if parameter.takes_grad() {
        parameter.accumulate(&grad.reshape(parameter.compute_shape())?)?;
    }
    parameter.end_use()
}

/// Returns `sum + x`, of one shape and dtype. The memory of `sum` may be reused, so `sum` must not
/// have another user, and `x` must use other memory.
pub(super) fn add_to(sum: Tensor, x: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if sum.dims() == x.dims()
        && sum.dtype() == x.dtype()
        && fulgurite_kernels::cuda::add(&sum, x)?.is_some()
    {
        return Ok(sum);
    }
    autograd::add_to(sum, x)
}
