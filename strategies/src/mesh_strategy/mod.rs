//! The single strategy implementation behind all configurations of this crate.
//!
//! | file | content |
//! |---|---|
//! | `settings` | the settings that each configuration becomes |
//! | `strategy` | the [`Strategy`](fulgurite_engine::strategy::Strategy) |
//! | `extensions` | its optional features: memory plans, repeated steps, saves |
//! | `units` | the choice of units that are gathered on their own |
//! | `replicated/` | whole parameters: gradients are all-reduced in buckets |
//! | `sharded/` | shards: units are gathered, gradients reduce-scattered |
//! | `ignored` | parameters excluded from data parallelism |
//! | `experts` | experts of a layer on ranks of their own |
//! | `pipeline/` | stages of the model on ranks of their own |
//! | `reduction` | gradient compression and predivision |
//! | `outer` | independent replicas, and the optimizer that synchronises them |
//! | `gradients` | partial gradients of tensor-parallel ranks, and late gradients |
//!
//! [`schedule`](crate::schedule) decides when to gather, free and reduce; `replicated` and
//! `sharded` perform it.

mod connect;
mod experts;
mod extensions;
mod gradients;
mod ignored;
mod outer;
mod pipeline;
mod plan;
mod reduction;
mod replicated;
mod settings;
mod sharded;
mod strategy;
mod units;

pub(crate) use experts::check_size as check_expert_parallel_size;
pub(crate) use outer::OuterSettings;
pub use pipeline::PipelineUnits;
pub(crate) use pipeline::{PipelineSettings, ScheduleSource};
pub(crate) use reduction::GradientSettings;
pub use settings::AccumulationSync;
pub(crate) use settings::{Settings, Sharding};
pub(crate) use strategy::MeshStrategy;
