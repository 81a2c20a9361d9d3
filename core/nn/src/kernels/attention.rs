//! Attention with grouped key and value heads; tensors are `[batch, time, heads, head_dim]`.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{D, DType, Tensor};

#[cfg(feature = "cuda")]
use super::attention_cuda;
use super::rope::Angles;
use super::{attention_host, attention_portable, sinks};
use crate::backend::uses_cpu_kernels;
use crate::documents::Documents;
use crate::host::with_float;
use crate::{Error, Result};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::execution::dry_run::{skips_pass, skips_products};
use fulgurite_engine::module::ForwardScope;
use fulgurite_engine::parameter::accumulation_dtype;

fn zeros_like(x: &Tensor) -> Result<Tensor> {
    storage::zeros(x.shape(), x.dtype(), x.device())
}

/// Scaled dot-product attention with these options.
#[derive(Debug, Clone)]
pub(crate) struct DotProductAttention {
    /// Factor of the scores.
    pub(crate) scale: f64,
    /// The bound `c` of the scores, which become `c * tanh(score / c)`.
    pub(crate) softcap: Option<f64>,
    /// Whether a query attends only to the keys up to its own position. The last query is at the
    /// position of the last key.
    pub(crate) causal: bool,
    /// The most keys that a causal query attends to, including its own; at least one. Otherwise the
    /// largest distance to a key on each side.
    pub(crate) window: Option<usize>,
    /// The position of the first query; `None` if the last query is at the position of the last
    /// key.
    pub(crate) first_query: Option<usize>,
    /// Whether each query is computed alone, with the same bits in any batch.
    pub(crate) apart: bool,
    /// One more score in each query head's softmax, `[heads]`, in the accumulation dtype.
    pub(crate) sinks: Option<Tensor>,
    /// Angles of the rotary position embedding, for each key position.
    pub(crate) angles: Option<Angles>,
    /// The documents, of which a query attends to its own only. There are as many queries as keys
    /// then.
    pub(crate) documents: Option<Arc<Documents>>,
}

/// The output, and the state for backward besides the inputs.
#[derive(Debug, Clone)]
pub(crate) struct AttentionOutput {
    /// `[batch, queries, heads, head_dim]`.
    pub(crate) output: Tensor,
    /// The log-sum-exp of each row of scores, `[batch, heads, queries]`.
    pub(crate) lse: Tensor,
}

/// The sizes of queries, keys and heads.
#[derive(Debug, Clone, Copy)]
pub(super) struct AttentionShape {
    pub(super) batch: usize,
    pub(super) queries: usize,
    pub(super) keys: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) dim: usize,
    /// The position of the first query among the keys.
    pub(super) first_query: usize,
}

impl AttentionShape {
    fn new(q: &Tensor, k: &Tensor, v: &Tensor, attend: &DotProductAttention) -> Result<Self> {
        let (batch, queries, heads, dim) = q.dims4()?;
        let (kv_batch, keys, kv_heads, kv_dim) = k.dims4()?;
        let wrong = |why: String| {
            let shapes = [q, k, v].map(|t| {
                let [b, t, h, d] = [0, 1, 2, 3].map(|i| t.dims().get(i).copied().unwrap_or(0));
                format!("batch {b}, heads {h}, time {t}, head_dim {d}")
            });
            Err(Error::other(format!(
                "attention: {why}; q: {}; k: {}; v: {}",
                shapes[0], shapes[1], shapes[2]
            )))
        };
        if k.dims() != v.dims() {
            return wrong("k and v must have one shape".to_owned());
        }
        if kv_batch != batch || kv_dim != dim {
            return wrong("q and k must agree in batch and head_dim".to_owned());
        }
        if kv_heads == 0 || heads % kv_heads != 0 {
            return wrong(format!("{heads} query heads do not divide into {kv_heads} groups"));
        }
        let last_aligned = keys.saturating_sub(queries);
        let first_query = attend.first_query.unwrap_or(last_aligned);
        if attend.causal && queries > keys {
            return wrong("a causal query needs a key at its own position".to_owned());
        }
        if q.dtype() != k.dtype() || q.dtype() != v.dtype() {
            return wrong(format!(
                "dtypes differ: q {:?}, k {:?}, v {:?}",
                q.dtype(),
                k.dtype(),
                v.dtype()
            ));
        }
        if attend.first_query.is_some_and(|first| keys.checked_sub(queries) < Some(first)) {
            return wrong(format!(
                "no key is at the position of the last query from {first_query} on"
            ));
        }
        Ok(Self { batch, queries, keys, heads, kv_heads, dim, first_query })
    }

    /// Returns the number of query heads per key head.
    pub(super) fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}

