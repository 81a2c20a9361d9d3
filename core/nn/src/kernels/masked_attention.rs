//! Masked attention, as tensor operations for any device. All probabilities are kept for backward.

use candle_core::{D, DType, Tensor};

use crate::Result;
use crate::backend::to_accumulation_dtype;
use fulgurite_engine::autograd::storage;

/// Scaled dot-product attention with a mask. Tensors are `[batch, heads, time, dim]`; the number of
/// query heads is a multiple of the number of key heads.
#[derive(Debug, Clone)]
pub(crate) struct MaskedAttention {
    pub(crate) scale: f64,
    /// Whether a query attends to a key, u8, `[batch or 1, heads or 1, queries or 1, keys]`.
    pub(crate) mask: Tensor,
}

impl MaskedAttention {
    /// Computes the output, and the probabilities for backward.
    pub(crate) fn forward(&self, [q, k, v]: [&Tensor; 3]) -> Result<(Tensor, Tensor)> {
        let dtype = q.dtype();
        let (q, k) = (to_accumulation_dtype(q)?, repeat(&to_accumulation_dtype(k)?, q)?);
        let v = repeat(&to_accumulation_dtype(v)?, &q)?;
        let scores = (q.matmul(&k.transpose(2, 3)?.contiguous()?)? * self.scale)?;
        let mask = self.mask.broadcast_as(scores.shape())?;
        let hidden = Tensor::new(f32::MIN, q.device())?.to_dtype(q.dtype())?;
        let scores = mask.where_cond(&scores, &hidden.broadcast_as(scores.shape())?)?;
        let exp = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?)?.exp()?;
        let exp = (exp * mask.to_dtype(q.dtype())?)?;
        // A query with any key has a sum of at least 1; a query without keys gives zeros.
        let sum = exp.sum_keepdim(D::Minus1)?.maximum(1.0)?;
        let probabilities = exp.broadcast_div(&sum)?;
        let output = probabilities.matmul(&v)?.to_dtype(dtype)?;
        Ok((output, probabilities))
    }

    /// Computes the gradients of q, k and v.
    pub(crate) fn backward(
        &self,
        [q, k, v]: [&Tensor; 3],
        probabilities: &Tensor,
        grad: &Tensor,
    ) -> Result<[Tensor; 3]> {
        let (dtype, kv_heads) = (q.dtype(), k.dim(1)?);
        let (q, grad) = (to_accumulation_dtype(q)?, to_accumulation_dtype(grad)?);
        let k = repeat(&to_accumulation_dtype(k)?, &q)?;
        let v = repeat(&to_accumulation_dtype(v)?, &q)?;
        let turned = probabilities.transpose(2, 3)?.contiguous()?;
        let dv = turned.matmul(&grad)?;
        let dp = grad.matmul(&v.transpose(2, 3)?.contiguous()?)?;
        let level = (&dp * probabilities)?.sum_keepdim(D::Minus1)?;
        let ds = ((dp.broadcast_sub(&level)? * probabilities)? * self.scale)?;
        let dq = ds.matmul(&k)?;
        let dk = ds.transpose(2, 3)?.contiguous()?.matmul(&q)?;
        Ok([
            storage::cast(&dq, dtype)?,
            sum_groups(&dk, kv_heads, dtype)?,
            sum_groups(&dv, kv_heads, dtype)?,
        ])
    }
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
