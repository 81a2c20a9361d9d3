//! The registry of plugins that are linked into this program, by name.
//!
//! typetag builds a plugin from its `type` tag but cannot list them; the registry can. The
//! `register_*!` macros add a [`PluginDescriptor`] beside the typetag implementation.

use std::collections::BTreeMap;

use crate::suggest::for_plugin;
use crate::{Error, KeyDoc, Result};

/// The framework's kinds of plugins, by their names in messages and listings.
pub mod kind {
    /// A `Strategy`: `trainer.strategy`.
    pub const STRATEGY: &str = "strategy";
    /// A `ProcessGroup`: `trainer.process_group`.
    pub const PROCESS_GROUP: &str = "process_group";
    /// An `Accelerator`: `trainer.accelerator`.
    pub const ACCELERATOR: &str = "accelerator";
    /// A `ClusterEnvironment`: `trainer.environment`.
    pub const ENVIRONMENT: &str = "environment";
    /// A `CheckpointIO`: `checkpoint.io`.
    pub const CHECKPOINT_IO: &str = "checkpoint_io";
    /// A `Logger`: `trainer.loggers`.
    pub const LOGGER: &str = "logger";
    /// A `Callback`: `trainer.callbacks`.
    pub const CALLBACK: &str = "callback";
    /// A `ParallelizeFn`: `trainer.strategy.parallelize`.
    pub const PARALLELIZE: &str = "parallelize";
    /// A `GradientCompression`: `trainer.strategy.gradient_compression`.
    pub const GRADIENT_COMPRESSION: &str = "gradient_compression";
    /// An `Optimizer`: `optimizer`.
    pub const OPTIMIZER: &str = "optimizer";
    /// A schedule of the learning rate: `scheduler`.
    pub const SCHEDULER: &str = "scheduler";
}

/// A registered plugin.
#[derive(Debug, Clone, Copy)]
pub struct PluginDescriptor {
    /// The kind, such as one of [`kind`].
    pub kind: &'static str,
    /// The `type` tag.
    pub name: &'static str,
    /// The crate that provides it.
    pub krate: &'static str,
    /// That crate's version.
    pub version: &'static str,
    /// One line about it.
    pub summary: &'static str,
    /// An example of its configuration, as a TOML inline value.
    pub example: &'static str,
    /// Its options, if its type is [`Documented`](crate::Documented).
    pub keys: fn() -> Option<Vec<KeyDoc>>,
}

inventory::collect!(PluginDescriptor);

/// Returns all linked plugins, sorted by kind and name.
pub fn plugins() -> Vec<PluginDescriptor> {
    let mut all: Vec<_> = inventory::iter::<PluginDescriptor>().copied().collect();
    all.sort_by_key(|d| (d.kind, d.name, d.krate));
    all
}

/// Returns the sorted names of the plugins of one kind.
pub fn names(kind: &str) -> Vec<&'static str> {
    plugins().into_iter().filter(|d| d.kind == kind).map(|d| d.name).collect()
}

/// Checks that no two plugins of one kind share a name.
///
/// # Errors
/// [`Error::DuplicatePlugin`], naming both crates.
pub fn validate() -> Result<()> {
    validate_descriptors(&plugins())
}

fn validate_descriptors(plugins: &[PluginDescriptor]) -> Result<()> {
    let mut seen = BTreeMap::new();
    for plugin in plugins {
        if let Some(first) = seen.insert((plugin.kind, plugin.name), plugin.krate) {
            return Err(Error::DuplicatePlugin {
                kind: plugin.kind,
                name: plugin.name.to_owned(),
                first: first.to_owned(),
                second: plugin.krate.to_owned(),
            });
        }
    }
    Ok(())
}

