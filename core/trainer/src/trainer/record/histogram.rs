//! [`Histogram`].

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use crate::Result;
use fulgurite_engine::execution::read;

/// A distribution of values, logged by
/// [`HookContext::log_histogram`](crate::trainer::HookContext::log_histogram).
///
/// The buckets are the same for all histograms, so that histograms of several tensors or ranks add
/// up exactly. Each bucket is a tenth wider than the one before it.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fulgurite_core::trainer::Histogram;
///
/// let histogram = Histogram::of(&Tensor::new(&[-1f32, 0.0, 0.0, 3.0], &Device::Cpu)?)?;
/// assert_eq!((histogram.count(), histogram.min(), histogram.max()), (4, -1.0, 3.0));
/// let zeros = histogram.buckets().find(|bucket| bucket.left < 0.0 && bucket.right > 0.0);
/// assert_eq!(zeros.unwrap().count, 2);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Histogram {
    count: u64,
    non_finite: u64,
    min: f64,
    max: f64,
    sum: f64,
    sum_of_squares: f64,
    /// The non-empty buckets with their counts, by index.
    ///
    /// Bucket 0 has the values that are at most 1e-12 from zero. Bucket `i > 0` has the values
    /// above `1e-12 * 1.1^(i - 1)` and up to `1e-12 * 1.1^i`, and bucket `-i` their negatives.
    buckets: Vec<(i32, u64)>,
}

/// A bucket of a [`Histogram`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bucket {
    /// The lower end.
    pub left: f64,
    /// The upper end.
    pub right: f64,
    /// Number of values in the bucket.
    pub count: u64,
}

/// The index of the last bucket, which has all larger values.
const LAST: i32 = 1300;
const FIRST_LIMIT: f64 = 1e-12;
const GROWTH: f64 = 1.1;

/// Returns the absolute value of the end of bucket `index` that is farther from zero.
fn limit(index: i32) -> f64 {
    FIRST_LIMIT * GROWTH.powi(index)
}

/// Returns the index of a value's bucket.
fn bucket(value: f64) -> i32 {
    let size = value.abs();
    let near = (size / FIRST_LIMIT).ln() / GROWTH.ln();
    let mut index = near.ceil().clamp(0.0, f64::from(LAST)) as i32;
    // Correct rounding errors of the logarithm.
    while index > 0 && size <= limit(index - 1) {
        index -= 1;
    }
    while index < LAST && size > limit(index) {
        index += 1;
    }
    if value < 0.0 { -index } else { index }
}

impl Histogram {
    /// Counts all elements of a tensor, which are read from its device.
    ///
    /// # Errors
    /// If the tensor cannot be read.
    pub fn of(values: &Tensor) -> Result<Self> {
        let values = values.flatten_all()?.to_dtype(DType::F64)?;
        let values = read::vec1::<f64>(&values, "histogram")?;
        Ok(Self::of_values(values))
    }

    /// Counts numbers.
    pub fn of_values(values: impl IntoIterator<Item = f64>) -> Self {
        let mut histogram = Self::default();
        let mut buckets = BTreeMap::new();
        let (mut min, mut max) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values {
            if !value.is_finite() {
                histogram.non_finite += 1;
                continue;
            }
            histogram.count += 1;
            histogram.add_to_sums(value, value * value);
            (min, max) = (min.min(value), max.max(value));
            *buckets.entry(bucket(value)).or_insert(0) += 1;
        }
        if histogram.count > 0 {
            (histogram.min, histogram.max) = (min, max);
        }
        histogram.buckets = buckets.into_iter().collect();
        histogram
    }

    /// Adds the values of another histogram.
    pub fn merge(&mut self, other: &Self) {
        let mut buckets: BTreeMap<i32, u64> = self.buckets.drain(..).collect();
        for &(index, count) in &other.buckets {
            *buckets.entry(index).or_insert(0) += count;
        }
        self.buckets = buckets.into_iter().collect();
        if self.count == 0 {
            (self.min, self.max) = (other.min, other.max);
        } else if other.count > 0 {
            (self.min, self.max) = (self.min.min(other.min), self.max.max(other.max));
        }
        self.count += other.count;
        self.non_finite += other.non_finite;
        self.add_to_sums(other.sum, other.sum_of_squares);
    }

