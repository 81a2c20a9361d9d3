//! The trait [`Metric`].

use std::fmt::Debug;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use crate::Result;

/// What is known of a metric from some samples: numbers that are merged with those of other samples, and what
/// they come to.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fulgurite_core::Result;
/// use fulgurite_core::metric::Metric;
///
/// /// The share of predictions that are at most `0.1` from the truth.
/// #[derive(Debug)]
/// struct Close { hits: f64, samples: f64 }
///
/// impl Metric for Close {
///     fn state(&self) -> Result<Tensor> {
///         Ok(Tensor::new(&[self.hits, self.samples], &Device::Cpu)?)
///     }
///     fn compute(&self, state: &[f64]) -> f64 {
///         state[0] / state[1]
///     }
/// }
/// ```
pub trait Metric: Debug + Send + Sync {
    /// The numbers: f64, of one dimension, on any device. All that are logged under one name have the same
    /// length. They are read on the host when the metric is logged, not in each step.
    ///
    /// # Errors
    /// If they cannot be computed.
    fn state(&self) -> Result<Tensor>;

    /// How states are merged, element by element.
    fn merge(&self) -> Merge {
        Merge::Sum
    }

    /// The metric of merged states; NaN if there were no samples.
    fn compute(&self, state: &[f64]) -> f64;

    /// The metric's numbers by name; by default one under the `name` that it was logged with.
    fn compute_all(&self, name: &str, state: &[f64]) -> Vec<(String, f64)> {
        vec![(name.to_owned(), self.compute(state))]
    }
}

/// How the states of two sets of samples make that of both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Merge {
    /// They are added.
    Sum,
    /// The smaller of each two elements.
    Min,
    /// The larger of each two elements.
    Max,
}

impl Merge {
    /// The state of no samples.
    pub(crate) fn neutral(self) -> f64 {
        match self {
            Self::Sum => 0.0,
            Self::Min => f64::INFINITY,
            Self::Max => f64::NEG_INFINITY,
        }
    }

    /// The state of both sets of samples.
    pub(crate) fn apply(self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        Ok(match self {
            Self::Sum => (a + b)?,
            Self::Min => a.minimum(b)?,
            Self::Max => a.maximum(b)?,
        })
    }
}
