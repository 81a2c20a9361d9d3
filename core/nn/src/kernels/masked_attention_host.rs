//! Attention with a mask or a bias of the scores on the CPU, with (sequence, head) pairs in
//! parallel.

use candle_core::Tensor;
use rayon::prelude::*;

use super::masked_attention::MaskedAttention;
use crate::Result;
use crate::gemm::{Mat, Threads, gemm};
use crate::host::{Float, dot, exp_in_place, host, max, tensor};
use fulgurite_engine::simd::vectorized;

/// The sizes of queries, keys and heads.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    heads: usize,
    kv_heads: usize,
    queries: usize,
    keys: usize,
    dim: usize,
}

impl Sizes {
    fn of(q: &Tensor, k: &Tensor) -> Result<Self> {
        let (_, heads, queries, dim) = q.dims4()?;
        let (_, kv_heads, keys, _) = k.dims4()?;
        Ok(Self { heads, kv_heads, queries, keys, dim })
    }

    /// The elements of a pair's queries, keys and scores.
    fn of_pair(self) -> [usize; 3] {
        [self.queries * self.dim, self.keys * self.dim, self.queries * self.keys]
    }

    /// The key head of a pair, among those of all sequences.
    fn kv_of(self, pair: usize) -> usize {
        pair / self.heads * self.kv_heads + pair % self.heads / (self.heads / self.kv_heads)
    }
}

/// A mask or a bias, `[batch or 1, heads or 1, queries or 1, keys]`.
#[derive(Clone, Copy)]
struct Broadcast<'a, E> {
    values: &'a [E],
    /// 0 where one value is for all.
    strides: [usize; 3],
    keys: usize,
}

impl<'a, E> Broadcast<'a, E> {
    fn new(values: &'a [E], of: &Tensor) -> Result<Self> {
        let (batch, heads, queries, keys) = of.dims4()?;
        let stride = |size: usize, stride: usize| if size == 1 { 0 } else { stride };
        let strides = [
            stride(batch, heads * queries * keys),
            stride(heads, queries * keys),
            stride(queries, keys),
        ];
        Ok(Self { values, strides, keys })
    }

    /// The values for a query.
    fn row(&self, sequence: usize, head: usize, query: usize) -> &'a [E] {
        let [of_sequence, of_head, of_query] = self.strides;
        let start = sequence * of_sequence + head * of_head + query * of_query;
        &self.values[start..start + self.keys]
    }
}

vectorized! {
    /// `row * scale + bias`.
    fn scale_and_add[T: Float](row: &mut [T], bias: &[T], scale: T) {
        row.iter_mut().zip(bias).for_each(|(x, &bias)| *x = *x * scale + bias);
    }

    fn scale_row[T: Float](row: &mut [T], scale: T) {
        row.iter_mut().for_each(|x| *x *= scale);
    }

    /// Gives keys that are not seen the score -infinity.
    fn hide[T: Float](row: &mut [T], mask: &[u8]) {
        let hidden = T::ZERO - T::INFINITY;
        row.iter_mut().zip(mask).for_each(|(x, &seen)| *x = if seen != 0 { *x } else { hidden });
    }

    /// Replaces scores by probabilities. Those of a query without keys are zeros.
    fn softmax_row[T: Float](row: &mut [T]) {
        let (top, hidden) = (max(row), T::ZERO - T::INFINITY);
        // NaNs do not count in `top`.
        if top == hidden && row.iter().all(|x| *x == hidden) {
            row.fill(T::ZERO);
            return;
        }
        let sum = exp_in_place(row, top);
        let scale = T::ONE / sum;
        row.iter_mut().for_each(|x| *x *= scale);
    }

    /// Replaces the gradients of a row's probabilities by the gradients of its scores, before the
    /// factor of the products.
    fn softmax_row_backward[T: Float](ds: &mut [T], p: &[T]) {
        let level = dot(ds, p);
        ds.iter_mut().zip(p).for_each(|(ds, &p)| *ds = p * (*ds - level));
    }
}

