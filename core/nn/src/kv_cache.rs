//! [`KvCache`]: keys and values of earlier tokens, for generation.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Tensor};

use crate::{Error, Result};
use fulgurite_engine::autograd::{is_grad_enabled, storage};
use fulgurite_engine::execution;

/// The keys and values that the attention layers of a model computed for the tokens of some
/// sequences, so that a forward of the next tokens computes these tokens only.
///
/// Within [`forward`](Self::forward), tokens of several sequences are one row, `[1, tokens]`,
/// without padding between them. [`CausalSelfAttention`](crate::CausalSelfAttention) adds their
/// keys and values and attends to all tokens of the same sequence. A tensor-parallel rank holds its
/// heads.
///
/// On the CPU, the bits of a sequence do not depend on the other sequences of the forward. Products
/// of fewer than 16 tokens sum each row alone, and larger ones are computed a sequence at a time.
/// On other devices, and under plans that cut the sequence, sums depend on the number of tokens.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fulgurite_core::autograd::no_grad;
/// use fulgurite_core::module::{Module, ModuleBuilder, ModuleInit};
/// # use fulgurite_core::autograd::storage;
/// use fulgurite_core::nn::{AttentionConfig, CausalSelfAttention, KvCache, RowTokens};
///
/// let b = ModuleBuilder::new(ModuleInit::default());
/// let attention = CausalSelfAttention::new(&b.pp("attn"), &AttentionConfig::new(16, 4))?;
/// # for slot in b.finish()?.slots() { storage::allocate(slot.compute()?)?; }
/// let _no_grad = no_grad();
/// let mut cache = KvCache::new(&[8, 8])?;
/// // Three tokens of the first sequence and two of the second.
/// let tokens = [RowTokens { row: 0, count: 3 }, RowTokens { row: 1, count: 2 }];
/// let x = Tensor::zeros((1, 5, 16), DType::F32, &Device::Cpu)?;
/// cache.forward(&tokens, 0, || attention.forward(&x))?;
/// // The next token of the second sequence.
/// let x = Tensor::zeros((1, 1, 16), DType::F32, &Device::Cpu)?;
/// cache.forward(&[RowTokens { row: 1, count: 1 }], 0, || attention.forward(&x))?;
/// assert_eq!([cache.length(0), cache.length(1)], [3, 3]);
/// assert_eq!(cache.bytes(), 2 * (8 + 8) * 16 * 4);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug)]
pub struct KvCache {
    rows: Vec<Row>,
    layers: Arc<Layers>,
}

/// A sequence.
#[derive(Debug, Clone, Copy)]
struct Row {
    length: usize,
    capacity: usize,
    is_freed: bool,
}

/// Keys and values of each sequence, by the path of the attention layer.
type Layers = Mutex<HashMap<String, Vec<Option<KeysAndValues>>>>;

/// Keys and values of a sequence, each `[heads of this rank, capacity, head_dim]`. Keys are
/// rotated.
#[derive(Debug, Clone)]
pub(crate) struct KeysAndValues {
    pub(crate) keys: Tensor,
    pub(crate) values: Tensor,
}

/// The tokens that a forward adds to one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowTokens {
    /// The sequence, by its place in the capacities of [`KvCache::new`].
    pub row: usize,
    /// Number of tokens.
    pub count: usize,
}

/// The tokens of a forward within [`KvCache::forward`].
#[derive(Debug)]
pub struct CachedTokens {
    segments: Vec<Segment>,
    tokens: usize,
    layers: Arc<Layers>,
}

/// Consecutive tokens of one sequence.
#[derive(Debug, Clone)]
pub(crate) struct Segment {
    row: usize,
    /// The places of these tokens in the forward.
    pub(crate) at: Range<usize>,
    /// The position of the first in the sequence.
    pub(crate) first: usize,
    /// The most tokens of the sequence.
    pub(crate) capacity: usize,
}

impl KvCache {
    /// A cache for sequences of up to these numbers of tokens. Memory is allocated when a layer
    /// first needs it.
    ///
    /// Rotary embeddings take the capacity as the length of the sequence, if their frequencies
    /// depend on it.
    ///
    /// # Errors
    /// If a capacity is 0.
    pub fn new(capacities: &[usize]) -> Result<Self> {
        if let Some(row) = capacities.iter().position(|capacity| *capacity == 0) {
            return Err(Error::other(format!(
                "a cache of keys and values needs room for a token in each sequence; sequence {row} has a \
                 capacity of 0"
            )));
        }
        let row = |&capacity: &usize| Row { length: 0, capacity, is_freed: false };
        Ok(Self { rows: capacities.iter().map(row).collect(), layers: Arc::default() })
    }

    /// The number of tokens of a sequence.
    ///
    /// # Panics
    /// If the sequence does not exist.
    pub fn length(&self, row: usize) -> usize {
        self.rows[row].length
    }

    /// Frees the memory of a sequence. It takes tokens no longer.
    ///
    /// # Panics
    /// If the sequence does not exist.
    pub fn free(&mut self, row: usize) {
        self.rows[row].is_freed = true;
        for rows in lock(&self.layers).values_mut() {
            rows[row] = None;
        }
    }

