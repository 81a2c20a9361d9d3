//! Attention with grouped key and value heads; tensors are `[batch, time, heads, head_dim]`.

use std::sync::Arc;

use candle_core::{D, Tensor};

#[cfg(feature = "cuda")]
use super::attention_cuda;
use super::rope::Angles;
use super::{attention_host, attention_portable};
use crate::backend::uses_cpu_kernels;
use crate::documents::Documents;
use crate::host::with_float;
use crate::{Error, Result};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::parameter::accumulation_dtype;

/// Scaled dot-product attention with these options.
#[derive(Debug, Clone)]
pub(crate) struct DotProductAttention {
    /// Factor of the scores.
    pub(crate) scale: f64,
    /// Whether a query attends only to the keys up to its own position. The last query is at the
    /// position of the last key.
    pub(crate) causal: bool,
    /// The most keys that a causal query attends to, including its own; at least one.
    pub(crate) window: Option<usize>,
    /// Angles of the rotary position embedding, for each key position.
    pub(crate) angles: Option<Angles>,
    /// The beginnings of documents. A causal query attends to its own document only. There are as
    /// many queries as keys then.
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
}

impl AttentionShape {
    fn new(q: &Tensor, k: &Tensor, v: &Tensor, causal: bool) -> Result<Self> {
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
        if causal && queries > keys {
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
        Ok(Self { batch, queries, keys, heads, kv_heads, dim })
    }

    /// Returns the number of query heads per key head.
    pub(super) fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Returns the number of keys that query `i` attends to.
    pub(super) fn visible(&self, causal: bool, i: usize) -> usize {
        if causal { self.keys - self.queries + i + 1 } else { self.keys }
    }
}

/// Checks that queries, keys and values fit each other.
pub(crate) fn attention_sizes(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<()> {
    AttentionShape::new(q, k, v, false).map(drop)
}

/// Returns the tensor in its accumulation dtype, with contiguous rows of `head_dim`, copying only
/// if necessary.
fn rows_contiguous(x: &Tensor) -> Result<Tensor> {
    let x = storage::cast(&x.detach(), accumulation_dtype(x.dtype()))?;
    Ok(if x.stride().last() == Some(&1) { x } else { x.contiguous()? })
}

impl DotProductAttention {
    /// Returns the first key that query `i` of a sequence attends to. It never decreases from query
    /// to query.
    pub(super) fn first_key(&self, s: AttentionShape, sequence: usize, i: usize) -> usize {
        let of_document = self.documents.as_ref().map_or(0, |d| d.first(sequence, i));
        of_document.max(self.first_in_window(s, i))
    }

    /// Returns the first key in the window of query `i`.
    pub(super) fn first_in_window(&self, s: AttentionShape, i: usize) -> usize {
        debug_assert!(self.window.is_none_or(|window| self.causal && window > 0));
        self.window.map_or(0, |window| s.visible(self.causal, i).saturating_sub(window))
    }

    /// `softmax(scale q k^T) v`.
    pub(crate) fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<AttentionOutput> {
        let sizes = AttentionShape::new(q, k, v, self.causal)?;
        let dtype = q.dtype();
        #[cfg(feature = "cuda")]
        if let Some(attended) =
            attention_cuda::forward(self, sizes, [&q.detach(), &k.detach(), &v.detach()])?
        {
            return Ok(attended);
        }
        let [q, k, v] = [rows_contiguous(q)?, rows_contiguous(k)?, rows_contiguous(v)?];
        let (output, lse) = if q.elem_count() == 0 || sizes.keys == 0 {
            (
                q.zeros_like()?,
                Tensor::zeros((sizes.batch, sizes.heads, sizes.queries), q.dtype(), q.device())?,
            )
        } else if uses_cpu_kernels(&q) {
            with_float!(q.dtype(), T => attention_host::forward::<T>(self, sizes, [&q, &k, &v]))?
        } else {
            attention_portable::forward(self, sizes, [&q, &k, &v])?
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
        let sizes = AttentionShape::new(q, k, v, self.causal)?;
        let dtype = q.dtype();
        #[cfg(feature = "cuda")]
        {
            let inputs = [&q.detach(), &k.detach(), &v.detach()];
            let saved = [&attended.output.detach(), &attended.lse, &grad.detach()];
            if let Some([dq, dk, dv]) = attention_cuda::backward(self, sizes, inputs, saved)? {
                return Ok([dq, storage::cast(&dk, dtype)?, storage::cast(&dv, dtype)?]);
            }
        }
        let [q, k, v] = [rows_contiguous(q)?, rows_contiguous(k)?, rows_contiguous(v)?];
        let (output, grad) = (rows_contiguous(&attended.output)?, rows_contiguous(grad)?);
        let saved = [&output, &attended.lse, &grad];
        let grads = if q.elem_count() == 0 || sizes.keys == 0 {
            [q.zeros_like()?, k.zeros_like()?, v.zeros_like()?]
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
