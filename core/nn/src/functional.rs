//! Differentiable functions of tensors, including some whose counterparts in candle_nn lack a
//! backward.
//!
//! ```
//! use candle_core::{Device, Tensor, Var};
//! use fulgurite_core::nn::functional::softmax_last_dim;
//!
//! let x = Var::new(&[[1f32, 2., 3.]], &Device::Cpu)?;
//! let first = softmax_last_dim(&x)?.narrow(1, 0, 1)?;
//! assert!(first.sum_all()?.backward()?.get(&x).is_some()); // candle_nn's has no gradient
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

use candle_core::{DType, Tensor};

use super::kernels::activation::{self, Activation};
use super::kernels::attention::{AttentionOutput, DotProductAttention, attention_sizes};
use super::kernels::masked_attention::MaskedAttention;
use super::kernels::norm::Norm;
use super::kernels::rope::Angles;
use super::kernels::softmax;
use super::norm::{eps_message, is_eps};
use crate::{Error, Result};
use fulgurite_engine::autograd::{self, save_for_backward};
use fulgurite_engine::module::ForwardScope;
use fulgurite_engine::parallel::record_function;

/// Softmax over the last dimension.
pub fn softmax_last_dim(x: &Tensor) -> Result<Tensor> {
    let y = softmax::softmax(&x.detach())?;
    record_function(&[x], y, |y, grad| Ok(vec![Some(softmax::softmax_backward(y, grad)?)]))
}

fn activate(x: &Tensor, activation: Activation) -> Result<Tensor> {
    let saved = x.detach();
    let y = activation.forward(&saved)?;
    record_function(&[x], y, move |_, grad| Ok(vec![Some(activation.backward(&saved, grad)?)]))
}

/// `x * sigmoid(x)`.
pub fn silu(x: &Tensor) -> Result<Tensor> {
    activate(x, Activation::Silu)
}

/// GELU with the exact error function, like `torch.nn.functional.gelu`.
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    activate(x, Activation::Gelu)
}

/// GELU's tanh approximation, as in GPT-2: `gelu_new` of transformers.
pub fn gelu_tanh(x: &Tensor) -> Result<Tensor> {
    activate(x, Activation::GeluTanh)
}

/// `max(x, 0)`, whose slope at 0 is 0.
pub fn relu(x: &Tensor) -> Result<Tensor> {
    activate(x, Activation::Relu)
}

/// `log(1 + exp(x))`, like `torch.nn.functional.softplus`: the cross entropy of the logit `x` with
/// the target 0, and `-log sigmoid(-x)`.
///
/// Its slope is `sigmoid(x)`, at 0 too. A formula of `relu` and `abs` has another slope there,
/// since candle takes 1 for the slopes of both.
pub fn softplus(x: &Tensor) -> Result<Tensor> {
    let saved = x.detach();
    let y = (saved.relu()? + (saved.abs()?.neg()?.exp()? + 1.0)?.log()?)?;
    record_function(&[x], y, move |_, grad| {
        let slope = (saved.neg()?.exp()? + 1.0)?.recip()?;
        Ok(vec![Some((grad * slope)?)])
    })
}

/// `x + y`, of one shape and dtype: a residual connection.
///
/// The gradient is handed to both inputs as it is. candle's `x + y` adds it to zeros for each of
/// them. Its sums in bf16 are slow, and on some CPUs lose denormals.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use fulgurite_core::nn::functional::{add, silu};
///
/// let x = Var::new(&[0f32, 1.], &Device::Cpu)?;
/// let y = add(&x, &silu(&x)?)?;
/// assert!(y.sum_all()?.backward()?.get(&x).is_some());
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
///
/// # Errors
/// If shapes or dtypes differ. Under a tensor-parallel plan also if the layouts do, which with
/// gradients is found by the layer that takes the sum.
pub fn add(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    check_alike("add", x, y)?;
    record_function(&[x, y], autograd::sum(x, y)?, |_, grad| Ok(vec![Some(grad.clone()); 2]))
}

