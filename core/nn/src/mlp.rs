//! Feed-forward blocks.

use candle_core::Tensor;

use super::kernels::activation::{Activation, gated, gated_backward};
use super::kernels::matmul::InputGrad;
use super::linear::Linear;
use super::residual::{FusedLayer, FusedOutput};
use super::sizes::check_sizes;
use super::styles::BlockStyles;
use crate::{Error, Result};
use fulgurite_engine::autograd::save_for_backward;
use fulgurite_engine::module::{Module, ModuleBuilder};
use fulgurite_engine::parallel::LayerHandle;
use fulgurite_engine::parameter::Init;

/// The shape of a [`GatedMlp`] or [`Mlp`].
#[derive(Debug, Clone, Copy)]
pub struct MlpConfig {
    /// Width of input and output.
    pub hidden_size: usize,
    /// Width inside.
    pub intermediate_size: usize,
    /// The activation.
    pub activation: Activation,
    /// Whether the projections have biases.
    pub bias: bool,
    /// Initial weights; `None` for those of [`Linear::new`]. Biases then start as in
    /// [`Linear::with_bias`], and else at zero.
    pub init: Option<Init>,
}

impl MlpConfig {
    fn check(&self, b: &ModuleBuilder) -> Result<()> {
        let sizes = [("hidden", self.hidden_size), ("intermediate", self.intermediate_size)];
        check_sizes(b, &sizes)
    }

    fn project(
        &self,
        b: &ModuleBuilder,
        name: &str,
        inputs: usize,
        outputs: usize,
    ) -> Result<Linear> {
        let b = b.pp(name);
        let init = self.init.unwrap_or(Init::kaiming_uniform(inputs));
        let linear = Linear::with_init(&b, inputs, outputs, init)?;
        match (self.bias, self.init) {
            (false, _) => Ok(linear),
            (true, None) => linear.add_bias(&b, init),
            (true, Some(_)) => linear.add_bias(&b, Init::ZEROS),
        }
    }

    fn inner(&self, b: &ModuleBuilder, name: &str) -> Result<Linear> {
        self.project(b, name, self.hidden_size, self.intermediate_size)
    }

    fn outer(&self, b: &ModuleBuilder) -> Result<Linear> {
        self.project(b, "down_proj", self.intermediate_size, self.hidden_size)
    }
}

/// The feed-forward block with SwiGLU, of Llama.
pub type SwiGluMlp = GatedMlp;

/// The feed-forward block of GPT-2.
pub type GeluMlp = Mlp;

/// A feed-forward block with a gate, `down_proj(activation(gate_proj(x)) * up_proj(x))`; with
/// [`Activation::Silu`] that of Llama (SwiGLU). One operation in the graph.
///
/// Input and output are `[.., hidden]`.
#[derive(Debug, Clone)]
pub struct GatedMlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
    activation: Activation,
    layer: LayerHandle,
}

impl GatedMlp {
    /// Llama's block, without biases, with the initial weights of [`Linear::new`].
    ///
    /// # Errors
    /// As [`with_config`](Self::with_config).
    pub fn new(b: &ModuleBuilder, hidden: usize, intermediate: usize) -> Result<Self> {
        Self::silu(b, hidden, intermediate, None)
    }

    /// Llama's block, without biases, with these initial weights.
    ///
    /// # Errors
    /// As [`with_config`](Self::with_config).
    pub fn with_init(
        b: &ModuleBuilder,
        hidden: usize,
        intermediate: usize,
        init: Init,
    ) -> Result<Self> {
        Self::silu(b, hidden, intermediate, Some(init))
    }

    fn silu(
        b: &ModuleBuilder,
        hidden_size: usize,
        intermediate_size: usize,
        init: Option<Init>,
    ) -> Result<Self> {
        let activation = Activation::Silu;
        let config = MlpConfig { hidden_size, intermediate_size, activation, bias: false, init };
        Self::with_config(b, &config)
    }

    /// A block of this shape.
    ///
    /// # Errors
    /// If a size is 0, or the builder's path has a layer already.
    pub fn with_config(b: &ModuleBuilder, config: &MlpConfig) -> Result<Self> {
        config.check(b)?;
        let layer = b.declare(BlockStyles::SWIGLU)?;
        Ok(Self {
            gate_proj: config.inner(b, "gate_proj")?,
            up_proj: config.inner(b, "up_proj")?,
            down_proj: config.outer(b)?,
            activation: config.activation,
            layer,
        })
    }
}

/// Unwraps the input gradient of a projection that was asked for one.
fn require_input_grad(d: Option<Tensor>) -> Result<Tensor> {
    d.ok_or_else(|| Error::other("a projection gave no gradient"))
}

