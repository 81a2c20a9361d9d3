//! [`LabelledTexts`].

use std::hash::Hasher as _;
use std::path::Path;

use candle_core::Device;
use fulgurite_engine::data::{DataContext, DataModule, DataReport, SourceReport, Split};
use fulgurite_error::{Error, Result};
use rayon::prelude::*;
use serde_json::Value;
use twox_hash::XxHash3_64;

use super::batch::{Labels, PaddedTexts, Padding, TextBatch};
use super::config::{LabelledTextsConfig, RowKind};
use super::encode::{Encoded, Text, TextEncoder};
use super::labels::{Label, LabelKind, LabelReader};
use crate::config::Paths;
use crate::held_out::hold_out;
use crate::rows::{self, Column, Place, Row};

/// Rows of each source that a preview tokenizes.
const PREVIEW_ROWS: usize = 2048;
/// A target that a loss leaves out.
const IGNORED: i64 = -100;

/// Rows of texts with labels: JSON lines, CSV or Parquet files, tokenized for a model as its
/// tokenizer's post-processor says.
///
/// | `data.type` | a row | a batch |
/// |---|---|---|
/// | `"texts"` | a text or a pair of texts, and a label | [`Labels`] of each text |
/// | `"words"` | a list of words and a list of tags | the tag at the first token of each word |
/// | `"pairs"` | two texts, and optionally a third | texts, and [`others`](TextBatch::others) |
///
/// Setup tokenizes all rows into memory. Texts longer than `seq_len` are cut, the longer one of a
/// pair first; the report counts them.
///
/// ```
/// use candle_core::Device;
/// use fulgurite_core::data::{DataContext, DataModule as _, Split};
/// use fulgurite_data::{LabelledTexts, LabelledTextsConfig, Labels};
///
/// # let dir = tempfile::tempdir().unwrap();
/// # let tokenizer = r#"{"version": "1.0", "truncation": null, "padding": null, "normalizer": null,
/// #   "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null,
/// #   "decoder": null, "model": {"type": "WordLevel", "vocab": {"a": 0, "good": 1, "bad": 2, "film": 3},
/// #   "unk_token": "a"}}"#;
/// # std::fs::write(dir.path().join("tokenizer.json"), tokenizer).unwrap();
/// let rows = "text,label\na good film,positive\na bad film,negative\n";
/// std::fs::write(dir.path().join("reviews.csv"), rows).unwrap();
/// let config = LabelledTextsConfig {
///     path: dir.path().join("reviews.csv").as_path().into(),
///     tokenizer: Some(dir.path().join("tokenizer.json").display().to_string()),
///     validation_fraction: Some(0.0),
///     ..LabelledTextsConfig::default()
/// };
/// let data = LabelledTexts::setup(&config, &DataContext::default())?;
/// assert_eq!(data.class_names().unwrap(), ["negative", "positive"]);
/// let batch = data.batch(Split::Train, &[0, 1], &Device::Cpu)?;
/// assert_eq!(batch.texts.ids.to_vec2::<u32>()?, [[0, 1, 3], [0, 2, 3]]);
/// assert_eq!(batch.labels, Labels::Classes(vec![1, 0]));
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug)]
pub struct LabelledTexts {
    config: LabelledTextsConfig,
    encoder: TextEncoder,
    labels: Option<LabelReader>,
    train: Vec<Sample>,
    validation: Vec<Sample>,
    /// `None` if the split has the rows of another one.
    test: Option<Vec<Sample>>,
    predict: Option<Vec<Sample>>,
    /// The largest segment of any token.
    last_segment: u8,
    report: DataReport,
    /// [`DataModule::memory`].
    memory: u64,
    warning: Option<String>,
}

/// A tokenized row.
#[derive(Debug, Clone, PartialEq)]
struct Sample {
    /// One text, pair or list of words; for rows of pairs two or three texts. For
    /// `"text_to_text"` the text and the one to write.
    texts: Vec<Encoded>,
    label: Label,
    place: Place,
}

