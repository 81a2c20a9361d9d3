//! Sums over ranks whose bits do not depend on the order of the terms.
//!
//! All ranks agree on the largest term of a sum first. Terms are then rounded to multiples of a
//! unit so small that they add up in 62 bits, and whole numbers add up exactly in any order. A sum
//! of `n` terms has an error of at most `n * n * 2^-61` of its largest term.

use candle_core::{Device, Tensor};

use crate::Result;
use fulgurite_collective::collective::{Collective, ProcessGroup, ReduceOp};
use fulgurite_tensor::execution::read;

/// Takes the terms of several sums.
pub(super) trait Terms {
    /// Takes a term, zero or more, of the sum with this index.
    fn take(&mut self, sum: usize, term: f64);
}

/// The largest term of each sum.
pub(super) struct Largest(pub(super) Vec<f64>);

impl Terms for Largest {
    #[inline(always)]
    fn take(&mut self, sum: usize, term: f64) {
        let largest = &mut self.0[sum];
        // A NaN stays.
        if !(term <= *largest || largest.is_nan()) {
            *largest = term;
        }
    }
}

/// Sums in units.
pub(super) struct Sums<'a> {
    /// One over the unit of each sum.
    scales: &'a [f64],
    pub(super) sums: Vec<i64>,
}

impl<'a> Sums<'a> {
    pub(super) fn new(scales: &'a [f64]) -> Self {
        Self { scales, sums: vec![0; scales.len()] }
    }
}

impl Terms for Sums<'_> {
    #[inline(always)]
    fn take(&mut self, sum: usize, term: f64) {
        self.sums[sum] += (term * self.scales[sum]).round() as i64;
    }
}

/// Returns one over the unit of each sum of `counts` terms at most, from this rank's largest terms.
/// Collective over `group`.
///
/// The scale of a sum with a term that is not finite is NaN.
pub(super) fn agree_on_scales(
    largest: Vec<f64>,
    counts: &[usize],
    group: Option<&dyn ProcessGroup>,
) -> Result<Vec<f64>> {
    let largest = reduce(largest, ReduceOp::Max, group)?;
    Ok(largest.into_iter().zip(counts).map(|(largest, count)| scale(largest, *count)).collect())
}

/// A power of two by which up to `count` terms up to `largest` can be multiplied and added.
fn scale(largest: f64, count: usize) -> f64 {
    if !largest.is_finite() {
        return f64::NAN;
    }
    let bits = 61 - count.max(1).next_power_of_two().trailing_zeros() as i32;
    // The smallest power of two above the largest term.
    let exponent = (largest.to_bits() >> 52 & 0x7ff) as i32 - 1022;
    2f64.powi((bits - exponent).min(1000))
}

/// Returns the sums over all ranks. Collective over `group`.
pub(super) fn finish(
    sums: Vec<i64>,
    scales: &[f64],
    group: Option<&dyn ProcessGroup>,
) -> Result<Vec<f64>> {
    let sums = reduce(sums, ReduceOp::Sum, group)?;
    Ok(sums.into_iter().zip(scales).map(|(sum, scale)| sum as f64 / scale).collect())
}

fn reduce<T>(values: Vec<T>, op: ReduceOp, group: Option<&dyn ProcessGroup>) -> Result<Vec<T>>
where
    T: fulgurite_tensor::autograd::storage::HostElement,
{
    let Some(group) = group.filter(|group| group.size() > 1 && !values.is_empty()) else {
        return Ok(values);
    };
    let n = values.len();
    let tensor = Tensor::from_vec(values, n, &Device::Cpu)?;
    group.run(Collective::all_reduce(&tensor, op))?;
    read::host::<T>(&tensor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulgurite_tensor::random::{Purpose, Stream};

    fn sum(parts: &[&[f64]], count: usize) -> f64 {
        // As over ranks, but here.
        let mut largest = Largest(vec![0.0]);
        parts.iter().copied().flatten().for_each(|term| largest.take(0, *term));
        let scales = agree_on_scales(largest.0, &[count], None).unwrap();
        let add = |part: &&[f64]| {
            let mut sums = Sums::new(&scales);
            part.iter().for_each(|term| sums.take(0, *term));
            sums.sums[0]
        };
        let sums = parts.iter().map(add).sum();
        finish(vec![sums], &scales, None).unwrap()[0]
    }

    #[test]
    fn order_and_parts_do_not_matter() {
        let stream = Stream::new(1, Purpose::Sample, "terms");
        for (n, power) in [(1, 1), (7, 1), (1000, 1), (1000, 9), (70_000, 5)] {
            let term = |i: u64| (stream.normal(i) as f32).powi(power) as f64;
            let mut terms: Vec<f64> = (0..n).map(|i| term(i).powi(2)).collect();
            let whole = sum(&[&terms], terms.len());
            let exact: f64 = terms.iter().sum();
            assert!((whole / exact - 1.0).abs() < 1e-9, "{n} {power}: {whole} {exact}");
            let (a, b) = terms.split_at(terms.len() / 3);
            assert_eq!(sum(&[a, b], terms.len()), whole);
            assert_eq!(sum(&[b, a, &[]], terms.len()), whole);
            terms.sort_by(f64::total_cmp);
            assert_eq!(sum(&[&terms], terms.len()), whole);
        }
    }

    #[test]
    fn extreme_terms_are_summed() {
        for term in [0.0, f64::MIN_POSITIVE, 1e-290, 1.0, 0.75, 1e300] {
            for n in [1, 2, 3, 1 << 10] {
                let terms = vec![term; n];
                let expected = term * n as f64;
                let found = sum(&[&terms], n);
                assert!((found - expected).abs() <= 1e-12 * expected.max(1e-280), "{term:e} {n}");
            }
        }
        assert!(sum(&[&[1.0, f64::INFINITY]], 2).is_nan());
        assert!(sum(&[&[f64::NAN, 1.0]], 2).is_nan());
    }
}
