//! Attention on GPUs: without scores in memory if tensor cores support the inputs. Otherwise by
//! products in the inputs' dtype with scores in f32, computed in blocks of bounded size.

use std::sync::Arc;

use candle_core::Tensor;
use fulgurite_kernels::cuda::{self, Attend};

use super::attention::{AttentionOutput, AttentionShape, DotProductAttention};
use super::attention_portable::heads_first;
use super::rope::Angles;
use crate::Result;
use crate::documents::Documents;

impl DotProductAttention {
    /// Whether the kernels have these options. The portable implementation has all.
    fn is_of_kernels(&self) -> bool {
        let limited = self.window.is_some() || self.documents.is_some();
        let aligned = self.first_query.is_none() || !self.causal;
        self.softcap.is_none() && aligned && (self.causal || !limited)
    }

    /// Calls `f` with this attention's arguments for the kernels.
    fn told<R>(
        &self,
        s: AttentionShape,
        like: &Tensor,
        f: impl FnOnce(Attend<'_>) -> Result<R>,
    ) -> Result<R> {
        let sent = |documents: &Arc<Documents>| documents.first_on(like.device());
        let firsts = self.documents.as_ref().map(sent).transpose()?;
        let first_of_all = |query| self.first_key_of_all(s, query);
        f(Attend {
            scale: self.scale,
            causal: self.causal,
            window: self.window,
            firsts: firsts.as_ref().map(|firsts| (firsts, &first_of_all as _)),
        })
    }
}

/// Returns `x`, `[batch, time, heads, dim]`, rotated, or `None` if no kernel supports it.
fn turned(x: &Tensor, angles: Option<&Angles>, inverse: bool) -> Result<Option<Tensor>> {
    let Some(angles) = angles else { return Ok(Some(x.clone())) };
    cuda::rope(x, [&angles.cos, &angles.sin], 1, inverse)
}

/// Returns queries and keys, rotated, or `None` if no kernel supports them.
fn turned_inputs(
    attend: &DotProductAttention,
    s: AttentionShape,
    [q, k]: [&Tensor; 2],
) -> Result<Option<(Tensor, Tensor)>> {
    let of_queries = attend.angles_of_queries(s)?;
    let (q, k) =
        (turned(q, of_queries.as_ref(), false)?, turned(k, attend.angles.as_ref(), false)?);
    Ok(q.zip(k))
}

/// [`forward`] without scores in memory, or `None` for unsupported tensors.
fn flash_forward(
    attend: &DotProductAttention,
    s: AttentionShape,
    [q, k, v]: [&Tensor; 3],
) -> Result<Option<AttentionOutput>> {
    if !attend.told(s, q, |told| cuda::takes_flash(told, [q, k, v]))? {
        return Ok(None);
    }
    let Some((q, k)) = turned_inputs(attend, s, [q, k])? else { return Ok(None) };
    let attended = attend.told(s, &q, |told| cuda::flash_attention(told, [&q, &k, v]))?;
    Ok(attended.map(|(output, lse)| AttentionOutput { output, lse }))
}

/// [`backward`] without scores in memory, or `None` for unsupported tensors.
fn flash_backward(
    attend: &DotProductAttention,
    s: AttentionShape,
    [q, k, v]: [&Tensor; 3],
    [output, lse, grad]: [&Tensor; 3],
) -> Result<Option<[Tensor; 3]>> {
    if !attend.told(s, q, |told| cuda::takes_flash(told, [q, k, v]))? {
        return Ok(None);
    }
    let Some((q, k)) = turned_inputs(attend, s, [q, k])? else { return Ok(None) };
    let grads = attend.told(s, &q, |told| {
        cuda::flash_attention_backward(told, [&q, &k, v], [output, lse], grad)
    })?;
    let Some([dq, dk, dv]) = grads else { return Ok(None) };
    let of_queries = attend.angles_of_queries(s)?;
    let (dq, dk) =
        (turned(&dq, of_queries.as_ref(), true)?, turned(&dk, attend.angles.as_ref(), true)?);
    Ok(dq.zip(dk).map(|(dq, dk)| [dq, dk, dv]))
}

/// Computes the output and the log-sum-exp, or returns `None` if no kernel supports the tensors.
pub(super) fn forward(
    attend: &DotProductAttention,
    s: AttentionShape,
    [q, k, v]: [&Tensor; 3],
) -> Result<Option<AttentionOutput>> {
    if !attend.is_of_kernels() || !cuda::takes(q) || !cuda::takes(k) {
        return Ok(None);
    }
    if let Some(attended) = flash_forward(attend, s, [q, k, v])? {
        return Ok(Some(attended));
    }
    let (q, k, v) = (attend.queries(s, q)?, attend.keys(k)?, heads_first(v)?);
    let attended = attend.told(s, &q, |told| cuda::attention(told, [&q, &k, &v]))?;
    let output = |(output, lse)| Ok(AttentionOutput { output: heads_first(&output)?, lse });
    attended.map(output).transpose()
}

/// Computes the gradients of q, k and v, or returns `None` if no kernel supports the tensors.
pub(super) fn backward(
    attend: &DotProductAttention,
    s: AttentionShape,
    [q, k, v]: [&Tensor; 3],
    [output, lse, grad]: [&Tensor; 3],
) -> Result<Option<[Tensor; 3]>> {
    if !attend.is_of_kernels() || !cuda::takes(q) || !cuda::takes(k) {
        return Ok(None);
    }
    let grad = grad.to_dtype(q.dtype())?;
    if let Some(grads) = flash_backward(attend, s, [q, k, v], [output, lse, &grad])? {
        return Ok(Some(grads));
    }
    let (q, k, v) = (attend.queries(s, q)?, attend.keys(k)?, heads_first(v)?);
    let grad = heads_first(&grad)?;
    let grads =
        attend.told(s, &q, |told| cuda::attention_backward(told, [&q, &k, &v], lse, &grad))?;
    grads.map(|grads| attend.inputs(s, grads)).transpose()
}
