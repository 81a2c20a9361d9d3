//! Attention on GPUs: without scores in memory if tensor cores support the inputs. Otherwise by
//! products in the inputs' dtype with scores in f32, computed in blocks of bounded size.

use std::ops::Range;
use std::sync::Arc;

use candle_core::Tensor;
use fulgurite_kernels::cuda::{self, Attend, DocumentKeys};

use super::attention::{AttentionOutput, AttentionShape, DotProductAttention};
use super::attention_portable::heads_first;
use super::rope::{Angles, rotate};
use crate::Result;
use crate::documents::Documents;

impl DotProductAttention {
    /// Calls `f` with this attention's arguments for the kernels.
    fn told<R>(
        &self,
        s: AttentionShape,
        like: &Tensor,
        f: impl FnOnce(Attend<'_>) -> Result<R>,
    ) -> Result<R> {
        let sent = |documents: &Arc<Documents>| documents.ranges_on(like.device());
        let sent = self.documents.as_ref().map(sent).transpose()?;
        let seen = |queries: Range<usize>| match &self.documents {
            None => 0..s.keys,
            Some(documents) => {
                let [first, last] = [queries.start, queries.end.saturating_sub(1)];
                documents.range_of_all(first).start..documents.range_of_all(last).end
            }
        };
        let keys = sent.as_ref().map(|[firsts, ends]| DocumentKeys {
            firsts,
            // A causal mask ends the keys of a query before its document does.
            ends: (!self.causal).then_some(ends),
            seen: &seen,
        });
        f(Attend {
            scale: self.scale,
            softcap: self.softcap,
            first_query: Some(s.first_query),
            causal: self.causal,
            window: self.window,
            documents: keys,
        })
    }
}

/// Returns `x`, `[batch, time, heads, dim]`, rotated. No kernel rotates a part of each head.
fn turned(x: &Tensor, angles: Option<&Angles>, inverse: bool) -> Result<Tensor> {
    let Some(angles) = angles else { return Ok(x.clone()) };
    match cuda::rope(x, [&angles.cos, &angles.sin], 1, inverse)? {
        Some(turned) => Ok(turned),
        None => heads_first(&rotate(&heads_first(x)?, angles, inverse)?),
    }
}

/// Returns queries and keys, rotated.
fn turned_inputs(
    attend: &DotProductAttention,
    s: AttentionShape,
    [q, k]: [&Tensor; 2],
) -> Result<(Tensor, Tensor)> {
    let of_queries = attend.angles_of_queries(s)?;
    let q = turned(q, of_queries.as_ref(), false)?;
    Ok((q, turned(k, attend.angles.as_ref(), false)?))
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
    let (q, k) = turned_inputs(attend, s, [q, k])?;
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
    let (q, k) = turned_inputs(attend, s, [q, k])?;
    let grads = attend.told(s, &q, |told| {
        cuda::flash_attention_backward(told, [&q, &k, v], [output, lse], grad)
    })?;
    let Some([dq, dk, dv]) = grads else { return Ok(None) };
    let of_queries = attend.angles_of_queries(s)?;
    let dq = turned(&dq, of_queries.as_ref(), true)?;
    Ok(Some([dq, turned(&dk, attend.angles.as_ref(), true)?, dv]))
}

/// Computes the output and the log-sum-exp, or returns `None` if no kernel supports the tensors.
pub(super) fn forward(
    attend: &DotProductAttention,
    s: AttentionShape,
    [q, k, v]: [&Tensor; 3],
) -> Result<Option<AttentionOutput>> {
    if !cuda::takes(q) || !cuda::takes(k) {
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
    if !cuda::takes(q) || !cuda::takes(k) {
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
