//! Feed-forward blocks.

use candle_core::Tensor;

use super::kernels::activation::{Activation, swiglu, swiglu_backward};
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

/// The feed-forward block of Llama, `down_proj(silu(gate_proj(x)) * up_proj(x))`. One operation in
/// the graph.
///
/// Input and output are `[.., hidden]`.
#[derive(Debug, Clone)]
pub struct SwiGluMlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
    layer: LayerHandle,
}

impl SwiGluMlp {
    /// A block without biases, with the initial weights of [`Linear::new`].
    ///
    /// # Errors
    /// If a size is 0, or the builder's path has a layer already.
    pub fn new(b: &ModuleBuilder, hidden: usize, intermediate: usize) -> Result<Self> {
        Self::build(b, hidden, intermediate, None)
    }

    /// A block without biases, with these initial weights.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_init(
        b: &ModuleBuilder,
        hidden: usize,
        intermediate: usize,
        init: Init,
    ) -> Result<Self> {
        Self::build(b, hidden, intermediate, Some(init))
    }

    fn build(
        b: &ModuleBuilder,
        hidden: usize,
        intermediate: usize,
        init: Option<Init>,
    ) -> Result<Self> {
        check_sizes(b, &[("hidden", hidden), ("intermediate", intermediate)])?;
        let layer = b.declare(BlockStyles::SWIGLU)?;
        let project = |name: &str, inputs, outputs| {
            let init = init.unwrap_or(Init::kaiming_uniform(inputs));
            Linear::with_init(&b.pp(name), inputs, outputs, init)
        };
        Ok(Self {
            gate_proj: project("gate_proj", hidden, intermediate)?,
            up_proj: project("up_proj", hidden, intermediate)?,
            down_proj: project("down_proj", intermediate, hidden)?,
            layer,
        })
    }
}

/// Unwraps the input gradient of a projection that was asked for one.
fn require_input_grad(d: Option<Tensor>) -> Result<Tensor> {
    d.ok_or_else(|| Error::other("a projection gave no gradient"))
}

impl FusedLayer for SwiGluMlp {
    fn compute(&self, x: &Tensor) -> Result<FusedOutput> {
        let (saved, input) = self.layer.redistribute_input(x)?;
        let (gate, gate_product) = self.gate_proj.compute(&saved)?;
        let (up, up_product) = self.up_proj.compute(&saved)?;
        let (y, down_product) = self.down_proj.compute(&swiglu(&gate, &up)?)?;
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
            let hidden = swiglu(&gate, &up)?;
            let d = require_input_grad(layer.down_proj.backward(
                &down_product,
                &hidden,
                &grad,
                InputGrad::New,
            )?)?;
            let (dgate, dup) = swiglu_backward(&gate, &up, &d)?;
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

impl Module for SwiGluMlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.compute(x)?.record(x)
    }
}

/// The feed-forward block of GPT-2, `down_proj(gelu(up_proj(x)))` with biases. One operation in the
/// graph.
///
/// Input and output are `[.., hidden]`.
#[derive(Debug, Clone)]
pub struct GeluMlp {
    up_proj: Linear,
    down_proj: Linear,
    activation: Activation,
    layer: LayerHandle,
}

impl GeluMlp {
    /// A block with the exact GELU.
    ///
    /// # Errors
    /// If a size is 0, or the builder's path has a layer already.
    pub fn new(b: &ModuleBuilder, hidden: usize, intermediate: usize) -> Result<Self> {
        Self::build(b, hidden, intermediate, Activation::Gelu)
    }

    /// A block with GELU's tanh approximation, as in GPT-2.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_tanh(b: &ModuleBuilder, hidden: usize, intermediate: usize) -> Result<Self> {
        Self::build(b, hidden, intermediate, Activation::GeluTanh)
    }

    fn build(
        b: &ModuleBuilder,
        hidden: usize,
        intermediate: usize,
        activation: Activation,
    ) -> Result<Self> {
        check_sizes(b, &[("hidden", hidden), ("intermediate", intermediate)])?;
        let layer = b.declare(BlockStyles::GELU)?;
        Ok(Self {
            up_proj: Linear::with_bias(&b.pp("up_proj"), hidden, intermediate)?,
            down_proj: Linear::with_bias(&b.pp("down_proj"), intermediate, hidden)?,
            activation,
            layer,
        })
    }
}

impl FusedLayer for GeluMlp {
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

impl Module for GeluMlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.compute(x)?.record(x)
    }
}
