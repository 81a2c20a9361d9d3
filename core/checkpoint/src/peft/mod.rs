//! Adapters in the format of PEFT: a directory with `adapter_model.safetensors` and `adapter_config.json`.

mod config;
mod files;
mod merge;

pub use config::PeftConfig;
pub use files::{AdapterSource, load_adapter, save_adapter};
pub use merge::MergedModel;

/// The file of the adapter's tensors.
pub const ADAPTER_MODEL: &str = "adapter_model.safetensors";
/// The file that says what the adapter is.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";
