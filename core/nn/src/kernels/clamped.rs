//! The clamped SwiGLU of gpt-oss.

use candle_core::Tensor;

use super::activation::sigmoid_portable;
use crate::Result;
use crate::backend::{to_accumulation_dtype, uses_cpu_kernels};
use crate::host::{Element, Float, host, tensor, with_element};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::simd::{TwoOfThree, map2, map3_2};

/// `(up + 1) * gate * sigmoid(alpha * gate)`, after `gate` is bounded above by the limit and `up`
/// on both sides.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClampedSwiGlu {
    /// Factor of the gate in the sigmoid: 1.702 in gpt-oss.
    pub alpha: f64,
    /// Bound of the projections: 7 in gpt-oss.
    pub limit: f64,
}

impl ClampedSwiGlu {
    /// Numbers that no layer computes with, in words.
    pub(crate) fn problem(self) -> Option<String> {
        let is_positive = |x: f64| x > 0.0 && x <= f64::from(f32::MAX);
        match is_positive(self.alpha) && is_positive(self.limit) {
            true => None,
            false => Some(format!(
                "alpha and limit of the clamped SwiGLU must be positive, got {:?} and {:?}",
                self.alpha, self.limit
            )),
        }
    }

    pub(crate) fn forward(self, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
        if uses_cpu_kernels(gate) {
            let (gate, up) = (gate.detach().contiguous()?, up.detach().contiguous()?);
            return with_element!(gate.dtype(), E => {
                let numbers = Numbers::<<E as Element>::Wide>::of(self);
                let (g, u) = (host(&gate)?, host(&up)?);
                let y = map2(g.slice::<E>()?, u.slice::<E>()?, |g: E, u: E| {
                    E::narrow(numbers.forward(g.widen(), u.widen()))
                });
                tensor(y, gate.shape())
            });
        }
        let dtype = gate.dtype();
        let (gate, up) = (to_accumulation_dtype(gate)?, to_accumulation_dtype(up)?);
        let (gate, up) = (gate.minimum(self.limit)?, up.clamp(-self.limit, self.limit)?);
        let glu = (&gate * sigmoid_portable(&(&gate * self.alpha)?)?)?;
        storage::cast(&((up + 1.0)? * glu)?, dtype)
    }

    /// The gradients of `gate` and `up`. Beyond a bound they are 0.
    pub(crate) fn backward(
        self,
        gate: &Tensor,
        up: &Tensor,
        grad: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        if uses_cpu_kernels(gate) {
            let (gate, up) = (gate.detach().contiguous()?, up.detach().contiguous()?);
            let grad = storage::cast(&grad.detach(), gate.dtype())?.contiguous()?;
            return with_element!(gate.dtype(), E => {
                let numbers = Numbers::<<E as Element>::Wide>::of(self);
                let (g, u, d) = (host(&gate)?, host(&up)?, host(&grad)?);
                let all = [g.slice::<E>()?, u.slice()?, d.slice()?];
                let (dgate, dup) = map3_2(all, numbers);
                Ok((tensor(dgate, gate.shape())?, tensor(dup, gate.shape())?))
            });
        }
        let dtype = gate.dtype();
        let [gate, up, grad] = [gate, up, grad].map(to_accumulation_dtype);
        let (gate, up, grad) = (gate?, up?, grad?);
        let mask = |x: Tensor| x.to_dtype(grad.dtype());
        let (in_gate, in_up) = (mask(gate.le(self.limit)?)?, mask(up.abs()?.le(self.limit)?)?);
        let (gate, up) = (gate.minimum(self.limit)?, up.clamp(-self.limit, self.limit)?);
        let s = sigmoid_portable(&(&gate * self.alpha)?)?;
        // The slope of `gate * sigmoid(alpha * gate)`.
        let slope = (&s + ((&gate * self.alpha)? * (&s * s.affine(-1.0, 1.0)?)?)?)?;
        let dgate = ((&grad * (up + 1.0)?)? * (slope * in_gate)?)?;
        let dup = (&grad * ((gate * s)? * in_up)?)?;
        Ok((storage::cast(&dgate, dtype)?, storage::cast(&dup, dtype)?))
    }
}

/// The numbers of a [`ClampedSwiGlu`] in the type of the arithmetic.
#[derive(Clone, Copy)]
struct Numbers<T> {
    alpha: T,
    limit: T,
}

impl<T: Float> Numbers<T> {
    fn of(ClampedSwiGlu { alpha, limit }: ClampedSwiGlu) -> Self {
        Self { alpha: T::from_f64(alpha), limit: T::from_f64(limit) }
    }

    /// NaN stays NaN.
    fn clamp(self, up: T) -> T {
        let least = T::ZERO - self.limit;
        if up > self.limit {
            self.limit
        } else if up < least {
            least
        } else {
            up
        }
    }

    fn forward(self, gate: T, up: T) -> T {
        let gate = if gate > self.limit { self.limit } else { gate };
        (self.clamp(up) + T::ONE) * gate * (self.alpha * gate).sigmoid()
    }
}

impl<E: Element> TwoOfThree<E> for Numbers<E::Wide> {
    #[inline(always)]
    fn of(self, gate: E, up: E, grad: E) -> (E, E) {
        let (g, u, d) = (gate.widen(), up.widen(), grad.widen());
        let (zero, one) = (E::Wide::ZERO, E::Wide::ONE);
        let in_gate = if g > self.limit { zero } else { one };
        let in_up = if u > self.limit || u < zero - self.limit { zero } else { one };
        let g = if g > self.limit { self.limit } else { g };
        let s = (self.alpha * g).sigmoid();
        let slope = s + self.alpha * g * s * (one - s);
        let dgate = d * (self.clamp(u) + one) * slope * in_gate;
        (E::narrow(dgate), E::narrow(d * g * s * in_up))
    }
}
