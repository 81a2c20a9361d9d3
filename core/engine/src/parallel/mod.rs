//! Tensor, sequence and context parallelism: plans, styles, and the collectives that carry
//! gradients.
//!
//! A [`Plan`] maps patterns of module paths to [`ParallelStyle`]s, with PyTorch's names and meaning;
//! [`ModuleTree::parallelize_module`](crate::module::ModuleTree::parallelize_module) applies it
//! before any value exists: it cuts the parameters' specs and tells the layers of
//! `nn` what to communicate at their edges. [`ContextParallel`] cuts sequences.
//! [`collectives`] are there for layers of one's own.
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
//! Between layers an activation is replicated over the tensor-parallel ranks or cut along a
//! dimension, and **its gradient has the same layout**. A style says which layouts a layer takes and
//! gives; nothing checks what the plain operations between layers do with them, so a plan must make
//! neighbours agree, as with PyTorch's styles on local tensors.

mod apply;
mod block;
mod check;
pub mod collectives;
mod context;
mod cut;
mod heads;
mod layer;
mod layout;
mod matching;
mod plan;
mod redistribute;
mod style;

pub(crate) use apply::Parallelized;
pub use context::ContextParallel;
pub use heads::Heads;
pub use layer::LayerHandle;
pub use layer::LayerParallel;
pub use layout::Layout;
pub use plan::{Plan, PlanEntry};
pub use redistribute::{Crossing, Redistribute};
pub use style::{
    Colwise, ParallelStyle, PrepareModuleInput, PrepareModuleOutput, Rowwise, SequenceParallel,
};
