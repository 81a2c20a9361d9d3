//! Self-attention of decoders and encoders.

use candle_core::Tensor;

use super::documents::Documents;
use super::gradients::accumulate_and_end_use;
use super::input::{Dim, check_dims};
use super::kernels::attention::{DotProductAttention, merge_heads, split_heads};
use super::kernels::cached_attention;
use super::kernels::context_attention::ContextAttention;
use super::kernels::matmul::InputGrad;
use super::kv_cache::CachedTokens;
use super::linear::Linear;
use super::product::ProductBackward;
use super::qk_norm::{QkCalls, QkNorm, QkNorms};
use super::residual::{FusedLayer, FusedOutput};
use super::rope::Rope;
use super::sizes::check_sizes;
use super::styles::{BlockStyles, SINKS};
use crate::backend::to_accumulation_dtype;
use crate::{Error, Result};
use fulgurite_engine::autograd::save_for_backward;
use fulgurite_engine::module::{ForwardScope, Module, ModuleBuilder};
use fulgurite_engine::parallel::{ContextParallel, LayerHandle};
use fulgurite_engine::parameter::{Init, Parameter};

/// The shape of a [`CausalSelfAttention`].
///
/// ```
/// use fulgurite_core::nn::{AttentionConfig, QkNorm, QkNormScope, Rope};
///
/// // Qwen3 0.6B.
/// let config = AttentionConfig {
///     num_kv_heads: 8,
///     head_dim: 128,
///     rope: Some(Rope::new(128, 1e6)?),
///     qk_norm: Some(QkNorm { eps: 1e-6, scope: QkNormScope::Head, unit_offset: false }),
///     ..AttentionConfig::new(1024, 16)
/// };
/// assert!(config.causal && !config.qkv_bias);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct AttentionConfig {
    /// Width of the input and the output.
    pub hidden_size: usize,
    /// Number of query heads.
    pub num_heads: usize,
    /// Number of key and value heads; it divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Whether a query attends only to the keys up to its own position, as in decoders. Otherwise
    /// it attends to all keys, as in encoders.
    pub causal: bool,
    /// Whether the projections of queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub output_bias: bool,
    /// The position embedding; shared between layers.
    pub rope: Option<Rope>,
    /// Factor of the scores; `None` is `1 / sqrt(head_dim)`.
    pub scale: Option<f64>,
    /// Bound of the scores: a score becomes `softcap * tanh(score / softcap)`. Gemma 2's
    /// `attn_logit_softcapping` in `transformers`.
    pub softcap: Option<f64>,
    /// Norms of queries and keys before the rotation.
    pub qk_norm: Option<QkNorm>,
    /// Limit of the keys that a query attends to; `None` for no limit. Time and memory for scores
    /// grow with the window, not with the square of the sequence.
    ///
    /// A causal query attends to at most this many keys, including its own: Mistral's
    /// `sliding_window` in `transformers`. Otherwise the window is the largest distance to a key on
    /// each side: half of ModernBERT's `local_attention`.
    pub window: Option<usize>,
    /// Whether each query head has a sink: one more score in the softmax, without a value. The
    /// parameter `sinks`, `[num_heads]`, of gpt-oss.
    pub sinks: bool,
    /// Initial values of the projections' weights; `None` for the default of [`Linear::new`].
    /// Biases and sinks start at zero.
    pub init: Option<Init>,
}

impl AttentionConfig {
    /// Causal attention with a key and value head for each query head and heads of `hidden_size /
    /// num_heads` elements, without biases and position embedding.
    pub fn new(hidden_size: usize, num_heads: usize) -> Self {
        Self {
            hidden_size,
            num_heads,
            num_kv_heads: num_heads,
            head_dim: hidden_size / num_heads.max(1),
            causal: true,
            qkv_bias: false,
            output_bias: false,
            rope: None,
            scale: None,
            softcap: None,
            qk_norm: None,
            window: None,
            sinks: false,
            init: None,
        }
    }
}

