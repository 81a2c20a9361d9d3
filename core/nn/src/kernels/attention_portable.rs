//! Attention as tensor operations, for any device. Queries are computed in blocks, so that the
//! scores of all queries are never in memory at once.

use candle_core::{D, DType, Tensor};

use super::attention::{AttentionShape, DotProductAttention};
use super::rope::{Angles, rotate};
use crate::Result;

/// Queries in a block.
const BLOCK: usize = 512;

/// Converts between `[batch, time, heads, dim]` and `[batch, heads, time, dim]`, contiguous.
pub(super) fn heads_first(x: &Tensor) -> Result<Tensor> {
    let x = x.transpose(1, 2)?;
    #[cfg(feature = "cuda")]
    let x = fulgurite_kernels::cuda::contiguous(&x)?;
    Ok(x.contiguous()?)
}

impl DotProductAttention {
    /// Returns the angles at the positions of the queries.
    pub(super) fn angles_of_queries(&self, s: AttentionShape) -> Result<Option<Angles>> {
        let Some(angles) = &self.angles else { return Ok(None) };
        Ok(Some(Angles {
            cos: angles.cos.narrow(0, s.first_query, s.queries)?,
            sin: angles.sin.narrow(0, s.first_query, s.queries)?,
        }))
    }

    /// Returns queries as `[batch, heads, time, dim]`, rotated.
    pub(super) fn queries(&self, s: AttentionShape, q: &Tensor) -> Result<Tensor> {
        let q = heads_first(q)?;
        match self.angles_of_queries(s)? {
            None => Ok(q),
            Some(angles) => rotate(&q, &angles, false),
        }
    }

    /// Returns keys as `[batch, kv_heads, time, dim]`, rotated.
    pub(super) fn keys(&self, k: &Tensor) -> Result<Tensor> {
        let k = heads_first(k)?;
        match &self.angles {
            None => Ok(k),
            Some(angles) => rotate(&k, angles, false),
        }
    }

    /// Converts the gradients of [`queries`](Self::queries), [`keys`](Self::keys) and values to
    /// gradients of the inputs.
    pub(super) fn inputs(
        &self,
        s: AttentionShape,
        [dq, dk, dv]: [Tensor; 3],
    ) -> Result<[Tensor; 3]> {
        let dq = match self.angles_of_queries(s)? {
            None => dq,
            Some(angles) => rotate(&dq, &angles, true)?,
        };
        let dk = match &self.angles {
            None => dk,
            Some(angles) => rotate(&dk, angles, true)?,
        };
        Ok([heads_first(&dq)?, heads_first(&dk)?, heads_first(&dv)?])
    }

    /// Returns the first key that any query from `start` on attends to.
    pub(super) fn first_key_of_all(&self, s: AttentionShape, start: usize) -> usize {
        let of_documents = self.documents.as_ref().map_or(0, |d| d.range_of_all(start).start);
        of_documents.max(self.keys_in_window(s, start).start)
    }

    /// Returns the first key that any of `n` queries from `start` on attends to, and the number of
    /// keys from there to the last one.
    fn keys_of_block(&self, s: AttentionShape, start: usize, n: usize) -> (usize, usize) {
        let (first, last) = (self.first_key_of_all(s, start), start + n - 1);
        let of_documents = self.documents.as_ref().map_or(s.keys, |d| d.range_of_all(last).end);
        (first, of_documents.min(self.keys_in_window(s, last).end) - first)
    }

    /// Returns the mask of `n` queries from `start` on, with minus infinity at hidden keys:
    /// `[n, seen]` or, with documents, `[batch, 1, n, seen]`. The first key is `first`.
    fn mask(
        &self,
        s: AttentionShape,
        (start, n): (usize, usize),
        (first, seen): (usize, usize),
        like: &Tensor,
    ) -> Result<Tensor> {
        let batch = if self.documents.is_some() { s.batch } else { 1 };
        let hidden: Vec<f32> = (0..batch * n * seen)
            .map(|i| {
                let (query, key) = (start + i / seen % n, first + i % seen);
                match self.keys_of(s, i / (n * seen), query).contains(&key) {
                    true => 0.0,
                    false => f32::NEG_INFINITY,
                }
            })
            .collect();
        let mask = Tensor::from_vec(hidden, (batch, 1, n, seen), like.device())?;
        let mask = if self.documents.is_some() { mask } else { mask.reshape((n, seen))? };
        Ok(mask.to_dtype(like.dtype())?)
    }

    /// Returns the scores of a block, bounded but not masked: `[batch, kv_heads, group * n, seen]`.
    fn scores(&self, q: &Tensor, k: &Tensor) -> Result<Tensor> {
        let scores = q.matmul(&k.t()?)?;
        match self.softcap {
            None => Ok(scores),
            Some(cap) => Ok(((scores / cap)?.tanh()? * cap)?),
        }
    }