/// The rows of one key, tokenized.
struct Source {
    samples: Vec<Sample>,
    cut: u64,
    /// Number of rows. A preview tokenizes some of them.
    rows: usize,
}

impl LabelledTexts {
    /// The content of a row.
    pub fn kind(&self) -> RowKind {
        self.config.kind
    }

    /// The kind of the labels.
    pub fn label_kind(&self) -> LabelKind {
        self.labels.as_ref().map_or(LabelKind::None, LabelReader::kind)
    }

    /// Number of classes of the training rows, or of `data.labels`; 0 for numbers.
    pub fn num_classes(&self) -> usize {
        self.labels.as_ref().map_or(0, |labels| labels.classes.len())
    }

    /// The names of the classes, in the order of their numbers in [`Labels`]; `None` for classes
    /// without names.
    pub fn class_names(&self) -> Option<Vec<&str>> {
        let classes = &self.labels.as_ref()?.classes;
        let names: Option<Vec<&str>> = classes.iter().map(|class| class.name.as_deref()).collect();
        names.filter(|names| !names.is_empty())
    }

    /// The file and line of the first training row with a class, for messages.
    pub fn place_of_class(&self, class: usize) -> Option<String> {
        let class = self.labels.as_ref()?.classes.get(class)?;
        class.place.as_ref().map(ToString::to_string)
    }

    /// Exclusive upper bound of all ids: the tokenizer's number of ids.
    pub fn vocab_size(&self) -> usize {
        self.encoder.vocab_size
    }

    /// The id of padding.
    pub fn pad_id(&self) -> u32 {
        self.encoder.pad_id
    }

    /// Whether a training text ends in the token of padding.
    pub fn ends_in_padding(&self) -> bool {
        let mut texts = self.train.iter().flat_map(|sample| &sample.texts);
        texts.any(|text| text.ids.last() == Some(&self.encoder.pad_id))
    }

    /// Number of segments that the tokenizer distinguishes in these rows.
    pub fn num_segments(&self) -> usize {
        usize::from(self.last_segment) + 1
    }

    /// The path of the tokenizer's file.
    pub fn tokenizer_file(&self) -> &Path {
        self.encoder.file()
    }

    /// Tokens in a sample at most.
    pub fn seq_len(&self) -> usize {
        self.config.seq_len
    }

