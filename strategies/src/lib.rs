//! Fulgurite's built-in strategies, chosen in a configuration file by name.
//!
//! | `trainer.strategy` | what a rank holds | what crosses the wire in a step |
//! |---|---|---|
//! | `auto` | `single_device` on one rank, `ddp` on more | |
//! | `single_device` | everything | nothing |
//! | `ddp` | everything | an all-reduce of the gradients, in buckets |
//! | `model_parallel` | its part on a mesh of replicas, shards, context and tensor parallelism | the collectives of each dimension above size 1 |
//! | `hsdp`, `tp`, `fsdp_tp` | as `model_parallel`, with other default sizes | |
//! | `diloco` | everything, or a part of its replica's, and twice the parameters of the outer optimizer | between two synchronisations nothing over replicas; in one, an all-reduce of the parameters' change |
//! | `fsdp`, `fsdp2` | 1/N of every parameter, gradient and optimizer state | all-gathers of parameters and a reduce-scatter of gradients, a unit at a time |
//!
//! and tensor-parallel plans for the key `trainer.strategy.parallelize`:
//!
//! | `parallelize` | what layers get |
//! |---|---|
//! | `llama` | NeMo's plan for Llama, with or without sequence parallelism |
//! | `hf` | a plan in Hugging Face's words, by default that of its Llama |
//! | `plan` | a plan written out |
//! | `none` | no tensor parallelism |
//!
//! and gradient compressions for the key `trainer.strategy.gradient_compression`:
//!
//! | `gradient_compression` | what replicas send |
//! |---|---|
//! | `bf16` | gradients in bfloat16: half of the bytes, the range of f32, 8 bits of precision |
//! | `fp16` | gradients in half precision, divided before so that their sum does not overflow: 11 bits |
//!
//! ```
//! use fulgurite_core::strategy::{BuildContext, Strategy as _, StrategyConfig as _};
//! use fulgurite_strategies::Fsdp;
//!
//! let strategy = Fsdp::default().build(&BuildContext::default())?;
//! assert!(strategy.capabilities().sharded);
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

mod auto;
mod ddp;
mod diloco;
mod fsdp;
mod gradient_compression;
mod mesh_strategy;
mod mixed_precision;
mod model_parallel;
mod parallelize;
mod prefetch;
pub mod schedule;
mod single_device;

pub use auto::Auto;
pub use ddp::Ddp;
pub use diloco::{Diloco, OuterSgd};
pub use fsdp::{Fsdp, ReshardAfterForward};
pub use gradient_compression::{Bf16Compression, Fp16Compression};
pub use mesh_strategy::AccumulationSync;
pub use mixed_precision::{DTypeName, DtypeOverride, MixedPrecisionPolicy};
pub use model_parallel::{ModelParallel, Size};
pub use parallelize::{HuggingFacePlan, InlinePlan, LlamaPlan, NoPlan, StyleNames};
pub use schedule::fsdp::Prefetch;
pub use single_device::SingleDevice;
