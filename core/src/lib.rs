//! The heart of Fulgurite: every trait, the trainer, parameters, units, meshes, optimizers and
//! layers. It names no strategy and no transport; those are plugins.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use fulgurite_core::module::{Module, ModuleBuilder, ModuleInit};
//! use fulgurite_core::nn::Linear;
//!
//! let b = ModuleBuilder::new(ModuleInit::default());
//! let layer = Linear::new(&b.pp("up"), 8, 32)?;
//! let tree = b.finish()?; // the model is described; nothing is allocated yet
//! assert_eq!(tree.elem_count(), 8 * 32);
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

pub mod autograd;
pub mod checkpoint;
pub mod collective;
pub mod config;
pub mod conformance;
pub mod data;
pub mod environment;
mod error;
pub mod fabric;
pub mod launch;
pub mod mesh;
pub mod module;
pub mod nn;
pub mod optim;
pub mod parallel;
pub mod parameter;
pub mod random;
pub mod registry;
pub mod run;
pub mod shard;
mod simd;
pub mod strategy;
pub mod trainer;

pub use error::{Error, Result};

/// What the registration macros expand to.
#[doc(hidden)]
pub mod __private {
    pub use inventory;
}
