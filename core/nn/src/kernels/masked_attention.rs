//! Attention with a mask or a bias of the scores. All probabilities are kept for backward.

use candle_core::{D, DType, Shape, Tensor};

use super::masked_attention_host;
use crate::Result;
use crate::backend::{to_accumulation_dtype, uses_cpu_kernels};
use crate::host::with_float;
use fulgurite_engine::autograd::storage;
use fulgurite_engine::execution::dry_run::{skips_pass, skips_products};
#[cfg(feature = "cuda")]
use fulgurite_kernels::cuda;

/// Scaled dot-product attention with a mask or a bias. Tensors are `[batch, heads, time, dim]`; the
/// number of query heads is a multiple of the number of key heads.
#[derive(Debug, Clone)]
pub(crate) struct MaskedAttention {
    pub(crate) scale: f64,
    /// Whether a query attends to a key, u8, `[batch or 1, heads or 1, queries or 1, keys]`.
    pub(crate) mask: Option<Tensor>,
    /// A term of the scores, `[batch or 1, heads or 1, queries or 1, keys]`.
    pub(crate) bias: Option<Tensor>,
}

/// The gradients of an attention's inputs.
pub(crate) struct MaskedGrads {
    /// Of q, k and v.
    pub(crate) inputs: [Tensor; 3],
    /// Of the bias, in its shape and dtype.
    pub(crate) bias: Option<Tensor>,
}

impl MaskedAttention {
    /// Computes the output, and the probabilities for backward.
    pub(crate) fn forward(&self, [q, k, v]: [&Tensor; 3]) -> Result<(Tensor, Tensor)> {
        let dtype = q.dtype();
        let [q, k, v] = [q, k, v].map(to_accumulation_dtype);
        let (q, k, v) = (q?, k?, v?);
        let bias = self.bias.as_ref().map(to_accumulation_dtype).transpose()?;
        if uses_cpu_kernels(&q) {
            let (output, probabilities) = match is_empty(&q, &k) || skips(&q, &k, 2, dtype)? {
                true => {
                    let (batch, heads, queries, _) = q.dims4()?;
                    let shape = Shape::from((batch, heads, queries, k.dim(2)?));
                    let zeros = |shape: &Shape| storage::zeros(shape, q.dtype(), q.device());
                    (zeros(q.shape())?, zeros(&shape)?)
                }
                false => with_float!(q.dtype(), T => {
                    masked_attention_host::forward::<T>(self, [&q, &k, &v], bias.as_ref())
                })?,
            };
            return Ok((storage::cast(&output, dtype)?, probabilities));
        }
        let (k, v) = (repeat(&k, &q)?, repeat(&v, &q)?);
        let scores = (q.matmul(&k.transpose(2, 3)?.contiguous()?)? * self.scale)?;
        let probabilities = self.probabilities(scores, bias.as_ref())?;
        let output = probabilities.matmul(&v)?.to_dtype(dtype)?;
        Ok((output, probabilities))
    }

