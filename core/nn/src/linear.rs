//! The linear layer.

use std::sync::Arc;

use candle_core::{DType, Tensor};

use super::adapter;
use super::input;
use super::kernels::matmul::{self, InputGrad};
use super::product::{Product, ProductBackward};
use super::sizes::check_sizes;
use super::styles::LinearStyles;
use super::weight::Weight;
use crate::{Error, Result};
use fulgurite_engine::module::{ForwardScope, Module, ModuleBuilder};
use fulgurite_engine::parallel::{InputCast, LayerHandle, Redistributed};
use fulgurite_engine::parameter::{Init, Parameter};

/// A linear layer: `y = x weight^T (+ bias)`, with `weight` of shape `[out, in]`.
///
/// `x` is `[.., in]`, `y` is `[.., out]`.
///
/// A plan may make it [`Colwise`](fulgurite_engine::parallel::Colwise) or
/// [`Rowwise`](fulgurite_engine::parallel::Rowwise).
/// [`Adapters`](fulgurite_engine::module::Adapters) may target it, unless its weight is
/// [tied](Self::tied). [`Quantization`](fulgurite_engine::module::Quantization) may target its
/// weight if frozen; the weight is then unpacked in each forward and backward.
#[derive(Debug, Clone)]
pub struct Linear {
    product: Arc<dyn Product>,
    bias: Option<Parameter>,
    layer: LayerHandle,
}

impl Linear {
    /// A layer without a bias. The initial weight is uniform within `1 / sqrt(inputs)`.
    ///
    /// # Errors
    /// If a size is 0, or the builder's path has a layer already.
    pub fn new(b: &ModuleBuilder, inputs: usize, outputs: usize) -> Result<Self> {
        Self::with_init(b, inputs, outputs, Init::kaiming_uniform(inputs))
    }

