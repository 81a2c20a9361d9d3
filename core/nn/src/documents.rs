//! [`Documents`]: the beginnings of documents in packed sequences.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::host::{indices, integers};
use crate::{Error, Result};
#[cfg(feature = "cuda")]
use fulgurite_engine::execution::transfer;
use fulgurite_engine::execution::{self, ContextGuard};

/// Targets that a loss ignores.
const IGNORED: i64 = -100;

/// The beginnings of documents in the sequences of a batch, if several documents are packed into
/// one sequence. While they are in force ([`run`](Self::run)),
/// [`CausalSelfAttention`](crate::CausalSelfAttention) attends within documents only, causal or
/// not, so each document is computed as if it were alone. Rotary embeddings need no change, because
/// attention depends on distances only. Other position embeddings use
/// [`positions`](Self::positions).
///
/// Not supported for sequences that ranks share (`context_parallel_size` above 1).
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fulgurite_core::nn::Documents;
///
/// // The id 0 ends a document.
/// let inputs = Tensor::new(&[[5u32, 6, 0, 7, 0, 8]], &Device::Cpu)?;
/// let documents = Documents::ended_by(&inputs, 0)?;
/// assert_eq!(documents.positions(&Device::Cpu)?.to_vec2::<u32>()?, [[0, 1, 2, 0, 1, 0]]);
///
/// // Targets after the end of a document are ignored: it does not predict the next document.
/// let targets = Tensor::new(&[[6i64, 0, 7, 0, 8, 9]], &Device::Cpu)?;
/// let targets = documents.ignore_ends(&inputs, &targets, 0)?;
/// assert_eq!(targets.to_vec2::<i64>()?, [[6, 0, -100, 0, -100, 9]]);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Documents {
    /// For each position of each sequence, the first position of its document.
    first: Arc<[u32]>,
    /// For each position of each sequence, the end of its document: the position after its last.
    end: Arc<[u32]>,
    batch: usize,
    time: usize,
    /// Copies of `first` and `end` on the device of the first layer that needed them.
    #[cfg(feature = "cuda")]
    on_device: Arc<std::sync::OnceLock<[Tensor; 2]>>,
}

impl Documents {
    fn new(first: Vec<u32>, batch: usize, time: usize) -> Self {
        let mut end = vec![0; first.len()];
        for (first, end) in first.chunks(time.max(1)).zip(end.chunks_mut(time.max(1))) {
            let mut after = time as u32;
            for (position, end) in end.iter_mut().enumerate().rev() {
                *end = after;
                if first[position] as usize == position {
                    after = position as u32;
                }
            }
        }
        Self {
            first: first.into(),
            end: end.into(),
            batch,
            time,
            #[cfg(feature = "cuda")]
            on_device: Arc::default(),
        }
    }

    /// Returns the documents of sequences `[batch, time]` of u32 or i64 ids. The id `end` ends a
    /// document, and the next one begins after it. The first document of a sequence may have begun
    /// before the sequence.
    ///
    /// # Errors
    /// If `inputs` has another shape or dtype.
    pub fn ended_by(inputs: &Tensor, end: u32) -> Result<Self> {
        let (batch, time) = inputs.dims2()?;
        let mut first = Vec::with_capacity(batch * time);
        let (ids, end) = (indices(inputs, "ids")?, i64::from(end));
        for sequence in ids.chunks(time.max(1)) {
            let mut begins = 0;
            for (position, &id) in sequence.iter().enumerate() {
                first.push(begins);
                if id == end {
                    begins = position as u32 + 1;
                }
            }
        }
        Ok(Self::new(first, batch, time))
    }

    /// Returns documents with these lengths, in order, for each sequence.
    ///
    /// # Errors
    /// If a document is empty, the lengths of two sequences have different sums, or a sum exceeds
    /// u32.
    pub fn of_lengths<L: AsRef<[usize]>>(lengths: &[L]) -> Result<Self> {
        let sum = |lengths: &[usize]| lengths.iter().try_fold(0usize, |sum, n| sum.checked_add(*n));
        let time = lengths.first().map_or(Some(0), |lengths| sum(lengths.as_ref()));
        let time = time.filter(|time| u32::try_from(*time).is_ok()).ok_or_else(|| {
            Error::other("the documents of the first sequence are longer than a u32 can count")
        })?;
        let mut first = Vec::new();
        for (i, lengths) in lengths.iter().map(AsRef::as_ref).enumerate() {
            if lengths.contains(&0) || sum(lengths) != Some(time) {
                return Err(Error::other(format!(
                    "the documents of sequence {i} have the lengths {lengths:?}, which must be at least 1 \
                     and add up to {time}, as those of the first sequence do"
                )));
            }
            for &length in lengths {
                let begins = first.len() - i * time;
                first.extend(std::iter::repeat_n(begins as u32, length));
            }
        }
        Ok(Self::new(first, lengths.len(), time))
    }

