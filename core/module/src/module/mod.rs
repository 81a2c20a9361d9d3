//! Modules, units, and the tree that records them.
//!
//! A [`ModuleBuilder`] goes through the model's constructors and records a [`ModuleTree`]: paths,
//! layer kinds, parameters, units. Strategies, plans and checkpoints work on the tree. A [`Unit`]
//! is a module that is gathered together, such as a transformer block.

mod activation_checkpointing;
mod activation_offload;
mod activations;
mod adapters;
mod after_step;
mod builder;
mod dtypes;
mod experts;
mod foreign_names;
mod forward;
mod fully_shard;
mod graph_alias;
mod graph_entry;
mod heads;
mod keep_in_fp32;
mod layer;
mod offloaded_graph;
mod parallelize;
mod pattern;
mod quantization;
mod recompute;
pub mod stage;
mod tree;
mod unit;
mod var_builder;

pub use activation_checkpointing::{ActivationCheckpointing, CheckpointMode};
pub use activation_offload::ActivationOffload;
pub use activations::Activations;
pub use adapters::{AdapterBias, Adapters, adapters_are_off, without_adapters};
pub use after_step::AfterStep;
pub use builder::{ModuleBuilder, ModuleInit};
pub use dtypes::{ModuleDtype, innermost_match};
pub use experts::{Experts, expert_path, expert_stack};
pub use foreign_names::{ForeignNames, ForeignPart};
pub use forward::{BatchRanks, ForwardScope};
pub use fully_shard::{FullyShard, Reshard, layers_or_names};
pub use layer::{CandleModule, Module};
pub use pattern::{
    PATTERN_HELP, PatternMatch, any_pattern_matches, check_pattern, find_pattern, glob_match,
    idle_pattern, pattern_matches, pattern_names,
};
pub use quantization::Quantization;
pub use tree::{ModuleInfo, ModuleTree};
pub use unit::{Unit, UnitHandle, UnitHooks};
