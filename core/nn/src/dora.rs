//! DoRA, the adapter with magnitudes (Liu et al. 2024), for linear layers, computed like PEFT
//! (`tuners/lora/dora.py`).

use candle_core::Tensor;

use super::backend::to_accumulation_dtype;
use super::dropout::Mask;
use super::gradients::add_to;
use super::kernels::matmul::{self, InputGrad};
use super::kernels::output_factors;
use super::lora::{Lora, drop_elements};
use super::product::{Product, ProductBackward};
use super::weight::Weight;
use crate::Result;
use fulgurite_engine::autograd::{save_for_backward, storage};
use fulgurite_engine::module::{Adapters, ModuleBuilder, adapters_are_off};
use fulgurite_engine::parallel::LayerHandle;
use fulgurite_engine::parameter::{Parameter, accumulation_dtype};

/// The name of the magnitudes' parameter, relative to the layer; PEFT's name in files.
pub(super) const MAGNITUDE: &str = "lora_magnitude_vector";

/// Elements of the adapted weight that are in memory at a time while norms are computed.
const PIECE: usize = 1 << 22;

/// The product with an adapter that has magnitudes. With `V = W + scale B A`, it is
/// `magnitude / norm(V) * (V x)`, row by row of `V`. The norm is a constant in backward.
#[derive(Debug, Clone)]
pub(super) struct DoraProduct {
    weight: Weight,
    lora: Lora,
    magnitude: Parameter,
}

/// The state that a forward keeps for its backward.
struct Saved {
    /// Elements that dropout zeroed.
    mask: Option<Mask>,
    /// `magnitude / norm(V)`, `[out]`, in the compute dtype.
    factor: Tensor,
    /// `1 / norm(V)`, `[out]`, in the accumulation dtype.
    inverse: Tensor,
    /// `V x` for the input after dropout; in a rowwise layer, this rank's partial sum.
    product: Tensor,
}

impl DoraProduct {
    /// Declares the adapter of the linear layer at the builder's path.
    pub(super) fn declare(
        b: &ModuleBuilder,
        layer: &LayerHandle,
        adapters: &Adapters,
        weight: Weight,
        sizes: [usize; 2],
    ) -> Result<Self> {
        let lora = Lora::of_linear(b, layer, adapters, sizes)?;
        let magnitude = b.adapter_magnitude(MAGNITUDE, weight.parameter())?;
        Ok(Self { weight, lora, magnitude })
    }

    fn backward(
        &self,
        Saved { mask, factor, inverse, product }: &Saved,
        x: &Tensor,
        grad: &Tensor,
        into: InputGrad,
    ) -> Result<Option<Tensor>> {
        output_factors::factor_grad(&self.magnitude, grad, product, inverse)?;
        let mask = mask.as_ref();
        let scaled = output_factors::scale(grad, factor)?;
        let weight = self.weight.value()?;
        let dx = if mask.is_none() {
            if let Some(weight) = self.weight.trained() {
                matmul::weight_grad(weight, x, &scaled)?;
            }
            matmul::input_grad(&scaled, &weight, into)?
        } else {
            let rest = (&scaled - grad)?;
            if let Some(weight) = self.weight.trained() {
                matmul::weight_grad(weight, x, grad)?;
                matmul::weight_grad(weight, &drop_elements(mask, x)?, &rest)?;
            }
            match matmul::input_grad(grad, &weight, into)? {
                None => None,
                Some(dx) => match matmul::input_grad(&rest, &weight, InputGrad::New)? {
                    None => Some(dx),
                    Some(own) => Some(add_to(dx, &drop_elements(mask, &own)?)?),
                },
            }
        };
        self.lora.backward(mask, x, &scaled, dx)
    }
}

impl Product for DoraProduct {
    fn weight(&self) -> &Weight {
        &self.weight
    }

    fn parameters(&self) -> Vec<&Parameter> {
        let adapter = self.lora.parameters().into_iter().chain([&self.magnitude]);
        self.weight.parameters().chain(adapter).collect()
    }

    /// Each call computes the norms of all rows of the weight.
    fn computes_rows_apart(&self) -> bool {
        false
    }

    /// With dropout it is PEFT's `W x + (factor - 1) W dropout(x) + factor scale B A dropout(x)`.
    fn forward(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<(Tensor, ProductBackward)> {
        if adapters_are_off() {
            return self.weight.forward(x, bias);
        }
        let (lora, weight) = (&self.lora, &self.weight.value()?);
        let inverse = inverse_norms(lora, weight)?;
        let magnitude = to_accumulation_dtype(&self.magnitude.value()?)?;
        let factor = (magnitude * &inverse)?.to_dtype(x.dtype())?;
        let mask = lora.mask(x)?;
        let dropped = drop_elements(mask.as_ref(), x)?;
        let base = matmul::linear(&dropped, weight, None)?;
        let change = matmul::linear(&lora.inner(&dropped)?, &lora.b.value()?, None)?;
        let product = add_to(change, &base)?;
        let y = output_factors::scale(&product, &factor)?;
        let y = match (&mask, bias) {
            (Some(_), bias) => (matmul::linear(x, weight, bias)? + (y - base)?)?,
            (None, Some(bias)) => y.broadcast_add(bias)?,
            (None, None) => y,
        };
        save_for_backward(&[&product]);
        let (layer, saved) = (self.clone(), Saved { mask, factor, inverse, product });
        Ok((y, Box::new(move |x, grad, into| layer.backward(&saved, x, grad, into))))
    }
}

/// Returns `1 / norm(V)` of each row that this rank computes, `[out]`, in the accumulation dtype.
/// It is 0 for a row of zeros, whose output is 0. Like PEFT's, norms are computed in the
/// accumulation dtype and rounded to the weight's dtype. The magnitudes are rounded the same way,
/// so the quotient is 1 before training. Collective in a rowwise layer.
fn inverse_norms(lora: &Lora, weight: &Tensor) -> Result<Tensor> {
    let (outputs, inputs) = weight.dims2()?;
    let dtype = accumulation_dtype(weight.dtype());
    let a = to_accumulation_dtype(&lora.a.value()?)?;
    let b = (to_accumulation_dtype(&lora.b.value()?)? * lora.scale)?;
    let rows = (PIECE / inputs.max(1)).max(1);
    let mut squares = Vec::with_capacity(outputs.div_ceil(rows));
    for start in (0..outputs).step_by(rows) {
        let n = rows.min(outputs - start);
        let own = weight.narrow(0, start, n)?;
        // `input_grad` adds to it in place.
        let own = match own.dtype() == dtype {
            true => own.force_contiguous()?,
            false => storage::cast(&own, dtype)?,
        };
        let b = b.narrow(0, start, n)?.contiguous()?;
        if let Some(adapted) = matmul::input_grad(&b, &a, InputGrad::AddTo(own))? {
            squares.push(adapted.sqr()?.sum(1)?);
        }
    }
    let squares = match squares.is_empty() {
        true => Tensor::zeros(0, dtype, weight.device())?,
        false => Tensor::cat(&squares, 0)?,
    };
    let norms = lora.layer.sum_over_inputs(squares)?.sqrt()?;
    let norms = norms.to_dtype(weight.dtype())?.to_dtype(dtype)?;
    Ok(norms.gt(0.0)?.where_cond(&norms.recip()?, &norms.zeros_like()?)?)
}