    /// Opens the data, with at most `most` tokenized rows of each key.
    fn open(config: &LabelledTextsConfig, most: usize) -> Result<Self> {
        config.validate()?;
        let encoder = TextEncoder::open(config)?;
        let texts = config.text_columns();
        let label = config.label_column();
        let columns: Vec<Column> = texts.iter().cloned().chain(label).collect();
        let mut report = DataReport::default();
        let mut labels: Option<Option<LabelReader>> = None;
        let mut open = |key: &str, paths: &Paths, needs_labels: bool| -> Result<Source> {
            let mut source = SourceReport::new(key);
            let texts = match needs_labels {
                true => &texts[..],
                false => &texts[..config.columns_of_predictions()],
            };
            let required = if needs_labels { columns.len() } else { texts.len() };
            let rows = rows::read(key, paths.as_slice(), &columns, required, &mut source)?;
            let reader = match &labels {
                Some(reader) => reader,
                None => labels.insert(LabelReader::of(config, &rows, texts.len())?),
            };
            let sample = |row: &Row| -> Result<(Sample, bool)> {
                let label = match reader {
                    Some(reader) if needs_labels => reader.read(row, texts.len())?,
                    _ => Label::None,
                };
                let (texts, cut) = encode(config, texts, row, &encoder, &label)?;
                Ok((Sample { texts, label, place: row.place.clone() }, cut))
            };
            // Labels are checked in all rows, and texts in some.
            if let Some(reader) = reader.as_ref().filter(|_| needs_labels) {
                for row in rows.iter().skip(most) {
                    reader.read(row, texts.len())?;
                }
            }
            let all: Vec<_> = rows[..rows.len().min(most)].par_iter().map(sample).collect();
            let mut found = Source { samples: Vec::new(), cut: 0, rows: rows.len() };
            for sample in all {
                let (sample, cut) = sample?;
                found.cut += u64::from(cut);
                found.samples.push(sample);
            }
            if found.cut > 0 {
                source.count("cut to data.seq_len", found.cut);
            }
            report.sources.push(source);
            Ok(found)
        };
        let all = open("data.path", &config.path, true)?;
        let mut sources = vec![(all.rows, all.samples.len())];
        let (train, validation, warning);
        match &config.validation_path {
            Some(paths) => {
                train = all.samples;
                let rows = open("data.validation_path", paths, true)?;
                sources.push((rows.rows, rows.samples.len()));
                (validation, warning) = (rows.samples, None);
            }
            None => {
                let purpose = "validation of labelled texts";
                let held = hold_out(all.samples, config.validation_fraction(), purpose);
                (train, validation, warning) = (held.train, held.validation, held.warning);
            }
        }
        let mut other = |key: &str, paths: &Option<Paths>, needs_labels| {
            let Some(paths) = paths else { return Ok(None) };
            let found = open(key, paths, needs_labels)?;
            sources.push((found.rows, found.samples.len()));
            Ok::<_, Error>(Some(found.samples))
        };
        let test = other("data.test_path", &config.test_path, true)?;
        let predict = other("data.predict_path", &config.predict_path, false)?;
        let splits = [Some(&train), Some(&validation), test.as_ref(), predict.as_ref()];
        let samples = || splits.iter().copied().flatten().flatten();
        let segments = samples().flat_map(|sample| &sample.texts).flat_map(|text| &text.segments);
        let last_segment = segments.copied().max().unwrap_or(0);
        // Of a preview, an estimate for all rows.
        let (rows, read) = sources.iter().fold((0, 0), |(a, b), (rows, read)| (a + rows, b + read));
        let known: u64 = samples().map(Sample::bytes).sum();
        let memory = (known as f64 * rows as f64 / read.max(1) as f64) as u64;
        Ok(Self {
            config: config.clone(),
            encoder,
            labels: labels.flatten(),
            train,
            validation,
            test,
            predict,
            last_segment,
            report,
            memory,
            warning,
        })
    }

    fn samples(&self, split: Split) -> &[Sample] {
        let test = self.test.as_ref().unwrap_or(&self.validation);
        match split {
            Split::Train => &self.train,
            Split::Validation => &self.validation,
            Split::ValidationSet(_) => &[],
            Split::Test => test,
            Split::Predict => self.predict.as_ref().unwrap_or(test),
        }
    }
}

