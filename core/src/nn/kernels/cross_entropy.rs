//! Cross entropy of rows of logits. Forward keeps one number a row, the log-sum-exp; backward
//! computes the probabilities again and writes the gradient in one pass.

use candle_core::{D, Tensor};
use rayon::prelude::*;

use crate::Result;
use crate::nn::arm::{on_host, wide};
use crate::nn::host::{Float, host, max, rows_per_piece, sum1, tensor, with_float};

/// Targets on the host: a class for each row, or none where the row is ignored.
pub(in crate::nn) type Targets = [Option<u32>];

/// The sum over all rows of `lse - (1 - smoothing) z[target] - smoothing mean(z)`, a scalar, and
/// the log-sum-exp of each row. `logits` is `[rows, classes]`.
pub(in crate::nn) fn forward(
    logits: &Tensor,
    targets: &Targets,
    smoothing: f64,
) -> Result<(Tensor, Tensor)> {
    let (rows, classes) = logits.dims2()?;
    let logits = wide(logits)?;
    if !on_host(&logits) {
        let (index, weight) = portable_targets(targets, &logits)?;
        let top = logits.max_keepdim(1)?;
        let sum = logits.broadcast_sub(&top)?.exp()?.sum_keepdim(1)?;
        let lse = (top + sum.log()?)?;
        let mut loss = (&lse - (logits.gather(&index, 1)? * (1.0 - smoothing))?)?;
        if smoothing != 0.0 {
            loss = (loss - (logits.mean_keepdim(D::Minus1)? * smoothing)?)?;
        }
        // A row that is ignored may hold infinities, which a product with zero does not remove.
        let loss = weight.ne(0.0)?.where_cond(&loss, &loss.zeros_like()?)?;
        return Ok((loss.sum_all()?, lse.flatten_all()?));
    }
    with_float!(logits.dtype(), T => {
        let host_x = host(&logits)?;
        let values = host_x.slice::<T>()?;
        let mut lse = vec![T::ZERO; rows];
        let piece = rows_per_piece(rows);
        let sums: Vec<f64> = lse
            .par_chunks_mut(piece)
            .zip(values.par_chunks(piece * classes).zip(targets.par_chunks(piece)))
            .map(|(lse, (values, targets))| {
                let mut sum = 0.0;
                for (lse, (z, target)) in
                    lse.iter_mut().zip(values.chunks_exact(classes).zip(targets))
                {
                    let Some(target) = target else { continue };
                    let top = max(z);
                    *lse = top + sum1(z, |z| (z - top).exp()).ln();
                    let mut loss =
                        lse.widen() - (1.0 - smoothing) * z[*target as usize].widen();
                    if smoothing != 0.0 {
                        loss -= smoothing * sum1(z, |z| z).widen() / classes as f64;
                    }
                    sum += loss;
                }
                sum
            })
            .collect();
        let sum: f64 = sums.into_iter().sum();
        Ok((tensor(vec![T::lit(sum)], ())?, tensor(lse, rows)?))
    })
}

/// The gradient of the logits, where the sum has the gradient `grad` (a scalar).
pub(in crate::nn) fn backward(
    logits: &Tensor,
    lse: &Tensor,
    targets: &Targets,
    smoothing: f64,
    grad: &Tensor,
) -> Result<Tensor> {
    let (dtype, (rows, classes)) = (logits.dtype(), logits.dims2()?);
    let logits = wide(logits)?;
    let grad = grad.to_dtype(logits.dtype())?;
    let uniform = smoothing / classes as f64;
    if !on_host(&logits) {
        let (index, weight) = portable_targets(targets, &logits)?;
        let p = (logits.broadcast_sub(&lse.reshape((rows, 1))?)?.exp()? - uniform)?;
        let hit = weight.ones_like()?.affine(smoothing - 1.0, 0.0)?;
        let d = p.scatter_add(&index, &hit, 1)?.broadcast_mul(&grad.reshape((1, 1))?)?;
        let keep = weight.ne(0.0)?.broadcast_as(d.shape())?;
        return Ok(keep.where_cond(&d, &d.zeros_like()?)?.to_dtype(dtype)?);
    }
    let d = with_float!(logits.dtype(), T => {
        let (host_x, lse) = (host(&logits)?, host(lse)?);
        let (values, lse) = (host_x.slice::<T>()?, lse.slice::<T>()?);
        let grad = grad.to_scalar::<T>()?;
        let (uniform, hit) = (T::lit(uniform), T::lit(1.0 - smoothing));
        let mut d = vec![T::ZERO; rows * classes];
        d.par_chunks_mut(classes)
            .zip(values.par_chunks(classes).zip(targets.par_iter().zip(lse)))
            .with_min_len(8)
            .for_each(|(d, (z, (target, &lse)))| {
                let Some(target) = target else { return };
                for (d, &z) in d.iter_mut().zip(z) {
                    *d = ((z - lse).exp() - uniform) * grad;
                }
                d[*target as usize] -= hit * grad;
            });
        tensor(d, (rows, classes))
    })?;
    Ok(d.to_dtype(dtype)?)
}

/// Targets as `[rows, 1]` indices (0 where ignored) and weights (0 where ignored, else 1).
fn portable_targets(targets: &Targets, like: &Tensor) -> Result<(Tensor, Tensor)> {
    let index: Vec<u32> = targets.iter().map(|t| t.unwrap_or(0)).collect();
    let weight: Vec<f32> = targets.iter().map(|t| f32::from(u8::from(t.is_some()))).collect();
    let shape = (targets.len(), 1);
    Ok((
        Tensor::from_vec(index, shape, like.device())?,
        Tensor::from_vec(weight, shape, like.device())?.to_dtype(like.dtype())?,
    ))
}
