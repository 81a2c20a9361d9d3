//! Text and token data for language models.
//!
//! [`TextData`] is a [`DataModule`](fulgurite_engine::data::DataModule) for text files and folders,
//! lines, JSON lines, token files and, with the feature `parquet`, rows of Parquet files. Text is
//! tokenized by a built-in byte-level tokenizer or a Hugging Face `tokenizer.json`. Batches are
//! [`TokenBatch`](fulgurite_engine::data::TokenBatch)es. With the feature `images`, `ImageFolder`
//! reads pictures.
//!
//! ```
//! use candle_core::Device;
//! use fulgurite_core::data::{DataContext, DataModule as _, Split};
//! use fulgurite_data::{TextData, TextDataConfig};
//!
//! let config = TextDataConfig {
//!     path: concat!(env!("CARGO_MANIFEST_DIR"), "/src").into(),
//!     seq_len: 16,
//!     ..TextDataConfig::default()
//! };
//! let data = TextData::setup(&config, &DataContext::default())?;
//! let batch = data.batch(Split::Train, &[0, 1], &Device::Cpu)?;
//! assert_eq!(batch.inputs.dims(), [2, 16]);
//! assert_eq!(data.vocab_size(), Some(257)); // the bytes, and the end of a text
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

mod chat;
mod config;
mod cuts;
mod files;
mod held_out;
#[cfg(feature = "images")]
mod images;
mod labelled;
mod lines;
#[cfg(feature = "parquet")]
mod parquet_texts;
mod pattern;
#[cfg(feature = "images")]
mod picture_files;
mod rows;
mod sequences;
mod sniff;
mod source;
mod special_tokens;
mod table;
mod text;
mod text_data;
mod token_cache;
mod token_files;
mod tokenizer;
mod tokenizer_file;
mod unknown;
mod walk;

pub use chat::{
    AnswerLogp, AnswerTexts, ChatData, ChatDataConfig, ChatTemplate, PreferenceBatch,
    PreferenceData, PreferenceDataConfig, PromptData, PromptDataConfig, PromptRow, PromptRows,
    Rendered, RewardBatch, RewardData, TemplateOptions, TooLong, TrainOn, UnpairedBatch,
    UnpairedData,
};
pub use config::{
    AddBosToken, CacheDir, DataKind, MixtureSource, OnError, Paths, TextDataConfig, TokenDtype,
};
#[cfg(feature = "images")]
pub use images::{ImageBatch, ImageFolder, ImageFolderConfig};
pub use labelled::{
    LabelKind, LabelledTexts, LabelledTextsConfig, Labels, PaddedTexts, RowKind, TextBatch,
};
pub use lines::{JsonLines, Lines};
pub use table::{OnMissing, Table, TableBatch, TableConfig, Task};
pub use text_data::TextData;
pub use tokenizer::Tokenizer;
