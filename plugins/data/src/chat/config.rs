//! The `[data]` table of conversations.

use std::collections::BTreeMap;

use fulgurite_config::{ConfigType, Documented};
use fulgurite_error::{Error, Result};
use serde::{Deserialize, Serialize};

use super::template::TemplateOptions;
use crate::config::{CacheDir, OnError, Paths, check_validation};

/// The default fraction of rows for validation.
const VALIDATION_FRACTION: f64 = 0.05;
/// Maximum tokens in a micro-batch of one rank: far above any real one.
const MAX_TOKENS: usize = 1 << 27;

/// The configuration of [`ChatData`](super::ChatData): conversations, and how a model learns from
/// them.
///
/// ```toml
/// [data]
/// path = "conversations.jsonl"
/// tokenizer = "Qwen3-0.6B"
/// seq_len = 2048
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Documented)]
#[serde(default, deny_unknown_fields)]
pub struct ChatDataConfig {
    /// Files and folders of conversations for training: `.jsonl` and `.ndjson` (a JSON object in
    /// each line), `.csv`, `.tsv` or, in programs with the feature `parquet`, `.parquet`. A row has
    /// `messages` (a list of tables with `role` and `content`), `conversations` (with `from` and
    /// `value`), `prompt` and `completion` (texts or lists of messages), or `instruction`, `input`
    /// and `output`; beside them perhaps `system` and `tools`.
    #[default(Paths::One(".".into()))]
    pub path: Paths,
    /// Files and folders of conversations for validation; then all of `path` is for training.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_path: Option<Paths>,
    /// The fraction of the rows of `path` for validation, chosen at random, the same in every run;
    /// at least 0 and less than 1. By default 0.05, and 0 with `validation_path`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_fraction: Option<f64>,
    /// The treatment of a row without a conversation or an answer, or whose conversation the
    /// template refuses: `"error"` ends the run, `"skip"` leaves the row out. The start of a run
    /// reports how many were left out.
    #[default(OnError::Error)]
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
    /// By default such templates write the date that they have for other programs, or are refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template_date: Option<String>,
    /// The text that the model learns to write: `"answers"` (all messages of the assistant, or
    /// completions), `"last"` (the last answer) or `"all"` (the whole text).
    #[default(TrainOn::Answers)]
    pub train_on: TrainOn,
    /// The token that ends a completion of a row with `prompt` and `completion`, by its name in
    /// `tokenizer`. By default the token that the files beside the tokenizer name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eos_token: Option<String>,
    /// The folder that caches token ids, so that other ranks of the host and later runs do not
    /// tokenize the same conversations again; `false` keeps ids in memory. By default (`true`)
    /// `fulgurite/tokens` in `$XDG_CACHE_HOME` or `~/.cache`, for 4 MiB of text or more.
    #[serde(skip_serializing_if = "CacheDir::is_default")]
    #[default(CacheDir::Default)]
    pub cache_dir: CacheDir,
    /// Tokens in a sample at most.
    #[default(1024)]
    pub seq_len: usize,
    /// The treatment of longer conversations: `"cut"` leaves out their ends, `"skip"` leaves them
    /// out, `"error"` ends the run. The start of a run reports how many there were.
    #[default(TooLong::Cut)]
    pub too_long: TooLong,
    /// Whether short conversations share a sample. Each attends to itself only, with positions of
    /// its own, so losses and gradients are the same as without packing.
    #[default(true)]
    pub packing: bool,
    /// The length of a micro-batch is rounded up to a multiple of this number.
    #[default(8)]
    pub pad_to_multiple_of: usize,
    /// Samples in a micro-batch of one data-parallel rank.
    #[default(4)]
    pub batch_size: usize,
    /// Whether training samples are shuffled, differently in each epoch.
    #[default(true)]
    pub shuffle: bool,
}

/// The text that a model learns to write: `data.train_on`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TrainOn {
    /// Each answer.
    Answers,
    /// The last answer.
    Last,
    /// The whole text.
    All,
}

/// The treatment of conversations of more than `data.seq_len` tokens: `data.too_long`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TooLong {
    /// Their ends are left out.
    Cut,
    /// They are left out.
    Skip,
    /// The run ends.
    Error,
}

impl ConfigType for TrainOn {
    fn describe() -> String {
        "`\"answers\"`, `\"last\"` or `\"all\"`".to_owned()
    }
}

impl ConfigType for TooLong {
    fn describe() -> String {
        "`\"cut\"`, `\"skip\"` or `\"error\"`".to_owned()
    }
}

impl ChatDataConfig {
    pub(super) fn validation_fraction(&self) -> f64 {
        let default = if self.validation_path.is_some() { 0.0 } else { VALIDATION_FRACTION };
        self.validation_fraction.unwrap_or(default)
    }

    /// The template's variables and date.
    ///
    /// # Errors
    /// If the date cannot be read.
    pub(super) fn template(&self) -> Result<TemplateOptions> {
        TemplateOptions::new(&self.template_options, self.template_date.as_deref())
    }

    pub(super) fn validate(&self) -> Result<()> {
        let fail = |message: String| Err(Error::Config(message));
        for (key, value) in
            [("pad_to_multiple_of", self.pad_to_multiple_of), ("batch_size", self.batch_size)]
        {
            if value == 0 {
                return fail(format!("data.{key} must be at least 1, got 0"));
            }
        }
        if self.seq_len < 2 {
            return fail(format!(
                "data.seq_len must be at least 2, a token and the one after it, got {}",
                self.seq_len
            ));
        }
        let longest = self.seq_len.checked_next_multiple_of(self.pad_to_multiple_of);
        let tokens = longest.and_then(|longest| self.batch_size.checked_mul(longest));
        if tokens.is_none_or(|tokens| tokens > MAX_TOKENS) {
            return fail(format!(
                "data.batch_size = {} times data.seq_len = {} are the tokens of a micro-batch, which must be at most \
                 {MAX_TOKENS}",
                self.batch_size, self.seq_len
            ));
        }
        if self.tokenizer.is_none() {
            return fail(
                "data.tokenizer is missing: name the folder of the model, or its tokenizer.json"
                    .to_owned(),
            );
        }
        let bytes = self.tokenizer.as_deref() == Some("bytes");
        if bytes && self.eos_token.is_some() {
            return fail("data.eos_token is for a Hugging Face tokenizer (data.tokenizer)".into());
        }
        let others = [("validation_path", self.validation_path.is_some())];
        check_validation(self.validation_fraction(), &others)
    }
}