    /// A layer without a bias, with this initial weight.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_init(b: &ModuleBuilder, inputs: usize, outputs: usize, init: Init) -> Result<Self> {
        check_sizes(b, &[("inputs", inputs), ("outputs", outputs)])?;
        let layer = b.declare(LinearStyles { inputs, outputs, cast: InputCast::Own })?;
        let weight = Weight::declare(b, &[outputs, inputs], init)?;
        let product = adapter::product(b, &layer, weight, [outputs, inputs])?;
        Ok(Self { product, bias: None, layer })
    }

    /// A layer with a bias. Initial weight and bias are uniform within `1 / sqrt(inputs)`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_bias(b: &ModuleBuilder, inputs: usize, outputs: usize) -> Result<Self> {
        Self::new(b, inputs, outputs)?.add_bias(b, Init::kaiming_uniform(inputs))
    }

    /// Adds a bias with these initial values. `b` is the builder that the layer was made with.
    ///
    /// # Errors
    /// If the builder's path has a bias already.
    pub fn add_bias(mut self, b: &ModuleBuilder, init: Init) -> Result<Self> {
        self.bias = Some(b.parameter("bias", [self.weight().global_shape()[0]], init)?);
        Ok(self)
    }

    /// A layer without a bias that shares `weight` (`[out, in]`) with another layer, such as an
    /// output head with the embedding.
    ///
    /// # Errors
    /// As [`new`](Self::new), and if `weight` belongs to another model or does not have two
    /// dimensions.
    pub fn tied(b: &ModuleBuilder, weight: &Parameter) -> Result<Self> {
        let [outputs, inputs] = *weight.global_shape() else {
            let message = format!(
                "has shape {:?}; a linear layer's weight has two dimensions",
                weight.global_shape()
            );
            return Err(Error::parameter(weight.fqn(), message));
        };
        let cast = InputCast::To(weight.compute_dtype());
        let layer = b.declare(LinearStyles { inputs, outputs, cast })?;
        b.tie("weight", weight)?;
        Ok(Self { product: Arc::new(Weight::Plain(weight.clone())), bias: None, layer })
    }

    /// The weight, `[out, in]`. For a quantised weight, its
    /// [codes](fulgurite_engine::quantization::PackedPart::Codes).
    pub fn weight(&self) -> &Parameter {
        self.product.weight().parameter()
    }

    /// The bias, `[out]`.
    pub fn bias(&self) -> Option<&Parameter> {
        self.bias.as_ref()
    }

    /// The number of outputs that this rank computes.
    pub(super) fn outputs(&self) -> usize {
        self.product.weight().outputs()
    }

    /// The number of inputs that this rank computes with.
    pub(super) fn inputs(&self) -> usize {
        self.product.weight().inputs()
    }

    /// Weight, adapter and bias.
    pub(super) fn parameters(&self) -> impl Iterator<Item = &Parameter> {
        self.product.parameters().into_iter().chain(&self.bias)
    }

    /// Whether rows of the input can be computed separately, independent of their position in the
    /// batch.
    pub(super) fn computes_rows_apart(&self) -> bool {
        self.product.computes_rows_apart()
    }

    /// Returns the bias that [`compute`](Self::compute) adds, and the bias that is added after the
    /// ranks' partial outputs are summed. At most one of them is set.
    fn split_bias(&self) -> (Option<&Parameter>, Option<&Parameter>) {
        let bias = self.bias.as_ref();
        if self.layer.output_is_partial() { (None, bias) } else { (bias, None) }
    }

    /// Adds the bias of a layer whose outputs are partial sums, after their reduction.
    pub(super) fn add_bias_after_reduction(&self, y: Tensor) -> Result<Tensor> {
        match self.split_bias().1 {
            None => Ok(y),
            Some(bias) => Ok(y.broadcast_add(&bias.value()?)?),
        }
    }

    /// The backward of [`add_bias_after_reduction`](Self::add_bias_after_reduction) for the bias:
    /// adds its gradient and ends its use.
    pub(super) fn bias_after_reduction_backward(&self, grad: &Tensor) -> Result<()> {
        match self.split_bias().1 {
            None => Ok(()),
            Some(bias) => {
                matmul::bias_grad(bias, grad)?;
                bias.end_use()
            }
        }
    }

    /// Returns the input in the compute dtype, in the graph.
    pub(super) fn cast_input(&self, x: &Tensor) -> Result<Tensor> {
        self.layer.cast_input(x, self.compute_dtype())
    }

    /// The dtype that the layer computes in.
    pub(super) fn compute_dtype(&self) -> DType {
        self.product.weight().compute_dtype()
    }

    /// Checks the last dimension of `x`.
    pub(super) fn check_width(&self, x: &Tensor) -> Result<()> {
        input::check_width(&self.layer, x, self.inputs())
    }

    /// Computes this rank's output for `x`, which is in the compute dtype, outside the graph.
    /// Returns the backward of the product, for [`backward`](Self::backward).
    pub(super) fn compute(&self, x: &Tensor) -> Result<(Tensor, ProductBackward)> {
        self.check_width(x)?;
        let bias = self.split_bias().0.map(Parameter::value).transpose()?;
        self.layer.run(|| self.product.forward(x, bias.as_ref()))
    }

    /// Returns the layer's record, which a plan may have changed.
    pub(super) fn layer(&self) -> &LayerHandle {
        &self.layer
    }

    /// Computes the gradient of `x`, adds the parameters' gradients and ends their uses.
    pub(super) fn backward(
        &self,
        product: &ProductBackward,
        x: &Tensor,
        grad: &Tensor,
        into: InputGrad,
    ) -> Result<Option<Tensor>> {
        let dx = self.backward_rows(product, x, grad, into)?;
        self.end_uses()?;
        Ok(dx)
    }

    /// [`backward`](Self::backward) without ending the uses, for some rows of the input, if other
    /// rows follow.
    pub(super) fn backward_rows(
        &self,
        product: &ProductBackward,
        x: &Tensor,
        grad: &Tensor,
        into: InputGrad,
    ) -> Result<Option<Tensor>> {
        if let Some(bias) = self.split_bias().0 {
            matmul::bias_grad(bias, grad)?;
        }
        product(x, grad, into)
    }

    /// Ends the uses of the parameters. After the last use the strategy may free the unit's values.
    pub(super) fn end_uses(&self) -> Result<()> {
        self.product.parameters().into_iter().try_for_each(Parameter::end_use)?;
        self.split_bias().0.map_or(Ok(()), Parameter::end_use)
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        // The loss identifies sharded logits by their tensor.
        let sharded_logits = self.layer.loss_parallel() && ForwardScope::current().loss_parallel;
        let (saved, input) = self.layer.redistribute_input(x)?;
        let (y, product) = self.compute(&saved)?;
        let (y, output) = match sharded_logits {
            true => (y, Redistributed::none()),
            false => self.layer.redistribute_output(y)?,
        };
        let y = self.add_bias_after_reduction(y)?;
        let (layer, tracked) = (self.clone(), self.layer.takes_gradient(x));
        let parameters: Vec<&Parameter> = self.parameters().collect();
        let backward = move |_: &Tensor, grad: &Tensor| {
            layer.bias_after_reduction_backward(grad)?;
            let grad = output.backward(grad)?;
            let dx = layer.backward(&product, &saved, &grad, InputGrad::new(tracked))?;
            Ok(vec![dx.map(|dx| input.backward(&dx)).transpose()?])
        };
        match sharded_logits {
            true => {
                let first = self.weight().compute_region().offsets[0];
                self.layer.record_logits(&[x], &parameters, y, first, backward)
            }
            false => self.layer.record(&[x], &parameters, y, backward),
        }
    }
}
