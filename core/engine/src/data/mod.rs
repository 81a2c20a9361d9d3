//! Data modules and sample orders.
//!
//! A [`DataModule`] has random access: it knows the number of samples and makes batches of given
//! samples. The samples of a rank in a step are a pure function ([`TrainSampler`],
//! [`EvalSampler`]). So the order is the same on any number of ranks, and a resumed run needs only
//! the step number.
//!
//! ```
//! use fulgurite_core::data::{SampleOrder, TrainSampler};
//!
//! // 2 ranks, 3 samples a micro-batch, 2 micro-batches a step: 12 samples a step.
//! let order = SampleOrder::new(42, false, 100)?;
//! let sampler = TrainSampler::new(order, 3, 2, 1, 2)?;
//! assert_eq!(sampler.global_batch_size(), 12);
//! assert_eq!(sampler.indices(0, 0), [6, 7, 8]); // rank 1 has the second half of the global batch
//! assert_eq!(sampler.indices(1, 1), [21, 22, 23]);
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

mod batch;
mod loader;
mod mixture;
mod module;
mod order;
mod report;
mod sampler;
mod samples;
mod streaming;

pub use batch::TokenBatch;
pub use loader::{Loader, Workers};
pub use mixture::Mixture;
pub use module::{DataContext, DataModule, Split};
pub use order::{SampleOrder, Sampler};
pub use report::{DataReport, LeftOut, SourceReport};
pub use sampler::{EvalSampler, LastBatch, StepSamples, TrainSampler};
pub use samples::Samples;
pub use streaming::{BlockShuffle, Endless, SampleStream, Streaming};
