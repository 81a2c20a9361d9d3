//! Attention that is not causal, of a sequence to itself or to another one.

use candle_core::Tensor;

use super::documents::Documents;
use super::functional::{attention, masked_attention};
use super::kv_cache::CachedTokens;
use super::linear::Linear;
use super::rope::Rope;
use super::sizes::check_sizes;
use crate::{Error, Result};
use fulgurite_engine::module::{Module, ModuleBuilder};
use fulgurite_engine::parameter::Init;

/// The shape of a [`MultiHeadAttention`].
///
/// ```
/// use fulgurite_core::nn::MultiHeadAttentionConfig;
///
/// let config =
///     MultiHeadAttentionConfig { context_size: 768, ..MultiHeadAttentionConfig::new(256, 8) };
/// assert_eq!((config.num_kv_heads, config.bias), (8, true));
/// ```
#[derive(Debug, Clone)]
pub struct MultiHeadAttentionConfig {
    /// Width of queries, input and output.
    pub hidden_size: usize,
    /// Number of heads; it divides `hidden_size`.
    pub num_heads: usize,
    /// Number of key and value heads; it divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of the context, which keys and values are computed from.
    pub context_size: usize,
    /// Whether the projections have biases.
    pub bias: bool,
    /// A rotary position embedding of queries and keys, with positions from 0. For attention of a
    /// sequence to itself.
    pub rope: Option<Rope>,
    /// Initial values of the projections' weights; `None` for the default of [`Linear::new`].
    /// Biases start at zero.
    pub init: Option<Init>,
}

impl MultiHeadAttentionConfig {
    /// Attention of a sequence to itself, or to one of the same width, with biases and one key and
    /// value head per head: PyTorch's `nn.MultiheadAttention(hidden_size, num_heads)`.
    pub fn new(hidden_size: usize, num_heads: usize) -> Self {
        Self {
            hidden_size,
            num_heads,
            num_kv_heads: num_heads,
            context_size: hidden_size,
            bias: true,
            rope: None,
            init: None,
        }
    }
}

/// Attention in which every query attends to every key, or to the keys that a mask allows: the
/// attention of encoders, and from a decoder to an encoder. Projections `q_proj`, `k_proj`,
/// `v_proj` and `o_proj`.
///
/// [`forward`](Module::forward) is attention of a sequence to itself without a mask;
/// [`attend`](Self::attend) takes another sequence and a mask. For causal attention,
/// [`CausalSelfAttention`](super::CausalSelfAttention) is faster, and supports context parallelism,
/// [`Documents`] and windows; with `causal: false` it is attention of encoders.
///
/// The projections are separate layers. In a tensor-parallel plan, `q_proj`, `k_proj` and `v_proj`
/// are colwise with output `shard(-1)`, and `o_proj` is rowwise. The number of ranks must divide
/// both numbers of heads.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fulgurite_core::module::{Module, ModuleBuilder, ModuleInit};
/// # use fulgurite_core::autograd::storage;
/// use fulgurite_core::nn::{MultiHeadAttention, MultiHeadAttentionConfig};
///
/// let b = ModuleBuilder::new(ModuleInit::default());
/// let attn = MultiHeadAttention::new(&b.pp("attn"), &MultiHeadAttentionConfig::new(16, 4))?;
/// # for slot in b.finish()?.slots() { storage::allocate(slot.compute()?)?; }
/// let x = Tensor::zeros((2, 5, 16), DType::F32, &Device::Cpu)?;
/// let context = Tensor::zeros((2, 7, 16), DType::F32, &Device::Cpu)?;
/// let seen = Tensor::ones((2, 7), DType::U8, &Device::Cpu)?; // 0 at padding
/// assert_eq!(attn.forward(&x)?.dims(), [2, 5, 16]);
/// assert_eq!(attn.attend(&x, &context, Some(&seen))?.dims(), [2, 5, 16]);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct MultiHeadAttention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    head_dim: usize,
    rope: Option<Rope>,
    path: String,
}

