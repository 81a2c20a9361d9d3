//! Conversations, for models that learn to answer.

mod config;
mod conversation;
mod data;
mod encode;
mod packing;
mod samples;
mod template;

pub use config::{ChatDataConfig, TooLong, TrainOn};
pub use data::ChatData;
pub use template::{ChatTemplate, Rendered, TemplateOptions};
