//! [`UnpairedData`].

use std::hash::Hasher as _;

use candle_core::{Device, Tensor};
use fulgurite_engine::data::{DataContext, DataModule, DataReport, SourceReport, Split};
use fulgurite_error::{Error, Result};
use minijinja::Value;
use rayon::prelude::*;
use twox_hash::XxHash3_64;

use super::conversation::{COLUMNS, Judged};
use super::encode::{ChatEncoder, Encoded};
use super::preferences::{PREVIEW_ROWS, PreferenceDataConfig};
use super::sequences::{self, Sequences};
use super::template::ChatTemplate;
use crate::config::Paths;
use crate::held_out::hold_out;
use crate::rows::{self, Column, Place, Row};
use crate::tokenizer::Tokenizer;

/// Prompts with one answer each, which is good or bad.
///
/// Setup tokenizes all rows into memory. Each row also has a *mismatched* answer: that of the
/// nearest row before it with another prompt, in the order of the files and around their end. So a
/// row's mismatched answer is the same in each epoch and on any number of ranks.
#[derive(Debug)]
pub struct UnpairedData {
    config: PreferenceDataConfig,
    encoder: ChatEncoder,
    train: Rows,
    validation: Rows,
    report: DataReport,
    /// [`DataModule::memory`].
    memory: u64,
    warnings: Vec<String>,
}

/// A micro-batch of [`UnpairedData`].
#[derive(Debug, Clone)]
pub struct UnpairedBatch {
    /// Token ids of prompts with their answers, u32 `[rows, time]`.
    pub inputs: Tensor,
    /// The next token at each position of an answer, and -100 elsewhere, i64 `[rows, time]`.
    pub targets: Tensor,
    /// Whether each answer is good.
    pub is_desirable: Vec<bool>,
    /// Token ids of the same prompts with the answers of other rows, u32 `[rows, time]`.
    pub mismatched_inputs: Tensor,
    /// As `targets`, of `mismatched_inputs`.
    pub mismatched_targets: Tensor,
}

/// A tokenized row.
#[derive(Debug, Clone)]
struct Sample {
    answer: [Encoded; 1],
    is_desirable: bool,
    place: Place,
}

impl Sample {
    fn bytes(&self) -> u64 {
        (size_of::<Self>() + self.answer[0].ids.len() * 5) as u64
    }
}

impl Sequences for Sample {
    fn sequences(&mut self) -> &mut [Encoded] {
        &mut self.answer
    }

    fn place(&self) -> &Place {
        &self.place
    }
}

/// The rows of a split, and the row of each one's mismatched answer.
#[derive(Debug, Default)]
struct Rows {
    samples: Vec<Sample>,
    mismatched: Vec<usize>,
}

impl Rows {
    fn new(samples: Vec<Sample>) -> Self {
        let prompt = |i: usize| samples[i].answer[0].prompt();
        let count = samples.len();
        let mut mismatched = Vec::with_capacity(count);
        // The last row whose prompt differs from the present one's, around the end.
        let mut last = (0..count).rev().find(|&i| prompt(i) != prompt(0));
        for i in 0..count {
            if i > 0 && prompt(i - 1) != prompt(i) {
                last = Some(i - 1);
            }
            mismatched.push(last.unwrap_or((i + count - 1) % count));
        }
        Self { samples, mismatched }
    }

    /// Whether there are rows, and all have one prompt.
    fn have_one_prompt(&self) -> bool {
        let mut prompts = self.samples.iter().map(|sample| sample.answer[0].prompt());
        prompts.next().is_some_and(|first| prompts.all(|prompt| prompt == first))
    }

    fn bytes(&self) -> u64 {
        self.samples.iter().map(|sample| sample.bytes() + size_of::<usize>() as u64).sum()
    }

    /// Number and a hash of rows.
    fn digest(&self) -> String {
        let mut hasher = XxHash3_64::default();
        for Sample { answer: [answer], is_desirable, .. } in &self.samples {
            hasher.write_u64(answer.ids.len() as u64);
            answer.ids.iter().for_each(|id| hasher.write_u32(*id));
            answer.learned.iter().for_each(|learned| hasher.write_u8(u8::from(*learned)));
            hasher.write_u8(u8::from(*is_desirable));
        }
        format!("{} answers ({:016x})", self.samples.len(), hasher.finish())
    }
}

impl UnpairedData {
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

    /// The number of good and of bad answers for training.
    pub fn label_counts(&self) -> [usize; 2] {
        let samples = &self.train.samples;
        let good = samples.iter().filter(|sample| sample.is_desirable).count();
        [good, samples.len() - good]
    }

    fn rows(&self, split: Split) -> Option<&Rows> {
        match split {
            Split::Train => Some(&self.train),
            Split::ValidationSet(_) => None,
            _ => Some(&self.validation),
        }
    }

    fn samples(&self, split: Split) -> &[Sample] {
        self.rows(split).map_or(&[], |rows| &rows.samples)
    }

