//! How layers deliver gradients, and which inputs they take.

use candle_core::{DType, Tensor};

use super::host::Float;
use crate::Result;
use fulgurite_engine::autograd::storage;
use fulgurite_engine::parameter::Parameter;

/// Lets `write` put (`false`) or add (`true`) a gradient into the parameter's buffer as a slice of
/// `T`. A buffer of another dtype is added to by way of a temporary. For CPU parameters.
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

/// Adds a gradient to the parameter's buffer and ends one use.
pub(super) fn deliver(parameter: &Parameter, grad: &Tensor) -> Result<()> {
    if parameter.requires_grad() {
        parameter.accumulate(&grad.reshape(parameter.compute_shape())?)?;
    }
    parameter.end_use()
}

/// The dtypes a layer's input may have.
pub(super) fn check_dtype(layer: &str, x: &Tensor, parameter: &Parameter) -> Result<()> {
    let (got, want): (DType, DType) = (x.dtype(), parameter.compute_dtype());
    if got != want {
        return Err(crate::Error::parameter(
            parameter.fqn(),
            format!(
                "{layer} computes in {want:?} and got an input of {got:?}; cast the input, or let \
                 a unit with mixed precision do it"
            ),
        ));
    }
    Ok(())
}
