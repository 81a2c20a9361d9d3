//! Products with a weight on the CPU in which each row is summed alone, in one order, so that its
//! result does not depend on the other rows. For few rows, and for batch-invariant forwards.

use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use crate::host::{Element, Float};

/// Rows from which on a product is left to the `gemm` crate.
pub(crate) const FEW: usize = 16;
/// Rows of the weight that are read at a time.
const OUTPUTS: usize = 4;
/// Rows of the input that a pass over the weight computes. The sums of 3 x 4 products fit the
/// registers of AVX2; with 4 x 4 the same loop took three times as long there.
const ROWS: usize = 3;
/// Bytes of the input that a pass over the weight reads, which stay in a core's cache.
const BLOCK_BYTES: usize = 1 << 17;
/// Multiplications that justify another thread.
const WORTH_A_THREAD: usize = 1 << 17;

/// Returns `x weight^T + bias`, `[rows, outputs]`, for `x` (`[rows, inputs]`) and `weight`
/// (`[outputs, inputs]`).
pub(crate) fn product<E: Element<Wide: Dots>>(
    x: &[E::Wide],
    weight: &[E],
    bias: Option<&[E::Wide]>,
    inputs: usize,
) -> Vec<E::Wide> {
    let (rows, outputs) = (x.len() / inputs.max(1), weight.len() / inputs.max(1));
    // `[outputs, rows]`, so that threads write apart.
    let mut columns = vec![E::Wide::ZERO; rows * outputs];
    let threads = (weight.len() * rows / WORTH_A_THREAD).clamp(1, rayon::current_num_threads());
    let share = (outputs.div_ceil(4 * threads)).next_multiple_of(OUTPUTS);
    let part = |columns: &mut [E::Wide], first: usize| {
        let weight = &weight[first * inputs..][..columns.len() / rows.max(1) * inputs];
        Arch::new().dispatch(Products { columns, x, weight, inputs });
    };
    match threads {
        1 => part(&mut columns, 0),
        _ => {
            let shares = columns.par_chunks_mut(share * rows).enumerate();
            shares.for_each(|(i, columns)| part(columns, i * share));
        }
    }
    if rows == 1 && bias.is_none() {
        return columns;
    }
    let bias = |output: usize| bias.map_or(E::Wide::ZERO, |bias| bias[output]);
    let mut y = vec![E::Wide::ZERO; rows * outputs];
    let write = |(row, y): (usize, &mut [E::Wide])| {
        for (o, y) in y.iter_mut().enumerate() {
            *y = columns[o * rows + row] + bias(o);
        }
    };
    match threads {
        1 => y.chunks_exact_mut(outputs.max(1)).enumerate().for_each(write),
        _ => y.par_chunks_exact_mut(outputs.max(1)).enumerate().with_min_len(8).for_each(write),
    }
    y
}

/// Dot products of several rows at once.
pub(super) trait Dots: Float {
    /// Returns the dot product of each row of `weight` with each row of `x`. Its bits depend on the
    /// two rows and the CPU alone.
    fn dots<S: Simd, const R: usize, const O: usize>(
        simd: S,
        x: [&[Self]; R],
        weight: [&[Self]; O],
    ) -> [[Self; R]; O];
}

macro_rules! dots {
    ($($T:ty: $as_simd:ident, $splat:ident, $mul_add:ident, $sum:ident;)*) => {$(
        impl Dots for $T {
            #[inline(always)]
            fn dots<S: Simd, const R: usize, const O: usize>(
                simd: S,
                x: [&[Self]; R],
                weight: [&[Self]; O],
            ) -> [[Self; R]; O] {
                let mut sums = [[simd.$splat(0.0); R]; O];
                let xs = x.map(|x| S::$as_simd(x));
                let weights = weight.map(|weight| S::$as_simd(weight));
                let n = weights[0].0.len();
                let (heads, whole) = (xs.map(|x| &x.0[..n]), weights.map(|weight| &weight.0[..n]));
                for i in 0..n {
                    let x = heads.map(|x| x[i]);
                    for o in 0..O {
                        let weight = whole[o][i];
                        for r in 0..R {
                            sums[o][r] = simd.$mul_add(weight, x[r], sums[o][r]);
                        }
                    }
                }
                let mut out = [[0.0; R]; O];
                for o in 0..O {
                    for r in 0..R {
                        let rest = xs[r].1.iter().zip(weights[o].1);
                        let rest = rest.fold(0.0, |sum, (x, weight)| sum + x * weight);
                        out[o][r] = simd.$sum(sums[o][r]) + rest;
                    }
                }
                out
            }
        }
    )*};
}

dots! {
    f32: as_simd_f32s, splat_f32s, mul_add_e_f32s, reduce_sum_f32s;
    f64: as_simd_f64s, splat_f64s, mul_add_e_f64s, reduce_sum_f64s;
}