/// The texts of a row as tokens, and whether one was cut.
fn encode(
    config: &LabelledTextsConfig,
    columns: &[Column],
    row: &Row,
    encoder: &TextEncoder,
    label: &Label,
) -> Result<(Vec<Encoded>, bool)> {
    let text = |i: usize| -> Result<String> {
        match &row.values[i] {
            Some(Value::String(text)) => Ok(text.clone()),
            // A CSV file does not distinguish an empty text from none.
            None if row.is_text => Ok(String::new()),
            None => {
                let Column { key, name } = &columns[i];
                Err(row.place.wrong(format!("has no text under {name:?} ({key})")))
            }
            Some(other) => {
                let Column { key, name } = &columns[i];
                Err(row.place.wrong(format!("has no text under {name:?} ({key}), but {other}")))
            }
        }
    };
    let texts = match (config.kind, columns.len()) {
        (RowKind::Texts, 2) => vec![Text::Pair(text(0)?, text(1)?)],
        (RowKind::Texts, _) => vec![Text::One(text(0)?)],
        (RowKind::Words, _) => {
            let words = match &row.values[0] {
                Some(Value::Array(words)) => words
                    .iter()
                    .map(|word| word.as_str().map(str::to_owned))
                    .collect::<Option<Vec<_>>>(),
                _ => None,
            };
            let Some(words) = words else {
                let Column { key, name } = &columns[0];
                let found = row.values[0].as_ref().unwrap_or(&Value::Null);
                return Err(row.place.wrong(format!(
                    "has no list of words under {name:?} ({key}), but {found}; lists are read from JSON lines and \
                     Parquet files"
                )));
            };
            if let Label::Classes(tags) = label
                && tags.len() != words.len()
            {
                return Err(row.place.wrong(format!(
                    "has {} words and {} tags; each word needs one",
                    words.len(),
                    tags.len()
                )));
            }
            vec![Text::Words(words)]
        }
        (RowKind::Pairs, count) => {
            (0..count).map(|i| text(i).map(Text::One)).collect::<Result<Vec<_>>>()?
        }
        (RowKind::TextToText, count) => {
            let prefix = config.text_prefix.as_deref().unwrap_or_default();
            let source = format!("{prefix}{}", text(0)?);
            let target = (1..count).map(text);
            std::iter::once(Ok(source))
                .chain(target)
                .map(|t| t.map(Text::One))
                .collect::<Result<_>>()?
        }
    };
    let mut encoded = Vec::new();
    let mut is_cut = false;
    for text in &texts {
        let (tokens, cut) = encoder.encode(text)?;
        if tokens.ids.is_empty() {
            return Err(row.place.wrong("has a text without any token"));
        }
        is_cut |= cut;
        encoded.push(tokens);
    }
    Ok((encoded, is_cut))
}

impl Sample {
    /// Bytes of memory.
    fn bytes(&self) -> u64 {
        let of_text = |text: &Encoded| {
            size_of::<Encoded>() + text.ids.len() * 5 + text.words.len() * size_of::<Option<u32>>()
        };
        (size_of::<Self>() + self.texts.iter().map(of_text).sum::<usize>()) as u64
    }

    fn hash(&self, hasher: &mut XxHash3_64) {
        for text in &self.texts {
            hasher.write_u64(text.ids.len() as u64);
            text.ids.iter().for_each(|id| hasher.write_u32(*id));
            hasher.write(&text.segments);
        }
        match &self.label {
            Label::None => {}
            Label::Classes(classes) | Label::Set(classes) => {
                hasher.write_u64(classes.len() as u64);
                classes.iter().for_each(|class| hasher.write_u32(*class));
            }
            Label::Numbers(numbers) => numbers.iter().for_each(|x| hasher.write_u32(x.to_bits())),
        }
    }
}

/// Number and a hash of samples.
fn digest<'a>(samples: impl IntoIterator<Item = &'a Sample>) -> String {
    let (mut hasher, mut count) = (XxHash3_64::default(), 0);
    for sample in samples {
        sample.hash(&mut hasher);
        count += 1;
    }
    format!("{count} rows ({:016x})", hasher.finish())
}

/// The labels of the samples of a batch, whose texts have `time` tokens.
fn labels_of(samples: &[&Sample], time: usize) -> Labels {
    match samples.first().map(|sample| &sample.label) {
        None | Some(Label::None) => Labels::None,
        Some(Label::Numbers(_)) => Labels::Numbers(
            samples
                .iter()
                .map(|sample| match &sample.label {
                    Label::Numbers(numbers) => numbers.to_vec(),
                    _ => Vec::new(),
                })
                .collect(),
        ),
        Some(Label::Set(_)) => Labels::Sets(
            samples
                .iter()
                .map(|sample| match &sample.label {
                    Label::Set(classes) => classes.to_vec(),
                    _ => Vec::new(),
                })
                .collect(),
        ),
        Some(Label::Classes(_)) => {
            let mut targets = Vec::new();
            for (row, sample) in samples.iter().enumerate() {
                let Label::Classes(classes) = &sample.label else { continue };
                match &*sample.texts[0].words {
                    [] => targets.push(i64::from(classes[0])),
                    words => {
                        let target = |word: &Option<u32>| match word {
                            Some(word) => i64::from(classes[*word as usize]),
                            None => IGNORED,
                        };
                        targets.extend(words.iter().map(target));
                        targets.resize((row + 1) * time, IGNORED);
                    }
                }
            }
            Labels::Classes(targets)
        }
    }
}