/// Self-attention, causal unless the configuration says otherwise: projections `q_proj`, `k_proj`,
/// `v_proj` and `o_proj`, norms `q_norm` and `k_norm`, rotary position embedding and grouped query
/// attention. One operation in the graph.
///
/// Input and output are `[batch, time, hidden_size]`. With [`Documents`] in force, attention stays
/// within each document. With a [`window`](AttentionConfig::window), a query attends to near keys
/// only. Options can be combined, also under tensor and context parallelism; documents need whole
/// sequences.
///
/// In a tensor-parallel plan, `q_proj`, `k_proj` and `v_proj` are colwise and `o_proj` rowwise. The
/// norms follow without a style of their own. With [`QkNormScope::Head`](super::QkNormScope) every
/// rank has the weight, and its gradient is summed over the ranks; a plan may say so with
/// `replicated_with_grad_allreduce`. With [`QkNormScope::Projection`](super::QkNormScope) the
/// weight is cut like the projection, and mean squares are summed over the ranks.
#[derive(Debug, Clone)]
pub struct CausalSelfAttention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    norms: Option<QkNorms>,
    sinks: Option<Parameter>,
    head_dim: usize,
    rope: Option<Rope>,
    scale: f64,
    softcap: Option<f64>,
    causal: bool,
    window: Option<usize>,
    layer: LayerHandle,
}

impl CausalSelfAttention {
    /// A layer of this shape.
    ///
    /// # Errors
    /// If a size is 0, if the heads do not divide into groups, if `rope` is for another head size,
    /// or if `scale`, `softcap` or the norms' `eps` are numbers that no layer computes with. Also
    /// if the builder's path has a layer already.
    pub fn new(b: &ModuleBuilder, config: &AttentionConfig) -> Result<Self> {
        let AttentionConfig { hidden_size, num_heads, num_kv_heads, head_dim, .. } = *config;
        let wrong = |message: String| Err(Error::module(b.path(), message));
        check_sizes(
            b,
            &[
                ("hidden_size", hidden_size),
                ("num_heads", num_heads),
                ("num_kv_heads", num_kv_heads),
                ("head_dim", head_dim),
                ("window", config.window.unwrap_or(usize::MAX)),
            ],
        )?;
        for (name, value) in [("scale", config.scale), ("softcap", config.softcap)] {
            if let Some(value) = value.filter(|x| !(*x > 0.0 && *x <= f64::from(f32::MAX))) {
                return wrong(format!("{name} must be a positive number, got {value:?}"));
            }
        }
        if !num_heads.is_multiple_of(num_kv_heads) {
            return wrong(format!(
                "{num_heads} attention heads cannot share {num_kv_heads} key and value heads; the \
                 second number must divide the first"
            ));
        }
        if let Some(rope) = config.rope.as_ref().filter(|rope| rope.head_dim() != head_dim) {
            return wrong(format!(
                "the rotary embedding is for heads of {} elements, the attention has heads of \
                 {head_dim}",
                rope.head_dim()
            ));
        }
        let Some(width) = num_heads.checked_mul(head_dim) else {
            return wrong(format!(
                "{num_heads} heads of {head_dim} elements are more elements than can be counted"
            ));
        };
        let scope = config.qk_norm.map(|norm| norm.scope);
        let styles = BlockStyles::attention(num_heads, num_kv_heads, hidden_size, scope);
        let styles = if config.sinks { styles.with_sinks() } else { styles };
        let layer = b.declare(styles)?;
        let project = |name: &str, inputs, heads: usize, bias: bool| {
            let b = b.pp(name);
            let init = config.init.unwrap_or(Init::kaiming_uniform(inputs));
            let outputs = if name == "o_proj" { hidden_size } else { heads * head_dim };
            let linear = Linear::with_init(&b, inputs, outputs, init)?;
            if bias { linear.add_bias(&b, Init::ZEROS) } else { Ok(linear) }
        };
        let sinks = || b.parameter(SINKS, [num_heads], Init::ZEROS);
        let sinks = config.sinks.then(sinks).transpose()?;
        Ok(Self {
            sinks,
            q_proj: project("q_proj", hidden_size, num_heads, config.qkv_bias)?,
            k_proj: project("k_proj", hidden_size, num_kv_heads, config.qkv_bias)?,
            v_proj: project("v_proj", hidden_size, num_kv_heads, config.qkv_bias)?,
            o_proj: project("o_proj", width, num_heads, config.output_bias)?,
            norms: config
                .qk_norm
                .map(|norm| QkNorms::new(b, norm, [num_heads, num_kv_heads], head_dim))
                .transpose()?,
            head_dim,
            rope: config.rope.clone(),
            scale: config.scale.unwrap_or(1.0 / (head_dim as f64).sqrt()),
            softcap: config.softcap,
            causal: config.causal,
            window: config.window,
            layer,
        })
    }

