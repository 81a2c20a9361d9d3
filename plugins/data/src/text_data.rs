//! [`TextData`].

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use fulgurite_engine::data::{
    DataContext, DataModule, DataReport, Mixture, Sampler, SourceReport, Split, TokenBatch,
};
use fulgurite_engine::execution::transfer;
use fulgurite_engine::parallel::ContextParallel;
use fulgurite_error::{Error, Result, counted};

use crate::TokenDtype;
use crate::config::{DataKind, Paths, TextDataConfig};
use crate::files::{Documents, ReadTo};
use crate::sequences::Sequences;
use crate::source::Source;
use crate::text::Text;
use crate::token_cache::TokenCache;
use crate::token_files::{TOKEN_FILES, TokenFile};
use crate::tokenizer::Tokenizer;
use crate::walk::{Wanted, find};

/// A target that losses leave out.
const IGNORED: i64 = -100;
/// Bytes of text that a preview tokenizes.
const PREVIEW_BYTES: usize = 4 << 20;
/// Maximum number of token files that a preview reads.
const PREVIEW_FILES: usize = 8;

/// Text, lines, JSON lines, or token files, cut into samples for a language model.
///
/// Sample `i` of a source is its tokens `i * stride .. i * stride + seq_len + 1`. All but the last
/// are the inputs, all but the first the targets. All text is one source. Its documents are files,
/// lines or texts of JSON values. The end-of-text token follows each document, and with
/// `add_bos_token` the start token precedes it. Setup tokenizes the text. The ids are in a file of
/// `cache_dir`, or in memory with two bytes per token for vocabularies of up to 65,536. Each token
/// file is a separate source, read on demand.
///
/// The last `validation_fraction` of the samples is for validation. Training has the earlier
/// samples that share no target with them. [`Split::Test`] and [`Split::Predict`] have the
/// validation samples. With `validation_sets`, validation uses these sets instead, and tests and
/// predictions are empty.
#[derive(Debug)]
pub struct TextData {
    train: Parts,
    validation: Parts,
    validation_sets: Vec<(String, Parts)>,
    /// The weight of each source of the training samples; empty without a mixture.
    weights: Vec<f64>,
    tokenizer: Option<Tokenizer>,
    vocab_size: Option<usize>,
    seq_len: usize,
    /// The id that ends a document, if documents are kept apart.
    separator: Option<u32>,
    first_ids: u32,
    report: DataReport,
    /// [`DataModule::memory`].
    memory: u64,
    /// Warnings that rank 0 shows.
    warnings: Vec<String>,
}

/// The samples of a split, source by source.
#[derive(Debug)]
struct Parts(Vec<SampleRange>);

/// Samples of one source.
#[derive(Debug, Clone)]
struct SampleRange {
    sequences: Arc<Sequences>,
    range: Range<u64>,
}

impl TextData {
    /// The tokenizer; `None` for token files unless `data.tokenizer` names one.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// Exclusive upper bound of all ids: `data.vocab_size`, or the tokenizer's number of ids.
    /// `None` for token files without either.
    pub fn vocab_size(&self) -> Option<usize> {
        self.vocab_size
    }

    /// The largest of the first ids of the token files; 0 for text, or without a
    /// [preview](DataModule::preview). A vocabulary that is too small is mostly found early this
    /// way.
    pub fn largest_first_id(&self) -> u32 {
        self.first_ids
    }

