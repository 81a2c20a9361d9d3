//! The seam: the traits that plugins implement, and everything that they are written in terms of.
//!
//! A training framework has two kinds of code. One decides: how a model is cut, how ranks talk,
//! where a checkpoint lies, what a batch is. The other carries out: the loop, the checkpoints'
//! formats, the layers. They meet here. A [`Strategy`](strategy::Strategy) distributes a model, a
//! [`ProcessGroup`](collective::ProcessGroup) carries tensors, a [`DataModule`](data::DataModule)
//! makes batches, a [`CheckpointIO`](checkpoint_io::CheckpointIO) keeps bytes, an
//! [`Optimizer`](optim::Optimizer) updates shards. None of them knows another: a strategy calls a
//! process group and never a transport, the loop calls a strategy and never a particular one. So
//! each can be added by a crate that this one has never heard of, and the conformance suites test
//! all of them alike.
//!
//! The crates below are re-exported, so that one name is enough: tensors and autograd
//! (`fulgurite-tensor`), ranks (`fulgurite-collective`), models (`fulgurite-module`), optimizers
//! (`fulgurite-optim`). This crate has no layer, no strategy, no transport and no checkpoint
//! format.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests read tensors"))]

pub mod checkpoint_io;
pub mod data;
pub mod strategy;

pub use fulgurite_collective::{accelerator, collective, mesh, shard};
pub use fulgurite_error::{Error, Result, counted};
pub use fulgurite_module::{module, parallel, parameter, plan, quantization};
pub use fulgurite_optim as optim;
pub use fulgurite_tensor::{autograd, execution, memory, random, simd};

#[doc(hidden)]
pub mod __private {
    pub use fulgurite_config::__private::inventory;
}
