//! Models over ranks.
//!
//! [`module`] describes a model without allocating it, as a tree of modules, units and parameters.
//! [`parameter`] has the parameter, which models and optimizers hold, and its slot, which
//! strategies hold. [`parallel`] has plans and styles that cut layers over ranks, [`quantization`]
//! weights of four or eight bits. Nothing here knows a layer or a strategy.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests read tensors"))]

pub mod module;
pub mod parallel;
pub mod parameter;
pub mod quantization;

pub use fulgurite_error::{Error, Result, counted};
