//! Ranks and what they hold.
//!
//! [`collective`] has the trait that transports implement and the calls that all ranks make.
//! [`accelerator`] is a rank's device, [`mesh`] the ranks as a grid, and [`shard`] the algebra of
//! regions: from a spec and a coordinate follows the part of a tensor that a rank holds. Nothing
//! here knows of models.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests read tensors"))]

pub mod accelerator;
pub mod collective;
pub mod mesh;
pub mod shard;

pub use fulgurite_error::{Error, Result, counted};
