//! Fulgurite: Lightning-style distributed training for candle.
//!
//! A user implements [`LightningModule`](prelude::LightningModule) and names a strategy in a
//! configuration file. The same program then trains on one core or on many processes: with data
//! parallelism (`ddp`), fully sharded (`fsdp`), or on any mesh of replicas, shards, context and
//! tensor parallelism (`model_parallel`).
//!
//! ```no_run
//! use fulgurite::prelude::*;
//! use serde::{Deserialize, Serialize};
//!
//! struct Net { embed: Embedding, blocks: Vec<Unit<GeluMlp>>, head: Linear }
//!
//! #[derive(Clone, Serialize, Deserialize, Documented)]
//! #[serde(deny_unknown_fields, default)]
//! struct NetConfig {
//!     /// Number of token ids.
//!     #[default(257)]
//!     vocab: usize,
//!     /// Width of the residual stream.
//!     #[default(64)]
//!     dim: usize,
//!     /// Number of blocks.
//!     #[default(2)]
//!     layers: usize,
//! }
//!
//! impl LightningModule for Net {
//!     type Config = NetConfig;
//!     type Data = TextData;
//!
//!     // Allocates nothing.
//!     fn configure_model(cfg: &NetConfig, b: &ModuleBuilder) -> Result<Self> {
//!         let block =
//!             |i| b.unit(&format!("blocks.{i}"), |b| GeluMlp::new(b, cfg.dim, 4 * cfg.dim));
//!         Ok(Self {
//!             embed: Embedding::new(&b.pp("embed"), cfg.vocab, cfg.dim)?,
//!             blocks: (0..cfg.layers).map(block).collect::<Result<_>>()?,
//!             head: Linear::new(&b.pp("head"), cfg.dim, cfg.vocab)?,
//!         })
//!     }
//!
//!     fn training_step(&mut self, batch: &TokenBatch, _: &mut StepContext) -> Result<Loss> {
//!         let mut x = self.embed.forward(&batch.inputs)?;
//!         for block in &self.blocks {
//!             x = (&x + block.forward(&x)?)?;
//!         }
//!         cross_entropy(&self.head.forward(&x)?, &batch.targets)
//!     }
//! }
//!
//! impl Hooks<TextData> for Net {} // none
//!
//! fulgurite::use_mimalloc!(); // an allocator that keeps memory for the next step; optional
//!
//! fn main() -> std::process::ExitCode {
//!     fulgurite::cli::<Net>() // fit, validate, --config, --set, …
//! }
//! ```
//!
//! This crate links the built-in plugins, has the [command line](cli()), and re-exports
//! [`fulgurite_core`] as [`core`].

#[cfg(feature = "mimalloc")]
pub mod allocator;
pub mod cli;
pub mod prelude;

pub use cli::cli;
pub use fulgurite_callbacks as callbacks;
pub use fulgurite_core as core;
pub use fulgurite_core::nn;
pub use fulgurite_data as data;
pub use fulgurite_strategies as strategies;

// Linked for the plugins that they register.
use fulgurite_accelerators as _;
use fulgurite_checkpoint_local as _;
use fulgurite_environments as _;
#[cfg(feature = "mpi")]
use fulgurite_mpi as _;
#[cfg(feature = "cuda")]
use fulgurite_nccl as _;
#[cfg(feature = "object-store")]
use fulgurite_object_store as _;
use fulgurite_transports as _;

/// Code in the README and the book, run as documentation tests.
#[cfg(doctest)]
mod book {
    #[doc = include_str!("../README.md")]
    mod readme {}
    #[doc = include_str!("../docs/src/guides/activation-checkpointing.md")]
    mod activation_checkpointing {}
    #[doc = include_str!("../docs/src/guides/adapters.md")]
    mod adapters {}
    #[doc = include_str!("../docs/src/guides/callbacks.md")]
    mod callbacks {}
    #[doc = include_str!("../docs/src/guides/candle-nn.md")]
    mod candle_nn {}
    #[doc = include_str!("../docs/src/guides/checkpoints.md")]
    mod checkpoints {}
    #[doc = include_str!("../docs/src/guides/chat.md")]
    mod chat {}
    #[doc = include_str!("../docs/src/guides/command-line.md")]
    mod command_line {}
    #[doc = include_str!("../docs/src/guides/data-module.md")]
    mod data_module {}
    #[doc = include_str!("../docs/src/guides/generation.md")]
    mod generation {}
    #[doc = include_str!("../docs/src/guides/serving.md")]
    mod serving {}
    #[doc = include_str!("../docs/src/guides/layers.md")]
    mod layers {}
    #[doc = include_str!("../docs/src/guides/hugging-face.md")]
    mod hugging_face {}
    #[doc = include_str!("../docs/src/guides/loading-data.md")]
    mod loading_data {}
    #[doc = include_str!("../docs/src/guides/loggers.md")]
    mod loggers {}
    #[doc = include_str!("../docs/src/guides/models.md")]
    mod models {}
    #[doc = include_str!("../docs/src/guides/module.md")]
    mod module {}
    #[doc = include_str!("../docs/src/guides/optimizers.md")]
    mod optimizers {}
    #[doc = include_str!("../docs/src/guides/own-model.md")]
    mod own_model {}
    #[doc = include_str!("../docs/src/guides/metrics.md")]
    mod metrics {}
    #[doc = include_str!("../docs/src/guides/model-parallel.md")]
    mod model_parallel {}
    #[doc = include_str!("../docs/src/guides/profiling.md")]
    mod profiling {}
    #[doc = include_str!("../docs/src/guides/project.md")]
    mod project {}
    #[doc = include_str!("../docs/src/guides/preferences.md")]
    mod preferences {}
    #[doc = include_str!("../docs/src/guides/strategies.md")]
    mod strategies {}
    #[doc = include_str!("../docs/src/guides/writing-a-strategy.md")]
    mod writing_a_strategy {}
}