/// Checks that a plugin of this kind and name is linked.
///
/// # Errors
/// [`Error::UnknownPlugin`], with a suggestion and the known names.
pub fn require(kind: &'static str, name: &str) -> Result<()> {
    let names = names(kind);
    if names.contains(&name) {
        return Ok(());
    }
    let available = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    let suggestion = for_plugin(kind, name, &names).unwrap_or_default();
    Err(Error::UnknownPlugin { kind, name: name.to_owned(), suggestion, available })
}

/// Submits a [`PluginDescriptor`]: `(kind, name, summary, example)`.
///
/// The plugin's type is added if its options are [`Documented`](crate::Documented). The
/// `register_*!` macros are shorter.
#[macro_export]
macro_rules! register_plugin {
    ($kind:expr, $name:literal, $summary:literal, $example:literal) => {
        $crate::register_plugin!(@ $kind, $name, $summary, $example, || None);
    };
    ($kind:expr, $name:literal, $summary:literal, $example:literal, $ty:ty) => {
        $crate::register_plugin!(
            @ $kind, $name, $summary, $example, $crate::documented_keys::<$ty>
        );
    };
    (@ $kind:expr, $name:literal, $summary:literal, $example:literal, $keys:expr) => {
        $crate::__private::inventory::submit! {
            $crate::registry::PluginDescriptor {
                kind: $kind,
                name: $name,
                krate: env!("CARGO_PKG_NAME"),
                version: env!("CARGO_PKG_VERSION"),
                summary: $summary,
                example: $example,
                keys: $keys,
            }
        }
    };
}

macro_rules! registration_macros {
    ($($macro_name:ident, $kind:ident, $trait_name:literal);* $(;)?) => { $(
        registration_macros!(@one ($) $macro_name, $kind, $trait_name);
    )* };
    (@one ($d:tt) $macro_name:ident, $kind:ident, $trait_name:literal) => {
        #[doc = concat!("Makes a `", $trait_name, "` known to the registry: `(name, type, summary, example)`.")]
        /// The name is the one given to `#[typetag::serde(name = …)]`; summary and example may be
        /// left out.
        #[macro_export]
        macro_rules! $macro_name {
            ($d name:literal, $d ty:ty) => { $crate::$macro_name!($d name, $d ty, "", ""); };
            ($d name:literal, $d ty:ty, $d summary:literal) => { $crate::$macro_name!($d name, $d ty, $d summary, ""); };
            ($d name:literal, $d ty:ty, $d summary:literal, $d example:literal) => {
                $crate::register_plugin!($crate::registry::kind::$kind, $d name, $d summary, $d example, $d ty);
            };
        }
    };
}

registration_macros! {
    register_strategy, STRATEGY, "StrategyConfig";
    register_process_group, PROCESS_GROUP, "ProcessGroupConfig";
    register_accelerator, ACCELERATOR, "AcceleratorConfig";
    register_environment, ENVIRONMENT, "EnvironmentConfig";
    register_checkpoint_io, CHECKPOINT_IO, "CheckpointIOConfig";
    register_logger, LOGGER, "LoggerConfig";
    register_callback, CALLBACK, "CallbackConfig";
    register_parallelize, PARALLELIZE, "ParallelizeFn";
    register_gradient_compression, GRADIENT_COMPRESSION, "GradientCompressionConfig";
    register_optimizer, OPTIMIZER, "OptimizerConfig";
    register_scheduler, SCHEDULER, "SchedulerConfig";
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    fn descriptor(name: &'static str, krate: &'static str) -> PluginDescriptor {
        PluginDescriptor {
            kind: kind::STRATEGY,
            name,
            krate,
            version: "1",
            summary: "",
            example: "",
            keys: || None,
        }
    }

    #[test]
    fn duplicates_are_named_with_both_crates() {
        let error = validate_descriptors(&[descriptor("ddp", "a"), descriptor("ddp", "b")]);
        assert_says!(error.unwrap_err(), "two strategy plugins are named `ddp` … `a` … `b` …");
        validate_descriptors(&[descriptor("ddp", "a"), descriptor("fsdp", "a")]).unwrap();
    }
}
