//! Batches of labelled texts.

use candle_core::{Device, Tensor};
use fulgurite_engine::execution::transfer;
use fulgurite_error::Result;

use super::encode::Encoded;

/// Texts of one micro-batch, padded behind their ends to one length.
#[derive(Debug, Clone)]
pub struct PaddedTexts {
    /// Token ids, u32 `[batch, time]`.
    pub ids: Tensor,
    /// The segment of each token, u32 `[batch, time]`: 1 in the second text of a pair, for
    /// tokenizers that say so, and 0 elsewhere.
    pub segments: Tensor,
    /// 1 for tokens and 0 for padding, u8 `[batch, time]`.
    pub mask: Tensor,
    /// Number of tokens of each text.
    pub lengths: Vec<usize>,
}

/// The labels of a micro-batch, on the host.
#[derive(Debug, Clone, PartialEq)]
pub enum Labels {
    /// Rows without labels, for predictions.
    None,
    /// The class of each text; for words the class of each token in `[batch, time]`, -100 where no
    /// word begins.
    Classes(Vec<i64>),
    /// The classes of each text.
    Sets(Vec<Vec<u32>>),
    /// The numbers of each text, equally many.
    Numbers(Vec<Vec<f32>>),
}

/// A micro-batch of [`LabelledTexts`](super::LabelledTexts).
#[derive(Debug, Clone)]
pub struct TextBatch {
    /// The texts, pairs of texts or sentences of words; for rows of pairs the first text of each.
    pub texts: PaddedTexts,
    /// For rows of pairs the texts that belong to [`texts`](Self::texts), and perhaps texts that do
    /// not. For `"text_to_text"` the texts to write; empty in a prediction.
    pub others: Vec<PaddedTexts>,
    /// The labels.
    pub labels: Labels,
    /// The longest length that a batch of this data can have.
    pub longest: usize,
}

/// The padding of a micro-batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Padding {
    pub(super) id: u32,
    pub(super) multiple_of: usize,
}

impl PaddedTexts {
    pub(super) fn new(texts: &[&Encoded], padding: Padding, device: &Device) -> Result<Self> {
        let lengths: Vec<usize> = texts.iter().map(|text| text.ids.len()).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0).max(1);
        let time = longest.next_multiple_of(padding.multiple_of);
        let shape = (texts.len(), time);
        let (mut ids, mut segments, mut mask) = (Vec::new(), Vec::new(), Vec::new());
        for (row, text) in texts.iter().enumerate() {
            ids.extend_from_slice(&text.ids);
            ids.resize((row + 1) * time, padding.id);
            segments.extend(text.segments.iter().map(|&segment| u32::from(segment)));
            segments.resize((row + 1) * time, 0);
            mask.resize(row * time + text.ids.len(), 1u8);
            mask.resize((row + 1) * time, 0);
        }
        let send = |tensor: Tensor| transfer::to_device(&tensor, device, "batch");
        Ok(Self {
            ids: send(Tensor::from_vec(ids, shape, &Device::Cpu)?)?,
            segments: send(Tensor::from_vec(segments, shape, &Device::Cpu)?)?,
            mask: send(Tensor::from_vec(mask, shape, &Device::Cpu)?)?,
            lengths,
        })
    }

    /// Length of the padded texts.
    pub fn time(&self) -> usize {
        self.ids.dims().last().copied().unwrap_or(0)
    }
}
