//! [`UnpairedData`].

use std::hash::Hasher as _;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use fulgurite_engine::data::{DataContext, DataModule, DataReport, SourceReport, Split};
use fulgurite_error::{Error, Result};
use minijinja::Value;
use rayon::prelude::*;
use twox_hash::XxHash3_64;

use super::conversation::{COLUMNS, Judged};
use super::encode::{ChatEncoder, Encoded};
use super::preference_config::PreferenceDataConfig;
use super::preferences::{PREDICT_KEY, PREVIEW_ROWS};
use super::reference::ReferenceFile;
use super::sequences::{self, Sequences};
use super::template::ChatTemplate;
use crate::config::Paths;
use crate::held_out::hold_out;
use crate::rows::{self, Column, Place, Row};
use crate::tokenizer::Tokenizer;

/// Prompts with one answer each, which is good or bad.
///
/// Setup tokenizes all rows into memory. Each row also has a *mismatched* answer, from the
/// nearest row before it with another prompt. The first rows of a key take it from the last ones,
/// and held-out rows count. So a row's mismatched answer is the same in each epoch and on any
/// number of ranks.
#[derive(Debug)]
pub struct UnpairedData {
    config: PreferenceDataConfig,
    encoder: ChatEncoder,
    train: Rows,
    validation: Rows,
    /// The rows of `data.predict_path`.
    predict: Option<Rows>,
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
    /// The log-probabilities of each answer and mismatched answer under the reference model, if the
    /// data has them.
    pub reference: Option<Vec<[f32; 2]>>,
    /// The keys of each answer and mismatched answer in a file of log-probabilities
    /// ([`AnswerLogp`](super::AnswerLogp)).
    pub keys: Vec<[u64; 2]>,
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

/// The rows of a key.
#[derive(Debug, Default)]
struct Source {
    samples: Vec<Sample>,
    /// The row of each one's mismatched answer.
    mismatched: Vec<usize>,
    /// The log-probabilities of each row's answer and mismatched answer under the reference model.
    reference: Option<Vec<[f32; 2]>>,
}

/// The rows of a split.
#[derive(Debug, Default)]
struct Rows {
    source: Arc<Source>,
    indices: Vec<usize>,
}

impl Source {
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
        Self { samples, mismatched, reference: None }
    }

    /// The prompt of a row with the answer of another, up to `len` tokens.
    fn mismatched_answer(&self, row: usize, len: usize) -> Encoded {
        let other = &self.samples[self.mismatched[row]].answer[0];
        self.samples[row].answer[0].with_answer_of(other, len)
    }

    /// Takes the log-probabilities of the reference from a file. `is_whole`: all rows are here.
    fn find_reference(&mut self, known: &ReferenceFile, len: usize, is_whole: bool) -> Result<()> {
        let of = |row: usize| {
            let Sample { answer: [answer], place, .. } = &self.samples[row];
            let own = known.log_probability(place, answer.key())?;
            // The first row of a preview has another mismatched answer than in the whole.
            let mismatched = match is_whole {
                true => known.log_probability(place, self.mismatched_answer(row, len).key())?,
                false => own,
            };
            Ok([own, mismatched])
        };
        self.reference = Some((0..self.samples.len()).map(of).collect::<Result<_>>()?);
        Ok(())
    }

    /// Whether there are rows, and all have one prompt.
    fn has_one_prompt(&self) -> bool {
        let mut prompts = self.samples.iter().map(|sample| sample.answer[0].prompt());
        prompts.next().is_some_and(|first| prompts.all(|prompt| prompt == first))
    }

    fn bytes(&self) -> u64 {
        let of = |sample: &Sample| sample.bytes() + size_of::<usize>() as u64;
        self.samples.iter().map(of).sum()
    }
}

impl Rows {
    /// All rows of a source.
    fn all(source: &Arc<Source>) -> Self {
        Self { source: source.clone(), indices: (0..source.samples.len()).collect() }
    }

    fn samples(&self) -> impl Iterator<Item = &Sample> {
        self.indices.iter().map(|&row| &self.source.samples[row])
    }

    /// Number and a hash of rows, with their mismatched answers.
    fn digest(&self) -> String {
        let mut hasher = XxHash3_64::default();
        for &row in &self.indices {
            for row in [row, self.source.mismatched[row]] {
                let Sample { answer: [answer], is_desirable, .. } = &self.source.samples[row];
                answer.hash_into(&mut hasher);
                hasher.write_u8(u8::from(*is_desirable));
            }
            let known = self.source.reference.iter().flat_map(|known| known[row]);
            known.for_each(|logp| hasher.write_u32(logp.to_bits()));
        }
        format!("{} answers ({:016x})", self.indices.len(), hasher.finish())
    }
}

impl UnpairedData {
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

    /// The number of good and of bad answers for training.
    pub fn label_counts(&self) -> [usize; 2] {
        let good = self.train.samples().filter(|sample| sample.is_desirable).count();
        [good, self.train.indices.len() - good]
    }

    /// Whether the rows have the log-probabilities of a reference model.
    pub fn has_reference(&self) -> bool {
        self.train.source.reference.is_some()
    }

