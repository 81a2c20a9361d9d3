//! Conversations, for models that learn to answer.

mod config;
mod conversation;
mod data;
mod encode;
mod packing;
mod preferences;
mod prompts;
mod rewards;
mod samples;
mod sequences;
mod template;
mod unpaired;

pub use config::{ChatDataConfig, TooLong, TrainOn};
pub use data::ChatData;
pub use preferences::{PreferenceBatch, PreferenceData, PreferenceDataConfig};
pub use prompts::{PromptData, PromptDataConfig, PromptRow, PromptRows};
pub use rewards::{RewardBatch, RewardData};
pub use template::{ChatTemplate, Rendered, TemplateOptions};
pub use unpaired::{UnpairedBatch, UnpairedData};
