//! Attention on the CPU, with (sequence, head) pairs in parallel and queries in blocks. A pair has
//! copies of its keys and values and the scores of one block; in backward also the gradients of all
//! three. Backward recomputes the probabilities from the saved log-sum-exp.

use std::ops::Deref;

use candle_core::{Storage, Tensor};
use pulp::Arch;
use rayon::prelude::*;

use super::attention::{AttentionShape, DotProductAttention};
use super::attention_row::Row;
use super::few_rows::Dots;
use super::rope::rotate_rows;
use crate::Result;
use crate::gemm::{Mat, Threads, gemm};
use crate::host::{
    Element, Float, Host, add_rows, dot, exp_in_place, host, max, strided_host, tensor,
};
use fulgurite_engine::simd::vectorized;

/// Queries in a block.
const BLOCK: usize = 128;

/// A `[batch, time, heads, dim]` tensor with contiguous rows.
#[derive(Clone, Copy)]
struct Rows<'a, T> {
    data: &'a [T],
    strides: [usize; 3],
    dim: usize,
}

impl<'a, T: Float> Rows<'a, T> {
    fn new(host: &'a Host<impl Deref<Target = Storage>>, of: &Tensor) -> Result<Self> {
        let stride = of.stride();
        let strides = [stride[0], stride[1], stride[2]];
        Ok(Self { data: host.slice()?, strides, dim: of.dims()[3] })
    }

    fn row(&self, batch: usize, time: usize, head: usize) -> &'a [T] {
        let [b, t, h] = self.strides;
        &self.data[batch * b + time * t + head * h..][..self.dim]
    }

    /// Copies rows of one head, from `start` on, into `out` until it is full.
    fn pack(&self, batch: usize, start: usize, head: usize, out: &mut [T]) {
        for (i, out) in out.chunks_exact_mut(self.dim).enumerate() {
            out.copy_from_slice(self.row(batch, start + i, head));
        }
    }
}

/// The cosines and sines of the rotary position embedding, and the pairs of a row, if any.
#[derive(Clone, Copy)]
struct Rotation<'a, T>(Option<(&'a [T], &'a [T], usize)>);

impl<T: Float> Rotation<'_, T> {
    /// Rotates consecutive rows, the first at position `start`. With `inverse` it rotates by the
    /// negative angles.
    fn apply(&self, rows: &mut [T], dim: usize, start: usize, inverse: bool) {
        if let Some((cos, sin, half)) = self.0 {
            rotate_rows(rows, cos, sin, [dim, half], start, inverse);
        }
    }
}

/// Returns the rows of each (batch, head) pair of a contiguous `[batch, time, heads, dim]`.
fn rows_by_head<T>(out: &mut [T], time: usize, heads: usize, dim: usize) -> Vec<Vec<&mut [T]>> {
    let batch = out.len() / (time * heads * dim);
    let mut rows: Vec<Vec<&mut [T]>> =
        (0..batch * heads).map(|_| Vec::with_capacity(time)).collect();
    for (i, row) in out.chunks_exact_mut(dim).enumerate() {
        rows[i / (time * heads) * heads + i % heads].push(row);
    }
    rows
}

vectorized! {
    fn scale_rows[T: Float](rows: &mut [T], scale: T) {
        rows.iter_mut().for_each(|x| *x *= scale);
    }

    /// Bounds scores: `cap * tanh(score / cap)`.
    fn cap_row[T: Float](row: &mut [T], cap: T) {
        let inverse = T::ONE / cap;
        row.iter_mut().for_each(|x| *x = cap * (*x * inverse).tanh());
    }

    /// Multiplies gradients of bounded scores by the slope of the bound, so that they are gradients
    /// of the unbounded ones.
    fn cap_row_backward[T: Float](ds: &mut [T], capped: &[T], cap: T) {
        let inverse = T::ONE / cap;
        for (ds, &capped) in ds.iter_mut().zip(capped) {
            let t = capped * inverse;
            *ds *= T::ONE - t * t;
        }
    }

    /// Replaces scores by probabilities. Returns the largest score `max` and the sum of
    /// `exp(score - max)`.
    fn softmax_row[T: Float](row: &mut [T]) -> (T, T) {
        let top = max(row);
        let sum = exp_in_place(row, top);
        let scale = T::ONE / sum;
        row.iter_mut().for_each(|x| *x *= scale);
        (top, sum)
    }

    /// Replaces the scores in `p` by probabilities, and the probabilities' gradients in `ds` by the
    /// scores' gradients. `output` is the row's output and `grad` its gradient.
    fn softmax_row_backward[T: Float](
        p: &mut [T],
        ds: &mut [T],
        lse: T,
        output: &[T],
        grad: &[T],
    ) {
        let level = dot(output, grad);
        for (p, ds) in p.iter_mut().zip(ds) {
            *p = (*p - lse).fast_exp();
            *ds = *p * (*ds - level);
        }
    }
}

