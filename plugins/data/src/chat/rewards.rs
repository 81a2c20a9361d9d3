//! [`RewardData`].

use candle_core::{Device, Tensor};
use fulgurite_engine::data::{DataContext, DataModule, DataReport, Split};
use fulgurite_engine::execution::transfer;
use fulgurite_error::{Error, Result};

use super::encode::Encoded;
use super::preferences::{PreferenceData, PreferenceDataConfig};
use crate::labelled::PaddedTexts;
use crate::special_tokens::named_token;
use crate::tokenizer::Tokenizer;

/// The rows of [`PreferenceData`] for a model that scores texts: each text is whole, with its last
/// token.
///
/// Padding is the `pad_token` of the files beside the tokenizer, or the end of a text.
#[derive(Debug)]
pub struct RewardData {
    pairs: PreferenceData,
    pad_id: u32,
}

/// A micro-batch of [`RewardData`].
#[derive(Debug, Clone)]
pub struct RewardBatch {
    /// The chosen and the rejected text of each pair, in turn: `[2 * pairs, time]`.
    pub texts: PaddedTexts,
    /// How much higher the chosen text of each pair shall score; 0 without a `margin` in the row.
    pub margins: Vec<f32>,
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

    fn with_padding(pairs: PreferenceData) -> Result<Self> {
        let tokenizer = pairs.tokenizer();
        let named =
            tokenizer.file().map(|file| named_token(file, "pad_token")).transpose()?.flatten();
        let pad_id = match named {
            None => tokenizer.end_of_text().unwrap_or(0),
            Some((place, token)) => match tokenizer.encode(&token)?[..] {
                [id] => id,
                _ => {
                    return Err(Error::Config(format!(
                        "{place} = {token:?} is not one token of the tokenizer; name one that it has"
                    )));
                }
            },
        };
        Ok(Self { pairs, pad_id })
    }
}

/// Pads texts behind their ends to one length, a multiple of `multiple`.
fn padded(
    texts: &[&Encoded],
    multiple: usize,
    padding: u32,
    device: &Device,
) -> Result<PaddedTexts> {
    let lengths: Vec<usize> = texts.iter().map(|text| text.ids.len()).collect();
    let time = lengths.iter().copied().max().unwrap_or(1).next_multiple_of(multiple);
    let (mut ids, mut mask) = (Vec::new(), Vec::new());
    for (row, text) in texts.iter().enumerate() {
        ids.extend_from_slice(&text.ids);
        ids.resize((row + 1) * time, padding);
        mask.resize(row * time + text.ids.len(), 1u8);
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
        Self::with_padding(PreferenceData::setup(config, context)?)
    }

    fn preview(config: &PreferenceDataConfig, context: &DataContext) -> Result<Self> {
        Self::with_padding(PreferenceData::preview(config, context)?)
    }

    fn batch_size(config: &PreferenceDataConfig) -> usize {
        config.batch_size
    }

    fn shuffle(config: &PreferenceDataConfig) -> bool {
        config.shuffle
    }

    fn len(&self, split: Split) -> u64 {
        self.pairs.len(split)
    }

    fn fingerprint(&self) -> Result<Option<String>> {
        self.pairs.fingerprint()
    }

    fn evaluation_fingerprint(&self) -> Result<Option<String>> {
        self.pairs.evaluation_fingerprint()
    }

    fn memory(&self) -> u64 {
        self.pairs.memory()
    }

    fn report(&self) -> Option<DataReport> {
        self.pairs.report()
    }

    fn sample_definition(&self) -> Result<Vec<(String, String)>> {
        self.pairs.sample_definition()
    }

    fn sample_name(&self, split: Split, index: u64) -> Option<String> {
        self.pairs.sample_name(split, index)
    }

    fn host_keys() -> &'static [&'static str] {
        PreferenceData::host_keys()
    }

    fn batch(&self, split: Split, indices: &[u64], device: &Device) -> Result<RewardBatch> {
        let (texts, margins) = self.pairs.answers_of(split, indices)?;
        let multiple = self.pairs.pad_to_multiple_of();
        Ok(RewardBatch { texts: padded(&texts, multiple, self.pad_id, device)?, margins })
    }
}
