//! The surroundings that code computes in: whether a graph is recorded, which step and which
//! samples it computes, what it tells others on the way.
//!
//! Each thread has one [`ExecutionContext`]. [`no_grad`](crate::autograd::no_grad) and
//! [`ForwardScope::enter`](crate::module::ForwardScope::enter) change it for as long as their guard
//! lives. A thread starts with gradients on and outside of any forward: work that is given to another
//! thread takes the context along.
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
//! So do tasks of rayon, each by itself: a thread that waits inside of rayon may carry out another's
//! task meanwhile, which then sees the context of that thread unless it enters its own.
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
mod grad_mode;

pub use context::{ContextGuard, ExecutionContext, enter, shared, value};
pub(crate) use grad_mode::GradMode;