impl FusedLayer for GatedMlp {
    fn compute(&self, x: &Tensor) -> Result<FusedOutput> {
        let (saved, input) = self.layer.redistribute_input(x)?;
        let (gate, gate_product) = self.gate_proj.compute(&saved)?;
        let (up, up_product) = self.up_proj.compute(&saved)?;
        let (y, down_product) = self.down_proj.compute(&gated(self.activation, &gate, &up)?)?;
        save_for_backward(&[&gate, &up]);
        let (y, output) = self.layer.redistribute_output(y)?;
        let y = self.down_proj.add_bias_after_reduction(y)?;

        let layers = [&self.gate_proj, &self.up_proj, &self.down_proj];
        let parameters = layers.into_iter().flat_map(|l| l.parameters());
        let layer = self.clone();
        FusedOutput::new(&self.layer, x, y, parameters, move |grad, wanted| {
            layer.down_proj.bias_after_reduction_backward(grad)?;
            let grad = output.backward(grad)?;
            // Recomputing the product is cheaper than saving it.
            let hidden = gated(layer.activation, &gate, &up)?;
            let d = require_input_grad(layer.down_proj.backward(
                &down_product,
                &hidden,
                &grad,
                InputGrad::New,
            )?)?;
            let (dgate, dup) = gated_backward(layer.activation, &gate, &up, &d)?;
            let dx =
                layer.gate_proj.backward(&gate_product, &saved, &dgate, InputGrad::new(wanted))?;
            let dx = layer.up_proj.backward(
                &up_product,
                &saved,
                &dup,
                InputGrad::new(wanted).add_to(dx),
            )?;
            dx.map(|dx| input.backward(&dx)).transpose()
        })
    }

    fn layer(&self) -> &LayerHandle {
        &self.layer
    }
}

impl Module for GatedMlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.compute(x)?.record(x)
    }
}

/// A feed-forward block without a gate, `down_proj(activation(up_proj(x)))`; with a GELU and biases
/// that of GPT-2. One operation in the graph.
///
/// Input and output are `[.., hidden]`.
#[derive(Debug, Clone)]
pub struct Mlp {
    up_proj: Linear,
    down_proj: Linear,
    activation: Activation,
    layer: LayerHandle,
}

impl Mlp {
    /// A block with biases and the exact GELU.
    ///
    /// # Errors
    /// As [`with_config`](Self::with_config).
    pub fn new(b: &ModuleBuilder, hidden: usize, intermediate: usize) -> Result<Self> {
        Self::gelu(b, hidden, intermediate, Activation::Gelu)
    }

    /// A block with biases and GELU's tanh approximation, as in GPT-2.
    ///
    /// # Errors
    /// As [`with_config`](Self::with_config).
    pub fn with_tanh(b: &ModuleBuilder, hidden: usize, intermediate: usize) -> Result<Self> {
        Self::gelu(b, hidden, intermediate, Activation::GeluTanh)
    }

    fn gelu(
        b: &ModuleBuilder,
        hidden_size: usize,
        intermediate_size: usize,
        activation: Activation,
    ) -> Result<Self> {
        let config =
            MlpConfig { hidden_size, intermediate_size, activation, bias: true, init: None };
        Self::with_config(b, &config)
    }

    /// A block of this shape.
    ///
    /// # Errors
    /// If a size is 0, or the builder's path has a layer already.
    pub fn with_config(b: &ModuleBuilder, config: &MlpConfig) -> Result<Self> {
        config.check(b)?;
        let layer = b.declare(BlockStyles::GELU)?;
        Ok(Self {
            up_proj: config.inner(b, "up_proj")?,
            down_proj: config.outer(b)?,
            activation: config.activation,
            layer,
        })
    }
}

impl FusedLayer for Mlp {
    fn compute(&self, x: &Tensor) -> Result<FusedOutput> {
        let (saved, input) = self.layer.redistribute_input(x)?;
        let (up, up_product) = self.up_proj.compute(&saved)?;
        let (y, down_product) = self.down_proj.compute(&self.activation.forward(&up)?)?;
        save_for_backward(&[&up]);
        let (y, output) = self.layer.redistribute_output(y)?;
        let y = self.down_proj.add_bias_after_reduction(y)?;

        let layers = [&self.up_proj, &self.down_proj];
        let parameters = layers.into_iter().flat_map(|l| l.parameters());
        let layer = self.clone();
        FusedOutput::new(&self.layer, x, y, parameters, move |grad, wanted| {
            layer.down_proj.bias_after_reduction_backward(grad)?;
            let grad = output.backward(grad)?;
            let hidden = layer.activation.forward(&up)?;
            let d = require_input_grad(layer.down_proj.backward(
                &down_product,
                &hidden,
                &grad,
                InputGrad::New,
            )?)?;
            let d = layer.activation.backward(&up, &d)?;
            let dx = layer.up_proj.backward(&up_product, &saved, &d, InputGrad::new(wanted))?;
            dx.map(|dx| input.backward(&dx)).transpose()
        })
    }

    fn layer(&self) -> &LayerHandle {
        &self.layer
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.compute(x)?.record(x)
    }
}
