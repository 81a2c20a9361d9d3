//! Attention of tensors: by matrix products (`[batch, heads, time, width]`), or without scores in
//! memory (`[batch, time, heads, width]`).

use std::ops::Range;

use candle_core::cuda_backend::WrapErr as _;
use candle_core::cuda_backend::cudarc::driver::sys::CUdevice_attribute_enum as Attribute;
use candle_core::{DType, Tensor};
use fulgurite_error::{Error, Result};

use super::layers::{alike, carry_out, output, taken};
use super::{address, cudnn};
use crate::plans::{self, Attention};

/// Limit on the memory for scores, probabilities and their gradients, in bytes.
const SCORES_BYTES: usize = 768 << 20;

/// The mask and the scale of an attention.
#[derive(Clone, Copy)]
pub struct Attend<'a> {
    /// Factor of the scores.
    pub scale: f64,
    /// The bound `c` of the scores, which become `c * tanh(score / c)`.
    pub softcap: Option<f64>,
    /// The position of the first query; `None` if the last query is at the last key's position.
    pub first_query: Option<usize>,
    /// Whether a query sees only the keys up to its own position.
    pub causal: bool,
    /// With `causal`: the most keys that a query sees, including its own. Otherwise the largest
    /// distance to a key on each side.
    pub window: Option<usize>,
    /// The keys that each query sees of its document.
    pub documents: Option<DocumentKeys<'a>>,
}

/// The keys that queries see of their documents. Neither first keys nor ends decrease from query to
/// query.
#[derive(Clone, Copy)]
pub struct DocumentKeys<'a> {
    /// The first key of each query, u32 `[batch, queries]`.
    pub firsts: &'a Tensor,
    /// The end of each query's keys, u32 `[batch, queries]`; `None` if the mask is causal, which
    /// ends them.
    pub ends: Option<&'a Tensor>,
    /// The keys of all sequences' documents of some queries, from the first to the last.
    pub seen: &'a plans::Seen<'a>,
}

/// The order of positions and heads in a tensor.
#[derive(Clone, Copy)]
enum Order {
    HeadsFirst,
    TimeFirst,
}

impl Order {
    /// Returns batch, heads, positions and width.
    fn sizes(self, tensor: &Tensor) -> Result<[usize; 4]> {
        let (batch, first, second, width) = tensor.dims4()?;
        Ok(match self {
            Self::HeadsFirst => [batch, first, second, width],
            Self::TimeFirst => [batch, second, first, width],
        })
    }
}

