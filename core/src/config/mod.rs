//! Configuration: TOML in layers, with messages that name the key.
//!
//! ```
//! use fulgurite_core::config::{ConfigLayers, RunConfig};
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
//!
//! - [`ConfigLayers`] stacks files and `--set` overrides.
//! - [`parse`] turns a table into any `Deserialize` type. An unknown key is an error everywhere,
//!   also for types without `deny_unknown_fields`.
//! - [`PluginValue`] and [`plugin`] take what a plugin is chosen by: `"name"` or
//!   `{ type = "name", … }`.
//! - [`config_struct!`](crate::config_struct) declares a table once, for serde and for the
//!   generated [`reference`](mod@reference).

mod checkpoint;
mod declare;
mod deserializer;
mod layers;
pub mod plugin;
mod problem;
pub mod reference;
mod run;
mod values;

pub use checkpoint::{CheckpointConfig, MonitorMode};
pub use declare::{ConfigType, Documented, KeyDoc};
pub use deserializer::{parse, parse_at};
pub use layers::{ConfigLayers, to_table, to_toml};
pub use plugin::{PluginKind, PluginValue};
pub(crate) use problem::nearest;
pub use run::RunConfig;
pub use values::{
    Amount, CkptPath, ClipAlgorithm, Devices, Precision, TimeLimit, UnusedParameters,
};
