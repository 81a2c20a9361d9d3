//! Modules that train the models of this crate.
//!
//! | `module.type` | module | models | data |
//! |---|---|---|---|
//! | `"causal_lm"` | [`CausalLm`] | decoders | `TextData` |
//! | `"text_generation"` | [`TextGeneration`], for predictions | decoders | `Prompts` |
//! | `"chat"` | [`Chat`] | decoders | `ChatData` |
//! | `"preference"` | [`Preference`] | decoders | `PreferenceData` |
//! | `"kto"` | [`Kto`] | decoders | `UnpairedData` |
//! | `"grpo"` | [`Grpo`] | decoders | `PromptData` |
//! | `"reward"` | [`Reward`] | decoders, encoders of text | `RewardData` |
//! | `"masked_lm"` | [`MaskedLm`] | encoders of text | `TextData` |
//! | `"sequence_classification"` | [`SequenceClassification`] | decoders, encoders of text | `LabelledTexts`, `"texts"` |
//! | `"token_classification"` | [`TokenClassification`] | decoders, encoders of text | `LabelledTexts`, `"words"` |
//! | `"seq2seq_lm"` | [`Seq2SeqLm`] | encoder-decoders | `LabelledTexts`, `"text_to_text"` |
//! | `"embedding"` | [`Embedding`] | decoders, encoders of text | `LabelledTexts`, `"pairs"` |
//! | `"image_classification"` | `ImageClassification` | encoders of pictures | `ImageFolder` |
//!
//! A head that the weights to start from lack is new and keeps its initial values. A head of theirs
//! that the module lacks is left out.

mod causal_lm;
mod chat;
mod classes;
mod common;
mod embedding;
mod expert_load;
mod frozen_reward;
mod grpo;
mod grpo_config;
mod grpo_loss;
#[cfg(feature = "images")]
mod image_classification;
mod kto;
mod losses;
mod masked_lm;
mod model_reward;
mod preference;
mod preference_losses;
mod reference;
mod reward;
mod scored_texts;
mod seq2seq_config;
mod seq2seq_lm;
mod sequence_classification;
mod text_generation;
mod token_classification;

/// The names of the modules in `module.type`.
pub(crate) const MODULES: [&str; 13] = [
    "causal_lm",
    "text_generation",
    "chat",
    "preference",
    "kto",
    "grpo",
    "reward",
    "masked_lm",
    "sequence_classification",
    "token_classification",
    "seq2seq_lm",
    "embedding",
    "image_classification",
];

pub use causal_lm::CausalLm;
pub use chat::Chat;
pub use embedding::Embedding;
pub use grpo::{GRPO_KEYS, Grpo, SampledAnswer};
pub use grpo_config::{GrpoConfig, GrpoLoss, ScaleRewards};
#[cfg(feature = "images")]
pub use image_classification::ImageClassification;
pub use kto::{KTO_KEYS, Kto};
pub use masked_lm::MaskedLm;
pub use model_reward::ModelReward;
pub use preference::{PREFERENCE_KEYS, Preference};
pub use reward::Reward;
pub use seq2seq_config::WritingConfig;
pub use seq2seq_lm::Seq2SeqLm;
pub use sequence_classification::SequenceClassification;
pub use text_generation::TextGeneration;
pub use token_classification::TokenClassification;
