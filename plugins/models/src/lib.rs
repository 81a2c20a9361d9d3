//! Models by their Hugging Face `config.json`, and modules that train them.
//!
//! ```no_run
//! fulgurite::use_mimalloc!();
//!
//! fn main() -> std::process::ExitCode {
//!     fulgurite::cli::<fulgurite_models::CausalLm>()
//! }
//! ```
//!
//! Such a program trains any decoder of [`FAMILIES`]: `model.from_pretrained` names a directory
//! with `config.json` and weights, or `[model]` has the keys of a `config.json`.

mod callbacks;
mod config;
mod decoder;
mod encoder;
mod encoder_decoder;
mod export;
mod families;
mod generation;
mod gguf;
mod layers;
mod matching;
mod modules;
mod peft;
mod recipes;
mod rewards;
mod weights;

pub use callbacks::{AnswersConfig, ChoicesConfig, LikelihoodConfig, SamplesConfig};
pub use config::{KEYS, Key, KeyKind, ModelConfig, resolve};
pub use decoder::{
    Decoder, DecoderConfig, ExpertsConfig, LatentConfig, LayerConfig, LoadLog, NormPlacement,
};
pub use encoder::{
    Classifier, ClassifierConfig, Encoder, EncoderConfig, EncoderInput, EncoderLayerConfig,
    InputConfig, MaskedLmConfig, MaskedLmHead, PatchConfig, Pooling, TextConfig,
};
pub use encoder_decoder::{DecodedTexts, EncoderDecoder, EncoderDecoderConfig, SourceTexts};
pub use export::Export;
pub use families::{Architecture, Description, FAMILIES, Family};
pub use generation::{
    Answer, AnswerText, BeamSearch, End, Generation, GenerationObserver, GenerationRanks,
    Generator, Prompt, PromptBatch, PromptSettings, Prompts, PromptsConfig, Sampling, end_tokens,
};
pub use gguf::{GgufAdapter, GgufDtype, GgufModel, GgufOptions, GgufWritten};
pub use layers::{FeedForward, NormKind};
pub use matching::{Match, Take};
#[cfg(feature = "images")]
pub use modules::ImageClassification;
pub use modules::{
    CausalLm, Chat, Embedding, GRPO_KEYS, Grpo, GrpoConfig, GrpoLoss, KTO_KEYS, Kto, MaskedLm,
    ModelReward, PREFERENCE_KEYS, Preference, Reward, SampledAnswer, ScaleRewards, Seq2SeqLm,
    SequenceClassification, TextGeneration, TokenClassification, WritingConfig,
};
pub use peft::{PeftAdapter, PeftWritten};
pub use recipes::{RECIPES, Recipe};
pub use rewards::{
    AnswerReward, PatternReward, ProgramReward, RewardConfig, RewardFunction, RewardedAnswer,
};
pub use weights::{ExportedSource, MappedSource, WeightLayout};
