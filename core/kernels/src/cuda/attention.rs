//! Attention of tensors, `[batch, heads, time, width]`.

use candle_core::{DType, Tensor};
use fulgurite_error::{Error, Result};

use super::address;
use super::layers::{alike, carry_out, output, taken};
use crate::plans::{self, Attention};

/// Bytes of scores, probabilities and their gradients that are in memory at once.
const SCORES_BYTES: usize = 768 << 20;

/// How queries attend to keys.
#[derive(Clone, Copy)]
pub struct Attend<'a> {
    /// Factor of the scores.
    pub scale: f64,
    /// Whether a query sees only the keys up to its own position; the last query is at the last key.
    pub causal: bool,
    /// The first key that each query sees, u32 `[batch, queries]`, and the first one that any query from a position on sees.
    pub firsts: Option<(&'a Tensor, &'a dyn Fn(usize) -> usize)>,
}

impl Attend<'_> {
    fn plan_of(&self, [q, k, v]: [&Tensor; 3]) -> Result<Option<Attention>> {
        let Some((_, dtype)) = taken(q) else { return Ok(None) };
        alike(&[k, v])?;
        let ((batch, heads, queries, width), (_, kv_heads, keys, _)) = (q.dims4()?, k.dims4()?);
        let fits = k.dims() == [batch, kv_heads, keys, width]
            && kv_heads > 0
            && heads % kv_heads == 0
            && keys > 0
            && (!self.causal || queries <= keys)
            && k.dtype() == q.dtype()
            && k.device().same_device(q.device());
        let firsts = match self.firsts {
            Some((firsts, _))
                if firsts.dims() == [batch, queries] && firsts.dtype() == DType::U32 =>
            {
                address(firsts)?
            }
            None => 0,
            Some(_) => {
                return Err(Error::other("each query of a sequence needs its first key, as u32"));
            }
        };
        if !fits {
            return Err(Error::other(format!(
                "attention of {:?} in {:?} to {:?} in {:?}",
                q.dims(),
                q.dtype(),
                k.dims(),
                k.dtype()
            )));
        }
        let (group, causal, scale) = (heads / kv_heads, self.causal, self.scale as f32);
        let mut of = Attention {
            dtype,
            batch,
            kv_heads,
            group,
            queries,
            keys,
            width,
            causal,
            scale,
            firsts,
            at_once: 0,
        };
        of.at_once = of.queries_within(SCORES_BYTES);
        // As launches and products count: rows of a block, and elements of a row.
        let counted = [group * queries, keys, width, batch * kv_heads, batch * heads * of.at_once];
        Ok(counted.iter().all(|&n| i32::try_from(n).is_ok()).then_some(of))
    }

    fn first_key(&self, query: usize) -> usize {
        self.firsts.map_or(0, |(_, first_of_all)| first_of_all(query))
    }
}

/// The output, `[batch, heads, queries, width]`, and the log-sum-exp of the scores of each query, f32
/// `[batch, heads, queries]`. Keys and values have as many heads as queries, or a divisor of it. `None` if no kernel takes
/// the tensors.
///
/// # Errors
/// If shapes do not fit, there is no memory left, or a launch fails.
pub fn attention(of: Attend<'_>, [q, k, v]: [&Tensor; 3]) -> Result<Option<(Tensor, Tensor)>> {
    let (Some((device, _)), Some(plan)) = (taken(q), of.plan_of([q, k, v])?) else {
        return Ok(None);
    };
    let (q, k, v) = (q.contiguous()?, k.contiguous()?, v.contiguous()?);
    let y = output(&q)?;
    let (batch, heads, queries, _) = q.dims4()?;
    let lse = Tensor::zeros((batch, heads, queries), DType::F32, q.device())?;
    let inputs = [address(&q)?, address(&k)?, address(&v)?];
    let plan =
        plans::attention(&plan, &|query| of.first_key(query), inputs, address(&y)?, address(&lse)?);
    carry_out(&plan, device, &[&q, &k, &v, &y, &lse])?;
    Ok(Some((y, lse)))
}

/// The gradients of [`attention`]'s q, in its dtype, and of k and v, in f32. `lse` is what it returned.
///
/// # Errors
/// As [`attention`].
pub fn attention_backward(
    of: Attend<'_>,
    [q, k, v]: [&Tensor; 3],
    lse: &Tensor,
    grad: &Tensor,
) -> Result<Option<[Tensor; 3]>> {
    let (Some((device, _)), Some(plan)) = (taken(q), of.plan_of([q, k, v])?) else {
        return Ok(None);
    };
    alike(&[q, grad])?;
    let (batch, heads, queries, _) = q.dims4()?;
    if lse.dims() != [batch, heads, queries] || lse.dtype() != DType::F32 {
        return Err(Error::other(format!(
            "attention of {:?} has no log-sum-exp of {:?}",
            q.dims(),
            lse.shape()
        )));
    }
    let (q, k, v) = (q.contiguous()?, k.contiguous()?, v.contiguous()?);
    let (lse, grad) = (lse.contiguous()?, grad.contiguous()?);
    let dq = output(&q)?;
    let [dk, dv] = [&k, &v].map(|x| Tensor::zeros(x.shape(), DType::F32, x.device()));
    let (dk, dv) = (dk?, dv?);
    let plan = plans::attention_backward(
        &plan,
        &|query| of.first_key(query),
        [address(&q)?, address(&k)?, address(&v)?],
        [address(&grad)?, address(&lse)?],
        [address(&dq)?, address(&dk)?, address(&dv)?],
    );
    carry_out(&plan, device, &[&q, &k, &v, &grad, &lse, &dq, &dk, &dv])?;
    Ok(Some([dq, dk, dv]))
}