/// Checks that queries, keys and values fit each other.
pub(crate) fn attention_sizes(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<()> {
    AttentionShape::new(q, k, v, &DotProductAttention::new(1.0, false)).map(drop)
}

/// Returns the tensor in its accumulation dtype, with contiguous rows of `head_dim`, copying only
/// if necessary.
fn rows_contiguous(x: &Tensor) -> Result<Tensor> {
    let x = storage::cast(&x.detach(), accumulation_dtype(x.dtype()))?;
    if x.stride().last() == Some(&1) { Ok(x) } else { storage::contiguous(&x) }
}

impl DotProductAttention {
    /// Attention to all keys, or causal attention, without further options, in the current
    /// [`ForwardScope`].
    pub(crate) fn new(scale: f64, causal: bool) -> Self {
        Self {
            scale,
            softcap: None,
            causal,
            window: None,
            first_query: None,
            apart: ForwardScope::current().batch_invariant,
            sinks: None,
            angles: None,
            documents: None,
        }
    }

    /// Returns the keys that query `i` of a sequence attends to. Neither end decreases from query
    /// to query.
    pub(super) fn keys_of(&self, s: AttentionShape, sequence: usize, i: usize) -> Range<usize> {
        let keys = self.keys_in_window(s, i);
        match &self.documents {
            None => keys,
            Some(documents) => {
                let document = documents.range(sequence, i);
                keys.start.max(document.start)..keys.end.min(document.end)
            }
        }
    }

    /// Returns the keys that query `i` attends to if documents are disregarded.
    pub(super) fn keys_in_window(&self, s: AttentionShape, i: usize) -> Range<usize> {
        let position = s.first_query + i;
        let end = if self.causal { position + 1 } else { s.keys };
        match self.window {
            None => 0..end,
            Some(window) if self.causal => end.saturating_sub(window)..end,
            Some(window) => {
                let after = position.saturating_add(window).saturating_add(1);
                position.saturating_sub(window)..end.min(after)
            }
        }
    }

    /// Whether a dry run skips `products` products of the size of the scores, for each head.
    fn skips(&self, s: AttentionShape, products: usize, dtype: DType) -> bool {
        // As many keys as a query in the middle sees.
        let keys = self.keys_in_window(s, s.queries / 2).len();
        let scores = s.batch * s.heads * s.queries * keys;
        skips_pass(2 * products * scores * accumulation_dtype(dtype).size_in_bytes());
        skips_products([s.queries, s.dim, keys], products * s.batch * s.heads, dtype)
    }

    /// `softmax(scale q k^T) v`, with the sinks in the softmax.
    pub(crate) fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<AttentionOutput> {
        let sizes = AttentionShape::new(q, k, v, self)?;
        let dtype = q.dtype();
        if self.apart && !uses_cpu_kernels(q) {
            return Err(Error::other(
                "batch-invariant attention is for the CPU (`batch_invariant`), and the tensors are on another device",
            ));
        }
        #[cfg(feature = "cuda")]
        if self.sinks.is_none()
            && let Some(attended) =
                attention_cuda::forward(self, sizes, [&q.detach(), &k.detach(), &v.detach()])?
        {
            return Ok(attended);
        }
        let [q, k, v] = [rows_contiguous(q)?, rows_contiguous(k)?, rows_contiguous(v)?];
        let is_empty = q.elem_count() == 0 || sizes.keys == 0;
        let (output, lse) = if is_empty || uses_cpu_kernels(&q) && self.skips(sizes, 2, dtype) {
            (
                zeros_like(&q)?,
                storage::zeros((sizes.batch, sizes.heads, sizes.queries), q.dtype(), q.device())?,
            )
        } else if uses_cpu_kernels(&q) {
            with_float!(q.dtype(), T => attention_host::forward::<T>(self, sizes, [&q, &k, &v]))?
        } else {
            attention_portable::forward(self, sizes, [&q, &k, &v])?
        };
        let (output, lse) = match &self.sinks {
            None => (output, lse),
            Some(sinks) => sinks::apply(&output, &lse, sinks)?,
        };
        Ok(AttentionOutput { output: storage::cast(&output, dtype)?, lse })
    }

    /// The gradients of q, k and v, contiguous.
    pub(crate) fn backward(
        &self,
        [q, k, v]: [&Tensor; 3],
        attended: &AttentionOutput,
        grad: &Tensor,
    ) -> Result<[Tensor; 3]> {
        let sizes = AttentionShape::new(q, k, v, self)?;
        let dtype = q.dtype();
        #[cfg(feature = "cuda")]
        if self.sinks.is_none() {
            let inputs = [&q.detach(), &k.detach(), &v.detach()];
            let saved = [&attended.output.detach(), &attended.lse, &grad.detach()];
            if let Some([dq, dk, dv]) = attention_cuda::backward(self, sizes, inputs, saved)? {
                return Ok([dq, storage::cast(&dk, dtype)?, storage::cast(&dv, dtype)?]);
            }
        }
        let [q, k, v] = [rows_contiguous(q)?, rows_contiguous(k)?, rows_contiguous(v)?];
        let (output, grad) = (rows_contiguous(&attended.output)?, rows_contiguous(grad)?);
        let saved = [&output, &attended.lse, &grad];
        let is_empty = q.elem_count() == 0 || sizes.keys == 0;
        let grads = if is_empty || uses_cpu_kernels(&q) && self.skips(sizes, 5, dtype) {
            [zeros_like(&q)?, zeros_like(&k)?, zeros_like(&v)?]
        } else if uses_cpu_kernels(&q) {
            with_float!(q.dtype(), T => {
                attention_host::backward::<T>(self, sizes, [&q, &k, &v], saved)
            })?
        } else {
            attention_portable::backward(self, sizes, [&q, &k, &v], saved)?
        };
        let [dq, dk, dv] = grads;
        Ok([storage::cast(&dq, dtype)?, storage::cast(&dk, dtype)?, storage::cast(&dv, dtype)?])
    }
}

/// Views `[batch, time, heads * head_dim]` as `[batch, time, heads, head_dim]`.
pub(crate) fn split_heads(x: &Tensor, heads: usize) -> Result<Tensor> {
    let (batch, time, width) = x.dims3()?;
    Ok(x.reshape((batch, time, heads, width / heads))?)
}

/// The inverse of [`split_heads`].
pub(crate) fn merge_heads(x: &Tensor) -> Result<Tensor> {
    Ok(x.flatten_from(D::Minus2)?)
}
