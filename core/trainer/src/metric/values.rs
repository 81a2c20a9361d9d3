//! Metrics of numbers: means, sums, extremes.

use candle_core::{DType, Device, Tensor};

use super::{Merge, Metric};
use crate::{Error, Result};
use fulgurite_nn::Loss;

fn state(numbers: &[f64]) -> Result<Tensor> {
    Ok(Tensor::new(numbers, &Device::Cpu)?)
}

/// A weighted mean.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mean {
    /// The sum of values times weights.
    pub sum: f64,
    /// The sum of weights.
    pub weight: f64,
}

impl Mean {
    /// Creates the mean of a value that stands for `weight` samples.
    pub fn of(value: f64, weight: f64) -> Self {
        // A value without samples does not count, not even if it is NaN.
        Self { sum: if weight == 0.0 { 0.0 } else { value * weight }, weight }
    }
}

impl Metric for Mean {
    fn state(&self) -> Result<Tensor> {
        state(&[self.sum, self.weight])
    }

    fn compute(&self, state: &[f64]) -> f64 {
        state[0] / state[1]
    }
}

/// Metrics of one value. `$merge` says how the values of batches and ranks are merged.
macro_rules! numbers {
    ($($(#[$doc:meta])+ $name:ident: $merge:ident),+) => { $(
        $(#[$doc])+
        #[derive(Debug, Clone, Copy, PartialEq)]
        pub struct $name(pub f64);

        impl Metric for $name {
            fn state(&self) -> Result<Tensor> {
                state(&[self.0])
            }

            fn merge(&self) -> Merge {
                Merge::$merge
            }

            fn compute(&self, state: &[f64]) -> f64 {
                state[0]
            }
        }
    )+ };
}

numbers! {
    /// A sum over all samples.
    Sum: Sum,
    /// The smallest value.
    Min: Min,
    /// The largest value.
    Max: Max
}

/// `exp` of the mean cross entropy per token.
#[derive(Debug, Clone)]
pub struct Perplexity(Tensor);

impl Perplexity {
    /// Counts a loss whose items are tokens, without reading the loss from its device.
    ///
    /// # Errors
    /// If the loss is not a single number.
    pub fn of(loss: &Loss) -> Result<Self> {
        let sum = loss.detach().sum().flatten_all()?.to_dtype(DType::F64)?;
        if sum.elem_count() != 1 {
            return Err(Error::other(format!(
                "a perplexity is that of a loss of one number, got a tensor of shape {:?}",
                loss.sum().dims()
            )));
        }
        let count = Tensor::new(&[loss.count()], sum.device())?;
        Ok(Self(Tensor::cat(&[sum, count], 0)?))
    }
}

impl Metric for Perplexity {
    fn state(&self) -> Result<Tensor> {
        Ok(self.0.clone())
    }

    fn compute(&self, state: &[f64]) -> f64 {
        (state[0] / state[1]).exp()
    }
}

/// The mean of squared differences.
#[derive(Debug, Clone)]
pub struct MeanSquaredError(Tensor);

impl MeanSquaredError {
    /// Sums the squared differences of predictions and targets of one shape.
    ///
    /// # Errors
    /// If their shapes differ.
    pub fn of(predictions: &Tensor, targets: &Tensor) -> Result<Self> {
        let difference = (predictions.detach() - targets.detach())?.to_dtype(DType::F64)?;
        let sum = difference.sqr()?.sum_all()?.reshape(1)?;
        let count = Tensor::new(&[targets.elem_count() as f64], sum.device())?;
        Ok(Self(Tensor::cat(&[sum, count], 0)?))
    }
}

impl Metric for MeanSquaredError {
    fn state(&self) -> Result<Tensor> {
        Ok(self.0.clone())
    }

    fn compute(&self, state: &[f64]) -> f64 {
        state[0] / state[1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(metric: &dyn Metric) -> f64 {
        metric.compute(&metric.state().unwrap().to_vec1::<f64>().unwrap())
    }

    #[test]
    fn numbers_are_what_they_say() {
        assert_eq!(value(&Mean::of(0.25, 8.0)), 0.25);
        assert!(value(&Mean::of(f64::NAN, 0.0)).is_nan());
        assert_eq!(Mean::of(f64::NAN, 0.0), Mean { sum: 0.0, weight: 0.0 });
        assert_eq!((value(&Sum(3.0)), value(&Min(-1.0)), value(&Max(7.0))), (3.0, -1.0, 7.0));
        let at = |values: &[f32]| Tensor::new(values, &Device::Cpu).unwrap();
        let loss = Loss::new(Tensor::new(3.0 * 7f64.ln(), &Device::Cpu).unwrap(), 3.0);
        assert!((value(&Perplexity::of(&loss).unwrap()) - 7.0).abs() < 1e-12);
        assert!(Perplexity::of(&Loss::new(at(&[1.0, 2.0]), 2.0)).is_err());
        let error = MeanSquaredError::of(&at(&[1.0, 2.0]), &at(&[1.0, 5.0])).unwrap();
        assert_eq!(value(&error), 4.5);
    }
}