impl Attend<'_> {
    fn plan_of(&self, order: Order, [q, k, v]: [&Tensor; 3]) -> Result<Option<Attention>> {
        let Some((_, dtype)) = taken(q) else { return Ok(None) };
        alike(&[k, v])?;
        let [batch, heads, queries, width] = order.sizes(q)?;
        let [kv_batch, kv_heads, keys, kv_width] = order.sizes(k)?;
        let fits = [kv_batch, kv_width] == [batch, width]
            && kv_heads > 0
            && heads % kv_heads == 0
            && keys > 0
            && self.first_query.is_none_or(|first| first <= keys.saturating_sub(queries))
            && (!self.causal || queries <= keys)
            && self.window.is_none_or(|window| !self.causal || window > 0)
            && k.dtype() == q.dtype()
            && k.device().same_device(q.device());
        let of_queries = |keys: Option<&Tensor>| match keys {
            None => Ok(0),
            Some(keys) if keys.dims() == [batch, queries] && keys.dtype() == DType::U32 => {
                address(keys)
            }
            Some(_) => Err(Error::other(
                "each query of a sequence needs its first key and its end, as u32",
            )),
        };
        let firsts = of_queries(self.documents.map(|documents| documents.firsts))?;
        let ends = of_queries(self.documents.and_then(|documents| documents.ends))?;
        if !fits {
            return Err(Error::other(format!(
                "no attention of {:?} in {:?} to {:?} in {:?}, causal: {}, with a window of {:?}, from {:?} on",
                q.dims(),
                q.dtype(),
                k.dims(),
                k.dtype(),
                self.causal,
                self.window,
                self.first_query
            )));
        }
        let (group, causal, scale) = (heads / kv_heads, self.causal, self.scale as f32);
        let last_aligned = keys.saturating_sub(queries);
        let of = Attention {
            dtype,
            batch,
            kv_heads,
            group,
            queries,
            keys,
            width,
            first_query: self.first_query.filter(|&first| first != last_aligned),
            causal,
            scale,
            softcap: self.softcap.map(|cap| cap as f32),
            firsts,
            ends,
            window: self.window,
        };
        Ok(Some(of))
    }

    /// Returns the plan of [`attention`], and how many queries to compute at once. `None` if no
    /// kernel supports the tensors or sizes exceed 32 bits.
    fn in_blocks(&self, tensors: [&Tensor; 3]) -> Result<Option<(Attention, usize)>> {
        let Some(of) = self.plan_of(Order::HeadsFirst, tensors)? else { return Ok(None) };
        let at_once = of.queries_within(SCORES_BYTES);
        // Sizes that launches and cuBLAS count in 32 bits.
        let heads = of.kv_heads * of.group;
        let rows = of.batch * heads * at_once;
        let counted = [of.group * of.queries, of.keys, of.width, of.batch * of.kv_heads, rows];
        Ok(counted.iter().all(|&n| i32::try_from(n).is_ok()).then_some((of, at_once)))
    }

    /// Returns the plan of [`flash_attention`], or `None` if no kernel supports it.
    fn flash(&self, [q, k, v]: [&Tensor; 3]) -> Result<Option<Attention>> {
        let Some((device, _)) = taken(q) else { return Ok(None) };
        let Some(of) = self.plan_of(Order::TimeFirst, [q, k, v])? else { return Ok(None) };
        // Asynchronous copies to shared memory and bf16 tensor cores need compute capability 8.0.
        let context = device.cuda_stream().context().clone();
        let (major, _) = context.compute_capability().w()?;
        if !of.is_flash() || major < 8 {
            if cudnn::is_wanted()? {
                cudnn::not_asked(&of, major);
            }
            return Ok(None);
        }
        // A block can ask for 99 KiB or more on GPUs from 8.0 on, which is enough, but possibly for
        // less on a GPU slice.
        let most = Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let most = usize::try_from(context.attribute(most).w()?).unwrap_or(0);
        // Sizes that the kernels count in 32 bits: rows, and elements between neighbouring rows.
        let rows = of.batch * of.kv_heads * of.group * of.queries.max(of.keys);
        let is_counted =
            [rows, of.kv_heads * of.group * of.width].iter().all(|&n| i32::try_from(n).is_ok());
        Ok((is_counted && of.flash_shared_bytes() <= most).then_some(of))
    }

    /// Returns the keys of the documents of some queries.
    fn seen(&self, queries: Range<usize>) -> Range<usize> {
        self.documents.map_or(0..usize::MAX, |documents| (documents.seen)(queries))
    }
}

/// Returns a contiguous tensor that is aligned to 16 bytes, copying if necessary.
fn aligned(x: &Tensor) -> Result<Tensor> {
    let x = x.contiguous()?;
    match address(&x)?.is_multiple_of(16) {
        true => Ok(x),
        false => Ok(x.force_contiguous()?),
    }
}

/// Whether [`flash_attention`] supports these tensors.
///
/// # Errors
/// If their shapes do not fit.
pub fn takes_flash(of: Attend<'_>, tensors: [&Tensor; 3]) -> Result<bool> {
    Ok(of.flash(tensors)?.is_some())
}

/// Computes [`attention`] without scores in memory. The inputs and the output are
/// `[batch, time, heads, width]`; the log-sum-exp is f32 `[batch, heads, queries]`. Returns `None`
/// if no kernel supports the tensors, or the GPU lacks the tensor cores. cuDNN computes it if it is
/// [chosen](crate::cudnn::AttentionKernels) and makes a plan.
///
/// # Errors
/// As [`attention`].
pub fn flash_attention(
    of: Attend<'_>,
    [q, k, v]: [&Tensor; 3],
) -> Result<Option<(Tensor, Tensor)>> {
    let (Some((device, _)), Some(plan)) = (taken(q), of.flash([q, k, v])?) else {
        return Ok(None);
    };
    let (q, k, v) = (aligned(q)?, aligned(k)?, aligned(v)?);
    if cudnn::is_wanted()?
        && let Some(attended) = cudnn::attention(&plan, device, [&q, &k, &v])?
    {
        return Ok(Some(attended));
    }
    let y = output(&q)?;
    let (batch, queries, heads, _) = q.dims4()?;
    let lse = Tensor::zeros((batch, heads, queries), DType::F32, q.device())?;
    let inputs = [address(&q)?, address(&k)?, address(&v)?];
    let plan = plans::flash_attention(&plan, inputs, address(&y)?, address(&lse)?);
    carry_out(&plan, device, &[&q, &k, &v, &y, &lse])?;
    Ok(Some((y, lse)))
}

