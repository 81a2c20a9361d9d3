//! Attention on GPUs: products in the dtype of the inputs, scores in f32, and no more of these in memory than are bounded.

use std::sync::Arc;

use candle_core::Tensor;
use fulgurite_kernels::cuda::{self, Attend};

use super::attention::{AttentionOutput, AttentionShape, DotProductAttention};
use super::attention_portable::heads_first;
use crate::Result;
use crate::documents::Documents;

impl DotProductAttention {
    /// Calls `f` with what a kernel is told of this attention.
    fn told<R>(&self, like: &Tensor, f: impl FnOnce(Attend<'_>) -> Result<R>) -> Result<R> {
        let sent = |documents: &Arc<Documents>| documents.first_on(like.device());
        let firsts = self.documents.as_ref().map(sent).transpose()?;
        let first_of_all = |query| self.first_key_of_all(query);
        f(Attend {
            scale: self.scale,
            causal: self.causal,
            firsts: firsts.as_ref().map(|firsts| (firsts, &first_of_all as _)),
        })
    }
}

/// The output and the log-sum-exp; `None` for tensors that no kernel takes.
pub(super) fn forward(
    attend: &DotProductAttention,
    s: AttentionShape,
    [q, k, v]: [&Tensor; 3],
) -> Result<Option<AttentionOutput>> {
    if !cuda::takes(q) || !cuda::takes(k) {
        return Ok(None);
    }
    let (q, k, v) = (attend.queries(s, q)?, attend.keys(k)?, heads_first(v)?);
    let attended = attend.told(&q, |told| cuda::attention(told, [&q, &k, &v]))?;
    let output = |(output, lse)| Ok(AttentionOutput { output: heads_first(&output)?, lse });
    attended.map(output).transpose()
}

/// The gradients of q, k and v; `None` for tensors that no kernel takes.
pub(super) fn backward(
    attend: &DotProductAttention,
    s: AttentionShape,
    [q, k, v]: [&Tensor; 3],
    [lse, grad]: [&Tensor; 2],
) -> Result<Option<[Tensor; 3]>> {
    if !cuda::takes(q) || !cuda::takes(k) {
        return Ok(None);
    }
    let (q, k, v) = (attend.queries(s, q)?, attend.keys(k)?, heads_first(v)?);
    let grad = heads_first(&grad.to_dtype(q.dtype())?)?;
    let grads = attend.told(&q, |told| cuda::attention_backward(told, [&q, &k, &v], lse, &grad))?;
    grads.map(|grads| attend.inputs(s, grads)).transpose()
}