    /// The softmax of the scores, which have no other user.
    fn probabilities(&self, mut scores: Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        {
            let mask = self.mask.as_ref().map(Tensor::contiguous).transpose()?;
            if cuda::masked_softmax(&scores, mask.as_ref(), bias)? {
                return Ok(scores);
            }
        }
        if let Some(bias) = bias {
            scores = scores.broadcast_add(bias)?;
        }
        let mask = self.mask.as_ref().map(|mask| mask.broadcast_as(scores.shape())).transpose()?;
        if let Some(mask) = &mask {
            let hidden = Tensor::new(f32::MIN, scores.device())?.to_dtype(scores.dtype())?;
            scores = mask.where_cond(&scores, &hidden.broadcast_as(scores.shape())?)?;
        }
        let mut exp = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?)?.exp()?;
        if let Some(mask) = mask {
            exp = (exp * mask.to_dtype(scores.dtype())?)?;
        }
        // A query with any key has a sum of at least 1; a query without keys gives zeros.
        let sum = exp.sum_keepdim(D::Minus1)?.maximum(1.0)?;
        Ok(exp.broadcast_div(&sum)?)
    }

    /// The gradient of the scores times a factor, from `dp`, the gradient of the probabilities.
    /// Nobody else uses `dp`.
    fn scores_backward(probabilities: &Tensor, dp: Tensor, factor: f64) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if cuda::masked_softmax_backward(probabilities, &dp, factor)? {
            return Ok(dp);
        }
        let level = (&dp * probabilities)?.sum_keepdim(D::Minus1)?;
        let ds = (dp.broadcast_sub(&level)? * probabilities)?;
        if factor == 1.0 { Ok(ds) } else { Ok((ds * factor)?) }
    }

    /// Computes the gradients of q, k, v and the bias.
    pub(crate) fn backward(
        &self,
        [q, k, v]: [&Tensor; 3],
        probabilities: &Tensor,
        grad: &Tensor,
    ) -> Result<MaskedGrads> {
        let (dtype, kv_heads) = (q.dtype(), k.dim(1)?);
        let [q, k, v, grad] = [q, k, v, grad].map(to_accumulation_dtype);
        let (q, k, v, grad) = (q?, k?, v?, grad?);
        if uses_cpu_kernels(&q) {
            let is_skipped = is_empty(&q, &k) || skips(&q, &k, 4, dtype)?;
            let (inputs, term) = match is_skipped {
                true => {
                    let zeros = |of: &Tensor| storage::zeros(of.shape(), of.dtype(), of.device());
                    let term = self.bias.as_ref().map(|_| zeros(probabilities)).transpose()?;
                    ([zeros(&q)?, zeros(&k)?, zeros(&v)?], term)
                }
                false => with_float!(q.dtype(), T => {
                    let (inputs, with_term) = ([&q, &k, &v], self.bias.is_some());
                    masked_attention_host::backward::<T>(self, inputs, probabilities, &grad, with_term)
                })?,
            };
            let bias = self.bias.as_ref().zip(term);
            let bias = bias.map(|(like, term)| sum_to(&term, like)).transpose()?;
            let [dq, dk, dv] = inputs.map(|grad| storage::cast(&grad, dtype));
            return Ok(MaskedGrads { inputs: [dq?, dk?, dv?], bias });
        }
        let (k, v) = (repeat(&k, &q)?, repeat(&v, &q)?);
        let turned = probabilities.transpose(2, 3)?.contiguous()?;
        let dv = turned.matmul(&grad)?;
        let dp = grad.matmul(&v.transpose(2, 3)?.contiguous()?)?;
        // The gradient of a bias has not the factor of the products.
        let factor = if self.bias.is_some() { 1.0 } else { self.scale };
        let mut ds = Self::scores_backward(probabilities, dp, factor)?;
        let mut bias = None;
        if let Some(like) = &self.bias {
            bias = Some(sum_to(&ds, like)?);
            ds = (ds * self.scale)?;
        }
        let dq = ds.matmul(&k)?;
        let dk = ds.transpose(2, 3)?.contiguous()?.matmul(&q)?;
        let inputs = [
            storage::cast(&dq, dtype)?,
            sum_groups(&dk, kv_heads, dtype)?,
            sum_groups(&dv, kv_heads, dtype)?,
        ];
        Ok(MaskedGrads { inputs, bias })
    }
}

fn is_empty(q: &Tensor, k: &Tensor) -> bool {
    q.elem_count() == 0 || k.elem_count() == 0
}

/// Whether a dry run skips `products` products of the size of the scores, for each head.
fn skips(q: &Tensor, k: &Tensor, products: usize, dtype: DType) -> Result<bool> {
    let (batch, heads, queries, dim) = q.dims4()?;
    let (keys, pairs) = (k.dim(2)?, batch * heads);
    skips_pass(2 * products * pairs * queries * keys * q.dtype().size_in_bytes());
    Ok(skips_products([queries, dim, keys], products * pairs, dtype))
}

/// Repeats the heads of keys or values for each query head.
fn repeat(x: &Tensor, q: &Tensor) -> Result<Tensor> {
    let (batch, heads, time, dim) = x.dims4()?;
    let group = q.dim(1)? / heads;
    if group == 1 {
        return Ok(x.clone());
    }
    let x = x.unsqueeze(2)?.broadcast_as((batch, heads, group, time, dim))?;
    Ok(x.contiguous()?.reshape((batch, heads * group, time, dim))?)
}

/// The transpose of [`repeat`].
fn sum_groups(grad: &Tensor, heads: usize, dtype: DType) -> Result<Tensor> {
    let (batch, all, time, dim) = grad.dims4()?;
    let grad = match all == heads {
        true => grad.clone(),
        false => grad.reshape((batch, heads, all / heads, time, dim))?.sum(2)?,
    };
    storage::cast(&grad, dtype)
}

/// Sums a gradient over the dimensions in which `like` has size 1.
fn sum_to(grad: &Tensor, like: &Tensor) -> Result<Tensor> {
    let mut grad = grad.clone();
    for (i, &size) in like.dims().iter().enumerate() {
        if size != grad.dim(i)? {
            grad = grad.sum_keepdim(i)?;
        }
    }
    storage::cast(&grad, like.dtype())
}
