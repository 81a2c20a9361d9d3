//! [`PromptData`].

use std::collections::BTreeMap;
use std::hash::Hasher as _;
use std::sync::Arc;

use candle_core::Device;
use fulgurite_config::Documented;
use fulgurite_engine::data::{DataContext, DataModule, DataReport, SourceReport, Split};
use fulgurite_error::{Error, Result};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use twox_hash::XxHash3_64;

use super::config::{ChatDataConfig, TrainOn};
use super::conversation;
use super::encode::ChatEncoder;
use super::preferences::PREVIEW_ROWS;
use super::template::ChatTemplate;
use crate::config::{CacheDir, OnError, Paths};
use crate::held_out::hold_out;
use crate::rows::{self, Column, Place, Row};
use crate::tokenizer::Tokenizer;

/// The columns that every row may have.
const COLUMNS: [&str; 5] = ["prompt", "messages", "answer", "system", "tools"];

/// The configuration of [`PromptData`]: prompts that a model answers to be rewarded.
///
/// ```toml
/// [data]
/// path = "sums.jsonl"
/// tokenizer = "Qwen3-0.6B"
/// seq_len = 256
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Documented)]
#[serde(default, deny_unknown_fields)]
pub struct PromptDataConfig {
    /// Files and folders of prompts for training: `.jsonl` and `.ndjson` (a JSON object in each
    /// line), `.csv`, `.tsv` or, in programs with the feature `parquet`, `.parquet`. A row has
    /// `prompt`, a text or a list of messages, or `messages`, and for some rewards an `answer`. A
    /// text is continued as it is; messages are written by the chat template. Rows may have
    /// `system` and `tools`.
    #[default(ChatDataConfig::default().path)]
    pub path: Paths,
    /// Files and folders of prompts for validation; then all of `path` is for training.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_path: Option<Paths>,
    /// The fraction of the rows of `path` for validation, chosen at random, the same in every run;
    /// at least 0 and less than 1. By default 0.05, and 0 with `validation_path`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_fraction: Option<f64>,
    /// Further columns that rewards get.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub columns: Vec<String>,
    /// The treatment of a row without a prompt, or whose prompt the template refuses: `"error"`
    /// ends the run, `"skip"` leaves the row out. The start of a run reports how many were left
    /// out.
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
    pub template_options: BTreeMap<String, Value>,
    /// The date that a template writes as today's (`strftime_now`), such as `"2026-01-31"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template_date: Option<String>,
    /// The token that ends an answer, by its name in `tokenizer`. By default the token that the
    /// files beside the tokenizer name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eos_token: Option<String>,
    /// Tokens of a prompt at most. Longer prompts are left out, and counted in the report of the
    /// run's start.
    #[default(ChatDataConfig::default().seq_len)]
    pub seq_len: usize,
    /// Prompts in a micro-batch of one data-parallel rank.
    #[default(ChatDataConfig::default().batch_size)]
    pub batch_size: usize,
    /// Whether prompts are shuffled, differently in each epoch.
    #[default(ChatDataConfig::default().shuffle)]
    pub shuffle: bool,
}

impl PromptDataConfig {
    /// As the configuration of conversations.
    fn chat(&self) -> ChatDataConfig {
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
            packing: false,
            batch_size: config.batch_size,
            shuffle: config.shuffle,
            ..ChatDataConfig::default()
        }
    }
}

/// Prompts that a model answers to be rewarded.
///
/// Setup tokenizes all rows into memory.
#[derive(Debug)]
pub struct PromptData {
    config: PromptDataConfig,
    encoder: ChatEncoder,
    train: Vec<Sample>,
    validation: Vec<Sample>,
    report: DataReport,
    warnings: Vec<String>,
}

/// A row of [`PromptData`].
#[derive(Debug, Clone, PartialEq)]
pub struct PromptRow {
    /// The prompt's tokens.
    pub ids: Vec<u32>,
    /// The row's columns as they are in the file.
    pub columns: Map<String, Value>,
}

/// A micro-batch of [`PromptData`].
#[derive(Debug, Clone)]
pub struct PromptRows {
    /// The rows.
    pub rows: Vec<Arc<PromptRow>>,
}

/// A row with its place.
#[derive(Debug)]
struct Sample {
    row: Arc<PromptRow>,
    place: Place,
}

