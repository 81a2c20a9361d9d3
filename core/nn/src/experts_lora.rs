//! LoRA of a projection of all experts.

use candle_core::Tensor;

use super::gradients::add_to;
use super::kernels::grouped::{self, Groups};
use super::lora::LINEAR;
use crate::{Error, Result};
use fulgurite_engine::autograd::scale;
use fulgurite_engine::module::{Experts, ModuleBuilder};
use fulgurite_engine::parameter::{Init, Parameter};

/// The adapters of a projection of all experts: `A`, `[experts, rank, inputs]`, and `B`, `[experts,
/// outputs, rank]`. They add `scale B_e A_e x` to the output of expert `e`.
#[derive(Debug, Clone)]
pub(super) struct StackLora {
    a: Parameter,
    b: Parameter,
    scale: f64,
}

impl StackLora {
    /// Declares the adapters of the projection at the builder's path, if it is a target. They start
    /// as those of linear layers.
    ///
    /// # Errors
    /// If they are to have magnitudes (DoRA) or dropout, as in PEFT.
    pub(super) fn declare(
        b: &ModuleBuilder,
        experts: &Experts,
        [inputs, outputs]: [usize; 2],
    ) -> Result<Option<Self>> {
        let Some(adapters) = b.adapter() else { return Ok(None) };
        let refused = match (adapters.dora, adapters.dropout > 0.0) {
            (true, _) => Some(("magnitudes (DoRA)", "dora = false")),
            (_, true) => Some(("dropout", "dropout = 0.0")),
            (false, false) => None,
        };
        if let Some((what, remedy)) = refused {
            return Err(Error::module(
                b.path(),
                format!(
                    "holds the weights of all experts, whose adapters have no {what}; set `trainer.adapters.{remedy}`, \
                     or leave them out with `trainer.adapters.exclude = [\"experts\"]`"
                ),
            ));
        }
        let (count, rank) = (experts.count(), adapters.rank);
        let (shape_a, shape_b) = ([count, rank, inputs], [count, outputs, rank]);
        let this = Self {
            a: b.adapter_parameter(LINEAR[0], shape_a, Init::kaiming_uniform(inputs))?,
            b: b.adapter_parameter(LINEAR[1], shape_b, Init::ZEROS)?,
            scale: adapters.scale(),
        };
        this.parameters().into_iter().try_for_each(|parameter| experts.add(parameter))?;
        Ok(Some(this))
    }

    pub(super) fn parameters(&self) -> [&Parameter; 2] {
        [&self.a, &self.b]
    }

    /// The values of `A`, whose product with the gradient of [`inner_grad`](Self::inner_grad) is a
    /// part of the input's gradient.
    pub(super) fn a(&self) -> Result<Tensor> {
        self.a.value()
    }

    /// `scale A x`.
    fn inner(&self, x: &Tensor, groups: &Groups) -> Result<Tensor> {
        scale(&grouped::linear(x, &self.a.value()?, groups)?, self.scale)
    }

    /// Adds the adapters' output for `x` to `y`.
    pub(super) fn add(&self, y: Tensor, x: &Tensor, groups: &Groups) -> Result<Tensor> {
        let inner = self.inner(x, groups)?;
        add_to(y, &grouped::linear(&inner, &self.b.value()?, groups)?)
    }

    /// The gradient of `A x`, for a gradient of the output.
    pub(super) fn inner_grad(&self, grad: &Tensor, groups: &Groups) -> Result<Tensor> {
        scale(&grouped::input_grad(&[(grad, &self.b.value()?)], groups)?, self.scale)
    }

    /// Adds the parameters' gradients, without ending their uses. `inner`: that of
    /// [`inner_grad`](Self::inner_grad).
    pub(super) fn weight_grads(
        &self,
        x: &Tensor,
        grad: &Tensor,
        inner: &Tensor,
        groups: &Groups,
    ) -> Result<()> {
        if self.b.takes_grad() {
            grouped::weight_grad(&self.b, &self.inner(x, groups)?, grad, groups)?;
        }
        grouped::weight_grad(&self.a, x, inner, groups)
    }
}
