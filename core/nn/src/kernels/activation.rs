//! Activation functions and SwiGLU.

use candle_core::Tensor;

use crate::Result;
use crate::backend::{to_accumulation_dtype, uses_cpu_kernels};
use crate::host::{Element, Float, host, tensor, with_element};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::simd::{TwoOfThree, map, map2, map3_2};

/// An activation function of a feed-forward block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// GELU with the exact error function.
    Gelu,
    /// GELU's tanh approximation: `gelu_new` and `gelu_pytorch_tanh` of transformers.
    GeluTanh,
    /// `max(x, 0)`. Its slope at 0 is 0, as in PyTorch.
    Relu,
}

const TANH_CUBE: f64 = 0.044_715;

fn sqrt_2_over_pi() -> f64 {
    std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2
}

fn silu<T: Float>(x: T) -> T {
    x * x.sigmoid()
}

fn silu_slope<T: Float>(x: T) -> T {
    let s = x.sigmoid();
    s * (T::ONE + x * (T::ONE - s))
}

fn gelu<T: Float>(x: T) -> T {
    T::from_f64(0.5) * x * (T::ONE + (x * T::from_f64(std::f64::consts::FRAC_1_SQRT_2)).erf())
}

fn gelu_slope<T: Float>(x: T) -> T {
    let half = T::from_f64(0.5);
    let cdf = half * (T::ONE + (x * T::from_f64(std::f64::consts::FRAC_1_SQRT_2)).erf());
    let pdf = T::from_f64(0.5 * sqrt_2_over_pi()) * (T::ZERO - half * x * x).fast_exp();
    cdf + x * pdf
}

/// `(1 + tanh(u)) / 2`, which is the sigmoid of `2u`, for the `u` of the approximation.
fn gelu_gate<T: Float>(x: T) -> T {
    let twice = T::from_f64(2.0 * sqrt_2_over_pi());
    (twice * (x + T::from_f64(TANH_CUBE) * x * x * x)).sigmoid()
}

fn gelu_tanh<T: Float>(x: T) -> T {
    x * gelu_gate(x)
}

fn gelu_tanh_slope<T: Float>(x: T) -> T {
    let gate = gelu_gate(x);
    let twice = T::from_f64(2.0 * sqrt_2_over_pi());
    let inner = twice * (T::ONE + T::from_f64(3.0 * TANH_CUBE) * x * x);
    gate + x * gate * (T::ONE - gate) * inner
}

fn relu<T: Float>(x: T) -> T {
    // NaN stays NaN.
    if x <= T::ZERO { T::ZERO } else { x }
}

fn relu_slope<T: Float>(x: T) -> T {
    if x > T::ZERO { T::ONE } else { T::ZERO }
}

/// `grad slope(x)`.
fn times_slope<E: Element>(
    x: &[E],
    grad: &[E],
    slope: impl Fn(E::Wide) -> E::Wide + Copy + Sync,
) -> Vec<E> {
    map2(x, grad, |x, grad| E::narrow(grad.widen() * slope(x.widen())))
}

/// The sigmoid of each element, by tensor operations.
pub(crate) fn sigmoid_portable(x: &Tensor) -> candle_core::Result<Tensor> {
    (x.neg()?.exp()? + 1.0)?.recip()
}