impl PromptData {
    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.encoder.tokenizer
    }

    /// The chat template; `None` if prompts are texts, and the tokenizer has no template.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.encoder.template()
    }

    /// Tokens of a prompt at most.
    pub fn seq_len(&self) -> usize {
        self.config.seq_len
    }

    /// Tokens of the longest prompt.
    pub fn longest(&self) -> usize {
        self.all().map(|sample| sample.row.ids.len()).max().unwrap_or(0)
    }

    /// Returns the place of the first row with a flaw in its columns, and the flaw.
    pub fn flaw(
        &self,
        flaw: impl Fn(&Map<String, Value>) -> Option<String>,
    ) -> Option<(String, String)> {
        self.all().find_map(|sample| {
            flaw(&sample.row.columns).map(|flaw| (sample.place.to_string(), flaw))
        })
    }

    fn all(&self) -> impl Iterator<Item = &Sample> {
        self.train.iter().chain(&self.validation)
    }

    fn samples(&self, split: Split) -> &[Sample] {
        match split {
            Split::Train => &self.train,
            Split::ValidationSet(_) => &[],
            _ => &self.validation,
        }
    }

    /// Opens the data, with at most `most` tokenized rows of each key.
    fn open(config: &PromptDataConfig, most: usize) -> Result<Self> {
        let chat = config.chat();
        chat.validate()?;
        let encoder = ChatEncoder::open(&chat)?;
        let mut warnings = encoder.tokenizer.warnings();
        let mut report = DataReport::default();
        let fixed = COLUMNS.map(|name| Column { key: "a column of prompts", name: name.into() });
        let further = config.columns.iter().filter(|name| !COLUMNS.contains(&name.as_str()));
        let further = further.map(|name| Column { key: "data.columns", name: name.clone() });
        let columns: Vec<Column> = fixed.into_iter().chain(further).collect();
        let mut open = |key: &str, paths: &Paths| -> Result<Vec<Sample>> {
            let mut source = SourceReport::new(key);
            let all: Vec<Row<Value>> = rows::read(key, paths.as_slice(), &columns, 0, &mut source)?;
            let count = all.len();
            let encode = |row| encode(&encoder, &columns, row);
            let encoded: Vec<Result<Sample>> = all.into_par_iter().take(most).map(encode).collect();
            let mut samples = Vec::new();
            let mut long = 0;
            for sample in encoded {
                let sample = match sample {
                    Ok(sample) => sample,
                    Err(error @ Error::Data(_)) if config.on_error == OnError::Skip => {
                        source.fault("not learned from", &error);
                        continue;
                    }
                    Err(error) => return Err(error),
                };
                let length = sample.row.ids.len();
                if length > config.seq_len {
                    let place = &sample.place;
                    source.leave_out(
                        "longer than data.seq_len",
                        format_args!("{place} has {length} tokens"),
                    );
                    long += 1;
                    continue;
                }
                samples.push(sample);
            }
            if long > 0 {
                warnings.push(format!(
                    "{key}: {long} of {count} prompts are left out, for they have more than data.seq_len = {} tokens",
                    config.seq_len
                ));
            }
            report.sources.push(source);
            match samples.is_empty() {
                true => Err(Error::Data(format!("{key} has no prompt to answer, of {count} rows"))),
                false => Ok(samples),
            }
        };
        let all = open("data.path", &config.path)?;
        let (train, validation) = match &config.validation_path {
            Some(paths) => (all, open("data.validation_path", paths)?),
            None => {
                let held = hold_out(all, chat.validation_fraction(), "validation of prompts");
                warnings.extend(held.warning);
                (held.train, held.validation)
            }
        };
        Ok(Self { config: config.clone(), encoder, train, validation, report, warnings })
    }
}

/// Tokenizes the prompt of a row.
fn encode(encoder: &ChatEncoder, columns: &[Column], row: Row<Value>) -> Result<Sample> {
    let place = row.place;
    let found = columns.iter().zip(row.values);
    let found = found.filter_map(|(column, value)| Some((column.name.clone(), value?)));
    let columns: Map<String, Value> = found.filter(|(_, value)| !value.is_null()).collect();
    let messages = match (columns.get("prompt"), columns.get("messages")) {
        (Some(_), Some(_)) => return Err(place.wrong("has both `prompt` and `messages`")),
        (Some(Value::String(_)), None) => None,
        (Some(list), None) | (None, Some(list)) => Some(list),
        (None, None) => {
            return Err(place.wrong("has neither `prompt`, a text or messages, nor `messages`"));
        }
    };
    let ids = match (messages, columns.get("prompt").and_then(Value::as_str)) {
        (None, Some(text)) => {
            let start = encoder.tokenizer.start_of_text().into_iter();
            start.chain(encoder.tokenizer.encode(text)?).collect()
        }
        (list, _) => {
            let list = list.cloned().unwrap_or_default();
            let text = encoder.prompt(&place, list, columns.get("system"), columns.get("tools"))?;
            encoder.tokenizer.encode(&text)?
        }
    };
    match ids.is_empty() {
        true => Err(place.wrong("has an empty prompt")),
        false => Ok(Sample { row: Arc::new(PromptRow { ids, columns }), place }),
    }
}

