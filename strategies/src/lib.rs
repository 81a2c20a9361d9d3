//! Fulgurite's built-in strategies, chosen in a configuration file by name.
//!
//! | `trainer.strategy` | a rank holds | communication in a step |
//! |---|---|---|
//! | `auto` | `single_device` on one rank, `ddp` on more | |
//! | `single_device` | everything | none |
//! | `ddp` | everything | all-reduce of gradients, in buckets |
//! | `model_parallel` | its part on a mesh | collectives of each dimension above size 1 |
//! | `hsdp`, `tp`, `fsdp_tp` | like `model_parallel`, with other default sizes | |
//! | `diloco` | its replica, or a shard, and the outer optimizer's state | see [`Diloco`] |
//! | `fsdp`, `fsdp2` | 1/N of model and optimizer state | all-gather and reduce-scatter per unit |
//!
//! The mesh of `model_parallel` has dimensions for replicas, shards, context and tensor
//! parallelism. `diloco` communicates nothing between replicas until a synchronisation, which
//! all-reduces the parameters' change. Its outer optimizer's state has up to twice the size of the
//! parameters.
//!
//! Tensor-parallel plans for the key `trainer.strategy.parallelize`:
//!
//! | `parallelize` | tensor-parallel plan |
//! |---|---|
//! | `llama` | NeMo's plan for Llama, with or without sequence parallelism |
//! | `hf` | a plan in Hugging Face's format, by default the plan of its Llama |
//! | `plan` | a plan written out |
//! | `none` | no tensor parallelism |
//!
//! Gradient compressions for the key `trainer.strategy.gradient_compression`:
//!
//! | `gradient_compression` | replicas send |
//! |---|---|
//! | `bf16` | gradients in bfloat16: half the bytes, the range of f32, 8 bits of precision |
//! | `fp16` | gradients in half precision, divided to prevent overflow: 11 bits of precision |
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
pub use mesh_strategy::{AccumulationSync, PipelineUnits};
pub use mixed_precision::{DTypeName, DtypeOverride, MixedPrecisionPolicy};
pub use model_parallel::{ModelParallel, Size};
pub use parallelize::{HuggingFacePlan, InlinePlan, LlamaPlan, NoPlan, StyleNames};
pub use schedule::fsdp::Prefetch;
pub use single_device::SingleDevice;