/// Evaluates `$body` with the tables of the rotation as slices.
macro_rules! with_rotation {
    ($attend:expr, $T:ty, $rotation:ident => $body:expr) => {
        match &$attend.angles {
            None => {
                let $rotation = Rotation::<$T>(None);
                $body
            }
            Some(angles) => {
                let (cos, sin) = (host(&angles.cos)?, host(&angles.sin)?);
                let pairs = angles.cos.dim(1)?;
                let $rotation = Rotation(Some((cos.slice::<$T>()?, sin.slice::<$T>()?, pairs)));
                $body
            }
        }
    };
}

pub(super) fn forward<T: Element<Wide = T> + Dots>(
    attend: &DotProductAttention,
    s: AttentionShape,
    [q, k, v]: [&Tensor; 3],
) -> Result<(Tensor, Tensor)> {
    let hosts = [strided_host(q), strided_host(k), strided_host(v)];
    let (q, k, v) =
        (Rows::<T>::new(&hosts[0], q)?, Rows::new(&hosts[1], k)?, Rows::new(&hosts[2], v)?);
    let mut output = vec![T::ZERO; s.batch * s.queries * s.heads * s.dim];
    let mut lse = vec![T::ZERO; s.batch * s.heads * s.queries];
    with_rotation!(attend, T, rotation => {
        rows_by_head(&mut output, s.queries, s.heads, s.dim)
            .into_par_iter()
            .zip(lse.par_chunks_mut(s.queries))
            .enumerate()
            .for_each(|(i, (rows, lse))| {
                forward_head(attend, s, [q, k, v], rotation, (i / s.heads, i % s.heads), rows, lse);
            });
    });
    Ok((
        tensor(output, (s.batch, s.queries, s.heads, s.dim))?,
        tensor(lse, (s.batch, s.heads, s.queries))?,
    ))
}

fn forward_head<T: Element<Wide = T> + Dots>(
    attend: &DotProductAttention,
    s: AttentionShape,
    [q, k, v]: [Rows<T>; 3],
    rotation: Rotation<T>,
    (batch, head): (usize, usize),
    mut output: Vec<&mut [T]>,
    lse: &mut [T],
) {
    let kv = head / s.group();
    let (mut keys, mut values) = (vec![T::ZERO; s.keys * s.dim], vec![T::ZERO; s.keys * s.dim]);
    k.pack(batch, 0, kv, &mut keys);
    rotation.apply(&mut keys, s.dim, 0, false);
    v.pack(batch, 0, kv, &mut values);
    let block = BLOCK.min(s.queries);
    let cap = attend.softcap.map(T::from_f64);
    let mut queries = vec![T::ZERO; block * s.dim];
    let mut scores = vec![T::ZERO; block * s.keys];
    for start in (0..s.queries).step_by(block) {
        let n = block.min(s.queries - start);
        // Later queries of the block start and end no earlier.
        let first = attend.keys_of(s, batch, start).start;
        let seen = attend.keys_of(s, batch, start + n - 1).end - first;
        let queries = &mut queries[..n * s.dim];
        q.pack(batch, start, head, queries);
        rotation.apply(queries, s.dim, s.first_query + start, false);
        scale_rows(queries, T::from_f64(attend.scale));
        if attend.apart {
            let rows = queries.chunks_exact(s.dim).zip(&mut output[start..]);
            for (i, ((query, output), lse)) in rows.zip(&mut lse[start..]).enumerate() {
                let seen = attend.keys_of(s, batch, start + i);
                let (top, sum) = Arch::new().dispatch(Row::<T> {
                    output,
                    scores: &mut scores[..seen.len()],
                    query,
                    keys: &keys[seen.start * s.dim..seen.end * s.dim],
                    values: &values[seen.start * s.dim..seen.end * s.dim],
                    cap,
                    room: &mut Vec::new(),
                });
                *lse = top + sum.ln();
            }
            continue;
        }
        let scores = &mut scores[..n * seen];
        let seen_keys = Mat::new(&keys[first * s.dim..], seen, s.dim);
        gemm(scores, Mat::new(queries, n, s.dim), seen_keys.t(), false, Threads::One);
        let rows = scores.chunks_exact_mut(seen).zip(&mut lse[start..]);
        for (i, (row, lse)) in rows.enumerate() {
            let keys = attend.keys_of(s, batch, start + i);
            let (row, hidden) = row.split_at_mut(keys.end - first);
            let (before, row) = row.split_at_mut(keys.start - first);
            if let Some(cap) = cap {
                cap_row(row, cap);
            }
            let (top, sum) = softmax_row(row);
            before.fill(T::ZERO);
            hidden.fill(T::ZERO);
            *lse = top + sum.ln();
        }
        let seen_values = Mat::new(&values[first * s.dim..], seen, s.dim);
        gemm(queries, Mat::new(scores, n, seen), seen_values, false, Threads::One);
        for (row, out) in queries.chunks_exact(s.dim).zip(&mut output[start..]) {
            out.copy_from_slice(row);
        }
    }
}

