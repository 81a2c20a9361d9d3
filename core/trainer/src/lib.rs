//! Training under a strategy: [`fabric`] for loops of one's own, [`trainer`] with the loop, and
//! [`run`], the configuration of a run.

pub mod fabric;
pub mod metric;
pub mod profiler;
pub mod run;
mod runtime;
pub mod trainer;
pub use fulgurite_engine::{Error, Result};

#[doc(hidden)]
pub mod __private {
    pub use inventory;
}
