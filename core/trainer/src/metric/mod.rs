//! Metrics that measure a model exactly, however samples are sharded over ranks.
//!
//! A mean of ranks' means is wrong if ranks have unequal numbers of samples, and precisions cannot
//! be averaged at all. So a [`Metric`] is a state that adds up: hits and samples, or counts by
//! class. A step makes a metric of its batch and logs it. The trainer adds the states of all
//! batches and ranks, and computes the value once.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use fulgurite_core::metric::{Accuracy, Metric};
//!
//! let logits = Tensor::new(&[[0.1f32, 0.9], [0.8, 0.2], [0.3, 0.7]], &Device::Cpu)?;
//! let targets = Tensor::new(&[1u32, 1, 1], &Device::Cpu)?;
//! let accuracy = Accuracy::of(&logits, &targets)?; // in a step: ctx.log("val_accuracy", accuracy)
//! let state = accuracy.state()?.to_vec1::<f64>()?;
//! assert_eq!(state, [2.0, 3.0]);
//! assert_eq!(accuracy.compute(&state), 2.0 / 3.0);
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

mod classification;
#[expect(clippy::module_inception, reason = "the trait is the module's subject")]
mod metric;
mod ranking;
mod table;
mod values;

pub use classification::{Accuracy, Average, ConfusionMatrix, F1Score, Precision, Recall};
pub use metric::{Merge, Metric};
pub use ranking::Auroc;
pub use table::MetricTable;
pub use values::{Max, Mean, MeanSquaredError, Min, Perplexity, Sum};
