//! Tensor, sequence and context parallelism: plans, styles, and differentiable collectives.
//!
//! A [`Plan`] maps patterns of module paths to [`ParallelStyle`]s, with PyTorch's names and
//! meaning. [`ModuleTree::parallelize_module`](crate::module::ModuleTree::parallelize_module)
//! applies it before any values exist: it cuts the parameters' specs and tells the layers which
//! collectives to run at their edges. A [`ParallelLayer`] defines which styles a kind of layer
//! supports, and how they shard it. The layers of `nn` implement it, and others can.
//! [`ContextParallel`] shards sequences. [`collectives`] are for layers outside of plans.
//!
//! ```
//! use fulgurite_core::parallel::{Colwise, Rowwise};
//! use fulgurite_core::plan;
//!
//! let plan = plan! {
//!     "blocks.*.up" => Colwise::default(),
//!     "blocks.*.down" => Rowwise::default(),
//! };
//! assert_eq!(plan.entries().len(), 2);
//! ```
//!
//! # Layouts
//! Between layers an activation is replicated over the tensor-parallel ranks or sharded along a
//! dimension, and **its gradient has the same layout**. A style sets the layouts of a layer's input
//! and output, and a plan must make neighbours agree. Along the edges that a model declares
//! ([`ModuleBuilder::edge`](crate::module::ModuleBuilder::edge)) this is checked before ranks
//! start. Each layer also checks its input in forward, before it communicates. It knows which layer
//! computed the input, directly or through candle's operations, and the error names both ends.
//!
//! A layer outside of the plan takes whole activations. A loss takes whole activations or
//! [`ShardedLogits`]. A parameter whose gradient the plan sums must be used on sharded activations.

pub(crate) mod activations;
pub mod collectives;
mod context;
mod edges;
mod layer;
mod layout;
mod mismatch;
mod parallel_layer;
mod plan;
mod redistribute;
mod sharded_logits;
mod sharding;
mod style;

pub use activations::{check_loss, describe_layout};
pub use context::ContextParallel;
pub(crate) use edges::{LayerEdges, describe, mixed, same, sharded_loss};
pub use layer::{LayerHandle, NotedOutput, record_function};
pub(crate) use layer::{LayerParallel, PlanRecord, SequenceLength};
pub use layout::Layout;
pub use mismatch::explain_mismatch;
pub(crate) use parallel_layer::Styles;
pub use parallel_layer::{InputCast, LayerStyles, ParallelLayer};
pub use plan::{Plan, PlanEntry};
pub(crate) use redistribute::Redistribute;
pub use redistribute::Redistributed;
pub use sharded_logits::ShardedLogits;
pub use sharding::LayerSharding;
pub(crate) use sharding::{ALL, ParameterSharding};
pub use style::{
    Colwise, ParallelStyle, PrepareModuleInput, PrepareModuleOutput, Rowwise, SequenceParallel,
};
