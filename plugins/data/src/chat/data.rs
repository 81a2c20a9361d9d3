//! [`ChatData`].

use std::hash::Hasher as _;

use candle_core::{Device, Tensor};
use fulgurite_engine::data::{
    DataContext, DataModule, DataReport, SourceReport, Split, TokenBatch,
};
use fulgurite_engine::execution::transfer;
use fulgurite_engine::parallel::ContextParallel;
use fulgurite_error::{Error, Result};
use twox_hash::XxHash3_64;

use super::config::ChatDataConfig;
use super::encode::ChatEncoder;
use super::packing::pack;
use super::samples::{Sample, read};
use super::template::ChatTemplate;
use crate::config::Paths;
use crate::held_out::hold_out;
use crate::tokenizer::Tokenizer;

/// A target that losses leave out.
const IGNORED: i64 = -100;
/// Rows that a preview tokenizes.
const PREVIEW_ROWS: usize = 200;

/// Conversations, rendered by a model's chat template. The model learns the answers.
///
/// A batch is a [`TokenBatch`]: the targets of all other tokens are -100. With `packing`, short
/// conversations share a sample, and the batch says where each ends
/// ([`documents`](DataModule::documents)). Setup tokenizes all rows into memory.
///
/// ```
/// use candle_core::Device;
/// use fulgurite_core::data::{DataContext, DataModule as _, Split};
/// use fulgurite_data::{ChatData, ChatDataConfig};
///
/// # let dir = tempfile::tempdir().unwrap();
/// let row = r#"{"prompt": "2 + 2 = ", "completion": "4"}"#;
/// std::fs::write(dir.path().join("sums.jsonl"), row).unwrap();
/// let config = ChatDataConfig {
///     path: dir.path().into(),
///     tokenizer: Some("bytes".to_owned()),
///     validation_fraction: Some(0.0),
///     ..ChatDataConfig::default()
/// };
/// let data = ChatData::setup(&config, &DataContext::default())?;
/// let batch = data.batch(Split::Train, &[0], &Device::Cpu)?;
/// // The completion and the token that ends it are learned.
/// assert_eq!(batch.targets.to_vec2::<i64>()?[0][7..10], [52, 256, -100]);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug)]
pub struct ChatData {
    config: ChatDataConfig,
    encoder: ChatEncoder,
    train: Part,
    validation: Part,
    report: DataReport,
    /// [`DataModule::memory`].
    memory: u64,
    warnings: Vec<String>,
}

/// The conversations of a split, and the samples that they are packed into.
#[derive(Debug)]
struct Part {
    conversations: Vec<Sample>,
    samples: Vec<Vec<usize>>,
}

impl Part {
    fn new(conversations: Vec<Sample>, config: &ChatDataConfig) -> Self {
        // The last token of a conversation is a target only.
        let size = |sample: &Sample| sample.encoded.ids.len() - 1;
        let samples = match config.packing {
            true => pack(&conversations.iter().map(size).collect::<Vec<_>>(), config.seq_len),
            false => (0..conversations.len()).map(|i| vec![i]).collect(),
        };
        Self { conversations, samples }
    }
}

impl ChatData {
    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.encoder.tokenizer
    }

    /// The chat template; `None` if rows are prompts and completions, and the tokenizer has no
    /// template.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.encoder.template()
    }

    /// Tokens in a sample at most.
    pub fn seq_len(&self) -> usize {
        self.config.seq_len
    }

    fn part(&self, split: Split) -> &Part {
        match split {
            Split::Train => &self.train,
            _ => &self.validation,
        }
    }

    /// Opens the data, with at most `most` tokenized rows of each key.
    fn open(config: &ChatDataConfig, most: usize) -> Result<Self> {
        config.validate()?;
        let encoder = ChatEncoder::open(config)?;
        let mut warnings = encoder.tokenizer.warnings();
        let mut report = DataReport::default();
        let (mut rows, mut tokenized) = (0, 0);
        let mut open = |key: &str, paths: &Paths| -> Result<Vec<Sample>> {
            let mut source = SourceReport::new(key);
            let found = read((key, paths), config, &encoder, most, &mut source)?;
            rows += found.rows;
            tokenized += found.rows.min(most);
            warnings.extend(found.warnings);
            report.sources.push(source);
            Ok(found.samples)
        };
        let all = open("data.path", &config.path)?;
        let (train, validation) = match &config.validation_path {
            Some(paths) => (all, open("data.validation_path", paths)?),
            None => {
                let held =
                    hold_out(all, config.validation_fraction(), "validation of conversations");
                warnings.extend(held.warning);
                (held.train, held.validation)
            }
        };
        let known: u64 = train.iter().chain(&validation).map(Sample::bytes).sum();
        let memory = (known as f64 * rows as f64 / tokenized.max(1) as f64) as u64;
        let (train, validation) = (Part::new(train, config), Part::new(validation, config));
        if config.packing {
            // Rows held out are of the same source as the others.
            let last = report.sources.len().saturating_sub(1);
            for (part, source) in [(&train, 0), (&validation, last)] {
                if let Some(source) = report.sources.get_mut(source) {
                    source.count("samples", part.samples.len() as u64);
                }
            }
        }
        Ok(Self { config: config.clone(), encoder, train, validation, report, memory, warnings })
    }
}

