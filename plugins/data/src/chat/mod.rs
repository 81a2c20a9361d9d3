//! Conversations, for models that learn to answer.

mod answer_texts;
mod config;
mod conversation;
mod data;
mod encode;
mod packing;
mod preference_config;
mod preferences;
mod prompts;
mod reference;
mod rewards;
mod samples;
mod sequences;
mod template;
mod unpaired;

pub use answer_texts::AnswerTexts;
pub use config::{ChatDataConfig, TooLong, TrainOn};
pub use data::ChatData;
pub use preference_config::PreferenceDataConfig;
pub use preferences::{PreferenceBatch, PreferenceData};
pub use prompts::{PromptData, PromptDataConfig, PromptRow, PromptRows};
pub use reference::AnswerLogp;
pub use rewards::{RewardBatch, RewardData};
pub use template::{ChatTemplate, Rendered, TemplateOptions};
pub use unpaired::{UnpairedBatch, UnpairedData};
