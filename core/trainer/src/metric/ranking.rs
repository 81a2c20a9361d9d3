//! Metrics of scores that rank samples.

use candle_core::{DType, Device, Tensor};

use super::Metric;
use crate::{Error, Result};
use fulgurite_engine::execution::read;

/// The area under the receiver operating characteristic curve.
///
/// It is the probability that a positive sample has a higher score than a negative one, with ties
/// counted half. Scores are put into bins of equal width (as torchmetrics does with `thresholds`),
/// so that states add up. The result is exact for the binned scores, however samples are sharded.
#[derive(Debug, Clone, PartialEq)]
pub struct Auroc {
    /// Negative samples by bin, then positive samples by bin.
    counts: Vec<f64>,
}

impl Auroc {
    /// The number of bins in [`of`](Self::of).
    pub const BINS: usize = 1000;

    /// Counts `scores` between 0 and 1 by `targets` of the same shape.
    ///
    /// Targets are u8, u32 or i64: 0 is negative, 1 positive.
    ///
    /// # Errors
    /// If shapes differ, a score is not between 0 and 1, or a target is neither 0 nor 1.
    pub fn of(scores: &Tensor, targets: &Tensor) -> Result<Self> {
        Self::with_bins(scores, targets, Self::BINS)
    }

    /// Like [`of`](Self::of), with this number of bins.
    ///
    /// # Errors
    /// As [`of`](Self::of), and if `bins` is 0.
    pub fn with_bins(scores: &Tensor, targets: &Tensor, bins: usize) -> Result<Self> {
        if bins == 0 || scores.dims() != targets.dims() {
            return Err(Error::other(format!(
                "an AUROC takes scores and targets of one shape and at least one bin, got {:?}, {:?} \
                 and {bins}",
                scores.dims(),
                targets.dims()
            )));
        }
        let scores = scores.detach().flatten_all()?.to_dtype(DType::F64)?;
        let scores = read::vec1::<f64>(&scores, "metric")?;
        let targets = targets.flatten_all()?.to_dtype(DType::I64)?;
        let targets = read::vec1::<i64>(&targets, "metric")?;
        let mut counts = vec![0.0; 2 * bins];
        for (score, target) in scores.into_iter().zip(targets) {
            let (0.0..=1.0, 0 | 1) = (score, target) else {
                return Err(Error::other(format!(
                    "an AUROC takes scores between 0 and 1 (`sigmoid` of a logit) and targets of 0 or \
                     1, got {score} and {target}"
                )));
            };
            let bin = ((score * bins as f64) as usize).min(bins - 1);
            counts[bin + if target == 1 { bins } else { 0 }] += 1.0;
        }
        Ok(Self { counts })
    }
}

impl Metric for Auroc {
    fn state(&self) -> Result<Tensor> {
        Ok(Tensor::new(self.counts.as_slice(), &Device::Cpu)?)
    }

    fn compute(&self, state: &[f64]) -> f64 {
        let (negative, positive) = state.split_at(state.len() / 2);
        let (mut below, mut wins) = (0.0, 0.0);
        for (negative, positive) in negative.iter().zip(positive) {
            wins += positive * (below + negative / 2.0);
            below += negative;
        }
        wins / (below * positive.iter().sum::<f64>())
    }
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;
    use proptest::prelude::*;

    use super::*;

    fn auroc(samples: &[(u32, bool)]) -> Auroc {
        let scores: Vec<f64> = samples.iter().map(|(score, _)| f64::from(*score) / 100.0).collect();
        let targets: Vec<u32> = samples.iter().map(|(_, positive)| u32::from(*positive)).collect();
        let at = |n| (n, &Device::Cpu);
        let (n, device) = at(samples.len());
        Auroc::of(
            &Tensor::from_vec(scores, n, device).unwrap(),
            &Tensor::from_vec(targets, n, device).unwrap(),
        )
        .unwrap()
    }

    proptest! {
        #[test]
        fn equals_the_share_of_ordered_pairs(
            samples in prop::collection::vec((0u32..=100, any::<bool>()), 2..40),
        ) {
            let of = |positive: bool| samples.iter().filter(move |s| s.1 == positive).map(|s| s.0);
            let pairs = of(true).flat_map(|p| of(false).map(move |n| (p, n)));
            let (mut wins, mut all) = (0.0, 0.0);
            for (positive, negative) in pairs {
                wins += match positive.cmp(&negative) {
                    std::cmp::Ordering::Less => 0.0,
                    std::cmp::Ordering::Equal => 0.5,
                    std::cmp::Ordering::Greater => 1.0,
                };
                all += 1.0;
            }
            let metric = auroc(&samples);
            let found = metric.compute(&metric.state().unwrap().to_vec1::<f64>().unwrap());
            prop_assert!((found - wins / all).abs() < 1e-12 || (found.is_nan() && all == 0.0));
        }
    }

    #[test]
    fn invalid_scores_are_refused() {
        let at = |values: &[f64]| Tensor::new(values, &Device::Cpu).unwrap();
        assert_says!(
            Auroc::of(&at(&[0.5, 1.5]), &at(&[0.0, 1.0])).unwrap_err(),
            "an AUROC takes scores between 0 and 1 … targets of 0 or 1, got 1.5 and 1"
        );
        assert_says!(
            Auroc::of(&at(&[0.5]), &at(&[0.0, 1.0])).unwrap_err(),
            "an AUROC takes scores and targets of one shape … got [1], [2] and 1000"
        );
    }
}
