//! The core of Fulgurite under one name: the traits, the trainer, parameters, units, meshes,
//! optimizers and layers. Strategies and transports are plugins, in crates of their own.
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

pub use fulgurite_checkpoint as checkpoint;
/// Configuration, and the derive macro [`Documented`](config::Documented).
pub mod config {
    #[doc(hidden)]
    pub use fulgurite_config::__private;
    pub use fulgurite_config::*;
    pub use fulgurite_config_derive::DocumentedForPlugins as Documented;
}
pub use fulgurite_config::{__private, registry};
pub use fulgurite_config::{
    plugin_kind, register_accelerator, register_callback, register_checkpoint_io,
    register_environment, register_gradient_compression, register_logger, register_optimizer,
    register_parallelize, register_plugin, register_process_group, register_scheduler,
    register_strategy, register_table,
};
pub use fulgurite_conformance as conformance;
pub use fulgurite_engine::plan;
pub use fulgurite_engine::{
    accelerator, autograd, collective, data, execution, memory, mesh, module, optim, parallel,
    parameter, quantization, random, shard, strategy,
};
pub use fulgurite_error::{Error, Result, advice, counted, files, output, quoted};
pub use fulgurite_launch as launch;
pub use fulgurite_launch::environment;
pub use fulgurite_nn as nn;
pub use fulgurite_trainer::{fabric, metric, profiler, register_progress, run, run_plan, trainer};