fn check_alike(function: &str, x: &Tensor, y: &Tensor) -> Result<()> {
    if x.dims() == y.dims() && x.dtype() == y.dtype() {
        return Ok(());
    }
    Err(Error::other(format!(
        "{function} takes two tensors of one shape and dtype, got {:?} {:?} and {:?} {:?}",
        x.dims(),
        x.dtype(),
        y.dims(),
        y.dtype()
    )))
}

/// `silu(gate) * up`; both have the same shape.
///
/// # Errors
/// If the shapes differ.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    check_alike("swiglu", gate, up)?;
    let (saved_gate, saved_up) = (gate.detach(), up.detach());
    let y = activation::gated(Activation::Silu, &saved_gate, &saved_up)?;
    record_function(&[gate, up], y, move |_, grad| {
        let (dgate, dup) =
            activation::gated_backward(Activation::Silu, &saved_gate, &saved_up, grad)?;
        Ok(vec![Some(dgate), Some(dup)])
    })
}

/// `x / sqrt(mean(x^2) + eps) * weight` over the last dimension; `weight` is `[width]`.
///
/// # Errors
/// If the weight has another size than the last dimension, or `eps` is negative or not finite.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    norm(x, weight, None, Norm { center: false, eps, unit_offset: false })
}

/// `(x - mean) / sqrt(variance + eps) * weight + bias` over the last dimension; `weight` and `bias`
/// are `[width]`.
///
/// # Errors
/// If weight or bias has another size than the last dimension, or `eps` is negative or not finite.
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    norm(x, weight, bias, Norm { center: true, eps, unit_offset: false })
}

fn norm(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, norm: Norm) -> Result<Tensor> {
    if !is_eps(norm.eps) {
        return Err(Error::other(eps_message(norm.eps)));
    }
    for vector in std::iter::once(weight).chain(bias) {
        if vector.rank() != 1 || x.dims().last() != vector.dims().last() {
            return Err(Error::other(format!(
                "a norm over the last dimension of {:?} got a weight or bias of shape {:?}",
                x.dims(),
                vector.dims()
            )));
        }
    }
    let (saved, saved_weight) = (x.detach(), weight.detach());
    let (y, stats) = norm.forward(&saved, &saved_weight, bias.map(Tensor::detach).as_ref())?;
    let inputs: Vec<&Tensor> = [x, weight].into_iter().chain(bias).collect();
    let with_bias = bias.is_some();
    let dtype = weight.dtype();
    record_function(&inputs, y, move |_, grad| {
        let grads = norm.backward(&saved, &saved_weight, with_bias, &stats, grad, None)?;
        let cast = |t: Tensor| t.to_dtype(dtype).map(Some);
        let mut all = vec![Some(grads.x), cast(grads.weight)?];
        if let Some(bias) = grads.bias {
            all.push(cast(bias)?);
        }
        Ok(all)
    })
}

/// Rotates the pairs (i, i + head_dim / 2) of `x` (`[.., time, head_dim]`) by angles, given as
/// cosines and sines (`[time, head_dim / 2]`). The angles receive no gradient. Same as
/// `rotary_emb::rope` of candle_nn.
///
/// # Errors
/// If the shapes do not fit.
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let fits = match *x.dims() {
        [.., time, dim] => {
            let want = [time, dim / 2];
            dim > 0 && dim.is_multiple_of(2) && cos.dims() == want && sin.dims() == want
        }
        _ => false,
    };
    if !fits {
        return Err(Error::other(format!(
            "rope takes x [.., time, head_dim] and cos and sin [time, head_dim / 2], got {:?}, \
             {:?} and {:?}",
            x.dims(),
            cos.dims(),
            sin.dims()
        )));
    }
    super::rope::apply(x, Angles { cos: cos.detach(), sin: sin.detach() })
}

