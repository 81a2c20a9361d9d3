//! Element types, test values and the reference reduction.

use half::{bf16, f16};

use fulgurite_engine::autograd::storage::HostElement;
use fulgurite_engine::collective::ReduceOp;

/// An element type of the suite.
pub(super) trait Value: HostElement + std::fmt::Debug {
    /// Value of the elements outside of views.
    const MARGIN: Self;

    /// Returns a value that depends on all arguments. Sums of such values depend on the order.
    fn test_value(rank: usize, index: usize, salt: u64) -> Self;

    /// Reduces one element over the ranks, in rank order.
    fn reduce(op: ReduceOp, values: &[Self]) -> Self;

    /// Returns the largest allowed difference from [`reduce`](Self::reduce).
    ///
    /// The reduction may be in another order, and rounded to this type after each step.
    fn slack(op: ReduceOp, values: &[Self]) -> f64;

    /// Whether the difference is at most `slack`.
    fn is_near(self, other: Self, slack: f64) -> bool;

    /// Bitwise equality, with all NaNs equal.
    fn same(self, other: Self) -> bool;
}

/// Returns the first `n` test values of `rank`.
pub(super) fn values<T: Value>(rank: usize, n: usize, salt: u64) -> Vec<T> {
    (0..n).map(|i| T::test_value(rank, i, salt)).collect()
}

/// Returns the reduction of the ranks' [`values`].
pub(super) fn reduced<T: Value>(op: ReduceOp, ranks: usize, n: usize, salt: u64) -> Vec<T> {
    let mut column = vec![T::MARGIN; ranks];
    (0..n)
        .map(|i| {
            for (rank, slot) in column.iter_mut().enumerate() {
                *slot = T::test_value(rank, i, salt);
            }
            T::reduce(op, &column)
        })
        .collect()
}

/// Returns the [slack](Value::slack) of each element of [`reduced`].
pub(super) fn slacks<T: Value>(op: ReduceOp, ranks: usize, n: usize, salt: u64) -> Vec<f64> {
    let mut column = vec![T::MARGIN; ranks];
    (0..n)
        .map(|i| {
            for (rank, slot) in column.iter_mut().enumerate() {
                *slot = T::test_value(rank, i, salt);
            }
            T::slack(op, &column)
        })
        .collect()
}

