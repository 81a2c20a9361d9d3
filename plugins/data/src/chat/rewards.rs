//! [`RewardData`].

use candle_core::{Device, Tensor};
use fulgurite_engine::data::{DataContext, DataModule, DataReport, SourceReport, Split};
use fulgurite_engine::execution::transfer;
use fulgurite_error::{Error, Result};
use minijinja::Value;
use rayon::prelude::*;

use super::config::TrainOn;
use super::conversation::{COLUMNS, Conversation};
use super::encode::{ChatEncoder, Encoded};
use super::preference_config::PreferenceDataConfig;
use super::preferences::{PREDICT_KEY, PREVIEW_ROWS, PreferenceData};
use super::sequences::{self, Sequences};
use crate::config::Paths;
use crate::labelled::PaddedTexts;
use crate::rows::{self, Column, Place, Row};
use crate::special_tokens::named_token;
use crate::tokenizer::Tokenizer;

/// The rows of [`PreferenceData`] for a model that scores texts: each text is whole, with its last
/// token.
///
/// The rows of `data.predict_path` may have one answer each.
/// Padding is the `pad_token` of the files beside the tokenizer, or the end of a text.
#[derive(Debug)]
pub struct RewardData {
    pairs: PreferenceData,
    /// The rows of `data.predict_path`, unless these are pairs.
    answers: Option<Answers>,
    pad_id: u32,
}

/// Rows with one answer.
#[derive(Debug)]
struct Answers {
    samples: Vec<Sample>,
    report: SourceReport,
    warnings: Vec<String>,
    /// [`DataModule::memory`].
    memory: u64,
}

/// A tokenized row with one answer.
#[derive(Debug)]
struct Sample {
    answer: [Encoded; 1],
    place: Place,
}

impl Sequences for Sample {
    fn sequences(&mut self) -> &mut [Encoded] {
        &mut self.answer
    }

    fn place(&self) -> &Place {
        &self.place
    }
}

/// A micro-batch of [`RewardData`].
#[derive(Debug, Clone)]
pub struct RewardBatch {
    /// The chosen and the rejected text of each pair, in turn: `[2 * pairs, time]`. In a prediction
    /// of rows with one answer, their texts: `[rows, time]`.
    pub texts: PaddedTexts,
    /// How much higher the chosen text of each pair shall score; 0 without a `margin` in the row.
    pub margins: Vec<f32>,
    /// Whether the texts are pairs.
    pub is_paired: bool,
}

impl RewardData {
    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        self.pairs.tokenizer()
    }

    /// Tokens of a text at most.
    pub fn seq_len(&self) -> usize {
        self.pairs.seq_len()
    }

    /// The id of padding.
    pub fn pad_id(&self) -> u32 {
        self.pad_id
    }

    /// Whether a text for training ends in the token of padding.
    pub fn ends_in_padding(&self) -> bool {
        let mut texts = self.pairs.answers(Split::Train);
        texts.any(|text| text.ids.last() == Some(&self.pad_id))
    }

    /// Opens the data, with at most `most` tokenized rows of each key.
    fn open(config: &PreferenceDataConfig, most: usize) -> Result<Self> {
        if config.reference_path.is_some() {
            return Err(Error::Config(
                "`data.reference_path`: is for `module.type` = \"preference\" and \"kto\"; leave it out"
                    .to_owned(),
            ));
        }
        let mut report = SourceReport::new(PREDICT_KEY);
        let predict = config.predict_path.as_ref();
        let rows = predict.map(|paths| answers_of_files(paths, &mut report)).transpose()?.flatten();
        let Some(rows) = rows else {
            return Self::with_padding(PreferenceData::open(config, predict, most)?, None);
        };
        let pairs = PreferenceData::open(config, None, most)?;
        let answers = Answers::of(pairs.encoder(), config, rows, report, most)?;
        Self::with_padding(pairs, Some(answers))
    }

    /// The answers of a split, if its rows have one each.
    fn answers(&self, split: Split) -> Option<&Answers> {
        self.answers.as_ref().filter(|_| split == Split::Predict)
    }

    fn with_padding(pairs: PreferenceData, answers: Option<Answers>) -> Result<Self> {
        let pad_id = padding_of(pairs.tokenizer())?;
        Ok(Self { pairs, answers, pad_id })
    }
}

/// The id of padding.
///
/// # Errors
/// If the files beside the tokenizer name a token that it does not have.
pub(super) fn padding_of(tokenizer: &Tokenizer) -> Result<u32> {
    let named = tokenizer.file().map(|file| named_token(file, "pad_token")).transpose()?.flatten();
    match named {
        None => Ok(tokenizer.end_of_text().unwrap_or(0)),
        Some((place, token)) => match tokenizer.encode(&token)?[..] {
            [id] => Ok(id),
            _ => Err(Error::Config(format!(
                "{place} = {token:?} is not one token of the tokenizer; name one that it has"
            ))),
        },
    }
}

/// The rows of files, unless they are pairs.
fn answers_of_files(paths: &Paths, report: &mut SourceReport) -> Result<Option<Vec<Row<Value>>>> {
    let columns = COLUMNS.map(|name| Column { key: "a column of answers", name: name.into() });
    let rows: Vec<Row<Value>> = rows::read(PREDICT_KEY, paths.as_slice(), &columns, 0, report)?;
    let chosen = COLUMNS.iter().position(|name| *name == "chosen");
    let is_pair = |row: &Row<Value>| chosen.is_some_and(|i| row.values[i].is_some());
    match rows.iter().filter(|row| is_pair(row)).count() {
        0 => Ok(Some(rows)),
        pairs if pairs == rows.len() => Ok(None),
        pairs => Err(Error::Data(format!(
            "{PREDICT_KEY} has {pairs} pairs of answers (`chosen`) and {} rows of one answer; predict them one kind \
             after the other",
            rows.len() - pairs
        ))),
    }
}