    /// Tokens in a sample.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// Opens the data: all token files, or at least `enough` bytes of text. `read_to` reports
    /// whether more text remains.
    fn open(config: &TextDataConfig, enough: usize, read_to: &mut ReadTo) -> Result<Self> {
        config.validate()?;
        let tokenizer = match (config.tokenizer.as_deref(), config.kind) {
            (None, DataKind::Tokens) => None,
            (Some("bytes") | None, _) => Some(Tokenizer::bytes()),
            (Some(path), _) => Some(Tokenizer::open(path.as_ref(), config.special_tokens())?),
        };
        let known = tokenizer.as_ref().map(Tokenizer::vocab_size);
        if let (Some(known), Some(vocab_size)) = (known, config.vocab_size)
            && config.kind != DataKind::Tokens
            && known > vocab_size
        {
            return Err(Error::Config(format!(
                "data.vocab_size is {vocab_size}, but the tokenizer has {known} ids; the model's \
                 vocabulary must hold them all"
            )));
        }
        let separator = match config.separate_documents {
            true => Some(end_of_documents(tokenizer.as_ref())?),
            false => None,
        };
        let mut warnings = match (&tokenizer, config.kind) {
            (None, _) | (_, DataKind::Tokens) => Vec::new(),
            (Some(tokenizer), _) => tokenizer.warnings(),
        };
        let (cache, mut memory) = (TokenCache::in_dir(&config.cache_dir), 0);
        let mut report = DataReport::default();
        let mut open = |key: &str, paths: &Paths| -> Result<Arc<Sequences>> {
            let mut source = SourceReport::new(key);
            let sources = match (config.kind, &tokenizer) {
                (kind, Some(tokenizer)) if kind != DataKind::Tokens => {
                    let paths = paths.as_slice();
                    let report = &mut source;
                    let documents = Documents::new(config, key, paths, enough, report);
                    let text = Text { documents, tokenizer, cache: cache.as_ref() };
                    let tokens = text.tokenize()?;
                    if tokens.to == ReadTo::Enough {
                        *read_to = tokens.to;
                    }
                    memory += tokens.memory;
                    warnings.extend(tokens.warnings(key));
                    if tokens.unknown.tokens > 0 {
                        source.count("unknown tokens", tokens.unknown.tokens);
                    }
                    if tokens.unknown.characters > 0 {
                        source.count("characters without a token", tokens.unknown.characters);
                    }
                    vec![tokens.ids]
                }
                _ => {
                    let wanted = Wanted::Extensions(TOKEN_FILES);
                    let files = find(key, paths.as_slice(), wanted, &mut source)?;
                    source.count("files", files.len() as u64);
                    files
                        .iter()
                        .map(|found| {
                            TokenFile::open(&found.path, config.token_dtype).map(Source::File)
                        })
                        .collect::<Result<_>>()?
                }
            };
            let tokens = sources.iter().map(Source::len).sum();
            source.count("tokens", tokens);
            let is_u16 = |source: &Source| matches!(source, Source::File(file) if file.dtype() == TokenDtype::U16);
            if let Some(ids) = config.vocab_size.or(known).filter(|&ids| ids > 1 << 16)
                && sources.iter().any(is_u16)
            {
                warnings.push(format!(
                    "{key} has files of u16 ids, which end at 65535, and the vocabulary has {ids}: were they written \
                     with a type that is too narrow?"
                ));
            }
            let sequences = Sequences::new(key, sources, config.seq_len, config.stride())?;
            // The tail of one text is short, but many short files may consist of tails.
            let unused = sequences.unused_targets();
            if sequences.sources().len() > 1 && unused > tokens / 10 {
                source.count("tokens in no sample", unused);
            }
            report.sources.push(source);
            Ok(Arc::new(sequences))
        };
        let sources = config.sources();
        let weights = sources.iter().map(|(.., weight)| *weight).collect();
        let (mut train, mut validation) = (Vec::new(), Vec::new());
        for (key, paths, _) in sources {
            let (of_train, of_validation) =
                split(open(&key, paths)?, config.validation_fraction())?;
            train.push(of_train);
            validation.push(of_validation);
        }
        let fraction = config.validation_fraction();
        let samples = train.iter().map(SampleRange::len).sum();
        let is_empty = fraction > 0.0 && validation.iter().all(|part| part.len() == 0);
        if let Some(paths) = &config.validation_path {
            validation = vec![SampleRange::of(open("data.validation_path", paths)?)];
        }
        let validation_sets = config
            .validation_sets
            .iter()
            .map(|(name, paths)| {
                let sequences = open(&format!("data.validation_sets.{name}"), paths)?;
                Ok((name.clone(), Parts(vec![SampleRange::of(sequences)])))
            })
            .collect::<Result<_>>()?;
        if is_empty {
            warnings.push(nothing_to_validate(fraction, samples));
        }
        let vocab_size = config.vocab_size.or(known);
        let data = Self {
            train: Parts(train),
            validation: Parts(validation),
            validation_sets,
            weights: if config.mixture.is_empty() { Vec::new() } else { weights },
            tokenizer,
            vocab_size,
            seq_len: config.seq_len,
            separator,
            first_ids: 0,
            report,
            memory,
            warnings,
        };
        data.sampler(0)?; // finds mistakes in the weights
        Ok(data)
    }

    /// Computes [`largest_first_id`](Self::largest_first_id).
    ///
    /// # Errors
    /// If an id is outside the vocabulary.
    fn read_first_ids(&self) -> Result<u32> {
        let sets = self.validation_sets.iter().map(|(_, set)| set);
        let splits = [&self.train, &self.validation].into_iter().chain(sets);
        let files = splits
            .flat_map(|split| &split.0)
            .flat_map(|part| part.sequences.sources())
            .filter_map(|source| match source {
                Source::File(file) => Some(file),
                Source::U16(_) | Source::U32(_) | Source::Kept(_) => None,
            });
        let mut largest = 0;
        for file in files.take(PREVIEW_FILES) {
            let id = file.largest_first_id()?;
            if self.vocab_size.is_some_and(|vocab_size| id as usize >= vocab_size) {
                return Err(wrong_id(file.name(), id, "at its beginning", self.vocab_size));
            }
            largest = largest.max(id);
        }
        Ok(largest)
    }

