//! [`PreferenceDataConfig`].

use std::collections::BTreeMap;

use fulgurite_config::Documented;
use serde::{Deserialize, Serialize};

use super::config::{ChatDataConfig, TooLong, TrainOn};
use crate::config::{CacheDir, OnError, Paths};

/// The configuration of [`PreferenceData`](super::PreferenceData), prompts with an answer that is
/// preferred to another, of [`RewardData`](super::RewardData), and of
/// [`UnpairedData`](super::UnpairedData), prompts with an answer that is good or bad.
///
/// ```toml
/// [data]
/// path = "preferences.jsonl"
/// tokenizer = "Qwen3-0.6B"
/// seq_len = 1024
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Documented)]
#[serde(default, deny_unknown_fields)]
pub struct PreferenceDataConfig {
    /// Files and folders of preferences for training: `.jsonl` and `.ndjson` (a JSON object in each
    /// line), `.csv`, `.tsv` or, in programs with the feature `parquet`, `.parquet`. A row has
    /// `chosen` and `rejected`, as conversations that begin alike, or as answers to a `prompt`
    /// (texts or lists of messages). For `reward` it may have a `margin` by which the chosen answer
    /// is better. For `kto` a row has `label` (true for a good answer) beside
    /// `prompt` and `completion`, or beside `messages`. Rows may have `system` and `tools`. With
    /// `predict_path` the list may be empty.
    #[default(ChatDataConfig::default().path)]
    pub path: Paths,
    /// Files and folders of preferences for validation; then all of `path` is for training.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_path: Option<Paths>,
    /// Files and folders of rows for a prediction; by default those for validation. For `reward` a
    /// row may have one answer: `prompt` and `completion`, or `messages`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predict_path: Option<Paths>,
    /// Files of JSON lines that `fulgurite predict` wrote for a `preference` or `kto`, with
    /// log-probabilities of the answers under the reference model (`model.reference` = "data").
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reference_path: Option<Paths>,
    /// The fraction of the rows of `path` for validation, chosen at random, the same in every run;
    /// at least 0 and less than 1. By default 0.05, and 0 with `validation_path`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_fraction: Option<f64>,
    /// The treatment of a row without a preference, or whose texts the template refuses:
    /// `"error"` ends the run, `"skip"` leaves the row out. The start of a run reports how many
    /// were left out.
    #[default(ChatDataConfig::default().on_error)]
    pub on_error: OnError,
    /// A Hugging Face `tokenizer.json`, a folder with one, a repository in the local Hub cache, or
    /// `"bytes"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<String>,
    /// The chat template: a file, or `"chatml"`. By default the tokenizer's, from
    /// `chat_template.jinja`, `tokenizer_config.json` or `chat_template.json` beside it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<String>,
    /// Variables of the template, such as `{ enable_thinking = false }`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub template_options: BTreeMap<String, serde_json::Value>,
    /// The date that a template writes as today's (`strftime_now`), such as `"2026-01-31"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template_date: Option<String>,
    /// The token that ends an answer that is a text, by its name in `tokenizer`. By default the
    /// token that the files beside the tokenizer name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eos_token: Option<String>,
    /// Tokens of a prompt and an answer at most.
    #[default(ChatDataConfig::default().seq_len)]
    pub seq_len: usize,
    /// The treatment of longer rows: `"cut"` leaves out the ends of answers, `"skip"`
    /// leaves the rows out, `"error"` ends the run.
    #[default(ChatDataConfig::default().too_long)]
    pub too_long: TooLong,
    /// The length of a micro-batch is rounded up to a multiple of this number.
    #[default(ChatDataConfig::default().pad_to_multiple_of)]
    pub pad_to_multiple_of: usize,
    /// Rows in a micro-batch of one data-parallel rank: pairs of two sequences, or answers.
    #[default(ChatDataConfig::default().batch_size)]
    pub batch_size: usize,
    /// Whether training samples are shuffled, differently in each epoch.
    #[default(ChatDataConfig::default().shuffle)]
    pub shuffle: bool,
}

impl PreferenceDataConfig {
    /// The keys that name files of a host.
    pub(super) const HOST_KEYS: &[&str] = &[
        "chat_template",
        "path",
        "predict_path",
        "reference_path",
        "tokenizer",
        "validation_path",
    ];

    /// Whether there are rows for training: `path` may be an empty list for a prediction.
    pub(super) fn has_training(&self) -> bool {
        self.predict_path.is_none() || !self.path.as_slice().is_empty()
    }

    /// As the configuration of conversations.
    pub(super) fn chat(&self) -> ChatDataConfig {
        let config = self.clone();
        ChatDataConfig {
            path: config.path,
            validation_path: config.validation_path,
            validation_fraction: config.validation_fraction,
            on_error: config.on_error,
            tokenizer: config.tokenizer,
            chat_template: config.chat_template,
            template_options: config.template_options,
            template_date: config.template_date,
            train_on: TrainOn::Answers,
            eos_token: config.eos_token,
            cache_dir: CacheDir::Off,
            seq_len: config.seq_len,
            too_long: config.too_long,
            packing: false,
            pad_to_multiple_of: config.pad_to_multiple_of,
            batch_size: config.batch_size,
            shuffle: config.shuffle,
        }
    }
}