impl Activation {
    /// The activation of each element.
    pub(crate) fn forward(self, x: &Tensor) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Some(y) = fulgurite_kernels::cuda::activation(self.kernel(), x)? {
            return Ok(y);
        }
        if uses_cpu_kernels(x) {
            let x = x.detach().contiguous()?;
            return with_element!(x.dtype(), E => {
                let host_x = host(&x)?;
                let values = host_x.slice::<E>()?;
                let y = match self {
                    Self::Silu => map(values, |x| E::narrow(silu(x.widen()))),
                    Self::Gelu => map(values, |x| E::narrow(gelu(x.widen()))),
                    Self::GeluTanh => map(values, |x| E::narrow(gelu_tanh(x.widen()))),
                    Self::Relu => map(values, |x| E::narrow(relu(x.widen()))),
                };
                tensor(y, x.shape())
            });
        }
        let dtype = x.dtype();
        let x = to_accumulation_dtype(x)?;
        let y = match self {
            Self::Silu => (&x * sigmoid_portable(&x)?)?,
            Self::Gelu => x.gelu_erf()?,
            Self::GeluTanh => ((Self::inner(&x)?.tanh()? + 1.0)? * (&x * 0.5)?)?,
            Self::Relu => x.relu()?,
        };
        storage::cast(&y, dtype)
    }

    /// The gradient of the input `x`.
    pub(crate) fn backward(self, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        {
            use fulgurite_kernels::cuda::activation_backward;
            let grad = grad.to_dtype(x.dtype())?;
            if let Some(dx) = activation_backward(self.kernel(), x, &grad)? {
                return Ok(dx);
            }
        }
        if uses_cpu_kernels(x) {
            let x = x.detach().contiguous()?;
            let grad = storage::cast(&grad.detach(), x.dtype())?.contiguous()?;
            return with_element!(x.dtype(), E => {
                let (host_x, grad) = (host(&x)?, host(&grad)?);
                let (values, grad) = (host_x.slice::<E>()?, grad.slice::<E>()?);
                let dx = match self {
                    Self::Silu => times_slope(values, grad, silu_slope),
                    Self::Gelu => times_slope(values, grad, gelu_slope),
                    Self::GeluTanh => times_slope(values, grad, gelu_tanh_slope),
                    Self::Relu => times_slope(values, grad, relu_slope),
                };
                tensor(dx, x.shape())
            });
        }
        let dtype = x.dtype();
        let (x, grad) = (to_accumulation_dtype(x)?, to_accumulation_dtype(grad)?);
        let dx = (self.slope_portable(&x)? * grad)?;
        storage::cast(&dx, dtype)
    }

    /// The function of the CUDA kernels.
    #[cfg(feature = "cuda")]
    fn kernel(self) -> fulgurite_kernels::plans::Activation {
        use fulgurite_kernels::plans::Activation;
        match self {
            Self::Silu => Activation::Silu,
            Self::Gelu => Activation::Gelu,
            Self::GeluTanh => Activation::GeluTanh,
            Self::Relu => Activation::Relu,
        }
    }

    fn inner(x: &Tensor) -> candle_core::Result<Tensor> {
        ((x + ((x.sqr()? * x)? * TANH_CUBE)?)? * sqrt_2_over_pi())?.contiguous()
    }

    fn slope_portable(self, x: &Tensor) -> candle_core::Result<Tensor> {
        match self {
            Self::Silu => {
                let s = sigmoid_portable(x)?;
                &s + (x * (&s * s.affine(-1.0, 1.0)?)?)?
            }
            Self::Gelu => {
                let cdf = ((x * std::f64::consts::FRAC_1_SQRT_2)?.erf()? + 1.0)? * 0.5;
                let pdf = (x.sqr()? * -0.5)?.exp()? * (0.5 * sqrt_2_over_pi());
                cdf? + (x * pdf?)?
            }
            Self::GeluTanh => {
                let t = Self::inner(x)?.tanh()?;
                let inner = x.sqr()?.affine(3.0 * TANH_CUBE, 1.0)? * sqrt_2_over_pi();
                let slope = (t.sqr()?.affine(-0.5, 0.5)? * inner?)?;
                t.affine(0.5, 0.5)? + (x * slope)?
            }
            Self::Relu => x.gt(0f64)?.to_dtype(x.dtype()),
        }
    }
}

/// `activation(gate) * up`.
pub(crate) fn gated(activation: Activation, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    {
        use fulgurite_kernels::cuda;
        let y = match activation {
            Activation::Silu => cuda::swiglu(gate, up)?,
            other => cuda::gated(other.kernel(), gate, up)?,
        };
        if let Some(y) = y {
            return Ok(y);
        }
    }
    if uses_cpu_kernels(gate) {
        let (gate, up) = (gate.detach().contiguous()?, up.detach().contiguous()?);
        return with_element!(gate.dtype(), E => {
            let (g, u) = (host(&gate)?, host(&up)?);
            let (g, u) = (g.slice::<E>()?, u.slice::<E>()?);
            let y = match activation {
                Activation::Silu => gated_by(g, u, silu),
                Activation::Gelu => gated_by(g, u, gelu),
                Activation::GeluTanh => gated_by(g, u, gelu_tanh),
                Activation::Relu => gated_by(g, u, relu),
            };
            tensor(y, gate.shape())
        });
    }
    let dtype = gate.dtype();
    let (gate, up) = (to_accumulation_dtype(gate)?, to_accumulation_dtype(up)?);
    storage::cast(&(activation.forward(&gate)? * up)?, dtype)
}

