//! Attention that is not causal, of a sequence to itself or to another one.

use candle_core::Tensor;

use super::documents::Documents;
use super::functional::{attention, biased_attention, masked_attention};
use super::kv_cache::CachedTokens;
use super::linear::Linear;
use super::rope::Rope;
use super::sizes::check_sizes;
use crate::{Error, Result};
use fulgurite_engine::module::{Activations, Module, ModuleBuilder};
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
    /// Number of heads.
    pub num_heads: usize,
    /// Number of key and value heads; it divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of one head; `None` for `hidden_size / num_heads`.
    pub head_dim: Option<usize>,
    /// Width of the context, which keys and values are computed from.
    pub context_size: usize,
    /// Whether the projections have biases.
    pub bias: bool,
    /// A rotary position embedding of queries and keys, with positions from 0. For attention of a
    /// sequence to itself.
    pub rope: Option<Rope>,
    /// Factor of the scores; `None` is `1 / sqrt(head_dim)`.
    pub scale: Option<f64>,
    /// Initial values of the projections' weights; `None` for the default of [`Linear::new`].
    /// Biases start at zero.
    pub init: Option<Init>,
    /// Initial values of `q_proj`'s weight, if they differ from the others'.
    pub query_init: Option<Init>,
    /// Initial values of `o_proj`'s weight, if they differ from the others'.
    pub output_init: Option<Init>,
}

impl MultiHeadAttentionConfig {
    /// Attention of a sequence to itself, or to one of the same width, with biases and one key and
    /// value head per head: PyTorch's `nn.MultiheadAttention(hidden_size, num_heads)`.
    pub fn new(hidden_size: usize, num_heads: usize) -> Self {
        Self {
            hidden_size,
            num_heads,
            num_kv_heads: num_heads,
            head_dim: None,
            context_size: hidden_size,
            bias: true,
            rope: None,
            scale: None,
            init: None,
            query_init: None,
            output_init: None,
        }
    }
}

/// Attention in which every query attends to every key, or to the keys that a mask allows: the
/// attention of encoders, and from a decoder to an encoder. Projections `q_proj`, `k_proj`,
/// `v_proj` and `o_proj`.
///
/// [`forward`](Module::forward) is attention of a sequence to itself without a mask;
/// [`attend`](Self::attend) takes another sequence and a mask. [`keys_values`](Self::keys_values)
/// and [`attend_to`](Self::attend_to) are its two halves, for keys that are used again, and for a
/// learned term of the scores. For causal attention,
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
    scale: f64,
    rope: Option<Rope>,
    path: String,
}

/// The keys and values of a context, which [`MultiHeadAttention::attend_to`] takes.
#[derive(Debug, Clone)]
pub struct KeysValues {
    /// `[batch, key and value heads, keys, head_dim]`.
    keys: Tensor,
    values: Tensor,
}

impl Activations for KeysValues {
    fn map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self { keys: f(&self.keys)?, values: f(&self.values)? })
    }
}

impl KeysValues {
    /// Returns these keys and values, and behind them later ones of the same sequences.
    ///
    /// # Errors
    /// If they are of another batch or layer.
    pub fn followed_by(&self, later: &Self) -> Result<Self> {
        let both = |first: &Tensor, then: &Tensor| Tensor::cat(&[first, then], 2);
        Ok(Self {
            keys: both(&self.keys, &later.keys)?,
            values: both(&self.values, &later.values)?,
        })
    }

    /// Returns the keys and values of these sequences, u32 of one dimension.
    ///
    /// # Errors
    /// If one is not below the batch.
    pub fn rows(&self, sequences: &Tensor) -> Result<Self> {
        let pick = |x: &Tensor| x.contiguous()?.index_select(sequences, 0);
        Ok(Self { keys: pick(&self.keys)?, values: pick(&self.values)? })
    }

    /// Number of keys.
    pub fn count(&self) -> usize {
        self.keys.dims()[2]
    }
}