    /// Returns a projection's output, outside the graph:
    /// `[batch, time, heads of this rank, head_dim]`.
    fn project(&self, projection: &Linear, x: &Tensor) -> Result<(Tensor, ProductBackward)> {
        let (y, product) = projection.compute(x)?;
        Ok((split_heads(&y, projection.outputs() / self.head_dim)?, product))
    }

    fn sinks_value(&self) -> Result<Option<Tensor>> {
        let value = |sinks: &Parameter| to_accumulation_dtype(&sinks.value()?);
        self.sinks.as_ref().map(value).transpose()
    }

    /// Computes the output for the tokens of a forward with a cache of keys and values.
    fn compute_cached(&self, x: &Tensor, tokens: &CachedTokens) -> Result<FusedOutput> {
        let (saved, _) = self.layer.redistribute_input(x)?;
        let width = Dim::Size(self.q_proj.inputs());
        check_dims(&self.layer, &saved, &[Dim::Any("batch"), Dim::Any("time"), width])?;
        self.layer.run(|| {
            tokens.check(saved.dim(0)?, saved.dim(1)?)?;
            let refused = match () {
                () if !self.causal => "attention that is not causal",
                () if ForwardScope::current().context.is_some() => "context_parallel_size above 1",
                () if Documents::any() => "documents of packed sequences",
                () => return Ok(()),
            };
            Err(Error::other(format!("a cache of keys and values does not go with {refused}")))
        })?;
        let attend = DotProductAttention {
            softcap: self.softcap,
            window: self.window,
            sinks: self.sinks_value()?,
            ..DotProductAttention::new(self.scale, true)
        };
        let q = self.project(&self.q_proj, &saved)?.0;
        let k = self.project(&self.k_proj, &saved)?.0;
        let v = self.project(&self.v_proj, &saved)?.0;
        let normed = self.normed([&q, &k])?.map(|(normed, _)| normed);
        let [q, k] = normed.as_ref().map_or([&q, &k], |[q, k]| [q, k]);
        let path = self.layer.path();
        let attended = self.layer.run(|| {
            cached_attention::forward(path, tokens, &attend, self.rope.as_ref(), [q, k, &v])
        })?;
        let (y, _) = self.o_proj.compute(&merge_heads(&attended)?)?;
        let (y, _) = self.layer.redistribute_output(y)?;
        let y = self.o_proj.add_bias_after_reduction(y)?;
        let layers = [&self.q_proj, &self.k_proj, &self.v_proj, &self.o_proj];
        let norms = self.norms.iter().flat_map(QkNorms::parameters);
        let parameters =
            layers.into_iter().flat_map(|l| l.parameters()).chain(norms).chain(&self.sinks);
        FusedOutput::new(&self.layer, x, y, parameters, |_, _| {
            Err(Error::other("a forward with a cache of keys and values has no backward"))
        })
    }

    /// Returns the norms of queries and keys, outside the graph, and the state for backward.
    fn normed(&self, inputs: [&Tensor; 2]) -> Result<Option<([Tensor; 2], QkCalls)>> {
        self.norms.as_ref().map(|norms| norms.forward(&self.layer, inputs)).transpose()
    }
}

