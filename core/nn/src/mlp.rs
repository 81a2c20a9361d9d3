//! Feed-forward blocks.

use candle_core::Tensor;

use super::kernels::activation::{Activation, swiglu, swiglu_backward};
use super::kernels::matmul::InputGrad;
use super::linear::Linear;
use super::residual::{Applied, FusedLayer};
use super::styles::BlockStyles;
use crate::{Error, Result};
use fulgurite_engine::module::{Module, ModuleBuilder};
use fulgurite_engine::parallel::LayerHandle;
use fulgurite_engine::parameter::Init;

/// `down_proj(silu(gate_proj(x)) * up_proj(x))`, as Llama has it. One operation in the graph.
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
    /// A block of `hidden` elements with `intermediate` inside, no biases, its weights as
    /// [`Linear::new`] starts them.
    ///
    /// # Errors
    /// If there is a layer at the builder's path already.
    pub fn new(b: &ModuleBuilder, hidden: usize, intermediate: usize) -> Result<Self> {
        Self::build(b, hidden, intermediate, None)
    }

    /// The same with weights that start as `init` says.
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

/// The gradient of a projection's input, which was asked for.
fn given(d: Option<Tensor>) -> Result<Tensor> {
    d.ok_or_else(|| Error::other("a projection gave no gradient"))
}

impl FusedLayer for SwiGluMlp {
    fn apply(&self, x: &Tensor) -> Result<Applied> {
        let (saved, input) = self.layer.redistribute_input(x)?;
        let gate = self.gate_proj.compute(&saved)?;
        let up = self.up_proj.compute(&saved)?;
        let y = self.down_proj.compute(&swiglu(&gate, &up)?)?;
        let (y, output) = self.layer.redistribute_output(y)?;
        let y = self.down_proj.add_last_bias(y)?;

        let layers = [&self.gate_proj, &self.up_proj, &self.down_proj];
        let parameters = layers.into_iter().flat_map(|l| l.parameters());
        let layer = self.clone();
        Ok(Applied::new(&self.layer, y, parameters, move |grad, wanted| {
            layer.down_proj.last_bias_backprop(grad)?;
            let grad = output.backward(grad)?;
            // The product is cheaper to compute again than to keep.
            let hidden = swiglu(&gate, &up)?;
            let d = given(layer.down_proj.backprop(&hidden, &grad, InputGrad::New)?)?;
            let (dgate, dup) = swiglu_backward(&gate, &up, &d)?;
            let dx = layer.gate_proj.backprop(&saved, &dgate, InputGrad::new(wanted))?;
            let dx = layer.up_proj.backprop(&saved, &dup, InputGrad::new(wanted).add_to(dx))?;
            dx.map(|dx| input.backward(&dx)).transpose()
        }))
    }
}

impl Module for SwiGluMlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.apply(x)?.record(x)
    }
}

/// `down_proj(gelu(up_proj(x)))` with biases, as GPT-2 has it. One operation in the graph.
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
    /// A block of `hidden` elements with `intermediate` inside and the exact GELU.
    ///
    /// # Errors
    /// If there is a layer at the builder's path already.
    pub fn new(b: &ModuleBuilder, hidden: usize, intermediate: usize) -> Result<Self> {
        Self::build(b, hidden, intermediate, Activation::Gelu)
    }

    /// The same with GELU's tanh approximation.
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
    fn apply(&self, x: &Tensor) -> Result<Applied> {
        let (saved, input) = self.layer.redistribute_input(x)?;
        let up = self.up_proj.compute(&saved)?;
        let y = self.down_proj.compute(&self.activation.forward(&up)?)?;
        let (y, output) = self.layer.redistribute_output(y)?;
        let y = self.down_proj.add_last_bias(y)?;

        let layers = [&self.up_proj, &self.down_proj];
        let parameters = layers.into_iter().flat_map(|l| l.parameters());
        let layer = self.clone();
        Ok(Applied::new(&self.layer, y, parameters, move |grad, wanted| {
            layer.down_proj.last_bias_backprop(grad)?;
            let grad = output.backward(grad)?;
            let hidden = layer.activation.forward(&up)?;
            let d = given(layer.down_proj.backprop(&hidden, &grad, InputGrad::New)?)?;
            let d = layer.activation.backward(&up, &d)?;
            let dx = layer.up_proj.backprop(&saved, &d, InputGrad::new(wanted))?;
            dx.map(|dx| input.backward(&dx)).transpose()
        }))
    }
}

impl Module for GeluMlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.apply(x)?.record(x)
    }
}