/// Calls `f` with rows of `width` elements, widened into `room` if necessary.
#[inline(always)]
pub(super) fn widened<E: Element, R, const O: usize>(
    rows: &[E],
    width: usize,
    room: &mut Vec<E::Wide>,
    f: impl FnOnce([&[E::Wide]; O]) -> R,
) -> R {
    let rows = match E::as_wide(rows) {
        Some(rows) => rows,
        None => {
            room.resize(O * width, E::Wide::ZERO);
            room.iter_mut().zip(rows).for_each(|(wide, x)| *wide = x.widen());
            &*room
        }
    };
    f(std::array::from_fn(|o| &rows[o * width..][..width]))
}

/// Writes the products of all rows of `x` and all outputs of `weight`, `[outputs, rows]`.
struct Products<'a, E: Element> {
    columns: &'a mut [E::Wide],
    x: &'a [E::Wide],
    weight: &'a [E],
    inputs: usize,
}

impl<E: Element<Wide: Dots>> Products<'_, E> {
    /// Writes the products of some rows with `O` outputs, from the weight's row `first` on.
    #[inline(always)]
    fn outputs<S: Simd, const O: usize>(
        &mut self,
        simd: S,
        some: Range<usize>,
        first: usize,
        room: &mut Vec<E::Wide>,
    ) {
        let Self { columns, x, weight, inputs } = self;
        let (inputs, rows) = (*inputs, x.len() / *inputs);
        let columns = &mut columns[first * rows..][..O * rows];
        let weight = &weight[first * inputs..][..O * inputs];
        widened(weight, inputs, room, |weight: [&[E::Wide]; O]| {
            let row = |i: usize| &x[i * inputs..][..inputs];
            let mut at = some.start;
            while some.end - at >= ROWS {
                let found =
                    E::Wide::dots::<S, ROWS, O>(simd, std::array::from_fn(|i| row(at + i)), weight);
                for (o, found) in found.iter().enumerate() {
                    columns[o * rows + at..][..ROWS].copy_from_slice(found);
                }
                at += ROWS;
            }
            while at < some.end {
                let found = E::Wide::dots::<S, 1, O>(simd, [row(at)], weight);
                for (o, [found]) in found.into_iter().enumerate() {
                    columns[o * rows + at] = found;
                }
                at += 1;
            }
        });
    }
}

impl<E: Element<Wide: Dots>> WithSimd for Products<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let outputs = self.weight.len() / self.inputs;
        let (whole, mut room) = (outputs / OUTPUTS * OUTPUTS, Vec::new());
        let rows = self.x.len() / self.inputs;
        let block = BLOCK_BYTES / (self.inputs * size_of::<E::Wide>());
        let block = (block / ROWS * ROWS).max(ROWS);
        for start in (0..rows).step_by(block) {
            let some = start..rows.min(start + block);
            for first in (0..whole).step_by(OUTPUTS) {
                self.outputs::<S, OUTPUTS>(simd, some.clone(), first, &mut room);
            }
            for first in whole..outputs {
                self.outputs::<S, 1>(simd, some.clone(), first, &mut room);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    fn values(n: usize, seed: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 7919 + seed * 271) % 1013) as f32 / 511.0 - 1.0).collect()
    }

    #[test]
    fn products_equal_a_plain_sum() {
        for (rows, outputs, inputs) in [(1, 1, 1), (1, 9, 33), (3, 4, 16), (5, 7, 50), (15, 6, 64)]
        {
            let (x, weight) = (values(rows * inputs, 1), values(outputs * inputs, 2));
            let bias = values(outputs, 3);
            let found = product::<f32>(&x, &weight, Some(&bias), inputs);
            assert_eq!(found.len(), rows * outputs);
            for (i, found) in found.iter().enumerate() {
                let (x, w) = (&x[i / outputs * inputs..], &weight[i % outputs * inputs..]);
                let pairs = x[..inputs].iter().zip(w);
                let sum: f64 = pairs.map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                let wanted = sum + f64::from(bias[i % outputs]);
                assert!((f64::from(*found) - wanted).abs() < 1e-4, "{rows} {outputs} {inputs}");
            }
        }
    }

    #[test]
    fn row_has_its_bits_in_any_batch() {
        let (inputs, outputs) = (500, 300);
        let weight: Vec<bf16> =
            values(outputs * inputs, 2).into_iter().map(bf16::from_f32).collect();
        let x = values(13 * inputs, 1);
        let all = product::<bf16>(&x, &weight, None, inputs);
        for rows in 1..13 {
            let some = product::<bf16>(&x[..rows * inputs], &weight, None, inputs);
            assert_eq!(some, all[..rows * outputs], "{rows}");
        }
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        assert_eq!(pool.install(|| product::<bf16>(&x, &weight, None, inputs)), all);
    }
}
