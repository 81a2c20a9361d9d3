//! The configuration of a model: the table `[model]`, and Hugging Face's `config.json`.

mod keys;
mod model_config;
mod pretrained;
mod reader;
mod rope;

pub(crate) use keys::OF_MODULES;
pub use keys::{KEYS, Key, KeyKind};
pub(crate) use model_config::AUTO;
pub use model_config::ModelConfig;
pub use pretrained::resolve;
pub(crate) use reader::Reader;
pub(crate) use rope::RopeDefaults;
