//! Adapters in the format of PEFT: a directory with `adapter_model.safetensors` and
//! `adapter_config.json`.

mod config;
mod experts;
mod files;
mod load;
mod merge;
mod source;

pub use config::PeftConfig;
pub use files::{AdapterLabels, save_adapter, write_adapter};
pub use load::load_adapter;
pub use merge::MergedModel;
pub use source::AdapterSource;

/// The file of the adapter's tensors.
pub const ADAPTER_MODEL: &str = "adapter_model.safetensors";
/// The file of the adapter's configuration.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";

/// Prefix of PEFT's names.
const PREFIX: &str = "base_model.model.";