    /// The samples of a split; `None` if the validation set does not exist.
    fn part(&self, split: Split) -> Option<&Parts> {
        match split {
            Split::Train => Some(&self.train),
            Split::ValidationSet(set) => self.validation_sets.get(set).map(|(_, parts)| parts),
            Split::Validation | Split::Test | Split::Predict => Some(&self.validation),
        }
    }
}

impl DataModule for TextData {
    type Config = TextDataConfig;
    type Batch = TokenBatch;

    fn exclusive_keys() -> &'static [&'static [&'static str]] {
        &[&["path", "mixture"], &["validation_fraction", "validation_path", "validation_sets"]]
    }

    fn setup(config: &TextDataConfig, context: &DataContext) -> Result<Self> {
        let data = Self::open(config, usize::MAX, &mut ReadTo::End)?;
        // Only rank 0 warns: the other ranks have the same data and tokenizer.
        for warning in data.warnings.iter().filter(|_| context.rank == 0) {
            tracing::warn!("{warning}");
        }
        Ok(data)
    }

    fn preview(config: &TextDataConfig, _: &DataContext) -> Result<Self> {
        let mut read_to = ReadTo::End;
        let beginning = Self::open(config, PREVIEW_BYTES, &mut read_to);
        let mut data = match read_to {
            // The error may only be due to reading too little text.
            ReadTo::Enough if beginning.is_err() => {
                Self::open(config, usize::MAX, &mut ReadTo::End)?
            }
            _ => beginning?,
        };
        data.first_ids = data.read_first_ids()?;
        Ok(data)
    }

    fn batch_size(config: &TextDataConfig) -> usize {
        config.batch_size
    }

    fn items(_: &TextDataConfig) -> &'static str {
        "tokens"
    }

    fn shuffle(config: &TextDataConfig) -> bool {
        config.shuffle
    }

    fn len(&self, split: Split) -> u64 {
        self.part(split).map_or(0, Parts::len)
    }

    fn validation_sets(&self) -> Vec<String> {
        self.validation_sets.iter().map(|(name, _)| name.clone()).collect()
    }

    fn sampler(&self, seed: u64) -> Result<Option<Arc<dyn Sampler>>> {
        if self.weights.is_empty() {
            return Ok(None);
        }
        let lens = self.train.0.iter().map(SampleRange::len);
        let sources: Vec<(f64, u64)> = self.weights.iter().copied().zip(lens).collect();
        Ok(Some(Arc::new(Mixture::new(seed, &sources)?)))
    }

    fn fingerprint(&self) -> Result<Option<String>> {
        let parts = self.train.0.iter().map(|part| part.sequences.fingerprint());
        let mut parts = parts.collect::<Result<Vec<_>>>()?;
        for (part, weight) in parts.iter_mut().zip(&self.weights) {
            *part = format!("{part} with weight {weight}");
        }
        Ok(Some(parts.join(", ")))
    }

    fn memory(&self) -> u64 {
        self.memory
    }

    fn report(&self) -> Option<DataReport> {
        Some(self.report.clone())
    }

    fn sample_definition(&self) -> Result<Vec<(String, String)>> {
        let stride = self.train.0.first().map_or(0, |part| part.sequences.stride());
        let mut keys = vec![
            ("`data.seq_len`", self.seq_len.to_string()),
            ("`data.stride`", stride.to_string()),
        ];
        if self.separator.is_some() {
            keys.push(("`data.separate_documents`", true.to_string()));
        }
        Ok(keys.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
    }

    fn evaluation_fingerprint(&self) -> Result<Option<String>> {
        let sets = self.validation_sets.iter().map(|(_, set)| set);
        // Parts of the training data are covered by the training data's fingerprint.
        let own = std::iter::once(&self.validation).chain(sets).flat_map(|parts| &parts.0);
        let own = own.filter(|part| {
            let is_same = |other: &SampleRange| Arc::ptr_eq(&other.sequences, &part.sequences);
            !self.train.0.iter().any(is_same)
        });
        let own = own.map(|part| part.sequences.fingerprint()).collect::<Result<Vec<_>>>()?;
        Ok((!own.is_empty()).then(|| own.join(", ")))
    }

    fn host_keys() -> &'static [&'static str] {
        &["cache_dir", "path", "mixture.path", "tokenizer", "validation_path", "validation_sets"]
    }

    fn shard_sequence(batch: TokenBatch, context: &ContextParallel) -> Result<TokenBatch> {
        batch.shard_sequence(context)
    }

    fn batch(&self, split: Split, indices: &[u64], device: &Device) -> Result<TokenBatch> {
        let parts = self.part(split).ok_or_else(|| Error::Data(format!("there is no {split}")))?;
        let shape = (indices.len(), self.seq_len);
        let mut inputs = Vec::with_capacity(shape.0 * shape.1);
        let mut targets = Vec::with_capacity(shape.0 * shape.1);
        let mut ids = vec![0; self.seq_len + 1];
        let mut documents = Vec::new();
        for &index in indices {
            let Some((sequences, sample)) = parts.find(index) else {
                let available = parts.len();
                return Err(Error::Data(format!(
                    "there is no {split} sample {index} of {available}"
                )));
            };
            let source = sequences.read(sample, &mut ids)?;
            if let Some(vocab_size) = self.vocab_size
                && let Some(id) = ids.iter().find(|&&id| id as usize >= vocab_size)
            {
                let place = format!("in {split} sample {index}");
                return Err(wrong_id(source.name(), *id, &place, Some(vocab_size)));
            }
            inputs.extend_from_slice(&ids[..self.seq_len]);
            targets.extend(ids[1..].iter().map(|&id| i64::from(id)));
            if let Some(end) = self.separator {
                let (inputs, first) = (&ids[..self.seq_len], targets.len() - self.seq_len);
                documents.push(lengths(inputs, end));
                let ends = inputs.iter().enumerate().filter(|(_, id)| **id == end);
                ends.for_each(|(position, _)| targets[first + position] = IGNORED);
            }
        }
        Ok(TokenBatch {
            inputs: transfer::to_device(
                &Tensor::from_vec(inputs, shape, &Device::Cpu)?,
                device,
                "batch",
            )?,
            targets: transfer::to_device(
                &Tensor::from_vec(targets, shape, &Device::Cpu)?,
                device,
                "batch",
            )?,
            documents: self.separator.map(|_| documents),
        })
    }

    fn documents(batch: &TokenBatch) -> Option<&[Vec<usize>]> {
        batch.documents.as_deref()
    }
}

