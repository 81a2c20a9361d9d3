//! LoRA, the low-rank adapter of a layer; `dora` adds magnitudes.

use candle_core::{D, Tensor};
use std::sync::Arc;

use super::dora::{Dora, DoraCall};
use super::dropout::Mask;
use super::kernels::embedding::{column_lookup, column_lookup_grad};
use super::kernels::matmul::{self, InputGrad};
use crate::{Error, Result};
use fulgurite_engine::module::ModuleBuilder;
use fulgurite_engine::parallel::LayerHandle;
use fulgurite_engine::parameter::{Init, Parameter};

/// The names of a linear layer's adapter parameters, relative to the layer, as in PEFT.
pub(super) const LINEAR: [&str; 2] = ["lora_A.weight", "lora_B.weight"];
/// The names of an embedding's adapter parameters.
pub(super) const EMBEDDING: [&str; 2] = ["lora_embedding_A", "lora_embedding_B"];

/// The adapter of a layer: `A`, `[rank, inputs]`, and `B`, `[outputs, rank]`. It adds `scale B A x`
/// to the layer's output.
#[derive(Debug, Clone)]
pub(super) struct Lora {
    pub(super) a: Parameter,
    pub(super) b: Parameter,
    pub(super) scale: f64,
    dropout: f64,
    pub(super) layer: LayerHandle,
    /// The magnitudes, for DoRA.
    pub(super) dora: Option<Dora>,
}

/// The state that one call's forward keeps for its backward.
#[derive(Debug, Clone, Default)]
pub(super) struct LoraCall {
    pub(super) mask: Option<Arc<Mask>>,
    pub(super) dora: Option<DoraCall>,
}

impl LoraCall {
    /// Returns `x` with the same elements zeroed as in forward.
    pub(super) fn drop(&self, x: &Tensor) -> Result<Tensor> {
        self.mask.as_ref().map_or_else(|| Ok(x.clone()), |mask| mask.apply(x))
    }
}

impl Lora {
    /// Declares the adapter of the linear layer at the builder's path, if it is a target. As in
    /// PEFT, `A` starts uniform within `1 / sqrt(inputs)`, and `B` starts at zero.
    pub(super) fn of_linear(
        b: &ModuleBuilder,
        layer: &LayerHandle,
        weight: &Parameter,
        [outputs, inputs]: [usize; 2],
    ) -> Result<Option<Self>> {
        let init = [Init::kaiming_uniform(inputs), Init::ZEROS];
        let Some(lora) = Self::declare(b, layer, inputs, outputs, LINEAR, init)? else {
            return Ok(None);
        };
        Ok(Some(Self { dora: Dora::of_linear(b, weight)?, ..lora }))
    }

    /// Declares the adapter of the embedding at the builder's path, if it is a target. `A` starts
    /// at zero, `B` normally distributed.
    pub(super) fn of_embedding(
        b: &ModuleBuilder,
        layer: &LayerHandle,
        rows: usize,
        width: usize,
    ) -> Result<Option<Self>> {
        if b.adapter().is_some_and(|adapters| adapters.dora) {
            return Err(Error::module(
                b.path(),
                "is an embedding, which takes no adapter with magnitudes (DoRA); leave it out with \
                 `trainer.adapters.exclude`, or set `trainer.adapters.dora = false`",
            ));
        }
        let normal = Init::Normal { mean: 0.0, std: 1.0 };
        Self::declare(b, layer, rows, width, EMBEDDING, [Init::ZEROS, normal])
    }

    fn declare(
        b: &ModuleBuilder,
        layer: &LayerHandle,
        inputs: usize,
        outputs: usize,
        names: [&str; 2],
        init: [Init; 2],
    ) -> Result<Option<Self>> {
        let Some(adapters) = b.adapter() else { return Ok(None) };
        Ok(Some(Self {
            a: b.adapter_parameter(names[0], [adapters.rank, inputs], init[0])?,
            b: b.adapter_parameter(names[1], [outputs, adapters.rank], init[1])?,
            scale: adapters.scale(),
            dropout: adapters.dropout,
            layer: layer.clone(),
            dora: None,
        }))
    }

