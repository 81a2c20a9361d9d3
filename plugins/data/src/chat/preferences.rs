//! [`PreferenceData`].

use std::collections::BTreeMap;
use std::hash::Hasher as _;

use candle_core::{Device, Tensor};
use fulgurite_config::Documented;
use fulgurite_engine::data::{DataContext, DataModule, DataReport, SourceReport, Split};
use fulgurite_error::{Error, Result};
use minijinja::Value;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use super::config::{ChatDataConfig, TooLong, TrainOn};
use super::conversation::{COLUMNS, Pair};
use super::encode::{ChatEncoder, Encoded};
use super::sequences::{self, Sequences};
use super::template::ChatTemplate;
use crate::config::{CacheDir, OnError, Paths};
use crate::held_out::hold_out;
use crate::rows::{self, Column, Place, Row};
use crate::tokenizer::Tokenizer;

/// Rows that a preview tokenizes.
pub(super) const PREVIEW_ROWS: usize = 200;

/// The configuration of [`PreferenceData`], prompts with an answer that is preferred to another,
/// of [`RewardData`](super::RewardData), and of [`UnpairedData`](super::UnpairedData), prompts with an
/// answer that is good or bad.
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
    /// `prompt` and `completion`, or beside `messages`. Rows may have `system` and `tools`.
    pub path: Paths,
    /// Files and folders of preferences for validation; then all of `path` is for training.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_path: Option<Paths>,
    /// The fraction of the rows of `path` for validation, chosen at random, the same in every run;
    /// at least 0 and less than 1. By default 0.05, and 0 with `validation_path`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_fraction: Option<f64>,
    /// The treatment of a row that is no preference, or that the template refuses: `"error"` ends
    /// the run, `"skip"` leaves it out. The start of a run reports how many were left out.
    pub on_error: OnError,
    /// A Hugging Face `tokenizer.json`, a folder with one, a repository in the local Hub cache, or
    /// `"bytes"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<String>,
    /// The chat template: a file, or `"chatml"`. By default that of the tokenizer, in
    /// `chat_template.jinja`, `tokenizer_config.json` or `chat_template.json` beside it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<String>,
    /// Variables of the template, such as `{ enable_thinking = false }`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub template_options: BTreeMap<String, serde_json::Value>,
    /// The date that a template writes as that of today (`strftime_now`), such as `"2026-01-31"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template_date: Option<String>,
    /// The token that ends an answer that is a text, by its name in `tokenizer`. By default the
    /// token that the files beside the tokenizer name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eos_token: Option<String>,
    /// Tokens of a prompt and an answer at most.
    pub seq_len: usize,
    /// What is done with rows that are longer: `"cut"` leaves out the ends of answers, `"skip"`
    /// leaves the rows out, `"error"` ends the run.
    pub too_long: TooLong,
    /// The length of a micro-batch is rounded up to a multiple of this number.
    pub pad_to_multiple_of: usize,
    /// Rows in a micro-batch of one data-parallel rank: pairs of two sequences, or answers.
    pub batch_size: usize,
    /// Whether training samples are shuffled, differently in each epoch.
    pub shuffle: bool,
}

impl Default for PreferenceDataConfig {
    fn default() -> Self {
        let ChatDataConfig {
            path,
            on_error,
            seq_len,
            too_long,
            pad_to_multiple_of,
            batch_size,
            shuffle,
            ..
        } = ChatDataConfig::default();
        Self {
            path,
            validation_path: None,
            validation_fraction: None,
            on_error,
            tokenizer: None,
            chat_template: None,
            template_options: BTreeMap::new(),
            template_date: None,
            eos_token: None,
            seq_len,
            too_long,
            pad_to_multiple_of,
            batch_size,
            shuffle,
        }
    }
}