impl Answers {
    fn of(
        encoder: &ChatEncoder,
        config: &PreferenceDataConfig,
        rows: Vec<Row<Value>>,
        mut report: SourceReport,
        most: usize,
    ) -> Result<Self> {
        let count = rows.len();
        let encode = |row: Row<Value>| -> Result<Sample> {
            let place = row.place;
            let value = |value: Option<Value>| value.unwrap_or(Value::UNDEFINED);
            let values: Vec<Value> = row.values.into_iter().map(value).collect();
            let conversation = Conversation::with_answer(&place, &values)?;
            // An answer may be empty.
            let text = encoder.render_for(TrainOn::All, &place, conversation)?;
            let answer = encoder.encode(&text)?;
            Ok(Sample { answer: [answer], place })
        };
        let encoded: Vec<_> = rows.into_par_iter().take(most).map(encode).collect();
        let read = encoded.len();
        let mut warnings = Vec::new();
        let samples = sequences::limited(PREDICT_KEY, config, encoded, &mut report, &mut warnings)?;
        let bytes = |sample: &Sample| size_of::<Sample>() + sample.answer[0].ids.len() * 5;
        let known: usize = samples.iter().map(bytes).sum();
        let memory = (known as f64 * count as f64 / read.max(1) as f64) as u64;
        Ok(Self { samples, report, warnings, memory })
    }
}

/// Pads texts behind their ends to one length, a multiple of `multiple`.
///
/// # Errors
/// If the device lacks the memory.
pub(super) fn padded(
    texts: &[&[u32]],
    multiple: usize,
    padding: u32,
    device: &Device,
) -> Result<PaddedTexts> {
    let lengths: Vec<usize> = texts.iter().map(|text| text.len()).collect();
    let time = lengths.iter().copied().max().unwrap_or(1).next_multiple_of(multiple);
    let (mut ids, mut mask) = (Vec::new(), Vec::new());
    for (row, text) in texts.iter().enumerate() {
        ids.extend_from_slice(text);
        ids.resize((row + 1) * time, padding);
        mask.resize(row * time + text.len(), 1u8);
        mask.resize((row + 1) * time, 0);
    }
    let shape = (texts.len(), time);
    let send = |tensor: Tensor| transfer::to_device(&tensor, device, "batch");
    Ok(PaddedTexts {
        segments: send(Tensor::from_vec(vec![0u32; ids.len()], shape, &Device::Cpu)?)?,
        ids: send(Tensor::from_vec(ids, shape, &Device::Cpu)?)?,
        mask: send(Tensor::from_vec(mask, shape, &Device::Cpu)?)?,
        lengths,
    })
}

impl DataModule for RewardData {
    type Config = PreferenceDataConfig;
    type Batch = RewardBatch;

    fn exclusive_keys() -> &'static [&'static [&'static str]] {
        PreferenceData::exclusive_keys()
    }

    fn setup(config: &PreferenceDataConfig, context: &DataContext) -> Result<Self> {
        let data = Self::open(config, usize::MAX)?;
        data.pairs.warn(context);
        let warnings = data.answers.iter().flat_map(|answers| &answers.warnings);
        for warning in warnings.filter(|_| context.rank == 0) {
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
        match self.answers(split) {
            Some(answers) => answers.samples.len() as u64,
            None => self.pairs.len(split),
        }
    }

    fn fingerprint(&self) -> Result<Option<String>> {
        self.pairs.fingerprint()
    }

    fn evaluation_fingerprint(&self) -> Result<Option<String>> {
        self.pairs.evaluation_fingerprint()
    }

    fn memory(&self) -> u64 {
        self.pairs.memory() + self.answers.as_ref().map_or(0, |answers| answers.memory)
    }

    fn report(&self) -> Option<DataReport> {
        let mut report = self.pairs.report()?;
        report.sources.extend(self.answers.iter().map(|answers| answers.report.clone()));
        Some(report)
    }

    fn sample_definition(&self) -> Result<Vec<(String, String)>> {
        self.pairs.sample_definition()
    }

    fn sample_name(&self, split: Split, index: u64) -> Option<String> {
        match self.answers(split) {
            Some(answers) => {
                Some(answers.samples.get(usize::try_from(index).ok()?)?.place.to_string())
            }
            None => self.pairs.sample_name(split, index),
        }
    }

    fn host_keys() -> &'static [&'static str] {
        PreferenceData::host_keys()
    }

    fn batch(&self, split: Split, indices: &[u64], device: &Device) -> Result<RewardBatch> {
        let (texts, margins, is_paired) = match self.answers(split) {
            None => {
                let (texts, margins) = self.pairs.answers_of(split, indices)?;
                (texts, margins, true)
            }
            Some(Answers { samples, .. }) => {
                let text = |&index: &u64| match samples.get(index as usize) {
                    Some(sample) => Ok(&sample.answer[0]),
                    None => Err(Error::Data(format!(
                        "there is no {split} sample {index} of {}",
                        samples.len()
                    ))),
                };
                (indices.iter().map(text).collect::<Result<_>>()?, Vec::new(), false)
            }
        };
        let texts: Vec<&[u32]> = texts.into_iter().map(|text| &*text.ids).collect();
        let texts = padded(&texts, self.pairs.pad_to_multiple_of(), self.pad_id, device)?;
        Ok(RewardBatch { texts, margins, is_paired })
    }
}
