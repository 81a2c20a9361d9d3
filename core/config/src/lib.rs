//! Configuration: TOML in layers, with messages that name the key.
//!
//! ```
//! use fulgurite_core::config::ConfigLayers;
//!
//! #[derive(serde::Deserialize)]
//! struct Run { trainer: Trainer }
//! #[derive(serde::Deserialize)]
//! struct Trainer { max_steps: u64 }
//!
//! let layers = ConfigLayers::new()
//!     .text("run.toml", "[trainer]\nmax_steps = 100")?
//!     .set("trainer.max_steps=200")?;
//! let run: Run = layers.parse()?;
//! assert_eq!(run.trainer.max_steps, 200);
//! # Ok::<(), fulgurite_core::Error>(())
//! ```
//!
//! - [`ConfigLayers`] stacks files and `--set` overrides.
//! - [`parse`] turns a table into any `Deserialize` type. An unknown key is always an error, even
//!   for types without `deny_unknown_fields`.
//! - [`PluginValue`] and [`plugin`] read a value that selects a plugin: `"name"` or
//!   `{ type = "name", … }`.
//! - [`Documented`](macro@Documented) derives a table's keys, their documentation and defaults,
//!   also for the generated [`reference`](mod@reference).

mod catalogue;
mod declare;
mod deserializer;
mod foreign;
mod layers;
pub mod plugin;
mod problem;
pub mod reference;
mod scalar;
pub mod schema;
mod suggest;

pub use catalogue::TableDescriptor;
pub use declare::{ConfigType, Documented, DocumentedType, KeyDoc, documented_keys};
pub use deserializer::{parse, parse_at};
pub use fulgurite_config_derive::Documented;
pub use layers::{ConfigLayers, to_table, to_toml};
pub use plugin::{PluginKind, PluginValue};
pub use scalar::{Scalar, deserialize_scalar};
pub use suggest::nearest;

pub mod registry;

pub use fulgurite_error::{Error, Result};

/// Used by the registration and derive macros.
#[doc(hidden)]
pub mod __private {
    pub use super::declare::{KnownWords, UnknownWords, Words};
    pub use inventory;
}
