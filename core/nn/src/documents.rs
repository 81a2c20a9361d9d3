//! [`Documents`]: the beginnings of documents in packed sequences.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::host::indices;
use crate::{Error, Result};
#[cfg(feature = "cuda")]
use fulgurite_engine::execution::transfer;
use fulgurite_engine::execution::{self, ContextGuard};

/// Targets that a loss ignores.
const IGNORED: i64 = -100;

/// The beginnings of documents in the sequences of a batch, if several documents are packed into
/// one sequence. While they are in force ([`run`](Self::run)),
/// [`CausalSelfAttention`](crate::CausalSelfAttention) attends within documents only, so each
/// document is computed as if it were alone. Rotary embeddings need no change, because attention
/// depends on distances only. Other position embeddings use [`positions`](Self::positions).
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
    batch: usize,
    time: usize,
    /// A copy of `first` on the device of the first layer that needed it.
    #[cfg(feature = "cuda")]
    on_device: Arc<std::sync::OnceLock<Tensor>>,
}

impl Documents {
    fn new(first: Vec<u32>, batch: usize, time: usize) -> Self {
        Self {
            first: first.into(),
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

    /// Returns the first key that the query at `position` attends to.
    pub(crate) fn first(&self, sequence: usize, position: usize) -> usize {
        self.first[sequence * self.time + position] as usize
    }

    /// Returns the first key of each query, u32 `[batch, time]`, on `device`; sent once for all
    /// layers.
    #[cfg(feature = "cuda")]
    pub(crate) fn first_on(&self, device: &Device) -> Result<Tensor> {
        let there = self.on_device.get().filter(|sent| sent.device().same_device(device));
        if let Some(sent) = there {
            return Ok(sent.clone());
        }
        let first = Tensor::from_slice(&self.first, (self.batch, self.time), &Device::Cpu)?;
        let sent = transfer::to_device(&first, device, "documents")?;
        // Another thread may have set the same value already.
        let _ = self.on_device.set(sent.clone());
        Ok(sent)
    }

    /// Returns the first key that any sequence's query at `position` attends to.
    pub(crate) fn first_of_all(&self, position: usize) -> usize {
        (0..self.batch).map(|sequence| self.first(sequence, position)).min().unwrap_or(0)
    }
}