    fn rows(&self, split: Split) -> Option<&Rows> {
        match split {
            Split::Train => Some(&self.train),
            Split::ValidationSet(_) => None,
            Split::Predict => Some(self.predict.as_ref().unwrap_or(&self.validation)),
            _ => Some(&self.validation),
        }
    }

    /// Opens the data, with at most `most` tokenized rows of each key.
    fn open(config: &PreferenceDataConfig, most: usize) -> Result<Self> {
        let chat = config.chat();
        chat.validate()?;
        let encoder = ChatEncoder::open(&chat)?;
        let mut warnings = encoder.tokenizer.warnings();
        let mut report = DataReport::default();
        let (mut count, mut tokenized, mut bytes) = (0, 0, 0);
        let known = config.reference_path.as_ref().map(ReferenceFile::open).transpose()?;
        let mut open = |key: &str, paths: &Paths| -> Result<Arc<Source>> {
            let mut source = SourceReport::new(key);
            let columns =
                COLUMNS.map(|name| Column { key: "a column of answers", name: name.into() });
            let all: Vec<Row<Value>> = rows::read(key, paths.as_slice(), &columns, 0, &mut source)?;
            let is_whole = all.len() <= most;
            count += all.len();
            tokenized += all.len().min(most);
            let encoded: Vec<Result<Sample>> =
                all.into_par_iter().take(most).map(|row| encode(&encoder, row)).collect();
            let samples = sequences::limited(key, config, encoded, &mut source, &mut warnings)?;
            report.sources.push(source);
            let mut rows = Source::new(samples);
            if rows.has_one_prompt() {
                warnings.push(format!(
                    "all rows of {key} have one prompt, so that no answer is mismatched, and `kto` estimates the \
                     divergence from the reference too high"
                ));
            }
            if let Some(known) = known.as_ref().filter(|_| key != PREDICT_KEY) {
                rows.find_reference(known, config.seq_len, is_whole)?;
            }
            bytes += rows.bytes();
            Ok(Arc::new(rows))
        };
        let all = match config.has_training() {
            true => open("data.path", &config.path)?,
            false => Arc::default(),
        };
        let others = config.validation_path.as_ref();
        let others = others.map(|paths| open("data.validation_path", paths)).transpose()?;
        let predict = config.predict_path.as_ref().map(|paths| open(PREDICT_KEY, paths));
        let predict = predict.transpose()?.as_ref().map(Rows::all);
        let (train, validation) = match &others {
            Some(others) => (Rows::all(&all), Rows::all(others)),
            None if all.samples.is_empty() => (Rows::all(&all), Rows::default()),
            None => {
                let rows = Rows::all(&all).indices;
                let held = hold_out(rows, chat.validation_fraction(), "validation of answers");
                warnings.extend(held.warning);
                let rows = |indices| Rows { source: all.clone(), indices };
                (rows(held.train), rows(held.validation))
            }
        };
        let memory = (bytes as f64 * count as f64 / tokenized.max(1) as f64) as u64;
        let config = config.clone();
        Ok(Self { config, encoder, train, validation, predict, report, memory, warnings })
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
        self.rows(split).map_or(0, |rows| rows.indices.len() as u64)
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
        let rows = self.rows(split)?;
        let row = rows.indices.get(usize::try_from(index).ok()?)?;
        Some(rows.source.samples[*row].place.to_string())
    }

    fn host_keys() -> &'static [&'static str] {
        PreferenceDataConfig::HOST_KEYS
    }

    fn batch(&self, split: Split, indices: &[u64], device: &Device) -> Result<UnpairedBatch> {
        let missing = |index: u64| {
            Error::Data(format!("there is no {split} sample {index} of {}", self.len(split)))
        };
        let rows = self.rows(split).ok_or_else(|| missing(0))?;
        let source = &rows.source;
        let (mut own, mut others, mut is_desirable) = (Vec::new(), Vec::new(), Vec::new());
        let (mut reference, mut keys) = (Vec::new(), Vec::new());
        for &index in indices {
            let row = *rows.indices.get(index as usize).ok_or_else(|| missing(index))?;
            let Sample { answer: [answer], is_desirable: is_good, .. } = &source.samples[row];
            let other = source.mismatched_answer(row, self.config.seq_len);
            is_desirable.push(*is_good);
            keys.push([answer.key(), other.key()]);
            reference.extend(source.reference.iter().map(|known| known[row]));
            own.push(answer);
            others.push(other);
        }
        let padding = self.encoder.tokenizer.end_of_text().unwrap_or(0);
        let pad = |sequences: &[&Encoded]| {
            sequences::padded(sequences, self.config.pad_to_multiple_of, padding, device)
        };
        let (inputs, targets) = pad(&own)?;
        let (mismatched_inputs, mismatched_targets) = pad(&others.iter().collect::<Vec<_>>())?;
        Ok(UnpairedBatch {
            inputs,
            targets,
            is_desirable,
            mismatched_inputs,
            mismatched_targets,
            reference: source.reference.is_some().then_some(reference),
            keys,
        })
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
            Source::new(samples.collect()).mismatched
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