impl PreferenceDataConfig {
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

/// Prompts with a chosen and a rejected answer.
///
/// Setup tokenizes all rows into memory.
#[derive(Debug)]
pub struct PreferenceData {
    config: PreferenceDataConfig,
    encoder: ChatEncoder,
    train: Vec<Sample>,
    validation: Vec<Sample>,
    report: DataReport,
    /// [`DataModule::memory`].
    memory: u64,
    warnings: Vec<String>,
}

/// A micro-batch of [`PreferenceData`]: the chosen and the rejected sequence of each pair, in turn.
#[derive(Debug, Clone)]
pub struct PreferenceBatch {
    /// Token ids, u32 `[2 * pairs, time]`.
    pub inputs: Tensor,
    /// The next token at each position of an answer, and -100 elsewhere, i64 `[2 * pairs, time]`.
    pub targets: Tensor,
    /// The number of answer tokens of each sequence.
    pub answer_tokens: Vec<usize>,
    /// The log-probabilities of each pair's answers under the reference model, if the data has
    /// them: chosen, rejected.
    pub reference: Option<Vec<[f32; 2]>>,
}

/// A tokenized row.
#[derive(Debug, Clone)]
struct Sample {
    answers: [Encoded; 2],
    reference: Option<[f32; 2]>,
    margin: Option<f32>,
    place: Place,
}

impl Sample {
    fn bytes(&self) -> u64 {
        let of = |encoded: &Encoded| encoded.ids.len() * 5;
        (size_of::<Self>() + self.answers.iter().map(of).sum::<usize>()) as u64
    }
}

impl Sequences for Sample {
    fn sequences(&mut self) -> &mut [Encoded] {
        &mut self.answers
    }

    fn place(&self) -> &Place {
        &self.place
    }
}

impl PreferenceData {
    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.encoder.tokenizer
    }

    /// The chat template; `None` if the tokenizer has none, and rows are texts.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.encoder.template()
    }

    /// Tokens of a prompt and an answer at most.
    pub fn seq_len(&self) -> usize {
        self.config.seq_len
    }

    /// Whether all rows have the log-probabilities of a reference model.
    pub fn has_reference(&self) -> bool {
        self.train.iter().chain(&self.validation).all(|sample| sample.reference.is_some())
    }

    fn samples(&self, split: Split) -> &[Sample] {
        match split {
            Split::Train => &self.train,
            Split::ValidationSet(_) => &[],
            _ => &self.validation,
        }
    }

    /// The samples of these indices.
    fn rows(&self, split: Split, indices: &[u64]) -> Result<Vec<&Sample>> {
        let all = self.samples(split);
        let sample = |&index: &u64| {
            all.get(index as usize).ok_or_else(|| {
                Error::Data(format!("there is no {split} sample {index} of {}", all.len()))
            })
        };
        indices.iter().map(sample).collect()
    }

    /// All answers of a split, the chosen and the rejected one of each pair in turn.
    pub(super) fn answers(&self, split: Split) -> impl Iterator<Item = &Encoded> {
        self.samples(split).iter().flat_map(|sample| &sample.answers)
    }

    /// The answers of these samples, the chosen and the rejected one of each pair in turn, and the
    /// pairs' margins.
    ///
    /// # Errors
    /// If the split has no such sample.
    pub(super) fn answers_of(
        &self,
        split: Split,
        indices: &[u64],
    ) -> Result<(Vec<&Encoded>, Vec<f32>)> {
        let samples = self.rows(split, indices)?;
        let margins = samples.iter().map(|sample| sample.margin.unwrap_or(0.0)).collect();
        Ok((samples.into_iter().flat_map(|sample| &sample.answers).collect(), margins))
    }

    pub(super) fn pad_to_multiple_of(&self) -> usize {
        self.config.pad_to_multiple_of
    }

    /// Opens the data, with at most `most` tokenized rows of each key.
    fn open(config: &PreferenceDataConfig, most: usize) -> Result<Self> {
        let chat = config.chat();
        chat.validate()?;
        let encoder = ChatEncoder::open(&chat)?;
        let mut warnings = encoder.tokenizer.warnings();
        let mut report = DataReport::default();
        let (mut rows, mut tokenized) = (0, 0);
        let mut open = |key: &str, paths: &Paths| -> Result<Vec<Sample>> {
            let mut source = SourceReport::new(key);
            let columns =
                COLUMNS.map(|name| Column { key: "a column of preferences", name: name.into() });
            let all: Vec<Row<Value>> = rows::read(key, paths.as_slice(), &columns, 0, &mut source)?;
            rows += all.len();
            tokenized += all.len().min(most);
            let encoded: Vec<Result<Sample>> =
                all.into_par_iter().take(most).map(|row| encode(&encoder, row)).collect();
            let samples = sequences::limited(key, config, encoded, &mut source, &mut warnings)?;
            report.sources.push(source);
            Ok(samples)
        };
        let all = open("data.path", &config.path)?;
        let (train, validation) = match &config.validation_path {
            Some(paths) => (all, open("data.validation_path", paths)?),
            None => {
                let held = hold_out(all, chat.validation_fraction(), "validation of preferences");
                warnings.extend(held.warning);
                (held.train, held.validation)
            }
        };
        let known: u64 = train.iter().chain(&validation).map(Sample::bytes).sum();
        let memory = (known as f64 * rows as f64 / tokenized.max(1) as f64) as u64;
        Ok(Self { config: config.clone(), encoder, train, validation, report, memory, warnings })
    }
}

