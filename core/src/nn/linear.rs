//! The linear layer.

use candle_core::Tensor;

use super::kernels::matmul::{self, InputGrad};
use super::record::{check_dtype, record};
use crate::module::{Module, ModuleBuilder};
use crate::parameter::{Init, Parameter};
use crate::{Error, Result};

/// `y = x weight^T (+ bias)`, with `weight` of shape `[out, in]`.
///
/// `x` is `[.., in]` of any rank from 1 on and in the parameters' compute dtype; `y` is `[.., out]`.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Parameter,
    bias: Option<Parameter>,
}

impl Linear {
    /// A layer without a bias, its weight uniform within `1 / sqrt(inputs)`.
    ///
    /// # Errors
    /// If there is a layer at the builder's path already.
    pub fn new(b: &ModuleBuilder, inputs: usize, outputs: usize) -> Result<Self> {
        Self::with_init(b, inputs, outputs, Init::kaiming_uniform(inputs))
    }

    /// A layer without a bias, its weight as `init` says.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_init(b: &ModuleBuilder, inputs: usize, outputs: usize, init: Init) -> Result<Self> {
        b.declare("Linear")?;
        Ok(Self { weight: b.parameter("weight", [outputs, inputs], init)?, bias: None })
    }

    /// A layer with a bias, both uniform within `1 / sqrt(inputs)`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_bias(b: &ModuleBuilder, inputs: usize, outputs: usize) -> Result<Self> {
        Self::new(b, inputs, outputs)?.add_bias(b, Init::kaiming_uniform(inputs))
    }

    /// The layer with a bias that starts as `init` says. `b` is the builder the layer was made
    /// with.
    ///
    /// # Errors
    /// If there is a bias at the builder's path already.
    pub fn add_bias(mut self, b: &ModuleBuilder, init: Init) -> Result<Self> {
        self.bias = Some(b.parameter("bias", [self.outputs()], init)?);
        Ok(self)
    }

    /// A layer without a bias whose weight is `weight` (`[out, in]`): an output head that shares
    /// the embedding.
    ///
    /// # Errors
    /// If `weight` is of another model or does not have two dimensions, and as [`new`](Self::new).
    pub fn tied(b: &ModuleBuilder, weight: &Parameter) -> Result<Self> {
        if weight.global_shape().len() != 2 {
            let message = format!(
                "has shape {:?}; a linear layer's weight has two dimensions",
                weight.global_shape()
            );
            return Err(Error::parameter(weight.fqn(), message));
        }
        b.declare("Linear")?;
        b.tie("weight", weight)?;
        Ok(Self { weight: weight.clone(), bias: None })
    }

    /// The weight, `[out, in]`.
    pub fn weight(&self) -> &Parameter {
        &self.weight
    }

    /// The bias, `[out]`.
    pub fn bias(&self) -> Option<&Parameter> {
        self.bias.as_ref()
    }

    fn outputs(&self) -> usize {
        self.weight.global_shape()[0]
    }

    /// The parameters, for [`record`].
    pub(super) fn parameters(&self) -> impl Iterator<Item = &Parameter> {
        std::iter::once(&self.weight).chain(&self.bias)
    }

    /// The output, outside the graph.
    pub(super) fn compute(&self, x: &Tensor) -> Result<Tensor> {
        let inputs = self.weight.global_shape()[1];
        if x.dims().last() != Some(&inputs) {
            let message = format!(
                "the linear layer takes {inputs} inputs in the last dimension, got a tensor of \
                 shape {:?}",
                x.dims()
            );
            return Err(Error::parameter(self.weight.fqn(), message));
        }
        check_dtype("the linear layer", x, &self.weight)?;
        let bias = self.bias.as_ref().map(Parameter::value).transpose()?;
        matmul::linear(x, &self.weight.value()?, bias.as_ref())
    }

    /// Computes the gradient of `x`, delivers those of the parameters and ends their uses.
    pub(super) fn backprop(
        &self,
        x: &Tensor,
        grad: &Tensor,
        into: InputGrad,
    ) -> Result<Option<Tensor>> {
        // The last delivery may take the unit's values away: the gradient of x comes first.
        let dx = match into {
            InputGrad::Skip => None,
            into => matmul::input_grad(grad, &self.weight.value()?, into)?,
        };
        matmul::weight_grad(&self.weight, x, grad)?;
        self.weight.end_use()?;
        if let Some(bias) = &self.bias {
            matmul::bias_grad(bias, grad)?;
            bias.end_use()?;
        }
        Ok(dx)
    }
}

/// What to do for the gradient of an input that may be outside the graph.
pub(super) fn wanted(x: &Tensor) -> impl Fn(Option<Tensor>) -> InputGrad + Send + Sync + use<> {
    let tracked = x.track_op();
    move |sum| match sum {
        _ if !tracked => InputGrad::Skip,
        None => InputGrad::New,
        Some(sum) => InputGrad::AddTo(sum),
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.compute(x)?;
        let (layer, saved, wanted) = (self.clone(), x.detach(), wanted(x));
        let parameters: Vec<&Parameter> = self.parameters().collect();
        record(&[x], &parameters, y, move |_, grad| {
            Ok(vec![layer.backprop(&saved, grad, wanted(None))?])
        })
    }
}
