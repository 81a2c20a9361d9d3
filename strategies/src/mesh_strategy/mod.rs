//! The one strategy behind all configurations of this crate.
//!
//! | file | subject |
//! |---|---|
//! | `settings` | what a configuration decides |
//! | `strategy` | the [`Strategy`](fulgurite_core::strategy::Strategy): mesh, cuts, and the calls of a step |
//! | `units` | which units are gathered on their own |
//! | `replicated/` | ranks that hold whole parameters: gradients are all-reduced in buckets |
//! | `sharded/` | ranks that hold shards: units are gathered, gradients reduce-scattered |
//! | `late_gradient` | the error of gradients that come when their sum has begun |
//! | `summands` | gradients that tensor-parallel ranks have summands of |

mod late_gradient;
mod replicated;
mod settings;
mod sharded;
mod strategy;
mod summands;
mod units;

pub(crate) use settings::{Settings, Sharding};
pub(crate) use strategy::MeshStrategy;
