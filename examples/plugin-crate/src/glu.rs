//! [`Glu`], a layer that plans can cut.

use candle_core::Tensor;
use fulgurite_core::Result;
use fulgurite_core::module::{Module, ModuleBuilder};
use fulgurite_core::parallel::{
    LayerHandle, LayerSharding, LayerStyles, Layout, ParallelLayer, ParallelStyle,
};
use fulgurite_core::parameter::{Init, Parameter};

/// A gated linear unit: `y = (x value^T) * sigmoid(x gate^T)`, with weights of `[out, in]`.
///
/// A plan may make it `colwise`, which cuts both weights along their outputs.
#[derive(Debug, Clone)]
pub struct Glu {
    value: Parameter,
    gate: Parameter,
    layer: LayerHandle,
}

/// The styles that the layer takes.
#[derive(Debug)]
struct GluStyles {
    inputs: usize,
    outputs: usize,
}

impl ParallelLayer for GluStyles {
    fn kind(&self) -> &'static str {
        "Glu"
    }

    fn takes(&self) -> &'static str {
        "it takes colwise"
    }

    fn shard(&self, styles: &LayerStyles<'_>) -> Result<LayerSharding> {
        let Some(ParallelStyle::Colwise(style)) = styles.own() else {
            return Err(styles.cannot_take(self));
        };
        styles.expect(self, "input", style.input, &[Layout::Replicate, Layout::SEQUENCE])?;
        styles.expect(self, "output", style.output, &[Layout::Replicate, Layout::LAST])?;
        Ok(LayerSharding::default()
            .cut("value", 0)
            .cut("gate", 0)
            .widths(self.inputs, self.outputs)
            // Every rank computes some of the outputs from the whole input, so it has a partial sum
            // of the input's gradient.
            .input(style.input, Layout::Partial)
            .output(Layout::LAST, style.output))
    }
}

impl Glu {
    /// Creates a layer from `inputs` to `outputs` elements.
    ///
    /// # Errors
    /// If a layer exists at the builder's path already.
    pub fn new(b: &ModuleBuilder, inputs: usize, outputs: usize) -> Result<Self> {
        let layer = b.declare(GluStyles { inputs, outputs })?;
        let init = Init::kaiming_uniform(inputs);
        Ok(Self {
            value: b.parameter("value", [outputs, inputs], init)?,
            gate: b.parameter("gate", [outputs, inputs], init)?,
            layer,
        })
    }
}

/// Runs the backward of `x weight^T` for the output's gradient `grad`: accumulates the gradient of
/// `weight`, and returns the gradient of `x`.
fn backprop(weight: &Parameter, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let dx = grad.matmul(&weight.value()?)?;
    weight.accumulate(&grad.t()?.matmul(x)?)?;
    weight.end_use()?;
    Ok(dx)
}

impl Module for Glu {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (given, input) = self.layer.redistribute_input(x)?;
        let rows = given.flatten_to(given.rank() - 2)?;
        let value = rows.matmul(&self.value.value()?.t()?)?;
        let gate = (rows.matmul(&self.gate.value()?.t()?)?.neg()?.exp()? + 1.0)?.recip()?;
        let mut shape = given.dims().to_vec();
        shape[given.rank() - 1] = value.dim(1)?;
        let (y, output) = self.layer.redistribute_output((&value * &gate)?.reshape(shape)?)?;
        let layer = self.clone();
        self.layer.record(&[x], &[&self.value, &self.gate], y, move |_, grad| {
            let grad = output.backward(grad)?.reshape(value.shape())?;
            let slope = (&gate * (1.0 - &gate)?)?;
            let dx = backprop(&layer.value, &rows, &(&grad * &gate)?)?;
            let dx = (dx + backprop(&layer.gate, &rows, &((grad * &value)? * slope)?)?)?;
            Ok(vec![Some(input.backward(&dx.reshape(given.shape())?)?)])
        })
    }
}
