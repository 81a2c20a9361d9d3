//! Softmax over the last dimension.

use candle_core::{D, Tensor};
use rayon::prelude::*;

use crate::Result;
use crate::backend::{to_accumulation_dtype, uses_cpu_kernels};
use crate::host::{Float, dot, exp_in_place, host, max, rows_per_piece, tensor, with_float};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::simd::vectorized;

vectorized! {
    fn normalize_rows[T: Float](y: &mut [T], n: usize) {
        for y in y.chunks_exact_mut(n) {
            let scale = T::ONE / exp_in_place(y, max(y));
            y.iter_mut().for_each(|y| *y *= scale);
        }
    }

    /// Replaces the gradient of the output in `dx` by the gradient of the input.
    fn backward_rows[T: Float](dx: &mut [T], y: &[T], n: usize) {
        for (dx, y) in dx.chunks_exact_mut(n).zip(y.chunks_exact(n)) {
            let level = dot(dx, y);
            dx.iter_mut().zip(y).for_each(|(dx, &y)| *dx = (*dx - level) * y);
        }
    }
}

/// Computes the softmax.
pub(crate) fn softmax(x: &Tensor) -> Result<Tensor> {
    let (dtype, n) = (x.dtype(), x.dim(D::Minus1)?.max(1));
    let x = to_accumulation_dtype(x)?;
    let y = if uses_cpu_kernels(&x) {
        with_float!(x.dtype(), T => {
            let mut y = host(&x)?.slice::<T>()?.to_vec();
            let piece = rows_per_piece(y.len() / n) * n;
            y.par_chunks_mut(piece).for_each(|y| {
                normalize_rows(y, n);
            });
            tensor(y, x.shape())
        })?
    } else {
        let exp = x.broadcast_sub(&x.max_keepdim(D::Minus1)?)?.exp()?;
        exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)?
    };
    storage::cast(&y, dtype)
}

/// Computes the gradient of the input, from the output.
pub(crate) fn softmax_backward(y: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let (dtype, n) = (y.dtype(), y.dim(D::Minus1)?.max(1));
    let (y, grad) = (to_accumulation_dtype(y)?, to_accumulation_dtype(grad)?);
    let dx = if uses_cpu_kernels(&y) {
        with_float!(y.dtype(), T => {
            let host_x = host(&y)?;
            let values = host_x.slice::<T>()?;
            let mut dx = host(&grad)?.slice::<T>()?.to_vec();
            let piece = rows_per_piece(values.len() / n) * n;
            dx.par_chunks_mut(piece).zip(values.par_chunks(piece)).for_each(|(dx, y)| {
                backward_rows(dx, y, n);
            });
            tensor(dx, y.shape())
        })?
    } else {
        let level = (&grad * &y)?.sum_keepdim(D::Minus1)?;
        (grad.broadcast_sub(&level)? * &y)?
    };
    storage::cast(&dx, dtype)
}
