//! Tools for checkpoints on disk: the functions behind the `fulgurite checkpoint` command.
//!
//! ```no_run
//! use fulgurite_core::checkpoint::CheckpointIO;
//! use fulgurite_core::checkpoint::tools::{AnyCheckpoint, ConvertOptions, ConvertTarget, convert, verify};
//!
//! fn publish(io: &dyn CheckpointIO) -> fulgurite_core::Result<()> {
//!     let checkpoint = AnyCheckpoint::open("checkpoints/step-00000300")?;
//!     assert!(verify(&checkpoint, &mut |_| {}).damages.is_empty());
//!     let options = ConvertOptions {
//!         dtype: Some(candle_core::DType::BF16),
//!         ..ConvertOptions::new(ConvertTarget::HuggingFace)
//!     };
//!     convert(&checkpoint, io, "my-model", &options, &mut |_| {})?;
//!     Ok(())
//! }
//! ```
//!
//! The tools need neither a process group nor an accelerator. Tensors are read and written one by
//! one. Checksums are verified, and an output appears under its name when it is complete and
//! durable.

mod any;
mod average;
mod convert;
mod diff;
mod distribute;
mod inspect;
mod output;
mod progress;
mod rename;
mod verify;

pub use any::{AnyCheckpoint, CheckpointKind};
pub use convert::{
    ConvertOptions, ConvertTarget, Converted, ForeignLayout, WeightChoice, consolidate, convert,
    reshard, with_weights,
};
pub use diff::{Change, Comparison, DiffOptions, Difference, ValueDifference, diff};
pub use inspect::{CheckpointSummary, TensorSet, TensorSummary, inspect};
pub use progress::Progress;
pub use rename::Rename;
pub use verify::{Damage, Verification, verify};