    pub(super) fn parameters(&self) -> impl Iterator<Item = &Parameter> {
        [&self.a, &self.b].into_iter().chain(self.dora.as_ref().map(|dora| &dora.magnitude))
    }

    /// Whether it needs all rows of an input at once: dropout depends on each row's position in the
    /// batch, and magnitudes need norms in each call.
    pub(super) fn takes_rows_together(&self) -> bool {
        self.dropout > 0.0 || self.dora.is_some()
    }

    /// Adds the adapter's output for `x` to `y`.
    pub(super) fn compute(&self, x: &Tensor, y: Tensor) -> Result<(Tensor, LoraCall)> {
        let call = self.call(x)?;
        let u = self.inner(&call.drop(x)?)?;
        Ok(((y + matmul::linear(&u, &self.b.value()?, None)?)?, call))
    }

    /// Starts a call with this input, before any computation.
    pub(super) fn call(&self, x: &Tensor) -> Result<LoraCall> {
        Ok(LoraCall { mask: self.mask(x)?.map(Arc::new), dora: None })
    }

    fn mask(&self, x: &Tensor) -> Result<Option<Mask>> {
        if self.dropout == 0.0 {
            return Ok(None);
        }
        let region = self.a.compute_region();
        let columns = (region.offsets[1], region.sizes[1], self.a.global_shape()[1]);
        Mask::of_columns(&self.layer, "lora_dropout", x, columns, self.dropout)
    }

    /// `scale A x`.
    pub(super) fn inner(&self, x: &Tensor) -> Result<Tensor> {
        Ok((matmul::linear(x, &self.a.value()?, None)? * self.scale)?)
    }

    /// Adds the gradients of the parameters, without ending their uses. Adds the gradient of `x` to
    /// `dx`, if any.
    pub(super) fn backward(
        &self,
        call: &LoraCall,
        x: &Tensor,
        grad: &Tensor,
        dx: Option<Tensor>,
    ) -> Result<Option<Tensor>> {
        let x = call.drop(x)?;
        if self.b.takes_grad() {
            matmul::weight_grad(&self.b, &self.inner(&x)?, grad)?;
        }
        let Some(du) = matmul::input_grad(grad, &self.b.value()?, InputGrad::New)? else {
            return Ok(dx);
        };
        let du = (du * self.scale)?;
        matmul::weight_grad(&self.a, &x, &du)?;
        let Some(dx) = dx else { return Ok(None) };
        let a = self.a.value()?;
        if call.mask.is_none() {
            return matmul::input_grad(&du, &a, InputGrad::AddTo(dx));
        }
        let own = matmul::input_grad(&du, &a, InputGrad::New)?;
        Ok(match own {
            Some(own) => Some((dx + call.drop(&own)?)?),
            None => Some(dx),
        })
    }

    /// Adds the adapter's output for these rows of an embedding (local ids) to `y`
    /// (`[ids, width]`).
    pub(super) fn look_up(&self, ids: &[u32], y: Tensor) -> Result<Tensor> {
        let u = (column_lookup(ids, &self.a.value()?)? * self.scale)?;
        Ok((y + matmul::linear(&u, &self.b.value()?, None)?)?)
    }

    /// The backward of [`look_up`](Self::look_up): adds the gradients and ends the uses.
    pub(super) fn look_up_backward(&self, ids: &[u32], grad: &Tensor) -> Result<()> {
        let grad = grad.reshape((ids.len(), grad.dim(D::Minus1)?))?;
        if self.b.takes_grad() {
            let u = (column_lookup(ids, &self.a.value()?)? * self.scale)?;
            matmul::weight_grad(&self.b, &u, &grad)?;
        }
        if let Some(du) = matmul::input_grad(&grad, &self.b.value()?, InputGrad::New)? {
            column_lookup_grad(&self.a, ids, &(du * self.scale)?)?;
        }
        self.end_uses()
    }

    pub(super) fn end_uses(&self) -> Result<()> {
        self.parameters().try_for_each(Parameter::end_use)
    }
}