/// The lengths of the documents in a sequence. `end` ends a document.
fn lengths(ids: &[u32], end: u32) -> Vec<usize> {
    ids.split_inclusive(|id| *id == end).map(<[u32]>::len).collect()
}

/// The id that ends a document.
fn end_of_documents(tokenizer: Option<&Tokenizer>) -> Result<u32> {
    tokenizer.and_then(Tokenizer::end_of_text).ok_or_else(|| {
        let why = match tokenizer {
            None => "for token files data.tokenizer says it, and is missing",
            Some(_) => "data.tokenizer has none that is known; name it with data.eos_token",
        };
        Error::Config(format!(
            "data.separate_documents needs the token that ends a document: {why}"
        ))
    })
}

impl Parts {
    fn len(&self) -> u64 {
        self.0.iter().map(SampleRange::len).sum()
    }

    /// The sequences of a sample, and its index there.
    fn find(&self, mut index: u64) -> Option<(&Sequences, u64)> {
        for SampleRange { sequences, range } in &self.0 {
            let len = range.end - range.start;
            if index < len {
                return Some((sequences, range.start + index));
            }
            index -= len;
        }
        None
    }
}

impl SampleRange {
    fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    fn of(sequences: Arc<Sequences>) -> Self {
        let range = 0..sequences.len();
        Self { sequences, range }
    }
}

fn split(sequences: Arc<Sequences>, fraction: f64) -> Result<(SampleRange, SampleRange)> {
    let len = sequences.len();
    let first = len - (len as f64 * fraction) as u64;
    let train = if first == len { len } else { sequences.disjoint_from(first) };
    if train == 0 {
        return Err(Error::Data(format!(
            "of {len} samples data.validation_fraction = {fraction} leaves none for training; \
             lower it or give more data"
        )));
    }
    let part = |range| SampleRange { sequences: sequences.clone(), range };
    Ok((part(0..train), part(first..len)))
}

/// The warning for a fraction that rounds to zero samples.
pub(crate) fn nothing_to_validate(fraction: f64, samples: u64) -> String {
    format!(
        "data.validation_fraction = {fraction} of {} is none, so nothing is validated; raise it, or give data of \
         its own with data.validation_path",
        counted(samples, "sample")
    )
}

fn wrong_id(source: String, id: u32, place: &str, vocab_size: Option<usize>) -> Error {
    Error::Data(format!(
        "{source} has the token id {id} {place}, but ids must be less than {}; are data.token_dtype, \
         data.tokenizer and data.vocab_size those that it was made with?",
        vocab_size.unwrap_or(0)
    ))
}
