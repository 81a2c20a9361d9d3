//! [`PreferenceData`].

use std::hash::Hasher as _;

use candle_core::{Device, Tensor};
use fulgurite_engine::data::{DataContext, DataModule, DataReport, SourceReport, Split};
use fulgurite_error::{Error, Result};
use minijinja::Value;
use rayon::prelude::*;
use twox_hash::XxHash3_64;

use super::conversation::{COLUMNS, Pair};
use super::encode::{ChatEncoder, Encoded};
use super::preference_config::PreferenceDataConfig;
use super::reference::ReferenceFile;
use super::sequences::{self, Sequences};
use super::template::ChatTemplate;
use crate::config::Paths;
use crate::held_out::hold_out;
use crate::rows::{self, Column, Place, Row};
use crate::tokenizer::Tokenizer;

/// Rows that a preview tokenizes.
pub(super) const PREVIEW_ROWS: usize = 200;

/// The key of rows for a prediction.
pub(super) const PREDICT_KEY: &str = "data.predict_path";

/// Prompts with a chosen and a rejected answer.
///
/// Setup tokenizes all rows into memory.
#[derive(Debug)]
pub struct PreferenceData {
    config: PreferenceDataConfig,
    encoder: ChatEncoder,
    train: Vec<Sample>,
    validation: Vec<Sample>,
    /// The rows of `data.predict_path`.
    predict: Option<Vec<Sample>>,
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
    /// The keys of each pair's sequences in a file of log-probabilities
    /// ([`AnswerLogp`](super::AnswerLogp)).
    pub keys: Vec<[u64; 2]>,
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

    /// Takes the log-probabilities of the reference from a file.
    fn find_reference(&mut self, known: &ReferenceFile) -> Result<()> {
        let of = |answer: &Encoded| known.log_probability(&self.place, answer.key());
        self.reference = Some([of(&self.answers[0])?, of(&self.answers[1])?]);
        Ok(())
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

    /// The chat template; `None` if rows are texts, and the tokenizer has no template.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.encoder.template()
    }

    /// Whether `data.reference_path` is set.
    pub fn has_reference_file(&self) -> bool {
        self.config.reference_path.is_some()
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
            Split::Predict => self.predict.as_ref().unwrap_or(&self.validation),
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
    /// If the split has fewer samples.
    pub(super) fn answers_of(
        &self,
        split: Split,
        indices: &[u64],
    ) -> Result<(Vec<&Encoded>, Vec<f32>)> {
        let samples = self.rows(split, indices)?;
        let margins = samples.iter().map(|sample| sample.margin.unwrap_or(0.0)).collect();
        Ok((samples.into_iter().flat_map(|sample| &sample.answers).collect(), margins))
    }

    pub(super) fn encoder(&self) -> &ChatEncoder {
        &self.encoder
    }

    pub(super) fn pad_to_multiple_of(&self) -> usize {
        self.config.pad_to_multiple_of
    }

    /// Logs the warnings of all ranks on the first.
    pub(super) fn warn(&self, context: &DataContext) {
        for warning in self.warnings.iter().filter(|_| context.rank == 0) {
            tracing::warn!("{warning}");
        }
    }

    /// Opens the data, with at most `most` tokenized rows of each key. `predict` are files of pairs
    /// for a prediction.
    pub(super) fn open(
        config: &PreferenceDataConfig,
        predict: Option<&Paths>,
        most: usize,
    ) -> Result<Self> {
        let chat = config.chat();
        chat.validate()?;
        let encoder = ChatEncoder::open(&chat)?;
        let mut warnings = encoder.tokenizer.warnings();
        let mut report = DataReport::default();
        let (mut rows, mut tokenized) = (0, 0);
        let known = config.reference_path.as_ref().map(ReferenceFile::open).transpose()?;
        let mut open = |key: &str, paths: &Paths| -> Result<Vec<Sample>> {
            let mut source = SourceReport::new(key);
            let columns =
                COLUMNS.map(|name| Column { key: "a column of preferences", name: name.into() });
            let all: Vec<Row<Value>> = rows::read(key, paths.as_slice(), &columns, 0, &mut source)?;
            rows += all.len();
            tokenized += all.len().min(most);
            let encoded: Vec<Result<Sample>> =
                all.into_par_iter().take(most).map(|row| encode(&encoder, row)).collect();
            let mut samples = sequences::limited(key, config, encoded, &mut source, &mut warnings)?;
            if let Some(known) = known.as_ref().filter(|_| key != PREDICT_KEY) {
                samples.iter_mut().try_for_each(|sample| sample.find_reference(known))?;
            }
            report.sources.push(source);
            Ok(samples)
        };
        let predict = predict.map(|paths| open(PREDICT_KEY, paths)).transpose()?;
        let all = match config.has_training() {
            true => open("data.path", &config.path)?,
            false => Vec::new(),
        };
        let (train, validation) = match &config.validation_path {
            Some(paths) => (all, open("data.validation_path", paths)?),
            None if all.is_empty() => (all, Vec::new()),
            None => {
                let held = hold_out(all, chat.validation_fraction(), "validation of preferences");
                warnings.extend(held.warning);
                (held.train, held.validation)
            }
        };
        let bytes: u64 = train
            .iter()
            .chain(&validation)
            .chain(predict.iter().flatten())
            .map(Sample::bytes)
            .sum();
        let memory = (bytes as f64 * rows as f64 / tokenized.max(1) as f64) as u64;
        let config = config.clone();
        Ok(Self { config, encoder, train, validation, predict, report, memory, warnings })
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
            answer.hash_into(&mut hasher);
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
        let data = Self::open(config, config.predict_path.as_ref(), usize::MAX)?;
        data.warn(context);
        Ok(data)
    }

    fn preview(config: &PreferenceDataConfig, _: &DataContext) -> Result<Self> {
        Self::open(config, config.predict_path.as_ref(), PREVIEW_ROWS)
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
        PreferenceDataConfig::HOST_KEYS
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
            keys: samples
                .iter()
                .map(|sample| sample.answers.each_ref().map(Encoded::key))
                .collect(),
        })
    }
}