/// Computes the gradients of [`flash_attention`]'s q, k and v, in their dtype. `y` and `lse` are
/// its results.
///
/// # Errors
/// As [`attention`].
pub fn flash_attention_backward(
    of: Attend<'_>,
    [q, k, v]: [&Tensor; 3],
    [y, lse]: [&Tensor; 2],
    grad: &Tensor,
) -> Result<Option<[Tensor; 3]>> {
    let (Some((device, _)), Some(plan)) = (taken(q), of.flash([q, k, v])?) else {
        return Ok(None);
    };
    alike(&[q, y, grad])?;
    let (batch, queries, heads, _) = q.dims4()?;
    check_lse(q, lse, [batch, heads, queries])?;
    let (q, k, v) = (aligned(q)?, aligned(k)?, aligned(v)?);
    let (y, lse, grad) = (aligned(y)?, aligned(lse)?, aligned(grad)?);
    if cudnn::is_wanted()?
        && let Some(grads) =
            cudnn::attention_backward(&plan, device, [&q, &k, &v], [&y, &lse, &grad])?
    {
        return Ok(Some(grads));
    }
    let (dq, dk, dv) = (output(&q)?, output(&k)?, output(&v)?);
    let plan = plans::flash_attention_backward(
        &plan,
        [address(&q)?, address(&k)?, address(&v)?],
        [address(&y)?, address(&lse)?, address(&grad)?],
        [address(&dq)?, address(&dk)?, address(&dv)?],
    );
    carry_out(&plan, device, &[&q, &k, &v, &y, &lse, &grad, &dq, &dk, &dv])?;
    Ok(Some([dq, dk, dv]))
}

fn check_lse(q: &Tensor, lse: &Tensor, shape: [usize; 3]) -> Result<()> {
    match lse.dims() == shape && lse.dtype() == DType::F32 {
        true => Ok(()),
        false => Err(Error::other(format!(
            "attention of {:?} has no log-sum-exp of {:?}",
            q.dims(),
            lse.shape()
        ))),
    }
}

/// Computes the output, `[batch, heads, queries, width]`, and the log-sum-exp of each query's
/// scores, f32 `[batch, heads, queries]`. The number of query heads is a multiple of the number of
/// key heads. Returns `None` if no kernel supports the tensors.
///
/// # Errors
/// If shapes do not fit, memory runs out, or a launch fails.
pub fn attention(of: Attend<'_>, [q, k, v]: [&Tensor; 3]) -> Result<Option<(Tensor, Tensor)>> {
    let (Some((device, _)), Some((plan, at_once))) = (taken(q), of.in_blocks([q, k, v])?) else {
        return Ok(None);
    };
    let (q, k, v) = (q.contiguous()?, k.contiguous()?, v.contiguous()?);
    let y = output(&q)?;
    let (batch, heads, queries, _) = q.dims4()?;
    let lse = Tensor::zeros((batch, heads, queries), DType::F32, q.device())?;
    let inputs = [address(&q)?, address(&k)?, address(&v)?];
    let seen = |queries| of.seen(queries);
    let plan = plans::attention(&plan, at_once, &seen, inputs, address(&y)?, address(&lse)?);
    carry_out(&plan, device, &[&q, &k, &v, &y, &lse])?;
    Ok(Some((y, lse)))
}

/// Computes the gradients of [`attention`]: for q in its dtype, for k and v in f32. `lse` is a
/// result of [`attention`].
///
/// # Errors
/// As [`attention`].
pub fn attention_backward(
    of: Attend<'_>,
    [q, k, v]: [&Tensor; 3],
    lse: &Tensor,
    grad: &Tensor,
) -> Result<Option<[Tensor; 3]>> {
    let (Some((device, _)), Some((plan, at_once))) = (taken(q), of.in_blocks([q, k, v])?) else {
        return Ok(None);
    };
    alike(&[q, grad])?;
    let (batch, heads, queries, _) = q.dims4()?;
    check_lse(q, lse, [batch, heads, queries])?;
    let (q, k, v) = (q.contiguous()?, k.contiguous()?, v.contiguous()?);
    let (lse, grad) = (lse.contiguous()?, grad.contiguous()?);
    let dq = output(&q)?;
    let [dk, dv] = [&k, &v].map(|x| Tensor::zeros(x.shape(), DType::F32, x.device()));
    let (dk, dv) = (dk?, dv?);
    let plan = plans::attention_backward(
        &plan,
        at_once,
        &|queries| of.seen(queries),
        [address(&q)?, address(&k)?, address(&v)?],
        [address(&grad)?, address(&lse)?],
        [address(&dq)?, address(&dk)?, address(&dv)?],
    );
    carry_out(&plan, device, &[&q, &k, &v, &grad, &lse, &dq, &dk, &dv])?;
    Ok(Some([dq, dk, dv]))
}
