//! The execution context of code: whether a graph is recorded, which step and samples a forward
//! computes, and records that layers share.
//!
//! Each thread has one [`ExecutionContext`]. [`no_grad`](crate::autograd::no_grad) and
//! `ForwardScope::enter` change it until their
//! guard is dropped. A new thread starts with gradients enabled and outside of any forward, so work
//! for another thread must take the context along.
//!
//! ```
//! use fulgurite_core::autograd::{is_grad_enabled, no_grad};
//! use fulgurite_core::execution::ExecutionContext;
//!
//! let _no_grad = no_grad();
//! let context = ExecutionContext::current();
//! std::thread::scope(|threads| {
//!     threads.spawn(|| {
//!         assert!(is_grad_enabled()); // another thread, another context
//!         context.run(|| assert!(!is_grad_enabled()));
//!     });
//! });
//! ```
//!
//! Each rayon task must enter the context too. A thread that waits inside rayon may run another
//! thread's task, which would otherwise see the waiting thread's context.
//!
//! ```
//! # use candle_core::{Device, Tensor};
//! # use fulgurite_core::{Result, execution::ExecutionContext, module::Module};
//! use rayon::prelude::*;
//!
//! fn forward_all(experts: &[impl Module + Sync], x: &Tensor) -> Result<Vec<Tensor>> {
//!     let context = ExecutionContext::current();
//!     experts.par_iter().map(|expert| context.run(|| expert.forward(x))).collect()
//! }
//! ```

mod context;
mod dry_copies;
pub mod dry_run;
pub(crate) mod grad_mode;
pub mod read;
mod sent;
pub mod transfer;

pub use context::{ContextGuard, ExecutionContext, enter, shared, value};
pub(crate) use context::{detect_anomalies, detects_anomalies};
pub(crate) use grad_mode::GradMode;