impl MultiHeadAttention {
    /// A layer of this shape.
    ///
    /// # Errors
    /// - A size is 0, or `scale` is not a positive number.
    /// - The heads do not divide the hidden size, and have no width of their own.
    /// - The key and value heads do not divide the heads.
    /// - `rope` is for another head size, or is given for a context of another width than `x`.
    /// - The path of a projection has a layer already.
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
                ("head_dim", config.head_dim.unwrap_or(usize::MAX)),
            ],
        )?;
        if let Some(scale) = config.scale.filter(|x| !(*x > 0.0 && *x <= f64::from(f32::MAX))) {
            return wrong(format!("scale must be a positive number, got {scale:?}"));
        }
        if config.head_dim.is_none() && !hidden_size.is_multiple_of(num_heads) {
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
        let head_dim = config.head_dim.unwrap_or(hidden_size / num_heads);
        let Some(width) = num_heads.checked_mul(head_dim) else {
            return wrong(format!(
                "{num_heads} heads of {head_dim} elements are more elements than can be counted"
            ));
        };
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
            let own = match name {
                "q_proj" => config.query_init,
                "o_proj" => config.output_init,
                _ => None,
            };
            let init = own.or(config.init).unwrap_or(Init::kaiming_uniform(inputs));
            let linear = Linear::with_init(&b, inputs, outputs, init)?;
            if config.bias { linear.add_bias(&b, Init::ZEROS) } else { Ok(linear) }
        };
        Ok(Self {
            q_proj: project("q_proj", hidden_size, width)?,
            k_proj: project("k_proj", context_size, num_kv_heads * head_dim)?,
            v_proj: project("v_proj", context_size, num_kv_heads * head_dim)?,
            o_proj: project("o_proj", width, hidden_size)?,
            head_dim,
            scale: config.scale.unwrap_or(1.0 / (head_dim as f64).sqrt()),
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
        self.attend_once(x, context, None, mask)
    }

    /// [`attend`](Self::attend) with a term of the scores,
    /// `[batch or 1, heads of this rank or 1, queries or 1, keys]`, which receives a gradient. With
    /// it all probabilities are kept for backward, as with a mask.
    ///
    /// # Errors
    /// As [`attend`](Self::attend), and if the bias has another shape.
    pub fn attend_biased(
        &self,
        x: &Tensor,
        context: &Tensor,
        bias: &Tensor,
        mask: Option<&Tensor>,
    ) -> Result<Tensor> {
        self.attend_once(x, context, Some(bias), mask)
    }

    fn attend_once(
        &self,
        x: &Tensor,
        context: &Tensor,
        bias: Option<&Tensor>,
        mask: Option<&Tensor>,
    ) -> Result<Tensor> {
        let attended = || {
            // One cast for all projections, so the gradient is cast back once.
            let own = cast(&self.q_proj, x)?;
            let context = match context.id() == x.id() {
                true => own.clone(),
                false => cast(&self.k_proj, context)?,
            };
            self.compute(&own, &self.project_context(&context)?, bias, mask)
        };
        attended().map_err(|error: Error| error.in_module(&self.path))
    }

    /// Returns the keys and values of `context`, `[batch, keys, context_size]`, with gradients.
    ///
    /// # Errors
    /// If the shape does not fit, or the layer has a rotary embedding, whose keys have positions.
    pub fn keys_values(&self, context: &Tensor) -> Result<KeysValues> {
        let projected = || match self.rope {
            None => self.project_context(&cast(&self.k_proj, context)?),
            Some(_) => Err(Error::other(
                "keys with a rotary embedding depend on positions, which `keys_values` does not know; use `attend`",
            )),
        };
        projected().map_err(|error: Error| error.in_module(&self.path))
    }

    /// [`attend_biased`](Self::attend_biased), or [`attend`](Self::attend), to keys and values that
    /// were computed before.
    ///
    /// # Errors
    /// As [`attend_biased`](Self::attend_biased).
    pub fn attend_to(
        &self,
        x: &Tensor,
        context: &KeysValues,
        bias: Option<&Tensor>,
        mask: Option<&Tensor>,
    ) -> Result<Tensor> {
        let attended = || self.compute(&cast(&self.q_proj, x)?, context, bias, mask);
        attended().map_err(|error: Error| error.in_module(&self.path))
    }

    /// The heads of a projection's output: `[batch, heads, time, head_dim]`.
    fn heads(&self, projection: &Linear, x: &Tensor) -> Result<Tensor> {
        if x.rank() != 3 {
            return Err(Error::other(format!(
                "expected inputs of shape [batch, time, width], got {:?}",
                x.dims()
            )));
        }
        let y = projection.forward(x)?;
        let (batch, time, width) = y.dims3()?;
        let y = y.reshape((batch, time, width / self.head_dim, self.head_dim))?;
        Ok(y.transpose(1, 2)?.contiguous()?)
    }

    fn project_context(&self, context: &Tensor) -> Result<KeysValues> {
        let mut keys = self.heads(&self.k_proj, context)?;
        if let Some(rope) = &self.rope {
            keys = rope.forward(&keys, 0)?;
        }
        Ok(KeysValues { keys, values: self.heads(&self.v_proj, context)? })
    }

    fn compute(
        &self,
        x: &Tensor,
        context: &KeysValues,
        bias: Option<&Tensor>,
        mask: Option<&Tensor>,
    ) -> Result<Tensor> {
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
        let mut q = self.heads(&self.q_proj, x)?;
        if let Some(rope) = &self.rope {
            q = rope.forward(&q, 0)?;
        }
        let KeysValues { keys: k, values: v } = context;
        let y = match (bias, mask) {
            (None, None) => attention(&q, k, v, self.scale, false)?,
            (None, Some(mask)) => masked_attention(&q, k, v, self.scale, mask)?,
            (Some(bias), mask) => biased_attention(&q, k, v, self.scale, bias, mask)?,
        };
        self.o_proj.forward(&y.transpose(1, 2)?.contiguous()?.flatten_from(2)?)
    }
}

/// Casts an input of a projection to the dtype that it computes in.
fn cast(projection: &Linear, x: &Tensor) -> Result<Tensor> {
    projection.layer().cast_input(x, projection.layer().output_dtype(x.dtype()))
}

impl Module for MultiHeadAttention {
    /// Attention of a sequence to itself, without a mask.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.attend(x, x, None)
    }
}
