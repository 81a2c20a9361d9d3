//! Products of few rows with a weight on the CPU. Each row is summed alone, in one order, so its
//! result does not depend on the other rows.

use rayon::prelude::*;

use crate::host::{Element, Float};
use fulgurite_engine::simd::vectorized;

/// Rows from which on a product is left to the `gemm` crate.
pub(crate) const FEW: usize = 16;
/// Lanes of a sum.
const LANES: usize = 16;
/// Rows of the weight that are read at a time.
const OUTPUTS: usize = 4;
/// Rows of the input that a pass over the weight computes.
const ROWS: usize = 4;
/// Multiplications that justify another thread.
const WORTH_A_THREAD: usize = 1 << 17;

/// Returns `x weight^T + bias`, `[rows, outputs]`, for `x` (`[rows, inputs]`) and `weight`
/// (`[outputs, inputs]`).
pub(crate) fn product<E: Element>(
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
        products(columns, x, weight, inputs);
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
    let row = |row: usize| (0..outputs).map(move |o| (row, o));
    (0..rows).flat_map(row).map(|(row, o)| columns[o * rows + row] + bias(o)).collect()
}

/// The sums of the lanes, in a fixed order.
#[inline(always)]
fn sum<T: Float>(lanes: [T; LANES]) -> T {
    let mut lanes = lanes;
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            let other = lanes[i + width];
            lanes[i] += other;
        }
        width /= 2;
    }
    lanes[0]
}

/// Computes the products of `R` rows of `x` and up to [`OUTPUTS`] of the weight.
#[inline(always)]
fn tile<E: Element, const R: usize, const O: usize>(
    x: [&[E::Wide]; R],
    weight: [&[E]; O],
) -> [[E::Wide; R]; O] {
    let mut lanes = [[[E::Wide::ZERO; LANES]; R]; O];
    let inputs = weight[0].len();
    let whole = inputs / LANES * LANES;
    let mut at = 0;
    while at < whole {
        for (weight, lanes) in weight.iter().zip(&mut lanes) {
            let weight: &[E; LANES] = weight[at..at + LANES].try_into().expect("of this length");
            let weight = weight.map(E::widen);
            for (x, lanes) in x.iter().zip(lanes) {
                let x: &[E::Wide; LANES] = x[at..at + LANES].try_into().expect("of this length");
                for lane in 0..LANES {
                    lanes[lane] += x[lane] * weight[lane];
                }
            }
        }
        at += LANES;
    }
    let mut out = [[E::Wide::ZERO; R]; O];
    for o in 0..O {
        for r in 0..R {
            let mut tail = E::Wide::ZERO;
            for (x, weight) in x[r][whole..].iter().zip(&weight[o][whole..]) {
                tail += *x * weight.widen();
            }
            out[o][r] = sum(lanes[o][r]) + tail;
        }
    }
    out
}

/// Writes the products of all rows and `O` outputs, `[O, rows]`.
#[inline(always)]
fn outputs<E: Element, const O: usize>(
    columns: &mut [E::Wide],
    x: &[E::Wide],
    weight: [&[E]; O],
    inputs: usize,
) {
    let rows = columns.len() / O;
    let row = |i: usize| &x[i * inputs..][..inputs];
    let mut at = 0;
    while at < rows {
        let mut write = |values: &[&[E::Wide]]| {
            for (o, values) in values.iter().enumerate() {
                columns[o * rows + at..][..values.len()].copy_from_slice(values);
            }
        };
        if rows - at >= ROWS {
            let found = tile::<E, ROWS, O>(std::array::from_fn(|i| row(at + i)), weight);
            write(&found.each_ref().map(|values| &values[..]));
            at += ROWS;
        } else {
            let found = tile::<E, 1, O>([row(at)], weight);
            write(&found.each_ref().map(|values| &values[..]));
            at += 1;
        }
    }
}

vectorized! {
    /// Writes the products of all rows and all outputs of `weight`, `[outputs, rows]`.
    fn products[E: Element](columns: &mut [E::Wide], x: &[E::Wide], weight: &[E], inputs: usize) {
        let rows = x.len() / inputs.max(1);
        let mut columns = columns.chunks_exact_mut(OUTPUTS * rows);
        let mut weights = weight.chunks_exact(OUTPUTS * inputs);
        for (columns, weight) in columns.by_ref().zip(weights.by_ref()) {
            let weight = std::array::from_fn(|o| &weight[o * inputs..][..inputs]);
            outputs::<E, OUTPUTS>(columns, x, weight, inputs);
        }
        let rest = columns.into_remainder().chunks_exact_mut(rows);
        for (columns, weight) in rest.zip(weights.remainder().chunks_exact(inputs)) {
            outputs::<E, 1>(columns, x, [weight], inputs);
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
