//! How a layer's computation enters the graph.

use candle_core::{DType, Tensor};

use super::host::Float;
use crate::Result;
use crate::autograd::{function, is_grad_enabled, storage};
use crate::parameter::Parameter;

/// Enters `output`, computed from `inputs` and `parameters`, into the graph: at most three
/// inputs, or two where there are parameters.
///
/// If anything is recorded, each trainable parameter counts one use here; `backward` gets the
/// gradient (contiguous) and must deliver to every one of `parameters` and end its use, after it
/// has read the parameter's value for the last time: its memory may go with that. It returns a
/// gradient for each input; those of inputs outside the graph are dropped.
pub(super) fn record(
    inputs: &[&Tensor],
    parameters: &[&Parameter],
    output: Tensor,
    backward: impl Fn(&Tensor, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
) -> Result<Tensor> {
    if !is_grad_enabled() {
        // Counts where a later backward computes this again.
        parameters.iter().for_each(|p| p.begin_use());
        return Ok(output);
    }
    let tracked: Vec<bool> = inputs.iter().map(|input| input.track_op()).collect();
    let trainable = parameters.iter().find(|p| p.requires_grad());
    if !tracked.contains(&true) && trainable.is_none() {
        return Ok(output);
    }
    parameters.iter().for_each(|p| p.begin_use());
    // Inputs outside the graph stay out of it. The token goes in even where an input is in it:
    // candle takes a cast from an integer for tracked, and does not follow it.
    let mut arguments: Vec<&Tensor> =
        inputs.iter().zip(&tracked).filter(|(_, tracked)| **tracked).map(|(x, _)| *x).collect();
    arguments.extend(trainable.map(|p| p.token()));
    let with_token = trainable.is_some();
    function(&arguments, output, move |output, grad| {
        let grads = backward(output, &grad.contiguous()?)?;
        let grads = grads.into_iter().zip(&tracked).filter(|(_, t)| **t).map(|(grad, _)| grad);
        Ok(grads.chain(with_token.then_some(None)).collect())
    })
}

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
