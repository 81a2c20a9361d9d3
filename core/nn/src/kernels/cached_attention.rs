//! Causal attention to keys and values of a [`KvCache`](crate::KvCache).

use candle_core::Tensor;

use super::attention::{AttentionShape, DotProductAttention};
use super::cached_attention_host;
use super::rope::{Angles, rotate};
use crate::Result;
use crate::backend::uses_cpu_kernels;
use crate::host::with_element;
use crate::kv_cache::{CachedTokens, KeysAndValues, Segment};
use crate::rope::Rope;
use fulgurite_engine::autograd::storage;
use fulgurite_engine::parameter::accumulation_dtype;

/// Tokens of a sequence from which on its first forward uses the attention of whole sequences.
const WHOLE: usize = 8;

/// Adds the keys and values to the cache of the layer at `path`, and attends to all of each
/// sequence: `q`, `k` and `v` are `[1, tokens, heads, head_dim]`, and so is the result. Rotates
/// queries and keys by `rope`. Padding gives zeros.
pub(crate) fn forward(
    path: &str,
    tokens: &CachedTokens,
    attend: &DotProductAttention,
    rope: Option<&Rope>,
    [q, k, v]: [&Tensor; 3],
) -> Result<Tensor> {
    let of_input = k.dtype();
    // A forward without a cache rotates and sums in the accumulation dtype, without rounding keys.
    let dtype = if attend.apart { accumulation_dtype(of_input) } else { of_input };
    let device = k.device();
    let [q, k, v] = [q, k, v].map(|x| storage::cast(&x.detach(), dtype)?.contiguous());
    let (q, k, v) = (q?, k?, v?);
    let (_, _, kv_heads, dim) = k.dims4()?;
    let cached = tokens.layer(path, [kv_heads, dim], dtype, device)?;
    let angles = |segment: &Segment| -> Result<Option<Angles>> {
        let n = segment.first + segment.at.len();
        rope.map(|rope| rope.angles_within(segment.capacity, n, dtype, device)).transpose()
    };
    let angles = tokens.segments().iter().map(angles).collect::<Result<Vec<_>>>()?;
    let segments: Vec<CachedSegment> = tokens
        .segments()
        .iter()
        .zip(&cached)
        .zip(&angles)
        .map(|((segment, cached), angles)| CachedSegment { segment, cached, angles })
        .collect();
    let on_host = uses_cpu_kernels(&q);
    let (mut outputs, mut direct) = (Vec::new(), Vec::new());
    for part in &segments {
        match on_host {
            true => with_element!(dtype, E => cached_attention_host::append::<E>(part, &k, &v))?,
            false => append(part, &k, &v)?,
        }
        let Segment { at, first, .. } = part.segment;
        if on_host && (*first > 0 || at.len() < WHOLE || attend.apart) {
            direct.push(part);
            continue;
        }
        outputs.push((at.clone(), whole(part, attend, [&q, &k, &v])?));
    }
    if outputs.len() == 1 && outputs[0].0.len() == tokens.tokens() {
        return Ok(outputs.swap_remove(0).1);
    }
    if on_host && !direct.is_empty() && outputs.is_empty() {
        let y =
            with_element!(dtype, E => cached_attention_host::forward::<E>(attend, &direct, &q))?;
        return storage::cast(&y, of_input);
    }
    let mut y = q.zeros_like()?;
    if !direct.is_empty() {
        y = with_element!(dtype, E => cached_attention_host::forward::<E>(attend, &direct, &q))?;
    }
    for (at, output) in outputs {
        y.slice_set(&output.contiguous()?, 1, at.start)?;
    }
    storage::cast(&y, of_input)
}

/// A segment with its sequence's keys and values and the angles of its positions.
pub(super) struct CachedSegment<'a> {
    pub(super) segment: &'a Segment,
    pub(super) cached: &'a KeysAndValues,
    pub(super) angles: &'a Option<Angles>,
}

/// Attends as within one sequence, by the kernels of [`DotProductAttention`].
fn whole(
    part: &CachedSegment,
    attend: &DotProductAttention,
    [q, k, v]: [&Tensor; 3],
) -> Result<Tensor> {
    let Segment { at, first, .. } = part.segment;
    let take = |x: &Tensor| x.narrow(1, at.start, at.len());
    let q = take(q)?;
    if *first == 0 {
        let attend = DotProductAttention { angles: part.angles.clone(), ..attend.clone() };
        return Ok(attend.forward(&q, &take(k)?, &take(v)?)?.output);
    }
    let seen = |x: &Tensor| -> Result<Tensor> {
        Ok(x.narrow(1, 0, first + at.len())?.transpose(0, 1)?.unsqueeze(0)?)
    };
    let q = turned(&q, part)?.transpose(0, 1)?.unsqueeze(0)?.contiguous()?;
    Ok(attend.forward(&q, &seen(&part.cached.keys)?, &seen(&part.cached.values)?)?.output)
}

/// Adds keys and values to the cache by tensor operations.
fn append(part: &CachedSegment, k: &Tensor, v: &Tensor) -> Result<()> {
    let Segment { at, first, .. } = part.segment;
    let take = |x: &Tensor| x.narrow(1, at.start, at.len());
    let keys = turned(&take(k)?, part)?.contiguous()?;
    part.cached.keys.slice_set(&keys, 1, *first)?;
    let values = take(v)?.squeeze(0)?.transpose(0, 1)?.contiguous()?;
    part.cached.values.slice_set(&values, 1, *first)?;
    Ok(())
}

/// Returns `x` (`[1, tokens, heads, head_dim]`) of a segment, rotated, `[heads, tokens, head_dim]`.
fn turned(x: &Tensor, part: &CachedSegment) -> Result<Tensor> {
    let Segment { at, first, .. } = part.segment;
    let x = x.squeeze(0)?.transpose(0, 1)?.contiguous()?;
    let Some(angles) = part.angles else { return Ok(x) };
    let take = |t: &Tensor| t.narrow(0, *first, at.len());
    let angles = Angles { cos: take(&angles.cos)?, sin: take(&angles.sin)? };
    storage::cast(&rotate(&x, &angles, false)?, x.dtype())
}

/// The sizes of a segment's attention.
pub(super) fn shape(part: &CachedSegment, heads: usize) -> Result<AttentionShape> {
    let Segment { at, first, .. } = part.segment;
    let (kv_heads, _, dim) = part.cached.keys.dims3()?;
    let (queries, first_query) = (at.len(), *first);
    let keys = first + queries;
    Ok(AttentionShape { batch: 1, queries, keys, heads, kv_heads, dim, first_query })
}
