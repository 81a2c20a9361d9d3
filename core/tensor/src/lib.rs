//! The ground that tensors are computed on.
//!
//! [`execution`] has the context that code finds on its thread, and the one way to read values.
//! [`autograd`] adds to candle's: hand-written backwards, memory that comes and goes under a
//! tensor, gradients that pass from one function to another. [`random`] has random numbers as
//! functions of their place, [`simd`] loops that use the CPU's vectors, and [`memory`] counts what
//! a process holds. Nothing here knows of ranks.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests read tensors"))]

pub mod autograd;
pub mod execution;
pub mod memory;
pub mod random;
pub mod simd;
mod zeros;

pub use fulgurite_error::{Error, Result, counted};

#[doc(hidden)]
pub mod __private {
    pub use pulp;
}
