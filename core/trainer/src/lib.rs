//! Training under a strategy: [`fabric`] for custom loops, [`trainer`] for the built-in loop, and
//! [`run`] for the configuration of a run.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests read tensors"))]

pub mod fabric;
pub mod metric;
pub mod profiler;
pub mod run;
mod runtime;
pub mod trainer;
pub use fulgurite_engine::{Error, Result, counted};
pub use trainer::run_plan;

#[doc(hidden)]
pub mod __private {
    pub use inventory;
}
