//! Causal self-attention.

use candle_core::Tensor;

use super::documents::Documents;
use super::input::{Dim, check_dims};
use super::kernels::attention::{DotProductAttention, merge_heads, split_heads};
use super::kernels::context_attention::ContextAttention;
use super::kernels::matmul::InputGrad;
use super::linear::Linear;
use super::product::ProductBackward;
use super::residual::{FusedLayer, FusedOutput};
use super::rope::Rope;
use super::sizes::check_sizes;
use super::styles::BlockStyles;
use crate::{Error, Result};
use fulgurite_engine::autograd::save_for_backward;
use fulgurite_engine::module::{ForwardScope, Module, ModuleBuilder};
use fulgurite_engine::parallel::{ContextParallel, LayerHandle};
use fulgurite_engine::parameter::Init;

/// The shape of a [`CausalSelfAttention`].
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
    /// Whether the projections of queries, keys and values have biases.
    pub qkv_bias: bool,
    /// The position embedding; shared between layers.
    pub rope: Option<Rope>,
    /// Initial values of the projections' weights; `None` for the default of [`Linear::new`].
    /// Biases start at zero.
    pub init: Option<Init>,
    /// The most keys that a query attends to, including its own: Mistral's `sliding_window` in
    /// `transformers`. `None` is no limit, like a window of at least the sequence's length. With a
    /// window, time and memory for scores grow with the window, not with the square of the
    /// sequence.
    pub window: Option<usize>,
}

/// Causal self-attention as in Llama: projections `q_proj`, `k_proj`, `v_proj` and `o_proj`, rotary
/// position embedding and grouped query attention. One operation in the graph.
///
/// Input and output are `[batch, time, hidden_size]`. With [`Documents`] in force, attention stays
/// within each document. With a [`window`](AttentionConfig::window), a query attends to the last
/// keys only, also with documents and under context parallelism.
#[derive(Debug, Clone)]
pub struct CausalSelfAttention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    head_dim: usize,
    rope: Option<Rope>,
    window: Option<usize>,
    layer: LayerHandle,
}

impl CausalSelfAttention {
    /// A layer of this shape.
    ///
    /// # Errors
    /// If a size is 0, if the heads do not divide into groups, if `rope` is for another head size,
    /// or if the builder's path has a layer already.
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
        let layer = b.declare(BlockStyles::attention(num_heads, num_kv_heads, hidden_size))?;
        let project = |name: &str, inputs, heads: usize, bias: bool| {
            let b = b.pp(name);
            let init = config.init.unwrap_or(Init::kaiming_uniform(inputs));
            let outputs = if name == "o_proj" { hidden_size } else { heads * head_dim };
            let linear = Linear::with_init(&b, inputs, outputs, init)?;
            if bias { linear.add_bias(&b, Init::ZEROS) } else { Ok(linear) }
        };
        Ok(Self {
            q_proj: project("q_proj", hidden_size, num_heads, config.qkv_bias)?,
            k_proj: project("k_proj", hidden_size, num_kv_heads, config.qkv_bias)?,
            v_proj: project("v_proj", hidden_size, num_kv_heads, config.qkv_bias)?,
            o_proj: project("o_proj", width, num_heads, false)?,
            head_dim,
            rope: config.rope.clone(),
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
}

impl FusedLayer for CausalSelfAttention {
    fn compute(&self, x: &Tensor) -> Result<FusedOutput> {
        let (saved, input) = self.layer.redistribute_input(x)?;
        let width = Dim::Size(self.q_proj.inputs());
        check_dims(&self.layer, &saved, &[Dim::Any("batch"), Dim::Any("time"), width])?;
        let (batch, time) = (saved.dim(0)?, saved.dim(1)?);
        let context = ForwardScope::current().context;
        let length = time * context.as_ref().map_or(1, ContextParallel::size);
        let rope = self.rope.as_ref();
        let attend = DotProductAttention {
            scale: 1.0 / (self.head_dim as f64).sqrt(),
            causal: true,
            window: self.window,
            angles: self.layer.run(|| {
                rope.map(|r| r.angles(0, length, saved.dtype(), saved.device())).transpose()
            })?,
            documents: self.layer.run(|| Documents::current(batch, time, context.is_some()))?,
        };
        let attend = ContextAttention { attend, context };
        let (q, q_product) = self.project(&self.q_proj, &saved)?;
        let (k, k_product) = self.project(&self.k_proj, &saved)?;
        let (v, v_product) = self.project(&self.v_proj, &saved)?;
        let attended = attend.forward(&q, &k, &v)?;
        let (y, o_product) = self.o_proj.compute(&merge_heads(attended.output())?)?;
        save_for_backward(&[&q, &k, &v, attended.output()]);
        let (y, output) = self.layer.redistribute_output(y)?;
        let y = self.o_proj.add_bias_after_reduction(y)?;

        let layers = [&self.q_proj, &self.k_proj, &self.v_proj, &self.o_proj];
        let parameters = layers.into_iter().flat_map(|l| l.parameters());
        let layer = self.clone();
        FusedOutput::new(&self.layer, x, y, parameters, move |grad, wanted| {
            layer.o_proj.bias_after_reduction_backward(grad)?;
            let grad = output.backward(grad)?;
            let merged = merge_heads(attended.output())?;
            let d = layer.o_proj.backward(&o_product, &merged, &grad, InputGrad::New)?;
            let d = d.ok_or_else(|| Error::other("the output projection gave no gradient"))?;
            let d = split_heads(&d, q.dim(2)?)?;
            let [dq, dk, dv] = attend.backward([&q, &k, &v], &attended, &d)?;
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