/// The output, `[batch, heads, queries, dim]`, and the probabilities,
/// `[batch, heads, queries, keys]`, of contiguous tensors.
pub(super) fn forward<T: Float>(
    of: &MaskedAttention,
    [q, k, v]: [&Tensor; 3],
    bias: Option<&Tensor>,
) -> Result<(Tensor, Tensor)> {
    let s = Sizes::of(q, k)?;
    let [of_queries, of_keys, of_scores] = s.of_pair();
    let batch = q.dim(0)?;
    let (mut output, mut probabilities) =
        (vec![T::ZERO; q.elem_count()], vec![T::ZERO; batch * s.heads * of_scores]);
    let (host_q, host_k, host_v) = (host(q)?, host(k)?, host(v)?);
    let (queries, keys, values) =
        (host_q.slice::<T>()?, host_k.slice::<T>()?, host_v.slice::<T>()?);
    let mask = of.mask.as_ref().map(Tensor::contiguous).transpose()?;
    let host_mask = mask.as_ref().map(host).transpose()?;
    let mask = match (&mask, &host_mask) {
        (Some(mask), Some(values)) => Some(Broadcast::new(values.slice::<u8>()?, mask)?),
        _ => None,
    };
    let host_bias = bias.map(host).transpose()?;
    let bias = match (bias, &host_bias) {
        (Some(bias), Some(values)) => Some(Broadcast::new(values.slice::<T>()?, bias)?),
        _ => None,
    };
    let scale = T::from_f64(of.scale);
    let pairs = output.par_chunks_mut(of_queries).zip(probabilities.par_chunks_mut(of_scores));
    pairs.enumerate().for_each(|(pair, (output, p))| {
        let (sequence, head, kv) = (pair / s.heads, pair % s.heads, s.kv_of(pair));
        let queries = Mat::new(&queries[pair * of_queries..][..of_queries], s.queries, s.dim);
        let [keys, values] =
            [keys, values].map(|rows| Mat::new(&rows[kv * of_keys..][..of_keys], s.keys, s.dim));
        gemm(p, queries, keys.t(), false, Threads::One);
        for (query, row) in p.chunks_exact_mut(s.keys).enumerate() {
            match &bias {
                Some(bias) => scale_and_add(row, bias.row(sequence, head, query), scale),
                None => scale_row(row, scale),
            }
            if let Some(mask) = &mask {
                hide(row, mask.row(sequence, head, query));
            }
            softmax_row(row);
        }
        gemm(output, Mat::new(p, s.queries, s.keys), values, false, Threads::One);
    });
    let shape = (batch, s.heads, s.queries, s.keys);
    Ok((tensor(output, q.shape())?, tensor(probabilities, shape)?))
}

/// The gradients of queries, keys and values, and of the scores' term with `with_term`, for each
/// query head.
pub(super) fn backward<T: Float>(
    of: &MaskedAttention,
    [q, k, v]: [&Tensor; 3],
    probabilities: &Tensor,
    grad: &Tensor,
    with_term: bool,
) -> Result<([Tensor; 3], Option<Tensor>)> {
    let s = Sizes::of(q, k)?;
    let [of_queries, of_keys, of_scores] = s.of_pair();
    let group = s.heads / s.kv_heads;
    let hosts = [host(q)?, host(k)?, host(v)?, host(probabilities)?, host(grad)?];
    let [queries, keys, values, p, grad] = [0, 1, 2, 3, 4].map(|i| hosts[i].slice::<T>());
    let (queries, keys, values, p, grad) = (queries?, keys?, values?, p?, grad?);
    let zeros = |n: usize| vec![T::ZERO; n];
    let (mut dq, mut dk, mut dv) =
        (zeros(q.elem_count()), zeros(k.elem_count()), zeros(k.elem_count()));
    let mut terms = zeros(if with_term { p.len() } else { 0 });
    let scale = T::from_f64(of.scale);
    let of_group = dq.par_chunks_mut(group * of_queries);
    let of_group = of_group.zip(dk.par_chunks_mut(of_keys)).zip(dv.par_chunks_mut(of_keys));
    let backward_group = |kv: usize, [dq, dk, dv]: [&mut [T]; 3], mut terms: Option<&mut [T]>| {
        let [keys, values] =
            [keys, values].map(|rows| Mat::new(&rows[kv * of_keys..][..of_keys], s.keys, s.dim));
        let mut room = zeros(if terms.is_some() { 0 } else { of_scores });
        for (i, dq) in dq.chunks_exact_mut(of_queries).enumerate() {
            let pair = kv * group + i;
            let [queries, grad] = [queries, grad]
                .map(|rows| Mat::new(&rows[pair * of_queries..][..of_queries], s.queries, s.dim));
            let p = &p[pair * of_scores..][..of_scores];
            let ds = match &mut terms {
                Some(terms) => &mut terms[i * of_scores..][..of_scores],
                None => &mut room,
            };
            gemm(ds, grad, values.t(), false, Threads::One);
            let rows = ds.chunks_exact_mut(s.keys).zip(p.chunks_exact(s.keys));
            rows.for_each(|(ds, p)| softmax_row_backward(ds, p));
            gemm(dv, Mat::new(p, s.queries, s.keys).t(), grad, true, Threads::One);
            let ds = Mat::new(ds, s.queries, s.keys);
            gemm(dk, ds.t(), queries, true, Threads::One);
            gemm(dq, ds, keys, false, Threads::One);
            scale_row(dq, scale);
        }
        scale_row(dk, scale);
    };
    match with_term {
        true => of_group.zip(terms.par_chunks_mut(group * of_scores)).enumerate().for_each(
            |(kv, (((dq, dk), dv), terms))| backward_group(kv, [dq, dk, dv], Some(terms)),
        ),
        false => of_group
            .enumerate()
            .for_each(|(kv, ((dq, dk), dv))| backward_group(kv, [dq, dk, dv], None)),
    }
    let term = with_term.then(|| tensor(terms, probabilities.shape())).transpose()?;
    Ok(([tensor(dq, q.shape())?, tensor(dk, k.shape())?, tensor(dv, v.shape())?], term))
}