pub(super) fn backward<T: Float>(
    attend: &DotProductAttention,
    s: AttentionShape,
    [q, k, v]: [&Tensor; 3],
    [output, lse, grad]: [&Tensor; 3],
) -> Result<[Tensor; 3]> {
    let hosts = [q, k, v, output, grad].map(strided_host);
    let inputs = [
        Rows::<T>::new(&hosts[0], q)?,
        Rows::new(&hosts[1], k)?,
        Rows::new(&hosts[2], v)?,
        Rows::new(&hosts[3], output)?,
        Rows::new(&hosts[4], grad)?,
    ];
    let lse = host(lse)?;
    let lse = lse.slice::<T>()?;
    let mut dq = vec![T::ZERO; s.batch * s.queries * s.heads * s.dim];
    let mut dk = vec![T::ZERO; s.batch * s.keys * s.kv_heads * s.dim];
    let mut dv = dk.clone();
    with_rotation!(attend, T, rotation => {
        let mut query_rows = rows_by_head(&mut dq, s.queries, s.heads, s.dim).into_iter();
        let groups: Vec<Vec<_>> = (0..s.batch * s.kv_heads)
            .map(|_| query_rows.by_ref().take(s.group()).collect())
            .collect();
        groups
            .into_par_iter()
            .zip(rows_by_head(&mut dk, s.keys, s.kv_heads, s.dim))
            .zip(rows_by_head(&mut dv, s.keys, s.kv_heads, s.dim))
            .enumerate()
            .for_each(|(i, ((dq, dk), dv))| {
                let at = (i / s.kv_heads, i % s.kv_heads);
                backward_group(attend, s, inputs, lse, rotation, at, (dq, dk, dv));
            });
    });
    Ok([
        tensor(dq, (s.batch, s.queries, s.heads, s.dim))?,
        tensor(dk, (s.batch, s.keys, s.kv_heads, s.dim))?,
        tensor(dv, (s.batch, s.keys, s.kv_heads, s.dim))?,
    ])
}

/// The gradient rows of one key head and its query heads, for queries, keys and values.
type GroupRows<'a, T> = (Vec<Vec<&'a mut [T]>>, Vec<&'a mut [T]>, Vec<&'a mut [T]>);

/// The backward of one key head. Its query heads run in parallel, because there may be fewer key
/// heads than threads.
fn backward_group<T: Float>(
    attend: &DotProductAttention,
    s: AttentionShape,
    inputs: [Rows<T>; 5],
    lse: &[T],
    rotation: Rotation<T>,
    (batch, kv): (usize, usize),
    (dq_rows, mut dk_rows, mut dv_rows): GroupRows<T>,
) {
    // At most one head per thread, because each head has its own gradients of all keys.
    let at_a_time = rayon::current_num_threads();
    let mut dq_rows = dq_rows.into_iter();
    let mut sum: Option<(Vec<T>, Vec<T>)> = None;
    for first in (kv * s.group()..(kv + 1) * s.group()).step_by(at_a_time) {
        let heads: Vec<(Vec<T>, Vec<T>)> = dq_rows
            .by_ref()
            .take(at_a_time)
            .collect::<Vec<_>>()
            .into_par_iter()
            .enumerate()
            .map(|(i, rows)| {
                backward_head(attend, s, inputs, lse, rotation, (batch, first + i), rows)
            })
            .collect();
        for (more_dk, more_dv) in heads {
            match &mut sum {
                None => sum = Some((more_dk, more_dv)),
                Some((dk, dv)) => {
                    add_rows(dk, &more_dk);
                    add_rows(dv, &more_dv);
                }
            }
        }
    }
    let Some((mut dk, dv)) = sum else { return };
    rotation.apply(&mut dk, s.dim, 0, true);
    for (row, out) in dk.chunks_exact(s.dim).zip(&mut dk_rows) {
        out.copy_from_slice(row);
    }
    for (row, out) in dv.chunks_exact(s.dim).zip(&mut dv_rows) {
        out.copy_from_slice(row);
    }
}