/// Tokenizes both answers of a row.
fn encode(encoder: &ChatEncoder, row: Row<Value>) -> Result<Sample> {
    let place = row.place;
    let values: Vec<Value> =
        row.values.into_iter().map(|value| value.unwrap_or(Value::UNDEFINED)).collect();
    let Pair { chosen, rejected, reference, margin } = Pair::of(&place, &values)?;
    let text = |conversation| encoder.render(&place, conversation);
    let texts = [text(chosen)?, text(rejected)?];
    let answers = [encoder.encode(&texts[0])?, encoder.encode(&texts[1])?];
    if answers[0] == answers[1] {
        return Err(place.wrong("has equal answers as `chosen` and `rejected`"));
    }
    Ok(Sample { answers, reference, margin, place })
}

/// Number and a hash of rows.
fn digest(samples: &[Sample]) -> String {
    let mut hasher = XxHash3_64::default();
    for sample in samples {
        for answer in &sample.answers {
            hasher.write_u64(answer.ids.len() as u64);
            answer.ids.iter().for_each(|id| hasher.write_u32(*id));
            answer.learned.iter().for_each(|learned| hasher.write_u8(u8::from(*learned)));
        }
        sample.reference.iter().flatten().for_each(|logp| hasher.write_u32(logp.to_bits()));
        sample.margin.iter().for_each(|margin| hasher.write_u32(margin.to_bits()));
    }
    format!("{} preferences ({:016x})", samples.len(), hasher.finish())
}

impl DataModule for PreferenceData {
    type Config = PreferenceDataConfig;
    type Batch = PreferenceBatch;

    fn exclusive_keys() -> &'static [&'static [&'static str]] {
        &[&["validation_fraction", "validation_path"]]
    }

    fn setup(config: &PreferenceDataConfig, context: &DataContext) -> Result<Self> {
        let data = Self::open(config, usize::MAX)?;
        for warning in data.warnings.iter().filter(|_| context.rank == 0) {
            tracing::warn!("{warning}");
        }
        Ok(data)
    }

    fn preview(config: &PreferenceDataConfig, _: &DataContext) -> Result<Self> {
        Self::open(config, PREVIEW_ROWS)
    }

    fn batch_size(config: &PreferenceDataConfig) -> usize {
        config.batch_size
    }

    fn shuffle(config: &PreferenceDataConfig) -> bool {
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

    fn memory(&self) -> u64 {
        self.memory
    }

    fn report(&self) -> Option<DataReport> {
        Some(self.report.clone())
    }

    fn sample_definition(&self) -> Result<Vec<(String, String)>> {
        Ok(vec![("`data.seq_len`".to_owned(), self.config.seq_len.to_string())])
    }

    fn sample_name(&self, split: Split, index: u64) -> Option<String> {
        let sample = self.samples(split).get(usize::try_from(index).ok()?)?;
        Some(sample.place.to_string())
    }

    fn host_keys() -> &'static [&'static str] {
        &["chat_template", "path", "tokenizer", "validation_path"]
    }

    fn batch(&self, split: Split, indices: &[u64], device: &Device) -> Result<PreferenceBatch> {
        let samples = self.rows(split, indices)?;
        let sequences: Vec<&Encoded> = samples.iter().flat_map(|sample| &sample.answers).collect();
        let padding = self.encoder.tokenizer.end_of_text().unwrap_or(0);
        let (inputs, targets) =
            sequences::padded(&sequences, self.config.pad_to_multiple_of, padding, device)?;
        Ok(PreferenceBatch {
            inputs,
            targets,
            answer_tokens: sequences.iter().map(|sequence| sequence.learned_tokens()).collect(),
            reference: samples.iter().map(|sample| sample.reference).collect(),
        })
    }
}
