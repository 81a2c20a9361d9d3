//! Rotary position embedding. A pair has an element of each half of a row.

use candle_core::{D, Tensor};
use rayon::prelude::*;

use crate::Result;
use crate::backend::{to_accumulation_dtype, uses_cpu_kernels};
use crate::host::{Float, host, rows_per_piece, tensor, with_float};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::execution::dry_run::skips_pass;
use fulgurite_engine::parameter::accumulation_dtype;
use fulgurite_engine::simd::vectorized;

/// Cosines and sines for each position, `[positions, pairs]`, in the accumulation dtype. There are
/// at most `head_dim / 2` pairs: element i is paired with element i + pairs, and later elements are
/// not rotated.
#[derive(Debug, Clone)]
pub(crate) struct Angles {
    pub(crate) cos: Tensor,
    pub(crate) sin: Tensor,
}

vectorized! {
    /// Rotates rows in place, the first by row `start` of the tables, which repeat. `sizes` are the
    /// elements of a row, and the pairs. With `inverse` it rotates by the negative angles.
    pub(super) fn rotate_rows[T: Float](
        rows: &mut [T],
        cos: &[T],
        sin: &[T],
        sizes: [usize; 2],
        start: usize,
        inverse: bool,
    ) {
        let [d, half] = sizes;
        let positions = cos.len() / half.max(1);
        let sign = if inverse { T::ZERO - T::ONE } else { T::ONE };
        for (i, row) in rows.chunks_exact_mut(d).enumerate() {
            let at = (start + i) % positions * half;
            let angles = cos[at..at + half].iter().zip(&sin[at..at + half]);
            let (first, second) = row.split_at_mut(half);
            for ((first, second), (&cos, &sin)) in first.iter_mut().zip(second).zip(angles) {
                let (a, b, sin) = (*first, *second, sign * sin);
                *first = a * cos - b * sin;
                *second = b * cos + a * sin;
            }
        }
    }
}

/// Rotates `x` (`[.., positions, head_dim]`). With `inverse` it rotates by the negative angles,
/// which is the backward.
pub(crate) fn rotate(x: &Tensor, angles: &Angles, inverse: bool) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    {
        let (tables, positions) = ([&angles.cos, &angles.sin], x.rank().saturating_sub(2));
        if let Some(y) = fulgurite_kernels::cuda::rope(x, tables, positions, inverse)? {
            return Ok(y);
        }
    }
    let (dtype, d, half) = (x.dtype(), x.dim(D::Minus1)?, angles.cos.dim(D::Minus1)?);
    let (cos, sin) = (
        angles.cos.to_dtype(accumulation_dtype(dtype))?.contiguous()?,
        angles.sin.to_dtype(accumulation_dtype(dtype))?.contiguous()?,
    );
    let x = to_accumulation_dtype(x)?;
    if !uses_cpu_kernels(&x) {
        let sin = if inverse { sin.neg()? } else { sin };
        let (a, b) = (x.narrow(D::Minus1, 0, half)?, x.narrow(D::Minus1, half, half)?);
        let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
        let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
        let rest = x.narrow(D::Minus1, 2 * half, d - 2 * half)?;
        let parts = if d > 2 * half { vec![first, second, rest] } else { vec![first, second] };
        // If a part is a view, candle joins all in transposed memory.
        return Ok(Tensor::cat(&parts, D::Minus1)?.contiguous()?.to_dtype(dtype)?);
    }
    let y = with_float!(x.dtype(), T => {
        let (cos, sin) = (host(&cos)?, host(&sin)?);
        let (cos, sin) = (cos.slice::<T>()?, sin.slice::<T>()?);
        let host_x = host(&x)?;
        let values = host_x.slice::<T>()?;
        if skips_pass(2 * size_of_val(values)) {
            return storage::cast(&tensor(vec![T::ZERO; values.len()], x.shape())?, dtype);
        }
        let mut y = values.to_vec();
        let rows = rows_per_piece(y.len() / d);
        y.par_chunks_mut(rows * d).enumerate().for_each(|(piece, y)| {
            rotate_rows(y, cos, sin, [d, half], piece * rows, inverse);
        });
        tensor(y, x.shape())
    })?;
    storage::cast(&y, dtype)
}