impl FusedLayer for CausalSelfAttention {
    fn compute(&self, x: &Tensor) -> Result<FusedOutput> {
        if let Some(tokens) = CachedTokens::current() {
            return self.compute_cached(x, &tokens);
        }
        let (saved, input) = self.layer.redistribute_input(x)?;
        let width = Dim::Size(self.q_proj.inputs());
        check_dims(&self.layer, &saved, &[Dim::Any("batch"), Dim::Any("time"), width])?;
        let (batch, time) = (saved.dim(0)?, saved.dim(1)?);
        let context = ForwardScope::current().context;
        let length = time * context.as_ref().map_or(1, ContextParallel::size);
        let rope = self.rope.as_ref();
        let attend = DotProductAttention {
            softcap: self.softcap,
            window: self.window,
            sinks: self.sinks_value()?,
            angles: self.layer.run(|| {
                rope.map(|r| r.angles(0, length, saved.dtype(), saved.device())).transpose()
            })?,
            documents: self.layer.run(|| Documents::current(batch, time, context.is_some()))?,
            ..DotProductAttention::new(self.scale, self.causal)
        };
        let attend = ContextAttention { attend, context };
        let (q, q_product) = self.project(&self.q_proj, &saved)?;
        let (k, k_product) = self.project(&self.k_proj, &saved)?;
        let (v, v_product) = self.project(&self.v_proj, &saved)?;
        let (normed, norm_calls) = self.normed([&q, &k])?.unzip();
        let [normed_q, normed_k] = normed.as_ref().map_or([&q, &k], |[q, k]| [q, k]);
        let attended = attend.forward(normed_q, normed_k, &v)?;
        drop(normed);
        let (y, o_product) = self.o_proj.compute(&merge_heads(attended.output())?)?;
        save_for_backward(&[&q, &k, &v, attended.output()]);
        let (y, output) = self.layer.redistribute_output(y)?;
        let y = self.o_proj.add_bias_after_reduction(y)?;

        let layers = [&self.q_proj, &self.k_proj, &self.v_proj, &self.o_proj];
        let norms = self.norms.iter().flat_map(QkNorms::parameters);
        let parameters =
            layers.into_iter().flat_map(|l| l.parameters()).chain(norms).chain(&self.sinks);
        let layer = self.clone();
        FusedOutput::new(&self.layer, x, y, parameters, move |grad, wanted| {
            layer.o_proj.bias_after_reduction_backward(grad)?;
            let grad = output.backward(grad)?;
            let merged = merge_heads(attended.output())?;
            let d = layer.o_proj.backward(&o_product, &merged, &grad, InputGrad::New)?;
            let d = d.ok_or_else(|| Error::other("the output projection gave no gradient"))?;
            let d = split_heads(&d, q.dim(2)?)?;
            if let Some((sinks, grad)) =
                layer.sinks.as_ref().zip(attend.sinks_backward(&attended, &d)?)
            {
                accumulate_and_end_use(sinks, &grad)?;
            }
            let [dq, dk, dv] = match layer.norms.as_ref().zip(norm_calls.as_ref()) {
                None => attend.backward([&q, &k, &v], &attended, &d)?,
                Some((norms, calls)) => {
                    let [normed_q, normed_k] = norms.forward_again(calls, [&q, &k])?;
                    let [dq, dk, dv] =
                        attend.backward([&normed_q, &normed_k, &v], &attended, &d)?;
                    let [dq, dk] = norms.backward(&layer.layer, calls, [&q, &k], [&dq, &dk])?;
                    [dq, dk, dv]
                }
            };
            let mut dx = None;
            let projections = [
                (&layer.q_proj, &q_product, dq),
                (&layer.k_proj, &k_product, dk),
                (&layer.v_proj, &v_product, dv),
            ];
            for (projection, product, d) in projections {
                dx = projection.backward(
                    product,
                    &saved,
                    &merge_heads(&d)?,
                    InputGrad::new(wanted).add_to(dx),
                )?;
            }
            dx.map(|dx| input.backward(&dx)).transpose()
        })
    }

    fn layer(&self) -> &LayerHandle {
        &self.layer
    }
}

impl Module for CausalSelfAttention {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.compute(x)?.record(x)
    }
}
