//! Attention of few queries to a cache of keys and values on the CPU, with (sequence, key head)
//! pairs in parallel.

use candle_core::{Tensor, WithDType as _};
use pulp::Arch;
use rayon::prelude::*;

use super::attention::{AttentionShape, DotProductAttention};
use super::attention_row::Row;
use super::cached_attention::{CachedSegment, shape};
use super::few_rows::Dots;
use super::rope::rotate_rows;
use super::sinks;
use crate::Result;
use crate::host::{Element, Float, host, tensor};
use crate::kv_cache::{KeysAndValues, Segment};
use fulgurite_engine::autograd::storage;

/// Multiplications from which on several threads share the work.
const WORTH_THREADS: usize = 1 << 18;

/// Adds keys, rotated, and values to the cache. Both are contiguous `[1, tokens, heads, head_dim]`.
pub(super) fn append<E: Element>(part: &CachedSegment, k: &Tensor, v: &Tensor) -> Result<()> {
    let Segment { at, first, capacity, .. } = part.segment;
    let (_, _, heads, dim) = k.dims4()?;
    let KeysAndValues { keys, values } = part.cached;
    let rotation = Rotation::<E::Wide>::of(part)?;
    let (k, v) = (host(k)?, host(v)?);
    let new = at.start * heads * dim..at.end * heads * dim;
    let (k, v) = (&k.slice::<E>()?[new.clone()], &v.slice::<E>()?[new]);
    // The row of a token's head in the cache begins here.
    let place = |i: usize| ((i % heads) * capacity + first + i / heads) * dim;
    storage::with_host_mut(keys, |keys: &mut [E]| {
        let mut row = vec![E::Wide::ZERO; dim];
        for (i, k) in k.chunks_exact(dim).enumerate() {
            widen(&mut row, k);
            rotation.apply(&mut row, i / heads);
            let to = &mut keys[place(i)..][..dim];
            to.iter_mut().zip(&row).for_each(|(to, &row)| *to = E::narrow(row));
        }
    })?;
    storage::with_host_mut(values, |values: &mut [E]| {
        for (i, v) in v.chunks_exact(dim).enumerate() {
            values[place(i)..][..dim].copy_from_slice(v);
        }
    })
}

/// Attends from the queries of these segments, of `q` (`[1, tokens, heads, head_dim]`, contiguous).
/// Returns the same shape, with zeros for other tokens.
pub(super) fn forward<E: Element<Wide: Dots>>(
    attend: &DotProductAttention,
    parts: &[&CachedSegment],
    q: &Tensor,
) -> Result<Tensor> {
    let (_, _, heads, dim) = q.dims4()?;
    let queries = host(q)?;
    let queries = queries.slice::<E>()?;
    let guards = parts
        .iter()
        .map(|part| Ok((host(&part.cached.keys)?, host(&part.cached.values)?)))
        .collect::<Result<Vec<_>>>()?;
    let sinks = attend.sinks.as_ref().map(host).transpose()?;
    let sinks = sinks.as_ref().map(|sinks| sinks.slice::<E::Wide>()).transpose()?;
    let mut sequences = Vec::with_capacity(parts.len());
    for (part, (keys, values)) in parts.iter().zip(&guards) {
        sequences.push(Sequence {
            attend,
            sinks,
            sizes: shape(part, heads)?,
            start: part.segment.at.start,
            capacity: part.segment.capacity,
            rotation: Rotation::of(part)?,
            keys: keys.slice::<E>()?,
            values: values.slice()?,
        });
    }
    let work = |s: &Sequence<E>| 2 * s.sizes.queries * s.sizes.keys * heads * dim;
    let work: usize = sequences.iter().map(work).sum();
    let heads_of = |s| (0..Sequence::<E>::kv_heads(s)).map(move |head| (s, head));
    let tasks: Vec<(&Sequence<E>, usize)> = sequences.iter().flat_map(heads_of).collect();
    let compute = |(sequence, head): &(&Sequence<E>, usize)| sequence.group(queries, *head);
    let rows: Vec<Vec<E>> = match work > WORTH_THREADS {
        true => tasks.par_iter().map(compute).collect(),
        false => tasks.iter().map(compute).collect(),
    };
    let mut out = vec![E::narrow(E::Wide::ZERO); queries.len()];
    for ((sequence, head), rows) in tasks.iter().zip(rows) {
        let group = sequence.sizes.group() * dim;
        for (i, rows) in rows.chunks_exact(group).enumerate() {
            let at = (sequence.start + i) * heads * dim + head * group;
            out[at..][..group].copy_from_slice(rows);
        }
    }
    tensor(out, q.shape())
}