/// Returns 64 mixed bits (splitmix64).
fn bits(rank: usize, index: usize, salt: u64) -> u64 {
    let mut z =
        (rank as u64) << 48 ^ (index as u64) << 8 ^ salt.wrapping_mul(0xD129_0C5A_93B5_2E4D);
    z = z.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Returns a signed value. Values span about ten binary orders of magnitude, so that the rounding
/// of sums depends on the order.
fn varied_value(rank: usize, index: usize, salt: u64) -> f64 {
    let bits = bits(rank, index, salt);
    let fraction = (bits >> 11) as f64 / (1u64 << 53) as f64 + 0.5;
    let scale = f64::from(1u32 << (bits & 7)) / 16.0;
    if bits & 8 == 0 { fraction * scale } else { -fraction * scale }
}

macro_rules! integers {
    ($($ty:ty),*) => { $(impl Value for $ty {
        const MARGIN: Self = 77;

        fn test_value(rank: usize, index: usize, salt: u64) -> Self {
            bits(rank, index, salt) as $ty
        }

        fn reduce(op: ReduceOp, values: &[Self]) -> Self {
            let fold = |f: fn($ty, $ty) -> $ty| values[1..].iter().fold(values[0], |a, &b| f(a, b));
            match op {
                ReduceOp::Sum => fold(<$ty>::wrapping_add),
                ReduceOp::Product => fold(<$ty>::wrapping_mul),
                ReduceOp::Min => fold(|a, b| a.min(b)),
                ReduceOp::Max => fold(|a, b| a.max(b)),
            }
        }

        fn slack(_: ReduceOp, _: &[Self]) -> f64 {
            0.0
        }

        fn is_near(self, other: Self, _: f64) -> bool {
            self == other
        }

        fn same(self, other: Self) -> bool {
            self == other
        }
    })* };
}

integers!(u8, u32, i32, i64);

macro_rules! floats {
    ($($ty:ty as $wide:ty, $margin:expr, $widen:expr, $narrow:expr, $epsilon:expr);* $(;)?) => { $(impl Value for $ty {
        const MARGIN: Self = $margin;

        fn test_value(rank: usize, index: usize, salt: u64) -> Self {
            let narrow: fn(f64) -> $ty = |x| $narrow(x as $wide);
            narrow(varied_value(rank, index, salt))
        }

        fn reduce(op: ReduceOp, values: &[Self]) -> Self {
            let mut result: $wide = $widen(values[0]);
            for &value in &values[1..] {
                let value: $wide = $widen(value);
                result = match op {
                    ReduceOp::Sum => result + value,
                    ReduceOp::Product => result * value,
                    _ if result.is_nan() || value.is_nan() => <$wide>::NAN,
                    ReduceOp::Min => result.min(value),
                    ReduceOp::Max => result.max(value),
                };
            }
            $narrow(result)
        }

        fn slack(op: ReduceOp, values: &[Self]) -> f64 {
            let sizes = values.iter().map(|&value| f64::from($widen(value)).abs());
            let size: f64 = match op {
                ReduceOp::Sum => sizes.sum(),
                ReduceOp::Product => sizes.product(),
                ReduceOp::Min | ReduceOp::Max => return 0.0,
            };
            // Small products of f16 have fewer digits.
            let least = if std::mem::size_of::<Self>() == 2 { 2f64.powi(-24) } else { 0.0 };
            (values.len() + 1) as f64 * f64::from($epsilon).mul_add(size, 16.0 * least)
        }

        fn is_near(self, other: Self, slack: f64) -> bool {
            (f64::from($widen(self)) - f64::from($widen(other))).abs() <= slack
        }

        fn same(self, other: Self) -> bool {
            self.to_bits() == other.to_bits() || (self.is_nan() && other.is_nan())
        }
    })* };
}

floats! {
    f32 as f32, 77.0, |x| x, |x| x, f32::EPSILON;
    f64 as f64, 77.0, |x| x, |x| x, f64::EPSILON;
    bf16 as f32, bf16::from_f32_const(77.0), |x: bf16| x.to_f32(), bf16::from_f32, bf16::EPSILON;
    f16 as f32, f16::from_f32_const(77.0), |x: f16| x.to_f32(), f16::from_f32, f16::EPSILON;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slack_allows_order_but_not_values() {
        fn check<T: Value>() {
            for op in [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max] {
                let mut noticed = 0;
                for i in 0..1000 {
                    let values: Vec<T> = (0..4).map(|r| T::test_value(r, i, 1)).collect();
                    let backward: Vec<T> = values.iter().rev().copied().collect();
                    // Rounded to the type after each step.
                    let steps = backward[1..].iter();
                    let steps = steps.fold(backward[0], |a, &b| T::reduce(op, &[a, b]));
                    let (exact, slack) = (T::reduce(op, &values), T::slack(op, &values));
                    assert!(steps.is_near(exact, slack), "{op:?} {values:?}: {steps:?} {exact:?}");
                    let without_one = T::reduce(op, &values[..3]);
                    noticed += usize::from(!without_one.is_near(exact, slack));
                }
                // The missing value is the smallest in one case of four, and small values hardly
                // change a sum.
                assert!(noticed > 200, "{op:?}: {noticed}");
            }
        }
        check::<f32>();
        check::<f64>();
        check::<i64>();
        check::<bf16>();
        check::<f16>();
    }

    #[test]
    fn test_value_sums_depend_on_order() {
        fn differing<T: Value>() -> usize {
            (0..1000)
                .filter(|&i| {
                    let forward: Vec<T> = (0..3).map(|r| T::test_value(r, i, 1)).collect();
                    let backward: Vec<T> = forward.iter().rev().copied().collect();
                    let sum = |v: &[T]| T::reduce(ReduceOp::Sum, v);
                    !sum(&forward).same(sum(&backward))
                })
                .count()
        }
        assert!(differing::<f32>() > 100, "{}", differing::<f32>());
        assert!(differing::<f64>() > 100, "{}", differing::<f64>());
    }
}
