//! LoRA, the low-rank adapter of a layer; `dora` adds magnitudes.

use candle_core::{D, Tensor};

use super::dropout::Mask;
use super::gradients::add_to;
use super::kernels::embedding::{column_lookup, column_lookup_grad, lookup, lookup_grad};
use super::kernels::matmul::{self, InputGrad};
use super::lookup::Lookup;
use super::product::{Product, ProductBackward};
use super::weight::Weight;
use crate::Result;
use fulgurite_engine::autograd::scale;
use fulgurite_engine::module::{Adapters, ModuleBuilder, adapters_are_off};
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
}

/// Returns `x` with the elements of `mask` zeroed.
pub(super) fn drop_elements(mask: Option<&Mask>, x: &Tensor) -> Result<Tensor> {
    mask.map_or_else(|| Ok(x.clone()), |mask| mask.apply(x))
}

impl Lora {
    /// Declares the adapter of the linear layer at the builder's path. As in PEFT, `A` starts
    /// uniform within `1 / sqrt(inputs)`, and `B` starts at zero.
    pub(super) fn of_linear(
        b: &ModuleBuilder,
        layer: &LayerHandle,
        adapters: &Adapters,
        [outputs, inputs]: [usize; 2],
    ) -> Result<Self> {
        let init = [Init::kaiming_uniform(inputs), Init::ZEROS];
        Self::declare(b, layer, adapters, [outputs, inputs], LINEAR, init)
    }

    fn declare(
        b: &ModuleBuilder,
        layer: &LayerHandle,
        adapters: &Adapters,
        [outputs, inputs]: [usize; 2],
        names: [&str; 2],
        init: [Init; 2],
    ) -> Result<Self> {
        Ok(Self {
            a: b.adapter_parameter(names[0], [adapters.rank, inputs], init[0])?,
            b: b.adapter_parameter(names[1], [outputs, adapters.rank], init[1])?,
            scale: adapters.scale(),
            dropout: adapters.dropout,
            layer: layer.clone(),
        })
    }

    pub(super) fn parameters(&self) -> [&Parameter; 2] {
        [&self.a, &self.b]
    }

    /// Returns the mask of the adapter's dropout for this input.
    pub(super) fn mask(&self, x: &Tensor) -> Result<Option<Mask>> {
        if self.dropout == 0.0 {
            return Ok(None);
        }
        let region = self.a.compute_region();
        let columns = (region.offsets[1], region.sizes[1], self.a.global_shape()[1]);
        Mask::of_columns(&self.layer, "lora_dropout", x, columns, self.dropout)
    }

    /// `scale A x`.
    pub(super) fn inner(&self, x: &Tensor) -> Result<Tensor> {
        scale(&matmul::linear(x, &self.a.value()?, None)?, self.scale)
    }

    /// Adds the gradients of the parameters, without ending their uses. Adds the gradient of `x` to
    /// `dx`, if any.
    pub(super) fn backward(
        &self,
        mask: Option<&Mask>,
        x: &Tensor,
        grad: &Tensor,
        dx: Option<Tensor>,
    ) -> Result<Option<Tensor>> {
        let x = drop_elements(mask, x)?;
        if self.b.takes_grad() {
            matmul::weight_grad(&self.b, &self.inner(&x)?, grad)?;
        }
        let Some(du) = matmul::input_grad(grad, &self.b.value()?, InputGrad::New)? else {
            return Ok(dx);
        };
        let du = scale(&du, self.scale)?;
        matmul::weight_grad(&self.a, &x, &du)?;
        let Some(dx) = dx else { return Ok(None) };
        let a = self.a.value()?;
        if mask.is_none() {
            return matmul::input_grad(&du, &a, InputGrad::AddTo(dx));
        }
        let own = matmul::input_grad(&du, &a, InputGrad::New)?;
        Ok(match own {
            Some(own) => Some(add_to(dx, &drop_elements(mask, &own)?)?),
            None => Some(dx),
        })
    }
}

