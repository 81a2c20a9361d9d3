//! The one strategy behind all configurations of this crate.
//!
//! | file | subject |
//! |---|---|
//! | `settings` | what each configuration is translated to |
//! | `strategy` | the [`Strategy`](fulgurite_engine::strategy::Strategy): mesh, cuts, and the calls of a step |
//! | `units` | which units are gathered on their own |
//! | `replicated/` | ranks that hold whole parameters: gradients are all-reduced in buckets |
//! | `sharded/` | ranks that hold shards: units are gathered, gradients reduce-scattered |
//! | `ignored` | parameters that data parallelism leaves alone |
//! | `reduction` | what is sent of gradients, and what they are divided by before |
//! | `outer` | replicas that train on their own, and the optimizer that brings them together |
//! | `gradients` | partial gradients of tensor-parallel ranks, and the error of gradients that come too late |
//!
//! When to gather, free and reduce is decided in [`schedule`](crate::schedule); `replicated` and `sharded`
//! perform it.

mod connect;
mod gradients;
mod ignored;
mod outer;
mod plan;
mod reduction;
mod replicated;
mod settings;
mod sharded;
mod strategy;
mod units;

pub(crate) use outer::OuterSettings;
pub(crate) use reduction::GradientSettings;
pub use settings::AccumulationSync;
pub(crate) use settings::{Settings, Sharding};
pub(crate) use strategy::MeshStrategy;