    /// Bytes of all keys and values on this rank: `2 * layers * capacity * kv_heads * head_dim`
    /// elements for each sequence that had a forward and is not [freed](Self::free).
    pub fn bytes(&self) -> usize {
        let layers = lock(&self.layers);
        let rows = layers.values().flatten().flatten();
        let size = |t: &Tensor| t.elem_count() * t.dtype().size_in_bytes();
        rows.map(|KeysAndValues { keys, values }| size(keys) + size(values)).sum()
    }

    /// Calls `compute`, a forward of these tokens in this order, followed by `padding` tokens that
    /// belong to no sequence and whose values do not count. Padding keeps ranks without tokens in
    /// step with others.
    ///
    /// If it succeeds, the tokens belong to their sequences. Gradients must be off. Collective if
    /// the forward is.
    ///
    /// # Errors
    /// As `compute`. If a sequence is unknown, freed or named twice, or if its tokens are none or
    /// exceed its capacity.
    pub fn forward<R>(
        &mut self,
        tokens: &[RowTokens],
        padding: usize,
        compute: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        if is_grad_enabled() {
            return Err(Error::other(
                "a cache of keys and values has no backward; turn gradients off with `no_grad`",
            ));
        }
        let mut segments = Vec::<Segment>::with_capacity(tokens.len());
        let mut at = 0;
        for &RowTokens { row, count } in tokens {
            let wrong =
                |what: String| Err(Error::other(format!("sequence {row} of a cache {what}")));
            let Some(&Row { length: first, capacity, is_freed }) = self.rows.get(row) else {
                return wrong(format!("does not exist; there are {}", self.rows.len()));
            };
            if is_freed || segments.iter().any(|segment| segment.row == row) {
                return wrong("is freed, or is named twice in one forward".to_owned());
            }
            if count == 0 || first + count > capacity {
                return wrong(format!(
                    "has {first} of at most {capacity} tokens, and {count} more cannot be added"
                ));
            }
            segments.push(Segment { row, at: at..at + count, first, capacity });
            at += count;
        }
        let layers = self.layers.clone();
        let cached = CachedTokens { segments, tokens: at + padding, layers };
        let result = {
            let _guard = execution::enter(cached);
            compute()?
        };
        for &RowTokens { row, count } in tokens {
            self.rows[row].length += count;
        }
        Ok(result)
    }
}

impl CachedTokens {
    /// The tokens of the forward on this thread, if it is within [`KvCache::forward`].
    pub fn current() -> Option<Arc<Self>> {
        execution::value::<Self>()
    }

    /// The position of each token in its sequence, u32 `[1, tokens]`; 0 for padding.
    ///
    /// # Errors
    /// If the device is out of memory.
    pub fn positions(&self, device: &Device) -> Result<Tensor> {
        let own = self.segments.iter().flat_map(|s| s.first..s.first + s.at.len());
        let mut positions: Vec<u32> = own.map(|position| position as u32).collect();
        positions.resize(self.tokens, 0);
        Ok(Tensor::from_vec(positions, (1, self.tokens), device)?)
    }

    /// Checks that a forward has the shape `[batch, time]` of these tokens.
    ///
    /// # Errors
    /// If it has another.
    pub fn check(&self, batch: usize, time: usize) -> Result<()> {
        match (batch, time) == (1, self.tokens) {
            true => Ok(()),
            false => Err(Error::other(format!(
                "a forward with a cache of keys and values takes its tokens as [1, {}], got [{batch}, {time}]",
                self.tokens
            ))),
        }
    }

    /// The longest sequence after this forward.
    pub fn longest(&self) -> usize {
        self.segments.iter().map(|s| s.first + s.at.len()).max().unwrap_or(0)
    }

    /// The number of tokens of the forward.
    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }

    pub(crate) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Returns the keys and values of each segment's sequence in the layer at `path`, allocated at
    /// the first use for this number of heads and elements of a head.
    pub(crate) fn layer(
        &self,
        path: &str,
        [heads, head_dim]: [usize; 2],
        dtype: DType,
        device: &Device,
    ) -> Result<Vec<KeysAndValues>> {
        let mut layers = lock(&self.layers);
        if !layers.contains_key(path) {
            layers.insert(path.to_owned(), Vec::new());
        }
        let Some(rows) = layers.get_mut(path) else {
            return Err(Error::other("a layer's cache is missing"));
        };
        let mut found = Vec::with_capacity(self.segments.len());
        for Segment { row, capacity, .. } in &self.segments {
            if rows.len() <= *row {
                rows.resize(row + 1, None);
            }
            let cached = match &rows[*row] {
                Some(cached) => cached.clone(),
                None => {
                    let new = || storage::zeros((heads, *capacity, head_dim), dtype, device);
                    let new = KeysAndValues { keys: new()?, values: new()? };
                    rows[*row].insert(new).clone()
                }
            };
            found.push(cached);
        }
        Ok(found)
    }
}

fn lock(layers: &Layers) -> MutexGuard<'_, HashMap<String, Vec<Option<KeysAndValues>>>> {
    layers.lock().unwrap_or_else(PoisonError::into_inner)
}