    /// Opens the data, with at most `most` tokenized rows of each key.
    fn open(config: &PreferenceDataConfig, most: usize) -> Result<Self> {
        let chat = config.chat();
        chat.validate()?;
        let encoder = ChatEncoder::open(&chat)?;
        let mut warnings = encoder.tokenizer.warnings();
        let mut report = DataReport::default();
        let (mut count, mut tokenized) = (0, 0);
        let mut open = |key: &str, paths: &Paths| -> Result<Vec<Sample>> {
            let mut source = SourceReport::new(key);
            let columns =
                COLUMNS.map(|name| Column { key: "a column of answers", name: name.into() });
            let all: Vec<Row<Value>> = rows::read(key, paths.as_slice(), &columns, 0, &mut source)?;
            count += all.len();
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
                let held = hold_out(all, chat.validation_fraction(), "validation of answers");
                warnings.extend(held.warning);
                (held.train, held.validation)
            }
        };
        let (train, validation) = (Rows::new(train), Rows::new(validation));
        for (rows, of) in [(&train, "training"), (&validation, "validation")] {
            if rows.have_one_prompt() {
                warnings.push(format!(
                    "all rows for {of} have one prompt, so that no answer is mismatched, and `kto` estimates the \
                     divergence from the reference too high"
                ));
            }
        }
        let known = train.bytes() + validation.bytes();
        let memory = (known as f64 * count as f64 / tokenized.max(1) as f64) as u64;
        Ok(Self { config: config.clone(), encoder, train, validation, report, memory, warnings })
    }
}

/// Tokenizes the answer of a row.
fn encode(encoder: &ChatEncoder, row: Row<Value>) -> Result<Sample> {
    let place = row.place;
    let values: Vec<Value> =
        row.values.into_iter().map(|value| value.unwrap_or(Value::UNDEFINED)).collect();
    let Judged { conversation, is_desirable } = Judged::of(&place, &values)?;
    let answer = encoder.encode(&encoder.render(&place, conversation)?)?;
    Ok(Sample { answer: [answer], is_desirable, place })
}

impl DataModule for UnpairedData {
    type Config = PreferenceDataConfig;
    type Batch = UnpairedBatch;

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
        Ok(Some(self.train.digest()))
    }

    fn evaluation_fingerprint(&self) -> Result<Option<String>> {
        Ok(Some(self.validation.digest()))
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

    fn batch(&self, split: Split, indices: &[u64], device: &Device) -> Result<UnpairedBatch> {
        let missing = |index: u64| {
            Error::Data(format!("there is no {split} sample {index} of {}", self.len(split)))
        };
        let rows = self.rows(split).ok_or_else(|| missing(0))?;
        let (mut own, mut others, mut is_desirable) = (Vec::new(), Vec::new(), Vec::new());
        for &index in indices {
            let row = index as usize;
            let sample = rows.samples.get(row).ok_or_else(|| missing(index))?;
            let other = &rows.samples[rows.mismatched[row]];
            own.push(&sample.answer[0]);
            others.push(sample.answer[0].with_answer_of(&other.answer[0], self.config.seq_len));
            is_desirable.push(sample.is_desirable);
        }
        let padding = self.encoder.tokenizer.end_of_text().unwrap_or(0);
        let pad = |sequences: &[&Encoded]| {
            sequences::padded(sequences, self.config.pad_to_multiple_of, padding, device)
        };
        let (inputs, targets) = pad(&own)?;
        let (mismatched_inputs, mismatched_targets) = pad(&others.iter().collect::<Vec<_>>())?;
        Ok(UnpairedBatch { inputs, targets, is_desirable, mismatched_inputs, mismatched_targets })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(prompt: &[u32], answer: &[u32]) -> Sample {
        let ids = prompt.iter().chain(answer).copied().collect();
        let learned = (0..prompt.len() + answer.len()).map(|i| i >= prompt.len()).collect();
        let answer = [Encoded { ids, learned }];
        Sample { answer, is_desirable: true, place: Place::named("row") }
    }

    #[test]
    fn mismatched_answers_have_other_prompts() {
        let of = |prompts: &[u32]| {
            let samples = prompts.iter().map(|prompt| sample(&[*prompt, 9], &[prompt + 1]));
            Rows::new(samples.collect()).mismatched
        };
        assert_eq!(of(&[1, 2, 3]), [2, 0, 1]);
        // Good and bad answers to one prompt are often neighbours.
        assert_eq!(of(&[1, 1, 2, 2, 1]), [3, 3, 1, 1, 3]);
        assert_eq!(of(&[1, 2, 1]), [1, 0, 1]);
        // Without another prompt the row before.
        assert_eq!(of(&[1, 1, 1]), [2, 0, 1]);
        assert_eq!(of(&[1]), [0]);
        assert!(of(&[]).is_empty());
    }

    #[test]
    fn answers_of_others_are_cut() {
        let (own, other) = (sample(&[1, 2, 3], &[4]), sample(&[5], &[6, 7, 8]));
        let joined = |len| own.answer[0].with_answer_of(&other.answer[0], len);
        assert_eq!(*joined(9).ids, [1, 2, 3, 6, 7, 8]);
        assert_eq!(*joined(9).learned, [false, false, false, true, true, true]);
        let cut = joined(5);
        assert_eq!((cut.ids.len(), cut.learned.len(), cut.learned_tokens()), (5, 5, 2));
    }
}