/// Number and a hash of conversations.
fn digest(part: &Part) -> String {
    let mut hasher = XxHash3_64::default();
    part.conversations.iter().for_each(|sample| sample.hash(&mut hasher));
    format!("{} conversations ({:016x})", part.conversations.len(), hasher.finish())
}

impl DataModule for ChatData {
    type Config = ChatDataConfig;
    type Batch = TokenBatch;

    fn exclusive_keys() -> &'static [&'static [&'static str]] {
        &[&["validation_fraction", "validation_path"]]
    }

    fn setup(config: &ChatDataConfig, context: &DataContext) -> Result<Self> {
        let data = Self::open(config, usize::MAX)?;
        for warning in data.warnings.iter().filter(|_| context.rank == 0) {
            tracing::warn!("{warning}");
        }
        Ok(data)
    }

    fn preview(config: &ChatDataConfig, _: &DataContext) -> Result<Self> {
        Self::open(config, PREVIEW_ROWS)
    }

    fn batch_size(config: &ChatDataConfig) -> usize {
        config.batch_size
    }

    fn items(_: &ChatDataConfig) -> &'static str {
        "tokens"
    }

    fn shuffle(config: &ChatDataConfig) -> bool {
        config.shuffle
    }

    fn len(&self, split: Split) -> u64 {
        match split {
            Split::ValidationSet(_) => 0,
            split => self.part(split).samples.len() as u64,
        }
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
        let config = &self.config;
        let mut hasher = XxHash3_64::default();
        hasher.write(self.template().map_or("", ChatTemplate::source).as_bytes());
        Ok(vec![
            ("`data.seq_len`".to_owned(), config.seq_len.to_string()),
            ("`data.packing`".to_owned(), config.packing.to_string()),
            ("the chat template".to_owned(), format!("{:016x}", hasher.finish())),
        ])
    }

    fn sample_name(&self, split: Split, index: u64) -> Option<String> {
        let part = self.part(split);
        let items = part.samples.get(usize::try_from(index).ok()?)?;
        let places = items.iter().map(|&i| part.conversations[i].place.to_string());
        Some(places.collect::<Vec<_>>().join("; "))
    }

    fn host_keys() -> &'static [&'static str] {
        &["cache_dir", "chat_template", "path", "tokenizer", "validation_path"]
    }

    fn documents(batch: &TokenBatch) -> Option<&[Vec<usize>]> {
        batch.documents.as_deref()
    }

    fn shard_sequence(batch: TokenBatch, context: &ContextParallel) -> Result<TokenBatch> {
        if batch.documents.is_some() {
            return Err(Error::Config(format!(
                "conversations that share samples (data.packing) need whole sequences, and context_parallel_size is {}; \
                 set data.packing = false",
                context.size()
            )));
        }
        batch.shard_sequence(context)
    }

    fn batch(&self, split: Split, indices: &[u64], device: &Device) -> Result<TokenBatch> {
        let part = self.part(split);
        let sample = |&index: &u64| {
            part.samples.get(index as usize).ok_or_else(|| {
                Error::Data(format!("there is no {split} sample {index} of {}", part.samples.len()))
            })
        };
        let samples = indices.iter().map(sample).collect::<Result<Vec<_>>>()?;
        let size = |&i: &usize| part.conversations[i].encoded.ids.len() - 1;
        let longest = samples.iter().map(|items| items.iter().map(size).sum()).max().unwrap_or(1);
        let time = longest.next_multiple_of(self.config.pad_to_multiple_of);
        let (mut inputs, mut targets, mut documents) = (Vec::new(), Vec::new(), Vec::new());
        // Nothing is learned from padding, and no token attends to it.
        let padding = self.encoder.tokenizer.end_of_text().unwrap_or(0);
        for (row, items) in samples.iter().enumerate() {
            let mut lengths: Vec<usize> = items.iter().map(size).collect();
            for &i in *items {
                let encoded = &part.conversations[i].encoded;
                inputs.extend_from_slice(&encoded.ids[..encoded.ids.len() - 1]);
                let next = encoded.ids.iter().zip(&encoded.learned).skip(1);
                targets
                    .extend(next.map(|(&id, &learned)| if learned { id.into() } else { IGNORED }));
            }
            let padded = time * (row + 1) - inputs.len();
            lengths.extend((padded > 0).then_some(padded));
            inputs.resize(time * (row + 1), padding);
            targets.resize(time * (row + 1), IGNORED);
            documents.push(lengths);
        }
        let shape = (samples.len(), time);
        let send = |tensor: Tensor| transfer::to_device(&tensor, device, "batch");
        Ok(TokenBatch {
            inputs: send(Tensor::from_vec(inputs, shape, &Device::Cpu)?)?,
            targets: send(Tensor::from_vec(targets, shape, &Device::Cpu)?)?,
            documents: self.config.packing.then_some(documents),
        })
    }
}
