//! The trait [`Metric`].

use std::fmt::Debug;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::MetricTable;
use crate::Result;

/// The state of a metric over some samples: values that merge with the states of other samples.
///
/// The metric's value is computed from the merged state.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fulgurite_core::Result;
/// use fulgurite_core::metric::Metric;
///
/// /// The fraction of predictions that are at most `0.1` from the truth.
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
    /// Returns the state: f64 values of one dimension, on any device.
    ///
    /// All states that are logged under one name have the same length. The host reads them when the
    /// metric is logged, not in each step.
    ///
    /// # Errors
    /// If the state cannot be computed.
    fn state(&self) -> Result<Tensor>;

    /// Returns how states are merged, element by element.
    fn merge(&self) -> Merge {
        Merge::Sum
    }

    /// Computes the metric from a merged state; NaN without samples.
    fn compute(&self, state: &[f64]) -> f64;

    /// Computes the metric's values by name; by default one, under the `name` that it was logged
    /// with.
    fn compute_all(&self, name: &str, state: &[f64]) -> Vec<(String, f64)> {
        vec![(name.to_owned(), self.compute(state))]
    }

    /// Returns the metric's value as a table, for a metric that has one beside its values.
    ///
    /// Tables are shown on the terminal and in reports. The default has none.
    ///
    /// # Errors
    /// If the state does not fit the table.
    fn table(&self, state: &[f64]) -> Result<Option<MetricTable>> {
        let _ = state;
        Ok(None)
    }
}

/// The element-wise operation that merges two states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Merge {
    /// The sum of the elements.
    Sum,
    /// The smaller of each two elements.
    Min,
    /// The larger of each two elements.
    Max,
}

impl Merge {
    /// Returns the state of an empty set of samples.
    pub(crate) fn neutral(self) -> f64 {
        match self {
            Self::Sum => 0.0,
            Self::Min => f64::INFINITY,
            Self::Max => f64::NEG_INFINITY,
        }
    }

    /// Merges the states of two sets of samples.
    pub(crate) fn apply(self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        Ok(match self {
            Self::Sum => (a + b)?,
            Self::Min => a.minimum(b)?,
            Self::Max => a.maximum(b)?,
        })
    }
}