impl ChatEncoder {
    /// The text of a list of messages, up to the beginning of the assistant's next one.
    ///
    /// # Errors
    /// If `list` is not a list of messages, or the template refuses it.
    fn prompt(
        &self,
        place: &Place,
        list: Value,
        system: Option<&Value>,
        tools: Option<&Value>,
    ) -> Result<String> {
        let template = self.template.as_ref().map_err(|why| Error::Config(why.clone()))?;
        let (messages, tools) = prompt_messages(place, list, system, tools)?;
        let rendered = template.render(&messages, &tools, true);
        Ok(rendered.map_err(|error| place.wrong(format!("cannot be rendered: {error}")))?.text)
    }
}

/// The messages of a prompt, and its tools.
///
/// # Errors
/// If `list` is not a list of messages, or its last one is an answer.
pub(super) fn prompt_messages(
    place: &Place,
    list: Value,
    system: Option<&Value>,
    tools: Option<&Value>,
) -> Result<(Vec<minijinja::Value>, minijinja::Value)> {
    let list = conversation::parsed(place, "messages", &of_json(list)?)?;
    let mut messages = conversation::messages(place, &list)?;
    if let Some(system) = system.filter(|system| system.as_str() != Some("")) {
        let content = of_json(system.clone())?;
        messages.insert(0, conversation::message("system", content));
    }
    if messages.last().is_some_and(conversation::is_answer) {
        return Err(place.wrong(
            "has messages that end with one of the assistant: a prompt ends with the message to answer",
        ));
    }
    let tools = match tools {
        None => minijinja::Value::UNDEFINED,
        Some(tools) => conversation::parsed(place, "tools", &of_json(tools.clone())?)?,
    };
    Ok((messages, tools))
}

/// A value of a row as templates take it.
fn of_json(value: Value) -> Result<minijinja::Value> {
    serde_json::from_value(value).map_err(Error::other)
}

impl DataModule for PromptData {
    type Config = PromptDataConfig;
    type Batch = PromptRows;

    fn exclusive_keys() -> &'static [&'static [&'static str]] {
        &[&["validation_fraction", "validation_path"]]
    }

    fn setup(config: &PromptDataConfig, context: &DataContext) -> Result<Self> {
        let data = Self::open(config, usize::MAX)?;
        for warning in data.warnings.iter().filter(|_| context.rank == 0) {
            tracing::warn!("{warning}");
        }
        Ok(data)
    }

    fn preview(config: &PromptDataConfig, _: &DataContext) -> Result<Self> {
        Self::open(config, PREVIEW_ROWS)
    }

    fn batch_size(config: &PromptDataConfig) -> usize {
        config.batch_size
    }

    fn items(_: &PromptDataConfig) -> &'static str {
        "tokens"
    }

    fn shuffle(config: &PromptDataConfig) -> bool {
        config.shuffle
    }

    fn len(&self, split: Split) -> u64 {
        self.samples(split).len() as u64
    }

    fn fingerprint(&self) -> Result<Option<String>> {
        Ok(Some(digest(&self.train)))
    }

    fn evaluation_fingerprint(&self) -> Result<Option<String>> {
        Ok(Some(digest(&self.validation)))
    }

    fn report(&self) -> Option<DataReport> {
        Some(self.report.clone())
    }

    fn sample_name(&self, split: Split, index: u64) -> Option<String> {
        let sample = self.samples(split).get(usize::try_from(index).ok()?)?;
        Some(sample.place.to_string())
    }

    fn host_keys() -> &'static [&'static str] {
        &["chat_template", "path", "tokenizer", "validation_path"]
    }

    fn batch(&self, split: Split, indices: &[u64], _: &Device) -> Result<PromptRows> {
        let samples = self.samples(split);
        let row = |&index: &u64| match samples.get(index as usize) {
            Some(sample) => Ok(sample.row.clone()),
            None => {
                Err(Error::Data(format!("there is no {split} sample {index} of {}", samples.len())))
            }
        };
        Ok(PromptRows { rows: indices.iter().map(row).collect::<Result<_>>()? })
    }
}

/// Number and a hash of prompts, with what rewards get.
fn digest(samples: &[Sample]) -> String {
    let mut hasher = XxHash3_64::default();
    for Sample { row, .. } in samples {
        hasher.write_u64(row.ids.len() as u64);
        row.ids.iter().for_each(|id| hasher.write_u32(*id));
        hasher.write(Value::Object(row.columns.clone()).to_string().as_bytes());
    }
    format!("{} prompts ({:016x})", samples.len(), hasher.finish())
}