    /// Returns the documents of padded sequences: the tokens of a sequence are one document, and
    /// the padding before and after them are others. So tokens attend to tokens only, and padding
    /// to padding. `mask` is the attention mask of `transformers`: `[batch, time]` of u8, u32 or
    /// i64, 1 for tokens and 0 for padding.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use fulgurite_core::nn::Documents;
    ///
    /// let mask = Tensor::new(&[[1u8, 1, 1, 0], [0, 0, 1, 1]], &Device::Cpu)?;
    /// let positions = Documents::of_mask(&mask)?.positions(&Device::Cpu)?;
    /// assert_eq!(positions.to_vec2::<u32>()?, [[0, 1, 2, 0], [0, 1, 0, 1]]);
    /// # Ok::<(), fulgurite_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// If `mask` has another shape, dtype or value, or padding between the tokens of a sequence.
    pub fn of_mask(mask: &Tensor) -> Result<Self> {
        let (batch, time) = mask.dims2().map_err(|_| {
            Error::other(format!("an attention mask is [batch, time], got {:?}", mask.dims()))
        })?;
        if !matches!(mask.dtype(), DType::U8 | DType::U32 | DType::I64) {
            return Err(Error::other(format!(
                "an attention mask is u8, u32 or i64, got {:?}",
                mask.dtype()
            )));
        }
        let mut first = Vec::with_capacity(batch * time);
        let mask = integers(mask, "an attention mask")?;
        for (i, sequence) in mask.chunks(time.max(1)).enumerate() {
            if let Some(value) = sequence.iter().find(|value| !matches!(value, 0 | 1)) {
                return Err(Error::other(format!(
                    "an attention mask has 1 for tokens and 0 for padding, got {value} in sequence {i}"
                )));
            }
            let (mut begins, mut runs) = (0, usize::from(sequence.first() == Some(&1)));
            for (position, &value) in sequence.iter().enumerate() {
                if position > 0 && value != sequence[position - 1] {
                    begins = position as u32;
                    runs += usize::from(value == 1);
                }
                first.push(begins);
            }
            if runs > 1 {
                return Err(Error::other(format!(
                    "the attention mask of sequence {i} has padding between its tokens; padding must be \
                     before or after them (for several documents in a sequence use \
                     `Documents::of_lengths`)"
                )));
            }
        }
        Ok(Self::new(first, batch, time))
    }

    /// Returns the position of each token in its document, u32 `[batch, time]`.
    ///
    /// # Errors
    /// If the device is out of memory.
    pub fn positions(&self, device: &Device) -> Result<Tensor> {
        let positions: Vec<u32> = self
            .first
            .iter()
            .enumerate()
            .map(|(i, first)| (i % self.time) as u32 - first)
            .collect();
        Ok(Tensor::from_vec(positions, (self.batch, self.time), device)?)
    }

    /// Sets the targets (i64 `[batch, time]`) of document ends to -100, which losses ignore,
    /// because another document follows.
    ///
    /// # Errors
    /// If `inputs` or `targets` has another shape or dtype.
    pub fn ignore_ends(&self, inputs: &Tensor, targets: &Tensor, end: u32) -> Result<Tensor> {
        let ends = inputs.eq(end)?;
        let ignored = Tensor::new(IGNORED, targets.device())?.broadcast_as(targets.shape())?;
        Ok(ends.to_dtype(DType::U8)?.where_cond(&ignored, targets)?)
    }

    /// Calls `f`, a model's forward, with these documents in force.
    pub fn run<R>(&self, f: impl FnOnce() -> R) -> R {
        let _guard = self.enter();
        f()
    }

    /// Puts these documents in force on this thread until the guard is dropped.
    pub fn enter(&self) -> ContextGuard {
        execution::enter(self.clone())
    }

    /// Returns the documents in force on this thread, if any.
    ///
    /// # Errors
    /// If they are not of `batch` sequences of `time` positions.
    pub fn in_force(batch: usize, time: usize) -> Result<Option<Arc<Self>>> {
        Self::current(batch, time, false)
    }

    /// Whether documents are in force.
    pub(crate) fn any() -> bool {
        execution::value::<Self>().is_some()
    }

    /// Returns the documents in force, for `batch` sequences of `time` positions that are all on
    /// this rank.
    pub(crate) fn current(batch: usize, time: usize, shared: bool) -> Result<Option<Arc<Self>>> {
        let Some(documents) = execution::value::<Self>() else { return Ok(None) };
        if shared {
            return Err(Error::other(
                "attention within documents needs whole sequences, and context_parallel_size is above 1",
            ));
        }
        if (documents.batch, documents.time) != (batch, time) {
            return Err(Error::other(format!(
                "the documents in force are of {} sequences of {} tokens, and attention is computed for \
                 {batch} of {time}",
                documents.batch, documents.time
            )));
        }
        Ok(Some(documents))
    }

    /// Returns the positions of the document at `position`.
    pub(crate) fn range(&self, sequence: usize, position: usize) -> Range<usize> {
        let at = sequence * self.time + position;
        self.first[at] as usize..self.end[at] as usize
    }

    /// Returns the first key of each query and the end of its keys, u32 `[batch, time]`, on
    /// `device`; sent once for all layers.
    #[cfg(feature = "cuda")]
    pub(crate) fn ranges_on(&self, device: &Device) -> Result<[Tensor; 2]> {
        let there = self.on_device.get().filter(|sent| sent[0].device().same_device(device));
        if let Some(sent) = there {
            return Ok(sent.clone());
        }
        let send = |keys: &[u32]| {
            let keys = Tensor::from_slice(keys, (self.batch, self.time), &Device::Cpu)?;
            transfer::to_device(&keys, device, "documents")
        };
        let sent = [send(&self.first)?, send(&self.end)?];
        // Another thread may have set the same value already.
        let _ = self.on_device.set(sent.clone());
        Ok(sent)
    }

    /// Returns the positions from the first to the last of any sequence's document at `position`.
    pub(crate) fn range_of_all(&self, position: usize) -> Range<usize> {
        let ranges = || (0..self.batch).map(|sequence| self.range(sequence, position));
        let first = ranges().map(|range| range.start).min().unwrap_or(0);
        first..ranges().map(|range| range.end).max().unwrap_or(self.time)
    }
}
