//! Training under a strategy: [`fabric`] for loops of one's own, [`trainer`] with the loop, and
//! [`run`], the configuration of a run.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests read tensors"))]

pub mod fabric;
pub mod metric;
pub mod profiler;
pub mod run;
mod runtime;
pub mod trainer;
pub use fulgurite_engine::{Error, Result, counted};

#[doc(hidden)]
pub mod __private {
    pub use inventory;
}
