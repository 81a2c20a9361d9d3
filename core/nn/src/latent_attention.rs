//! The attention of DeepSeek-V3, whose keys and values come from a narrow projection.

use candle_core::{D, Tensor};

use super::documents::Documents;
use super::kernels::attention::{DotProductAttention, merge_heads, split_heads};
use super::kernels::cached_attention;
use super::kernels::context_attention::ContextAttention;
use super::kv_cache::CachedTokens;
use super::linear::Linear;
use super::norm::RmsNorm;
use super::rope::Rope;
use super::sizes::check_sizes;
use super::styles::LatentStyles;
use crate::{Error, Result};
use fulgurite_engine::module::{ForwardScope, Module, ModuleBuilder};
use fulgurite_engine::parallel::{ContextParallel, LayerHandle};
use fulgurite_engine::parameter::Init;

/// The shape of a [`LatentAttention`], with the names of DeepSeek-V3 in `transformers`.
#[derive(Debug, Clone)]
pub struct LatentAttentionConfig {
    /// Width of input and output.
    pub hidden_size: usize,
    /// Number of heads, each with a query, a key and a value.
    pub num_heads: usize,
    /// Width of the projection that queries come from; `None` projects queries from the input.
    pub q_lora_rank: Option<usize>,
    /// Width of the projection that keys and values come from.
    pub kv_lora_rank: usize,
    /// Elements of a head's queries and keys without positions.
    pub qk_nope_head_dim: usize,
    /// Elements of a head's queries that are rotated. All heads share these elements of keys.
    pub qk_rope_head_dim: usize,
    /// Elements of a head's values.
    pub v_head_dim: usize,
    /// The position embedding. Its heads have [`head_dim`](Self::head_dim) elements, and it rotates
    /// the first `qk_rope_head_dim`.
    pub rope: Rope,
    /// Whether the projections rotate neighbouring elements (0 and 1, 2 and 3, …) as pairs, as in
    /// the released files. Otherwise a pair is an element of the first half and one of the second.
    pub rope_interleave: bool,
    /// Factor of the scores; `None` is `1 / sqrt(qk_nope_head_dim + qk_rope_head_dim)`.
    pub scale: Option<f64>,
    /// Whether the first projections and the output projection have biases.
    pub bias: bool,
    /// Epsilon of the norms of the narrow projections.
    pub norm_eps: f64,
    /// Initial weights of the projections; `None` for the default of [`Linear::new`]. Biases start
    /// at zero.
    pub init: Option<Init>,
}

impl LatentAttentionConfig {
    /// Width of a head in the computation of attention: the larger width of keys and values. The
    /// smaller one is filled up with zeros.
    pub fn head_dim(&self) -> usize {
        (self.qk_nope_head_dim.saturating_add(self.qk_rope_head_dim)).max(self.v_head_dim)
    }
}

/// Causal multi-head latent attention (MLA): queries by `q_a_proj`, `q_a_layernorm` and `q_b_proj`
/// (or `q_proj`), keys and values by `kv_a_proj_with_mqa`, `kv_a_layernorm` and `kv_b_proj`, and
/// `o_proj`.
///
/// Input and output are `[batch, time, hidden_size]`. With [`Documents`] in force, attention stays
/// within each document. A cache holds the keys and values of all heads, not the narrow
/// projection. No tensor-parallel plan cuts the layer: every rank computes it whole. Documents and
/// context parallelism are as in [`CausalSelfAttention`](super::CausalSelfAttention).
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// # use fulgurite_core::autograd::storage;
/// use fulgurite_core::module::{Module, ModuleBuilder, ModuleInit};
/// use fulgurite_core::nn::{LatentAttention, LatentAttentionConfig, Rope, RopeConfig};
///
/// let config = LatentAttentionConfig {
///     hidden_size: 16,
///     num_heads: 2,
///     q_lora_rank: Some(12),
///     kv_lora_rank: 8,
///     qk_nope_head_dim: 4,
///     qk_rope_head_dim: 2,
///     v_head_dim: 4,
///     rope: Rope::with_config(&RopeConfig { rotary_dim: 2, ..RopeConfig::new(6, 1e4) })?,
///     rope_interleave: true,
///     scale: None,
///     bias: false,
///     norm_eps: 1e-6,
///     init: None,
/// };
/// let b = ModuleBuilder::new(ModuleInit::default());
/// let attention = LatentAttention::new(&b.pp("self_attn"), &config)?;
/// # for slot in b.finish()?.slots() { storage::allocate(slot.compute()?)?; }
/// let x = Tensor::ones((1, 3, 16), DType::F32, &Device::Cpu)?;
/// assert_eq!(attention.forward(&x)?.dims(), [1, 3, 16]);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct LatentAttention {
    queries: Queries,
    kv_a_proj: Linear,
    kv_a_layernorm: RmsNorm,
    kv_b_proj: Linear,
    o_proj: Linear,
    config: LatentAttentionConfig,
    layer: LayerHandle,
}

