//! Ranks that hold shards: units are gathered to compute, and gradients are reduce-scattered.

mod group;
mod log;
mod runtime;

pub(super) use group::{Member, ParamGroup};
pub(super) use runtime::{Casts, PrefetchLists, ShardedRuntime};
