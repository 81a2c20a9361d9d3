//! Attention sinks: a learned score for each head, which takes probability and gives no value.

use candle_core::{D, Tensor};

use crate::Result;
use crate::backend::{to_accumulation_dtype, uses_cpu_kernels};
use crate::host::{Float, host, tensor, with_float};

/// The factor of an output for a softmax with the score `sink` more, and the log-sum-exp with it.
pub(super) fn factor<T: Float>(lse: T, sink: T) -> (T, T) {
    let top = if sink > lse { sink } else { lse };
    let sum = (lse - top).fast_exp() + (sink - top).fast_exp();
    let with_sink = top + sum.ln();
    ((lse - with_sink).fast_exp(), with_sink)
}

/// Adds the score of each head (`sinks`, `[heads]`) to the softmax that gave `output` (`[batch,
/// queries, heads, head_dim]`) and `lse` (`[batch, heads, queries]`), all in the accumulation
/// dtype. The backward of attention then takes the result as it is: the probabilities are
/// `exp(score - lse)` again.
pub(super) fn apply(output: &Tensor, lse: &Tensor, sinks: &Tensor) -> Result<(Tensor, Tensor)> {
    let (factors, with_sink) = match uses_cpu_kernels(lse) {
        true => with_float!(lse.dtype(), T => {
            let (_, heads, queries) = lse.dims3()?;
            let (host_lse, host_sinks) = (host(lse)?, host(sinks)?);
            let (values, sinks) = (host_lse.slice::<T>()?, host_sinks.slice::<T>()?);
            let of = |(i, lse): (usize, &T)| factor(*lse, sinks[i / queries.max(1) % heads]);
            let (factors, with_sink): (Vec<T>, Vec<T>) = values.iter().enumerate().map(of).unzip();
            Ok::<_, crate::Error>((tensor(factors, lse.shape())?, tensor(with_sink, lse.shape())?))
        })?,
        false => {
            let sinks = sinks.reshape((1, (), 1))?.broadcast_as(lse.shape())?;
            let top = lse.maximum(&sinks)?;
            let sum = ((lse - &top)?.exp()? + (sinks - &top)?.exp()?)?;
            let with_sink = (top + sum.log()?)?;
            ((lse - &with_sink)?.exp()?, with_sink)
        }
    };
    let factors = factors.transpose(1, 2)?.unsqueeze(D::Minus1)?;
    Ok((output.broadcast_mul(&factors)?, with_sink))
}

/// The gradient of the sinks, `[heads]`, from an output with them, its log-sum-exp and its
/// gradient.
pub(super) fn backward(
    output: &Tensor,
    lse: &Tensor,
    sinks: &Tensor,
    grad: &Tensor,
) -> Result<Tensor> {
    let (output, grad) = (to_accumulation_dtype(output)?, to_accumulation_dtype(grad)?);
    // `[batch, heads, queries]`: the level that the softmax subtracts.
    let level = (output * grad)?.sum(D::Minus1)?.transpose(1, 2)?;
    let sinks = sinks.reshape((1, (), 1))?.broadcast_as(lse.shape())?;
    let probabilities = (sinks - lse)?.exp()?;
    Ok((probabilities * level)?.neg()?.sum((0, 2))?)
}