impl MultiHeadAttention {
    /// A layer of this shape.
    ///
    /// # Errors
    /// If a size is 0, the heads do not divide the hidden size, or the key and value heads do not
    /// divide the heads. Also if `rope` is for another head size or the context has
    /// another width, or if the path of a projection has a layer already.
    pub fn new(b: &ModuleBuilder, config: &MultiHeadAttentionConfig) -> Result<Self> {
        let MultiHeadAttentionConfig { hidden_size, num_heads, num_kv_heads, context_size, .. } =
            *config;
        let wrong = |message: String| Err(Error::module(b.path(), message));
        check_sizes(
            b,
            &[
                ("hidden_size", hidden_size),
                ("num_heads", num_heads),
                ("num_kv_heads", num_kv_heads),
                ("context_size", context_size),
            ],
        )?;
        if !hidden_size.is_multiple_of(num_heads) {
            return wrong(format!(
                "{num_heads} heads do not divide a hidden size of {hidden_size}"
            ));
        }
        if !num_heads.is_multiple_of(num_kv_heads) {
            return wrong(format!(
                "{num_heads} attention heads cannot share {num_kv_heads} key and value heads; the \
                 second number must divide the first"
            ));
        }
        let head_dim = hidden_size / num_heads;
        if let Some(rope) = &config.rope {
            if rope.head_dim() != head_dim {
                return wrong(format!(
                    "the rotary embedding is for heads of {} elements, the attention has heads of \
                     {head_dim}",
                    rope.head_dim()
                ));
            }
            if context_size != hidden_size {
                return wrong(format!(
                    "a rotary embedding is for attention of a sequence to itself; here queries are made \
                     of {hidden_size} elements and keys of {context_size}"
                ));
            }
        }
        let project = |name: &str, inputs, outputs| {
            let b = b.pp(name);
            let init = config.init.unwrap_or(Init::kaiming_uniform(inputs));
            let linear = Linear::with_init(&b, inputs, outputs, init)?;
            if config.bias { linear.add_bias(&b, Init::ZEROS) } else { Ok(linear) }
        };
        Ok(Self {
            q_proj: project("q_proj", hidden_size, hidden_size)?,
            k_proj: project("k_proj", context_size, num_kv_heads * head_dim)?,
            v_proj: project("v_proj", context_size, num_kv_heads * head_dim)?,
            o_proj: project("o_proj", hidden_size, hidden_size)?,
            head_dim,
            rope: config.rope.clone(),
            path: b.path().to_owned(),
        })
    }

    /// Attends from `x`, `[batch, queries, hidden_size]`, to `context`,
    /// `[batch, keys, context_size]`. The same tensor twice is attention of a sequence to itself.
    /// The output has the shape of `x`.
    ///
    /// `mask`, in u8, is 1 where a query attends to a key and 0 elsewhere. Its shape is
    /// `[batch, keys]` for all queries alike (0 at padding), `[batch or 1, queries, keys]`, or
    /// `[batch or 1, heads or 1, queries, keys]`. The mask receives no gradient. A query without
    /// any key gives zeros before `o_proj`. With a mask all probabilities are kept for backward,
    /// `batch * heads * queries * keys` numbers.
    ///
    /// # Errors
    /// If shapes or dtypes do not fit. Also with [`Documents`] in force, which are not supported (a
    /// mask can express them), and under context parallelism, which keeps other keys on other
    /// ranks.
    pub fn attend(&self, x: &Tensor, context: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
        self.compute(x, context, mask).map_err(|error| error.in_module(&self.path))
    }

    fn compute(&self, x: &Tensor, context: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
        // One cast for all projections, so the gradient is cast back once.
        let cast = |projection: &Linear, x: &Tensor| {
            projection.layer().cast_input(x, projection.layer().output_dtype(x.dtype()))
        };
        let own = cast(&self.q_proj, x)?;
        let context = match context.id() == x.id() {
            true => own.clone(),
            false => cast(&self.k_proj, context)?,
        };
        let (x, context) = (&own, &context);
        for x in [x, context] {
            if x.rank() != 3 {
                return Err(Error::other(format!(
                    "expected inputs of shape [batch, time, width], got {:?}",
                    x.dims()
                )));
            }
        }
        if Documents::any() {
            return Err(Error::other(
                "documents of packed sequences are in force, which this attention does not know; give it \
                 a mask that keeps them apart, outside of `Documents::enter`, or use CausalSelfAttention",
            ));
        }
        if CachedTokens::current().is_some() {
            return Err(Error::other(
                "a cache of keys and values is in force, which this attention does not know; use \
                 CausalSelfAttention",
            ));
        }
        let heads = |projection: &Linear, x: &Tensor| -> Result<Tensor> {
            let y = projection.forward(x)?;
            let (batch, time, width) = y.dims3()?;
            let y = y.reshape((batch, time, width / self.head_dim, self.head_dim))?;
            Ok(y.transpose(1, 2)?.contiguous()?)
        };
        let mut q = heads(&self.q_proj, x)?;
        let mut k = heads(&self.k_proj, context)?;
        let v = heads(&self.v_proj, context)?;
        if let Some(rope) = &self.rope {
            (q, k) = (rope.forward(&q, 0)?, rope.forward(&k, 0)?);
        }
        let scale = 1.0 / (self.head_dim as f64).sqrt();
        let y = match mask {
            None => attention(&q, &k, &v, scale, false)?,
            Some(mask) => masked_attention(&q, &k, &v, scale, mask)?,
        };
        self.o_proj.forward(&y.transpose(1, 2)?.contiguous()?.flatten_from(2)?)
    }
}

impl Module for MultiHeadAttention {
    /// Attention of a sequence to itself, without a mask.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.attend(x, x, None)
    }
}
