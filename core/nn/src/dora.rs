//! DoRA, the adapter with magnitudes (Liu et al. 2024), for linear layers, computed like PEFT
//! (`tuners/lora/dora.py`).

use candle_core::Tensor;

use super::backend::to_accumulation_dtype;
use super::kernels::matmul::{self, InputGrad};
use super::lora::{Lora, LoraCall};
use super::weight::Weight;
use crate::{Error, Result};
use fulgurite_engine::autograd::save_for_backward;
use fulgurite_engine::module::ModuleBuilder;
use fulgurite_engine::parameter::{Parameter, accumulation_dtype};

/// The name of the magnitudes' parameter, relative to the layer; PEFT's name in files.
pub(super) const MAGNITUDE: &str = "lora_magnitude_vector";

/// Elements of the adapted weight that are in memory at a time while norms are computed.
const PIECE: usize = 1 << 22;

/// The magnitudes of an adapter. With `V = W + scale B A`, the layer computes
/// `magnitude / norm(V) * (V x)`, row by row of `V`. The norm is a constant in backward.
#[derive(Debug, Clone)]
pub(super) struct Dora {
    pub(super) magnitude: Parameter,
}

/// The state that one call's forward keeps for its backward.
#[derive(Debug, Clone)]
pub(super) struct DoraCall {
    /// `magnitude / norm(V)`, `[out]`, in the compute dtype.
    factor: Tensor,
    /// `1 / norm(V)`, `[out]`, in the accumulation dtype.
    inverse: Tensor,
    /// `V x` for the input after dropout; in a rowwise layer, this rank's partial sum.
    product: Tensor,
}

impl Dora {
    /// Declares the magnitudes of the linear layer at the builder's path, if its adapter has
    /// magnitudes.
    pub(super) fn of_linear(b: &ModuleBuilder, weight: &Parameter) -> Result<Option<Self>> {
        match b.adapter().is_some_and(|adapters| adapters.dora) {
            true => Ok(Some(Self { magnitude: b.adapter_magnitude(MAGNITUDE, weight)? })),
            false => Ok(None),
        }
    }

    /// Computes the layer's output for `x`, with this bias.
    ///
    /// With dropout it is PEFT's `W x + (factor - 1) W dropout(x) + factor scale B A dropout(x)`.
    pub(super) fn compute(
        &self,
        lora: &Lora,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<(Tensor, LoraCall)> {
        let inverse = inverse_norms(lora, weight)?;
        let magnitude = to_accumulation_dtype(&self.magnitude.value()?)?;
        let factor = (magnitude * &inverse)?.to_dtype(x.dtype())?;
        let call = lora.call(x)?;
        let dropped = call.drop(x)?;
        let base = matmul::linear(&dropped, weight, None)?;
        let product = (&base + matmul::linear(&lora.inner(&dropped)?, &lora.b.value()?, None)?)?;
        let y = product.broadcast_mul(&factor)?;
        let y = match (&call.mask, bias) {
            (Some(_), bias) => (matmul::linear(x, weight, bias)? + (y - base)?)?,
            (None, Some(bias)) => y.broadcast_add(bias)?,
            (None, None) => y,
        };
        save_for_backward(&[&product]);
        let dora = Some(DoraCall { factor, inverse, product });
        Ok((y, LoraCall { dora, ..call }))
    }

    /// The backward of [`compute`](Self::compute), except for the bias. Returns the gradient of
    /// `x`, and adds the parameters' gradients without ending their uses.
    pub(super) fn backward(
        &self,
        lora: &Lora,
        call: &LoraCall,
        x: &Tensor,
        grad: &Tensor,
        into: InputGrad,
        weight: &Weight,
    ) -> Result<Option<Tensor>> {
        let DoraCall { factor, inverse, product } = call.dora.as_ref().ok_or_else(|| {
            Error::parameter(self.magnitude.fqn(), "its backward got the call of another layer")
        })?;
        if self.magnitude.takes_grad() {
            let terms = (to_accumulation_dtype(grad)? * to_accumulation_dtype(product)?)?;
            matmul::bias_grad(&self.magnitude, &terms.broadcast_mul(inverse)?)?;
        }
        let scaled = grad.broadcast_mul(factor)?;
        let value = weight.value()?;
        let dx = if call.mask.is_none() {
            if let Some(weight) = weight.trained() {
                matmul::weight_grad(weight, x, &scaled)?;
            }
            matmul::input_grad(&scaled, &value, into)?
        } else {
            let rest = (&scaled - grad)?;
            if let Some(weight) = weight.trained() {
                matmul::weight_grad(weight, x, grad)?;
                matmul::weight_grad(weight, &call.drop(x)?, &rest)?;
            }
            match matmul::input_grad(grad, &value, into)? {
                None => None,
                Some(dx) => match matmul::input_grad(&rest, &value, InputGrad::New)? {
                    None => Some(dx),
                    Some(own) => Some((dx + call.drop(&own)?)?),
                },
            }
        };
        lora.backward(call, x, &scaled, dx)
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
        let own = weight.narrow(0, start, n)?.to_dtype(dtype)?.copy()?;
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
