//! The configuration of a run: seed, model, data, and the tables `[trainer]` and `[checkpoint]`.
//!
//! ```
//! use fulgurite_core::config::ConfigLayers;
//! use fulgurite_core::run::RunConfig;
//!
//! # #[derive(serde::Serialize, serde::Deserialize)] struct Model {}
//! # #[derive(serde::Serialize, serde::Deserialize)] struct Data {}
//! let layers = ConfigLayers::new()
//!     .text("run.toml", "[trainer]\nmax_steps = 100\nstrategy = \"fsdp\"")?
//!     .set("trainer.max_steps=200")?;
//! let run = RunConfig::<Model, Data>::from_layers(layers)?;
//! assert_eq!(run.trainer.max_steps, Some(200));
//! assert_eq!(run.trainer.strategy.name, "fsdp");
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

mod adapter_config;
mod agreement;
mod checkpoint_config;
mod elastic_config;
mod quantization_config;
mod run_config;
mod trainer_config;
mod values;

pub use adapter_config::{AdapterConfig, AdapterTargets, BiasMode, LayerKind};
pub use checkpoint_config::{CheckpointConfig, LoadConfig, MonitorMode, NewNames, RenameRule};
pub use elastic_config::ElasticConfig;
pub use quantization_config::{FormatName, QuantizationConfig};
pub use run_config::{RunConfig, reference_sections};
pub use trainer_config::{Limits, TrainerConfig};
pub(crate) use trainer_config::{MAX_TIMEOUT_SECS, available_cores};
pub use values::{
    CkptPath, ClipAlgorithm, CountOrFraction, Devices, FastDevRun, LateReads, MemoryCheck,
    MicroBatchSize, Precision, TimeLimit,
};