/// `softmax(scale q k^T) v`, with `q` of shape `[batch, heads, queries, head_dim]`, and `k` and `v`
/// of shape `[batch, kv_heads, keys, head_dim]`. Each group of `heads / kv_heads` query heads
/// shares a key and value head. With `causal`, the last query is at the position of the last key,
/// and each query attends to the keys up to its own position. The output has the shape of `q`.
///
/// Backward needs one saved number per query, besides inputs and output. On the CPU, heads are
/// computed in parallel. Each running head has a copy of its keys and values, and the scores of 128
/// queries. In backward it has twice that, and the gradients of keys and values.
///
/// # Errors
/// If shapes or dtypes do not fit. Also under context parallelism, which spreads the keys of a
/// sequence over ranks; [`CausalSelfAttention`](super::CausalSelfAttention) gathers them.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, causal: bool) -> Result<Tensor> {
    check_whole_sequences("attention")?;
    attend_to(DotProductAttention::new(scale, causal), q, k, v)
}

/// Causal [`attention`] with a limit: a query attends to `window` keys at most, including its own,
/// like Mistral's `sliding_window` in `transformers`. A window of at least the number of keys is
/// the same as causal attention.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fulgurite_core::nn::functional::sliding_window_attention;
///
/// // All scores are 0, so the output is the mean of the visible values.
/// let zeros = Tensor::zeros((1, 1, 4, 1), candle_core::DType::F32, &Device::Cpu)?;
/// let v = Tensor::new(&[[[[0f32], [2.], [4.], [6.]]]], &Device::Cpu)?;
/// let y = sliding_window_attention(&zeros, &zeros, &v, 1.0, 2)?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [0.0, 1.0, 3.0, 5.0]);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
///
/// # Errors
/// As [`attention`], and if the window is 0.
pub fn sliding_window_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f64,
    window: usize,
) -> Result<Tensor> {
    check_whole_sequences("sliding_window_attention")?;
    if window == 0 {
        return Err(Error::other(
            "a sliding window of 0 keys has not even a query's own; expected at least 1",
        ));
    }
    let window = Some(window);
    attend_to(DotProductAttention { window, ..DotProductAttention::new(scale, true) }, q, k, v)
}

fn attend_to(attend: DotProductAttention, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let [q, k, v] = [q.transpose(1, 2)?, k.transpose(1, 2)?, v.transpose(1, 2)?];
    let [sq, sk, sv] = [q.detach(), k.detach(), v.detach()];
    let AttentionOutput { output, lse } = attend.forward(&sq, &sk, &sv)?;
    let y = record_function(&[&q, &k, &v], output, move |output, grad| {
        let attended = AttentionOutput { output: output.detach(), lse: lse.clone() };
        let grads = attend.backward([&sq, &sk, &sv], &attended, grad)?;
        Ok(grads.map(Some).to_vec())
    })?;
    Ok(y.transpose(1, 2)?)
}

fn check_whole_sequences(name: &str) -> Result<()> {
    if ForwardScope::current().context.is_none() {
        return Ok(());
    }
    Err(Error::other(format!(
        "`functional::{name}` sees this rank's part of the sequence only, and context_parallel_size is \
         above 1; use `CausalSelfAttention`"
    )))
}

/// [`attention`] of each query to the keys that `mask` allows. The mask is u8, with 1 where a query
/// attends to a key and 0 elsewhere. Its shape is `[batch, keys]` for all queries alike,
/// `[batch or 1, queries, keys]` or `[batch or 1, heads or 1, queries, keys]`. The mask receives no
/// gradient. A query without any key gives zeros.
///
/// All probabilities are saved for backward, `batch * heads * queries * keys` numbers.
///
/// # Errors
/// As [`attention`], and if the mask has another shape or dtype.
pub fn masked_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f64,
    mask: &Tensor,
) -> Result<Tensor> {
    attend_explicitly("masked_attention", [q, k, v], scale, Some(mask), None)
}

