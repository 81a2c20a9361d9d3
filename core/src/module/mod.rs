//! Modules, and what is known of them apart from their Rust types.
//!
//! A [`ModuleBuilder`] goes through the model's constructors and records a [`ModuleTree`]: paths,
//! layer kinds, parameters, units. Strategies, plans and checkpoints work on the tree. A [`Unit`]
//! marks a module that is worth gathering as one.

mod builder;
mod forward;
mod fully_shard;
mod layer;
mod tree;
mod unit;
mod var_builder;

pub use builder::{ModuleBuilder, ModuleInit};
pub use forward::{ForwardScope, ForwardScopeGuard};
pub use fully_shard::{FullyShard, layers_or_names};
pub use layer::Module;
pub use tree::{ModuleInfo, ModuleTree, glob_match};
pub use unit::{Unit, UnitHandle, UnitHooks};
