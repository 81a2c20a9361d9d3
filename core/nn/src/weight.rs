//! The weight of a linear layer, and of the linear layers of all experts.

use candle_core::{DType, Tensor};

use super::kernels::grouped::Groups;
use super::kernels::matmul::{self, InputGrad};
use crate::Result;
use fulgurite_engine::module::ModuleBuilder;
use fulgurite_engine::parameter::{Init, Parameter, compute_or_leave};
use fulgurite_engine::quantization::WeightFormat;

/// The weight of a linear layer, `[outputs, inputs]`, or of all experts,
/// `[experts, outputs, inputs]`.
#[derive(Debug, Clone)]
pub(super) enum Weight {
    /// A parameter of its shape.
    Plain(Parameter),
    /// Quantised; not trained.
    Packed {
        codes: Parameter,
        scales: Parameter,
        format: WeightFormat,
        /// The dtype after unpacking.
        compute_dtype: DType,
    },
}

impl Weight {
    /// Declares the weight of the layer at the builder's path, `[outputs, inputs]` or
    /// `[experts, outputs, inputs]`.
    pub(super) fn declare(b: &ModuleBuilder, shape: &[usize], init: Init) -> Result<Self> {
        const NAME: &str = "weight";
        let Some(format) = b.quantization(NAME) else {
            return Ok(Self::Plain(b.parameter(NAME, shape, init)?));
        };
        let [codes, scales] = b.packed_parameters(NAME, shape, init, format)?;
        Ok(Self::Packed { codes, scales, format, compute_dtype: b.compute_dtype() })
    }

    /// Returns the parameter of the weight's name; for a packed weight, the codes.
    pub(super) fn parameter(&self) -> &Parameter {
        match self {
            Self::Plain(parameter) => parameter,
            Self::Packed { codes, .. } => codes,
        }
    }

    pub(super) fn parameters(&self) -> impl Iterator<Item = &Parameter> {
        let scales = match self {
            Self::Plain(_) => None,
            Self::Packed { scales, .. } => Some(scales),
        };
        std::iter::once(self.parameter()).chain(scales)
    }

    /// Returns the dtype that the layer computes in.
    pub(super) fn compute_dtype(&self) -> DType {
        match self {
            Self::Plain(parameter) => parameter.compute_dtype(),
            Self::Packed { compute_dtype, .. } => *compute_dtype,
        }
    }

    /// Returns the number of a linear layer's outputs that this rank computes.
    pub(super) fn outputs(&self) -> usize {
        self.parameter().compute_shape()[0]
    }

    /// Returns the number of a linear layer's inputs that this rank computes with.
    pub(super) fn inputs(&self) -> usize {
        let columns = self.parameter().compute_shape()[1];
        match self {
            Self::Plain(_) => columns,
            Self::Packed { format, .. } => columns * format.columns_a_code(),
        }
    }

    /// Returns this rank's values in the compute dtype. A packed weight is unpacked into new memory
    /// in each call.
    pub(super) fn value(&self) -> Result<Tensor> {
        match self {
            Self::Plain(parameter) => parameter.value(),
            Self::Packed { codes, scales, format, compute_dtype } => {
                format.unpack(&codes.value()?, &scales.value()?, *compute_dtype)
            }
        }
    }

    /// The [`value`](Self::value) of all experts, of which those without rows may be zero.
    pub(super) fn value_of_experts(&self, groups: &Groups) -> Result<Tensor> {
        match self {
            Self::Plain(parameter) => parameter.value(),
            Self::Packed { codes, scales, format, compute_dtype } => {
                let has_rows = |expert: usize| !groups.ranges[expert].is_empty();
                format.unpack_where(&codes.value()?, &scales.value()?, *compute_dtype, has_rows)
            }
        }
    }

    /// Returns the parameter that is trained, if any.
    pub(super) fn trained(&self) -> Option<&Parameter> {
        match self {
            Self::Plain(parameter) => Some(parameter),
            Self::Packed { .. } => None,
        }
    }

    /// For a linear layer, returns the gradient of `x` for the gradient of the product, and adds
    /// the trained parameter's gradient without ending its use.
    pub(super) fn backward(
        &self,
        x: &Tensor,
        grad: &Tensor,
        into: InputGrad,
    ) -> Result<Option<Tensor>> {
        let dx = match into {
            InputGrad::Skip => None,
            into => matmul::input_grad(grad, &self.value()?, into)?,
        };
        if let Some(weight) = self.trained().filter(|weight| weight.takes_grad()) {
            let (weight, x, grad) = (weight.clone(), x.clone(), grad.clone());
            compute_or_leave(move || matmul::weight_grad(&weight, &x, &grad))?;
        }
        Ok(dx)
    }
}