/// `softmax(scale q k^T + bias) v`, as [`attention`] and [`masked_attention`]: attention with a
/// learned term of its scores, such as [`RelativePositionBias`](super::RelativePositionBias).
///
/// `bias` is `[batch or 1, heads or 1, queries or 1, keys]`, and receives a gradient.
///
/// All probabilities are saved for backward, `batch * heads * queries * keys` numbers.
///
/// # Errors
/// As [`masked_attention`], and if the bias has another shape.
pub fn biased_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f64,
    bias: &Tensor,
    mask: Option<&Tensor>,
) -> Result<Tensor> {
    attend_explicitly("biased_attention", [q, k, v], scale, mask, Some(bias))
}

fn attend_explicitly(
    name: &str,
    [q, k, v]: [&Tensor; 3],
    scale: f64,
    mask: Option<&Tensor>,
    bias: Option<&Tensor>,
) -> Result<Tensor> {
    check_whole_sequences(name)?;
    // The check of the other kernel, in which heads follow positions.
    let [tq, tk, tv] = [q.transpose(1, 2)?, k.transpose(1, 2)?, v.transpose(1, 2)?];
    attention_sizes(&tq, &tk, &tv)?;
    let (batch, heads, queries, _) = q.dims4()?;
    let sizes = [batch, heads, queries, k.dim(2)?];
    let mask = mask.map(|mask| attention_mask(mask, sizes)).transpose()?;
    if let Some(bias) = bias.filter(|bias| bias.rank() != 4 || !fits(bias, sizes)) {
        let [_, _, _, keys] = sizes;
        return Err(Error::other(format!(
            "attention of {queries} queries to {keys} keys, of {heads} heads and a batch of {batch}, takes \
             a bias of shape [batch or 1, heads or 1, queries or 1, keys], got {:?}",
            bias.dims()
        )));
    }
    let attend = MaskedAttention { scale, mask, bias: bias.map(Tensor::detach) };
    let [sq, sk, sv] = [q.detach(), k.detach(), v.detach()];
    let (output, probabilities) = attend.forward([&sq, &sk, &sv])?;
    save_for_backward(&[&probabilities]);
    let Some(bias) = bias else {
        return record_function(&[q, k, v], output, move |_, grad| {
            let grads = attend.backward([&sq, &sk, &sv], &probabilities, grad)?;
            Ok(grads.inputs.map(Some).to_vec())
        });
    };
    // An operation of the graph has three inputs at most.
    let keys_values = Tensor::cat(&[k, v], 3)?;
    record_function(&[q, &keys_values, bias], output, move |_, grad| {
        let grads = attend.backward([&sq, &sk, &sv], &probabilities, grad)?;
        let [dq, dk, dv] = grads.inputs;
        Ok(vec![Some(dq), Some(Tensor::cat(&[dk, dv], 3)?), grads.bias])
    })
}

/// Whether each size of a tensor of four dimensions is the wanted one or 1, and the last the wanted
/// one.
fn fits(tensor: &Tensor, sizes: [usize; 4]) -> bool {
    let each = |(&got, want): (&usize, usize)| got == want || got == 1;
    tensor.dims().iter().zip(sizes).all(each) && tensor.dims()[3] == sizes[3]
}

/// Returns the mask with dimensions `[batch, heads, queries, keys]`, each of that size or 1.
fn attention_mask(mask: &Tensor, sizes: [usize; 4]) -> Result<Tensor> {
    let [batch, heads, queries, keys] = sizes;
    let wrong = || {
        Error::other(format!(
            "attention of {queries} queries to {keys} keys, of {heads} heads and a batch of {batch}, takes \
             a mask in U8 of shape [batch, keys], [batch or 1, queries, keys] or [batch or 1, heads or 1, \
             queries, keys], got {:?} in {:?}",
            mask.dims(),
            mask.dtype()
        ))
    };
    let mask = match (mask.dtype(), mask.rank()) {
        (DType::U8, 2) => mask.unsqueeze(1)?.unsqueeze(1)?,
        (DType::U8, 3) => mask.unsqueeze(1)?,
        (DType::U8, 4) => mask.clone(),
        _ => return Err(wrong()),
    };
    if fits(&mask, sizes) { Ok(mask.detach()) } else { Err(wrong()) }
}
