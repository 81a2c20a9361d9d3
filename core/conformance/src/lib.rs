//! Conformance tests for plugins: [`process_group`] for transports, [`strategy`] for strategies.
//!
//! Every rank of a group calls them. A rank that finds a broken promise returns an error that names
//! it.
//!
//! ```
//! use fulgurite_core::collective::Solo;
//! use fulgurite_core::conformance;
//!
//! conformance::process_group(&Solo::new("world", 0))?;
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

#![allow(clippy::disallowed_methods, reason = "its suites read tensors, as tests do")]

mod process_group;
mod strategy;

pub use fulgurite_engine::{Error, Result};
pub use process_group::{
    process_group, process_group_abort, process_group_on, process_group_timeout,
};
pub use strategy::{Equivalence, strategy};
