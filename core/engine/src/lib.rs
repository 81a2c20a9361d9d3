//! Parameters, modules, shards, meshes, collectives, optimizers, and the traits
//! [`Strategy`](strategy::Strategy) and [`CheckpointIO`](checkpoint_io::CheckpointIO). This crate
//! contains no concrete layer, strategy, transport or checkpoint format.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests read tensors"))]

pub mod accelerator;
pub mod autograd;
pub mod checkpoint_io;
pub mod collective;
pub mod data;
pub mod execution;
pub mod mesh;
pub mod module;
pub mod optim;
pub mod parallel;
pub mod parameter;
pub mod quantization;
pub mod random;
pub mod shard;
pub mod simd;
pub mod strategy;

pub use fulgurite_error::{Error, Result, counted};

#[doc(hidden)]
pub mod __private {
    pub use fulgurite_config::__private::inventory;
    pub use pulp;
}
