//! Fully sharded data parallelism, as PyTorch FSDP2 (`fully_shard`): every rank keeps 1/N of every
//! parameter (dim 0, uneven shards), gathers a unit's parameters just before it computes and frees
//! them after, and reduce-scatters its gradients as soon as its backward is done.

mod config;
mod group;
mod runtime;
mod schedule;

pub use config::{Fsdp, ReshardAfterForward};