/// The attention within one sequence.
struct Sequence<'a, E: Element> {
    attend: &'a DotProductAttention,
    /// The score of each query head's sink.
    sinks: Option<&'a [E::Wide]>,
    sizes: AttentionShape,
    /// The place of the first query in the forward.
    start: usize,
    capacity: usize,
    rotation: Rotation<E::Wide>,
    /// `[heads, capacity, dim]`.
    keys: &'a [E],
    values: &'a [E],
}

impl<E: Element<Wide: Dots>> Sequence<'_, E> {
    fn kv_heads(&self) -> usize {
        self.sizes.kv_heads
    }

    /// Attends from the query heads of one key head. Returns `[queries, heads of the group, dim]`.
    fn group(&self, queries: &[E], head: usize) -> Vec<E> {
        let AttentionShape { heads, dim, queries: count, .. } = self.sizes;
        let group = self.sizes.group();
        let mut rows = Vec::with_capacity(count * group * dim);
        let [mut query, mut output] = [(); 2].map(|()| vec![E::Wide::ZERO; dim]);
        let mut scores = vec![E::Wide::ZERO; self.sizes.keys];
        let scale = E::Wide::from_f64(self.attend.scale);
        let cap = self.attend.softcap.map(E::Wide::from_f64);
        let mut room = Vec::new();
        let of_head = head * self.capacity * dim;
        for i in 0..count {
            let seen = self.attend.keys_in_window(self.sizes, i);
            let range = of_head + seen.start * dim..of_head + seen.end * dim;
            let (keys, values) = (&self.keys[range.clone()], &self.values[range]);
            let scores = &mut scores[..seen.len()];
            for of_group in 0..group {
                let at = ((self.start + i) * heads + head * group + of_group) * dim;
                widen(&mut query, &queries[at..][..dim]);
                self.rotation.apply(&mut query, i);
                query.iter_mut().for_each(|x| *x *= scale);
                let (top, sum) = Arch::new().dispatch(Row {
                    output: &mut output,
                    scores,
                    query: &query,
                    keys,
                    values,
                    cap,
                    room: &mut room,
                });
                if let Some(sinks) = self.sinks {
                    let sink = sinks[head * group + of_group];
                    let (factor, _) = sinks::factor(top + sum.ln(), sink);
                    output.iter_mut().for_each(|x| *x *= factor);
                }
                rows.extend(output.iter().map(|&x| E::narrow(x)));
            }
        }
        rows
    }
}

fn widen<E: Element>(row: &mut [E::Wide], of: &[E]) {
    row.iter_mut().zip(of).for_each(|(row, of)| *row = of.widen());
}

/// The cosines and sines of a segment's positions, and the pairs of a row, if keys are rotated.
struct Rotation<T>(Option<(Vec<T>, Vec<T>, usize)>);

impl<T: Float> Rotation<T> {
    fn of(part: &CachedSegment) -> Result<Self> {
        let Segment { at, first, .. } = part.segment;
        let Some(angles) = part.angles else { return Ok(Self(None)) };
        let pairs = angles.cos.dim(1)?;
        let take = |t: &Tensor| -> Result<Vec<T>> {
            Ok(host(t)?.slice::<T>()?[first * pairs..(first + at.len()) * pairs].to_vec())
        };
        Ok(Self(Some((take(&angles.cos)?, take(&angles.sin)?, pairs))))
    }

    /// Rotates the row of the segment's token `i`.
    fn apply(&self, row: &mut [T], i: usize) {
        if let Some((cos, sin, pairs)) = &self.0 {
            rotate_rows(row, cos, sin, [row.len(), *pairs], i, false);
        }
    }
}