    /// Adds to the sums, which stay finite so that they can be written.
    fn add_to_sums(&mut self, sum: f64, sum_of_squares: f64) {
        self.sum = (self.sum + sum).clamp(f64::MIN, f64::MAX);
        self.sum_of_squares = (self.sum_of_squares + sum_of_squares).min(f64::MAX);
    }

    /// Returns the number of finite values.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the number of values that are NaN or infinite, which are not in any bucket.
    pub fn non_finite(&self) -> u64 {
        self.non_finite
    }

    /// Returns the smallest finite value; 0 if there is none.
    pub fn min(&self) -> f64 {
        self.min
    }

    /// Returns the largest finite value; 0 if there is none.
    pub fn max(&self) -> f64 {
        self.max
    }

    /// Returns the sum of the finite values.
    pub fn sum(&self) -> f64 {
        self.sum
    }

    /// Returns the sum of the squares of the finite values.
    pub fn sum_of_squares(&self) -> f64 {
        self.sum_of_squares
    }

    /// Returns the non-empty buckets, in rising order.
    pub fn buckets(&self) -> impl Iterator<Item = Bucket> + '_ {
        self.buckets.iter().map(|&(index, count)| {
            let (near, far) = (limit(index.abs() - 1), limit(index.abs()));
            let (left, right) = match index {
                0 => (-far, far),
                1.. => (near, far),
                _ => (-far, -near),
            };
            Bucket { left, right, count }
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn non_finite_values_are_counted_separately() {
        let histogram = Histogram::of_values([f64::NAN, 1.0, f64::NEG_INFINITY, -2.0]);
        assert_eq!((histogram.count(), histogram.non_finite()), (2, 2));
        assert_eq!((histogram.min(), histogram.max(), histogram.sum()), (-2.0, 1.0, -1.0));
        let empty = Histogram::of_values([f64::NAN]);
        assert_eq!((empty.count(), empty.min(), empty.buckets().count()), (0, 0.0, 0));
    }

    #[test]
    fn extreme_numbers_have_a_bucket() {
        let values = [f64::MIN_POSITIVE, 5e-324, f64::MAX, -f64::MAX, f64::from(f32::MAX), 1e-12];
        let histogram = Histogram::of_values(values);
        assert_eq!(histogram.buckets().map(|bucket| bucket.count).sum::<u64>(), 6);
        assert_eq!(histogram.max(), f64::MAX);
    }

    proptest! {
        #[test]
        fn every_value_is_in_its_bucket(values in prop::collection::vec(-1e6..1e6f64, 1..40)) {
            let histogram = Histogram::of_values(values.iter().copied());
            let mut edge = f64::NEG_INFINITY;
            for bucket in histogram.buckets() {
                prop_assert!(bucket.left >= edge && bucket.right >= bucket.left);
                edge = bucket.right;
                // A bucket includes its end that is farther from zero.
                let inside = |value: &&f64| match bucket.right < 0.0 {
                    true => (bucket.left..bucket.right).contains(*value),
                    false => **value > bucket.left && **value <= bucket.right,
                };
                prop_assert_eq!(values.iter().filter(inside).count() as u64, bucket.count);
            }
        }

        #[test]
        fn parts_add_up_to_the_whole(values in prop::collection::vec(-10.0..10.0f64, 0..40), at in 0..40usize) {
            let at = at.min(values.len());
            let whole = Histogram::of_values(values.iter().copied());
            let mut sum = Histogram::of_values(values[..at].iter().copied());
            sum.merge(&Histogram::of_values(values[at..].iter().copied()));
            prop_assert_eq!((sum.count, sum.min, sum.max), (whole.count, whole.min, whole.max));
            prop_assert_eq!(sum.buckets, whole.buckets);
        }
    }
}