/// The projections of queries.
#[derive(Debug, Clone)]
enum Queries {
    Direct(Linear),
    Narrow { a: Linear, norm: RmsNorm, b: Linear },
}

impl LatentAttention {
    /// A layer of this shape.
    ///
    /// # Errors
    /// If a size is 0, if `rope` is for other sizes, if `scale` is not positive, or if the
    /// builder's path has a layer already.
    pub fn new(b: &ModuleBuilder, config: &LatentAttentionConfig) -> Result<Self> {
        let &LatentAttentionConfig { hidden_size, num_heads, kv_lora_rank, .. } = config;
        let &LatentAttentionConfig { qk_nope_head_dim, qk_rope_head_dim, v_head_dim, .. } = config;
        check_sizes(
            b,
            &[
                ("hidden_size", hidden_size),
                ("num_heads", num_heads),
                ("q_lora_rank", config.q_lora_rank.unwrap_or(1)),
                ("kv_lora_rank", kv_lora_rank),
                ("qk_nope_head_dim", qk_nope_head_dim),
                ("qk_rope_head_dim", qk_rope_head_dim),
                ("v_head_dim", v_head_dim),
            ],
        )?;
        let wrong = |message: String| Err(Error::module(b.path(), message));
        let of_rope = [config.rope.head_dim(), config.rope.rotary_dim()];
        if of_rope != [config.head_dim(), qk_rope_head_dim] {
            return wrong(format!(
                "the rotary embedding rotates {} of {} elements, and should rotate {qk_rope_head_dim} of {}",
                of_rope[1],
                of_rope[0],
                config.head_dim()
            ));
        }
        if let Some(scale) = config.scale.filter(|x| !(*x > 0.0 && *x <= f64::from(f32::MAX))) {
            return wrong(format!("scale must be a positive number, got {scale:?}"));
        }
        let widths = [qk_nope_head_dim + qk_rope_head_dim, qk_nope_head_dim + v_head_dim];
        let widths = widths.map(|width| num_heads.checked_mul(width));
        let [Some(q_width), Some(kv_width)] = widths else {
            return wrong(format!("{num_heads} heads have more elements than can be counted"));
        };
        let layer = b.declare(LatentStyles)?;
        let project = |name: &str, inputs: usize, outputs: usize, bias: bool| {
            let b = b.pp(name);
            let init = config.init.unwrap_or(Init::kaiming_uniform(inputs));
            let linear = Linear::with_init(&b, inputs, outputs, init)?;
            if bias { linear.add_bias(&b, Init::ZEROS) } else { Ok(linear) }
        };
        let norm = |name: &str, width| RmsNorm::new(&b.pp(name), width, config.norm_eps);
        let bias = config.bias;
        let queries = match config.q_lora_rank {
            None => Queries::Direct(project("q_proj", hidden_size, q_width, false)?),
            Some(rank) => Queries::Narrow {
                a: project("q_a_proj", hidden_size, rank, bias)?,
                norm: norm("q_a_layernorm", rank)?,
                b: project("q_b_proj", rank, q_width, false)?,
            },
        };
        let narrow = kv_lora_rank + qk_rope_head_dim;
        Ok(Self {
            queries,
            kv_a_proj: project("kv_a_proj_with_mqa", hidden_size, narrow, bias)?,
            kv_a_layernorm: norm("kv_a_layernorm", kv_lora_rank)?,
            kv_b_proj: project("kv_b_proj", kv_lora_rank, kv_width, false)?,
            o_proj: project("o_proj", num_heads * v_head_dim, hidden_size, bias)?,
            config: config.clone(),
            layer,
        })
    }