fn gated_by<E: Element>(
    gate: &[E],
    up: &[E],
    activation: impl Fn(E::Wide) -> E::Wide + Copy + Sync,
) -> Vec<E> {
    map2(gate, up, |g, u| E::narrow(activation(g.widen()) * u.widen()))
}

/// Maps an element of `gate`, one of `up` and the output's gradient to the gradients of the first
/// two.
#[derive(Clone, Copy)]
struct SwigluGrads;

impl<E: Element> TwoOfThree<E> for SwigluGrads {
    #[inline(always)]
    fn of(self, gate: E, up: E, grad: E) -> (E, E) {
        let (g, u, d) = (gate.widen(), up.widen(), grad.widen());
        let (one, s) = (E::Wide::ONE, g.sigmoid());
        (E::narrow(d * u * s * (one + g * (one - s))), E::narrow(d * g * s))
    }
}

/// [`SwigluGrads`] for another activation, by its function and its slope.
#[derive(Clone, Copy)]
struct GatedGrads<F, S>(F, S);

impl<E, F, S> TwoOfThree<E> for GatedGrads<F, S>
where
    E: Element,
    F: Fn(E::Wide) -> E::Wide + Copy + Send + Sync,
    S: Fn(E::Wide) -> E::Wide + Copy + Send + Sync,
{
    #[inline(always)]
    fn of(self, gate: E, up: E, grad: E) -> (E, E) {
        let (g, u, d) = (gate.widen(), up.widen(), grad.widen());
        (E::narrow(d * u * (self.1)(g)), E::narrow(d * (self.0)(g)))
    }
}

/// The gradients of `gate` and `up`.
pub(crate) fn gated_backward(
    activation: Activation,
    gate: &Tensor,
    up: &Tensor,
    grad: &Tensor,
) -> Result<(Tensor, Tensor)> {
    #[cfg(feature = "cuda")]
    {
        use fulgurite_kernels::cuda;
        let grad = grad.to_dtype(gate.dtype())?;
        let grads = match activation {
            Activation::Silu => cuda::swiglu_backward(gate, up, &grad)?,
            other => cuda::gated_backward(other.kernel(), gate, up, &grad)?,
        };
        if let Some(grads) = grads {
            return Ok(grads);
        }
    }
    if uses_cpu_kernels(gate) {
        let (gate, up) = (gate.detach().contiguous()?, up.detach().contiguous()?);
        let grad = storage::cast(&grad.detach(), gate.dtype())?.contiguous()?;
        return with_element!(gate.dtype(), E => {
            let (g, u, d) = (host(&gate)?, host(&up)?, host(&grad)?);
            let all = [g.slice::<E>()?, u.slice()?, d.slice()?];
            let (dgate, dup) = match activation {
                Activation::Silu => map3_2(all, SwigluGrads),
                Activation::Gelu => map3_2(all, GatedGrads(gelu, gelu_slope)),
                Activation::GeluTanh => map3_2(all, GatedGrads(gelu_tanh, gelu_tanh_slope)),
                Activation::Relu => map3_2(all, GatedGrads(relu, relu_slope)),
            };
            Ok((tensor(dgate, gate.shape())?, tensor(dup, gate.shape())?))
        });
    }
    let dtype = gate.dtype();
    let (gate, up, grad) =
        (to_accumulation_dtype(gate)?, to_accumulation_dtype(up)?, to_accumulation_dtype(grad)?);
    let slope = activation.slope_portable(&gate)?;
    let dup = (&grad * activation.forward(&gate)?)?;
    let dgate = ((grad * up)? * slope)?;
    Ok((storage::cast(&dgate, dtype)?, storage::cast(&dup, dtype)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relu_of_infinities_and_nan() {
        let of = [f32::NEG_INFINITY, -1.0, -0.0, 2.0, f32::INFINITY].map(relu);
        assert_eq!(of.map(f32::to_bits), [0.0, 0.0, 0.0, 2.0, f32::INFINITY].map(f32::to_bits));
        assert!(relu(f32::NAN).is_nan());
    }
}