/// The backward of one query head: writes the gradient rows of its queries and returns its
/// contributions to the gradients of the keys (still rotated) and the values.
fn backward_head<T: Float>(
    attend: &DotProductAttention,
    s: AttentionShape,
    [q, k, v, output, grad]: [Rows<T>; 5],
    lse: &[T],
    rotation: Rotation<T>,
    (batch, head): (usize, usize),
    mut dq_rows: Vec<&mut [T]>,
) -> (Vec<T>, Vec<T>) {
    let kv = head / s.group();
    let zeros = |n: usize| vec![T::ZERO; n];
    let (mut keys, mut values) = (zeros(s.keys * s.dim), zeros(s.keys * s.dim));
    k.pack(batch, 0, kv, &mut keys);
    rotation.apply(&mut keys, s.dim, 0, false);
    v.pack(batch, 0, kv, &mut values);
    let (mut dk, mut dv) = (zeros(s.keys * s.dim), zeros(s.keys * s.dim));
    let block = BLOCK.min(s.queries);
    let [mut queries, mut grads, mut dq] = [(); 3].map(|()| zeros(block * s.dim));
    let [mut scores, mut dscores] = [(); 2].map(|()| zeros(block * s.keys));
    let scale = T::from_f64(attend.scale);
    let cap = attend.softcap.map(T::from_f64);
    let mut capped = zeros(if cap.is_some() { s.keys } else { 0 });
    let lse = &lse[(batch * s.heads + head) * s.queries..][..s.queries];
    for start in (0..s.queries).step_by(block) {
        let n = block.min(s.queries - start);
        let position = s.first_query + start;
        let first = attend.keys_of(s, batch, start).start;
        let seen = attend.keys_of(s, batch, start + n - 1).end - first;
        let (queries, grads) = (&mut queries[..n * s.dim], &mut grads[..n * s.dim]);
        q.pack(batch, start, head, queries);
        rotation.apply(queries, s.dim, position, false);
        scale_rows(queries, scale);
        grad.pack(batch, start, head, grads);
        let (queries_mat, grads_mat) = (Mat::new(&*queries, n, s.dim), Mat::new(&*grads, n, s.dim));
        let [keys, values] =
            [&keys, &values].map(|rows| Mat::new(&rows[first * s.dim..], seen, s.dim));
        let (scores, dscores) = (&mut scores[..n * seen], &mut dscores[..n * seen]);
        gemm(scores, queries_mat, keys.t(), false, Threads::One);
        gemm(dscores, grads_mat, values.t(), false, Threads::One);
        let rows = scores.chunks_exact_mut(seen).zip(dscores.chunks_exact_mut(seen));
        for (i, (p, ds)) in rows.enumerate() {
            let keys = attend.keys_of(s, batch, start + i);
            let (p, hidden) = p.split_at_mut(keys.end - first);
            let (ds, hidden_ds) = ds.split_at_mut(p.len());
            let (before, p) = p.split_at_mut(keys.start - first);
            let (before_ds, ds) = ds.split_at_mut(before.len());
            let output = output.row(batch, start + i, head);
            let grad = &grads[i * s.dim..][..s.dim];
            if let Some(cap) = cap {
                cap_row(p, cap);
                capped[..p.len()].copy_from_slice(p);
            }
            softmax_row_backward(p, ds, lse[start + i], output, grad);
            if let Some(cap) = cap {
                cap_row_backward(ds, &capped, cap);
            }
            for hidden in [before, before_ds, hidden, hidden_ds] {
                hidden.fill(T::ZERO);
            }
        }
        let (p, ds) = (Mat::new(&*scores, n, seen), Mat::new(&*dscores, n, seen));
        gemm(&mut dv[first * s.dim..], p.t(), grads_mat, true, Threads::One);
        gemm(&mut dk[first * s.dim..], ds.t(), queries_mat, true, Threads::One);
        let dq = &mut dq[..n * s.dim];
        gemm(dq, ds, keys, false, Threads::One);
        rotation.apply(dq, s.dim, position, true);
        for (row, out) in dq.chunks_exact(s.dim).zip(&mut dq_rows[start..]) {
            out.iter_mut().zip(row).for_each(|(out, &x)| *out = x * scale);
        }
    }
    (dk, dv)
}