    /// Returns queries, keys and values, `[batch, time, heads, head_dim]`, in the graph. The
    /// rotated elements of queries and keys come first: an order of elements that queries and keys
    /// share leaves scores as they are.
    fn project(&self, x: &Tensor) -> Result<[Tensor; 3]> {
        let &LatentAttentionConfig { num_heads, kv_lora_rank, .. } = &self.config;
        let &LatentAttentionConfig { qk_nope_head_dim, qk_rope_head_dim, v_head_dim, .. } =
            &self.config;
        let q = match &self.queries {
            Queries::Direct(linear) => linear.forward(x)?,
            Queries::Narrow { a, norm, b } => b.forward(&norm.forward(&a.forward(x)?)?)?,
        };
        let q = split_heads(&q, num_heads)?;
        let q_rotated = self.pairs(&q.narrow(3, qk_nope_head_dim, qk_rope_head_dim)?)?;
        let q = self.filled(&[&q_rotated, &q.narrow(3, 0, qk_nope_head_dim)?])?;
        let narrow = self.kv_a_proj.forward(x)?;
        let latent = narrow.narrow(2, 0, kv_lora_rank)?.contiguous()?;
        let kv = self.kv_b_proj.forward(&self.kv_a_layernorm.forward(&latent)?)?;
        let kv = split_heads(&kv, num_heads)?;
        let k = kv.narrow(3, 0, qk_nope_head_dim)?;
        let k_rotated = narrow.narrow(2, kv_lora_rank, qk_rope_head_dim)?.unsqueeze(2)?;
        let (batch, time, ..) = kv.dims4()?;
        let k_rotated = self.pairs(&k_rotated)?;
        let k_rotated = k_rotated.broadcast_as((batch, time, num_heads, qk_rope_head_dim))?;
        let k = self.filled(&[&k_rotated, &k])?;
        let v = self.filled(&[&kv.narrow(3, qk_nope_head_dim, v_head_dim)?])?;
        Ok([q, k, v])
    }

    /// The elements in the order of rotated halves.
    fn pairs(&self, x: &Tensor) -> Result<Tensor> {
        if !self.config.rope_interleave {
            return Ok(x.clone());
        }
        let (batch, time, heads, dim) = x.dims4()?;
        let pairs = x.contiguous()?.reshape((batch, time, heads, dim / 2, 2))?;
        Ok(pairs.transpose(3, 4)?.contiguous()?.reshape((batch, time, heads, dim))?)
    }

    /// Joins parts of heads, and fills the heads up with zeros.
    fn filled(&self, parts: &[&Tensor]) -> Result<Tensor> {
        let joined = match parts {
            [one] => one.contiguous()?,
            parts => Tensor::cat(parts, D::Minus1)?,
        };
        let missing = self.config.head_dim() - joined.dim(D::Minus1)?;
        match missing {
            0 => Ok(joined),
            _ => Ok(joined.pad_with_zeros(D::Minus1, 0, missing)?),
        }
    }

    fn attention(&self) -> DotProductAttention {
        let width = self.config.qk_nope_head_dim + self.config.qk_rope_head_dim;
        let scale = self.config.scale.unwrap_or(1.0 / (width as f64).sqrt());
        DotProductAttention::new(scale, true)
    }

    /// Attention in a forward with a cache of keys and values.
    fn attend_cached(&self, [q, k, v]: [&Tensor; 3], tokens: &CachedTokens) -> Result<Tensor> {
        let (batch, time, ..) = q.dims4()?;
        self.layer.run(|| {
            tokens.check(batch, time)?;
            let refused = match () {
                () if ForwardScope::current().context.is_some() => "context_parallel_size above 1",
                () if Documents::any() => "documents of packed sequences",
                () => {
                    let rope = Some(&self.config.rope);
                    let path = self.layer.path();
                    return cached_attention::forward(
                        path,
                        tokens,
                        &self.attention(),
                        rope,
                        [q, k, v],
                    );
                }
            };
            Err(Error::other(format!("a cache of keys and values does not go with {refused}")))
        })
    }

    fn attend(&self, [q, k, v]: [&Tensor; 3]) -> Result<Tensor> {
        let (batch, time, ..) = q.dims4()?;
        let context = ForwardScope::current().context;
        let length = time * context.as_ref().map_or(1, ContextParallel::size);
        let attend = self.layer.run(|| {
            Ok(DotProductAttention {
                angles: Some(self.config.rope.angles(0, length, q.dtype(), q.device())?),
                documents: Documents::current(batch, time, context.is_some())?,
                ..self.attention()
            })
        })?;
        let attend = ContextAttention { attend, context };
        let inputs = [q, k, v].map(Tensor::detach);
        let attended = attend.forward(&inputs[0], &inputs[1], &inputs[2])?;
        let output = attended.output().clone();
        self.layer.record(&[q, k, v], &[], output, move |output, grad| {
            let [q, k, v] = &inputs;
            let attended = attended.with_output(&output.detach())?;
            let grads = attend.backward([q, k, v], &attended, grad)?;
            Ok(grads.map(Some).into())
        })
    }
}

impl Module for LatentAttention {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        // One cast for both projections, so that their gradients add up before it.
        let first = self.kv_a_proj.layer();
        let x = &first.cast_input(x, first.output_dtype(x.dtype()))?;
        let [q, k, v] = self.project(x)?;
        let y = match CachedTokens::current() {
            Some(tokens) => self.attend_cached([&q, &k, &v], &tokens)?,
            None => self.attend([&q, &k, &v])?,
        };
        let y = y.narrow(3, 0, self.config.v_head_dim)?.contiguous()?;
        self.o_proj.forward(&merge_heads(&y)?)
    }
}