/// The product with an adapter: `W x + scale B A dropout(x)`.
#[derive(Debug, Clone)]
pub(super) struct LoraProduct {
    weight: Weight,
    lora: Lora,
}

impl LoraProduct {
    /// Declares the adapter of the linear layer at the builder's path.
    pub(super) fn declare(
        b: &ModuleBuilder,
        layer: &LayerHandle,
        adapters: &Adapters,
        weight: Weight,
        sizes: [usize; 2],
    ) -> Result<Self> {
        Ok(Self { weight, lora: Lora::of_linear(b, layer, adapters, sizes)? })
    }
}

impl Product for LoraProduct {
    fn weight(&self) -> &Weight {
        &self.weight
    }

    fn parameters(&self) -> Vec<&Parameter> {
        self.weight.parameters().chain(self.lora.parameters()).collect()
    }

    /// Dropout depends on each row's position in the batch.
    fn computes_rows_apart(&self) -> bool {
        self.lora.dropout == 0.0
    }

    fn forward(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<(Tensor, ProductBackward)> {
        if adapters_are_off() {
            return self.weight.forward(x, bias);
        }
        let y = matmul::linear(x, &self.weight.value()?, bias)?;
        let mask = self.lora.mask(x)?;
        let u = self.lora.inner(&drop_elements(mask.as_ref(), x)?)?;
        let y = add_to(y, &matmul::linear(&u, &self.lora.b.value()?, None)?)?;
        let Self { weight, lora } = self.clone();
        Ok((
            y,
            Box::new(move |x, grad, into| {
                let dx = weight.backward(x, grad, into)?;
                lora.backward(mask.as_ref(), x, grad, dx)
            }),
        ))
    }
}

/// The lookup with an adapter, which adds `scale B A` of the rows.
#[derive(Debug)]
pub(super) struct LoraLookup {
    weight: Parameter,
    lora: Lora,
}

impl LoraLookup {
    /// Declares the adapter of the embedding at the builder's path. `A` starts at zero, `B`
    /// normally distributed.
    pub(super) fn declare(
        b: &ModuleBuilder,
        layer: &LayerHandle,
        adapters: &Adapters,
        weight: Parameter,
    ) -> Result<Self> {
        let sizes = [weight.global_shape()[1], weight.global_shape()[0]];
        let init = [Init::ZEROS, Init::Normal { mean: 0.0, std: 1.0 }];
        Ok(Self { weight, lora: Lora::declare(b, layer, adapters, sizes, EMBEDDING, init)? })
    }

    /// `scale A` of the ids.
    fn inner(&self, ids: &[u32]) -> Result<Tensor> {
        scale(&column_lookup(ids, &self.lora.a.value()?)?, self.lora.scale)
    }
}

impl Lookup for LoraLookup {
    fn weight(&self) -> &Parameter {
        &self.weight
    }

    fn parameters(&self) -> Vec<&Parameter> {
        std::iter::once(&self.weight).chain(self.lora.parameters()).collect()
    }

    fn forward(&self, ids: &[u32]) -> Result<Tensor> {
        let y = lookup(ids, &self.weight.value()?)?;
        if adapters_are_off() {
            return Ok(y);
        }
        add_to(y, &matmul::linear(&self.inner(ids)?, &self.lora.b.value()?, None)?)
    }

    fn backward(&self, ids: &[u32], grad: &Tensor) -> Result<()> {
        let Lora { a, b, .. } = &self.lora;
        lookup_grad(&self.weight, ids, grad)?;
        let grad = grad.reshape((ids.len(), grad.dim(D::Minus1)?))?;
        if b.takes_grad() {
            matmul::weight_grad(b, &self.inner(ids)?, &grad)?;
        }
        if let Some(du) = matmul::input_grad(&grad, &b.value()?, InputGrad::New)? {
            column_lookup_grad(a, ids, &scale(&du, self.lora.scale)?)?;
        }
        [a, b, &self.weight].into_iter().try_for_each(Parameter::end_use)
    }
}