impl DataModule for LabelledTexts {
    type Config = LabelledTextsConfig;
    type Batch = TextBatch;

    fn exclusive_keys() -> &'static [&'static [&'static str]] {
        &[&["validation_fraction", "validation_path"]]
    }

    fn setup(config: &LabelledTextsConfig, context: &DataContext) -> Result<Self> {
        let data = Self::open(config, usize::MAX)?;
        if let Some(warning) = data.warning.as_ref().filter(|_| context.rank == 0) {
            tracing::warn!("{warning}");
        }
        Ok(data)
    }

    fn preview(config: &LabelledTextsConfig, _: &DataContext) -> Result<Self> {
        Self::open(config, PREVIEW_ROWS)
    }

    fn batch_size(config: &LabelledTextsConfig) -> usize {
        config.batch_size
    }

    fn items(config: &LabelledTextsConfig) -> &'static str {
        match config.kind {
            RowKind::Texts | RowKind::Pairs => "samples",
            RowKind::Words => "words",
            RowKind::TextToText => "tokens",
        }
    }

    fn shuffle(config: &LabelledTextsConfig) -> bool {
        config.shuffle
    }

    fn len(&self, split: Split) -> u64 {
        self.samples(split).len() as u64
    }

    fn fingerprint(&self) -> Result<Option<String>> {
        Ok(Some(digest(&self.train)))
    }

    fn memory(&self) -> u64 {
        self.memory
    }

    fn sample_name(&self, split: Split, index: u64) -> Option<String> {
        let sample = self.samples(split).get(usize::try_from(index).ok()?)?;
        Some(sample.place.to_string())
    }

    fn report(&self) -> Option<DataReport> {
        Some(self.report.clone())
    }

    fn sample_definition(&self) -> Result<Vec<(String, String)>> {
        let mut definition = vec![
            ("`data.type`".to_owned(), self.config.kind.name().to_owned()),
            ("`data.seq_len`".to_owned(), self.config.seq_len.to_string()),
            ("the tokenizer".to_owned(), format!("{:032x}", self.encoder.hash)),
        ];
        if let Some(prefix) = &self.config.text_prefix {
            definition.push(("`data.text_prefix`".to_owned(), format!("{prefix:?}")));
        }
        if let Some(names) = self.class_names() {
            definition.push(("the classes".to_owned(), names.join(", ")));
        }
        Ok(definition)
    }

    fn evaluation_fingerprint(&self) -> Result<Option<String>> {
        let others = [Some(&self.validation), self.test.as_ref(), self.predict.as_ref()];
        Ok(Some(digest(others.into_iter().flatten().flatten())))
    }

    fn host_keys() -> &'static [&'static str] {
        &["path", "validation_path", "test_path", "predict_path", "tokenizer"]
    }

    fn batch(&self, split: Split, indices: &[u64], device: &Device) -> Result<TextBatch> {
        let all = self.samples(split);
        let sample = |&index: &u64| {
            all.get(index as usize).ok_or_else(|| {
                Error::Data(format!("there is no {split} sample {index} of {}", all.len()))
            })
        };
        let samples = indices.iter().map(sample).collect::<Result<Vec<_>>>()?;
        let multiple_of = self.config.pad_to_multiple_of;
        let padding = Padding { id: self.encoder.pad_id, multiple_of };
        let padded = |which: usize| {
            let texts: Vec<&Encoded> = samples.iter().map(|sample| &sample.texts[which]).collect();
            PaddedTexts::new(&texts, padding, device)
        };
        let count = samples.first().map_or(1, |sample| sample.texts.len());
        let texts = padded(0)?;
        Ok(TextBatch {
            labels: labels_of(&samples, texts.time()),
            texts,
            others: (1..count).map(padded).collect::<Result<_>>()?,
            longest: self.config.seq_len.next_multiple_of(multiple_of),
        })
    }
}