    /// Converts gradients of bounded scores to gradients of unbounded ones.
    fn scores_backward(&self, ds: Tensor, scores: &Tensor) -> Result<Tensor> {
        match self.softcap {
            None => Ok(ds),
            Some(cap) => Ok((ds * (scores / cap)?.sqr()?.affine(-1.0, 1.0)?)?),
        }
    }

    /// Adds minus infinity to the scores of hidden keys. The block's first query is `start`, its
    /// first key `first`.
    fn masked(
        &self,
        s: AttentionShape,
        scores: &Tensor,
        (start, first): (usize, usize),
    ) -> Result<Tensor> {
        if !self.causal && self.window.is_none() && self.documents.is_none() {
            return Ok(scores.clone());
        }
        let (n, seen) = (scores.dim(2)? / s.group(), scores.dim(3)?);
        let mask = self.mask(s, (start, n), (first, seen), scores)?;
        let shape = scores.shape().clone();
        Ok(scores.reshape((s.batch, s.heads, n, seen))?.broadcast_add(&mask)?.reshape(shape)?)
    }
}

/// Returns a block of queries, with the heads of one group one after the other:
/// `[batch, kv_heads, group * n, dim]`.
fn block(x: &Tensor, s: AttentionShape, start: usize, n: usize) -> candle_core::Result<Tensor> {
    let x = x.narrow(2, start, n)?.contiguous()?;
    x.reshape((s.batch, s.kv_heads, s.group() * n, ()))
}

/// The inverse of [`block`].
fn unblock(x: &Tensor, s: AttentionShape, n: usize) -> candle_core::Result<Tensor> {
    x.reshape((s.batch, s.heads, n, ()))
}

pub(super) fn forward(
    attend: &DotProductAttention,
    s: AttentionShape,
    [q, k, v]: [&Tensor; 3],
) -> Result<(Tensor, Tensor)> {
    let (q, k, v) = ((attend.queries(s, q)? * attend.scale)?, attend.keys(k)?, heads_first(v)?);
    let (mut outputs, mut lses) = (Vec::new(), Vec::new());
    for start in (0..s.queries).step_by(BLOCK) {
        let n = BLOCK.min(s.queries - start);
        let (first, seen) = attend.keys_of_block(s, start, n);
        let (k, v) = (k.narrow(2, first, seen)?, v.narrow(2, first, seen)?.contiguous()?);
        let scores = attend.scores(&block(&q, s, start, n)?, &k)?;
        let scores = attend.masked(s, &scores, (start, first))?;
        let top = scores.max_keepdim(D::Minus1)?;
        let exp = scores.broadcast_sub(&top)?.exp()?;
        let sum = exp.sum_keepdim(D::Minus1)?;
        outputs.push(unblock(&exp.broadcast_div(&sum)?.matmul(&v)?, s, n)?);
        lses.push(unblock(&(top + sum.log()?)?, s, n)?.squeeze(3)?);
    }
    let output = Tensor::cat(&outputs, 2)?.transpose(1, 2)?.contiguous()?;
    Ok((output, Tensor::cat(&lses, 2)?.contiguous()?))
}

pub(super) fn backward(
    attend: &DotProductAttention,
    s: AttentionShape,
    [q, k, v]: [&Tensor; 3],
    [output, lse, grad]: [&Tensor; 3],
) -> Result<[Tensor; 3]> {
    let (q, k, v) = ((attend.queries(s, q)? * attend.scale)?, attend.keys(k)?, heads_first(v)?);
    let (output, grad) = (heads_first(output)?, heads_first(grad)?);
    let level = (&output * &grad)?.sum_keepdim(D::Minus1)?;
    let lse = lse.unsqueeze(3)?;
    let mut dqs = Vec::new();
    let (mut dk, mut dv) = (k.zeros_like()?, v.zeros_like()?);
    for start in (0..s.queries).step_by(BLOCK) {
        let n = BLOCK.min(s.queries - start);
        let (first, seen) = attend.keys_of_block(s, start, n);
        let (k, v) = (k.narrow(2, first, seen)?.contiguous()?, v.narrow(2, first, seen)?);
        let q = block(&q, s, start, n)?;
        let grad = block(&grad, s, start, n)?;
        let scores = attend.scores(&q, &k)?;
        let p = attend
            .masked(s, &scores, (start, first))?
            .broadcast_sub(&block(&lse, s, start, n)?)?
            .exp()?;
        let dp = grad.matmul(&v.t()?)?;
        let ds = (&p * dp.broadcast_sub(&block(&level, s, start, n)?)?)?;
        let ds = attend.scores_backward(ds, &scores)?;
        dqs.push(unblock(&(ds.matmul(&k)? * attend.scale)?, s, n)?);
        let pad = |t: Tensor| t.pad_with_zeros(2, first, s.keys - first - seen);
        dk = (dk + pad(ds.t()?.matmul(&q)?)?)?;
        dv = (dv + pad(p.t()?.matmul(&grad)?)?)?;
    }
    debug_assert!(dk.dtype() != DType::BF16, "computed in the accumulation dtype");
    attend.inputs(s, [Tensor::cat(&dqs, 2)?, dk, dv])
}
