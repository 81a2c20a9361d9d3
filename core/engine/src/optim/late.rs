//! The scale of gradients in a step whose loss and norm the host does not know yet.

use candle_core::{Device, Tensor};

use super::GradScale;
use crate::Result;
use crate::execution::read;

/// The scale of a step's gradients in the memory of their device: the factor follows from the norm, and the step changes
/// nothing if its loss or norm is not finite, all without the host. It knows them only when it [reads](Self::numbers) them.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fulgurite_core::optim::{GradScale, LateScale};
///
/// let of = |loss_sum: f64, squared_norm: f64| -> fulgurite_core::Result<LateScale> {
///     let [loss_sum, squared_norm] = [loss_sum, squared_norm].map(|x| Tensor::new(x, &Device::Cpu));
///     LateScale::new((&loss_sum?, &squared_norm?), &GradScale::default(), Some(1.0), None)
/// };
/// assert_eq!(of(3.0, 16.0)?.numbers().to_vec1::<f64>()?, [3.0, 4.0]);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct LateScale {
    /// The sum of the loss and the norm of the mean gradient: two of f64.
    numbers: Tensor,
    /// One f64.
    factor: Tensor,
    /// One f64: NaN since a loss or a norm was not finite, 0 before.
    spoilt: Tensor,
    /// One u8: whether it is NaN.
    skips: Tensor,
    clip_value: Option<f64>,
    /// The same for kernels: factor, bound, whether to skip, and nothing, in f32.
    #[cfg(feature = "cuda")]
    for_kernels: Tensor,
}

impl LateScale {
    /// The scale of a step by the sum of its loss and the square of its mean gradient's norm, over all ranks: scalars of
    /// f64 on the device of its gradients.
    ///
    /// `scale` is what the host knows: the factor that makes the mean, and the bound of elements. Gradients are brought to a
    /// norm of at most `max_norm`, as by [`clip_factor`](super::clip_factor). If the scale of the step `before` made it
    /// skip, this one does too: the host finds out later.
    ///
    /// # Errors
    /// If the device fails, or they are on different ones.
    pub fn new(
        (loss_sum, squared_norm): (&Tensor, &Tensor),
        scale: &GradScale,
        max_norm: Option<f64>,
        before: Option<&Self>,
    ) -> Result<Self> {
        let device = loss_sum.device();
        let norm = squared_norm.reshape(1)?.sqrt()?;
        let numbers = Tensor::cat(&[&loss_sum.reshape(1)?, &norm], 0)?;
        // 0 of finite numbers, NaN of others, which stays.
        let zeros = (&numbers * 0.0)?;
        let mut spoilt = (zeros.narrow(0, 0, 1)? + zeros.narrow(0, 1, 1)?)?;
        if let Some(before) = before {
            spoilt = (spoilt + &before.spoilt)?;
        }
        let factor = match max_norm.filter(|max| max.is_finite()) {
            Some(max) => {
                let limit = Tensor::full(max, 1, device)?;
                // The quotient is 1 up to the limit.
                let norm = (norm + 1e-6)?.maximum(&limit)?;
                ((limit / norm)? * scale.factor)?
            }
            None => Tensor::full(scale.factor, 1, device)?,
        };
        let skips = spoilt.ne(&spoilt)?;
        Ok(Self {
            #[cfg(feature = "cuda")]
            for_kernels: Self::for_kernels(&factor, scale.clip_value, &skips)?,
            numbers,
            factor,
            spoilt,
            skips,
            clip_value: scale.clip_value,
        })
    }

    /// Four words, as [`StepScale`](fulgurite_kernels::plans::StepScale) has them; one that is not zero skips.
    #[cfg(feature = "cuda")]
    fn for_kernels(factor: &Tensor, bound: Option<f64>, skips: &Tensor) -> Result<Tensor> {
        let f32 = candle_core::DType::F32;
        let bound = Tensor::full(bound.unwrap_or(f64::INFINITY) as f32, 1, factor.device())?;
        let unused = Tensor::zeros(1, f32, factor.device())?;
        let words = [factor.to_dtype(f32)?, bound, skips.to_dtype(f32)?, unused];
        Ok(Tensor::cat(&words, 0)?)
    }

    /// The sum of the loss and the norm of the mean gradient before clipping, over all ranks: a list of two of f64 on the
    /// device, to be [read later](read::later).
    pub fn numbers(&self) -> &Tensor {
        &self.numbers
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        self.numbers.device()
    }

    /// What the host finds if this is in its memory.
    pub(super) fn on_host(&self) -> Result<Option<OnHost>> {
        if !self.device().is_cpu() {
            return Ok(None);
        }
        if read::host::<f64>(&self.spoilt)?[0].is_nan() {
            return Ok(Some(OnHost::Skip));
        }
        let factor = read::host::<f64>(&self.factor)?[0];
        Ok(Some(OnHost::Scale(GradScale { factor, clip_value: self.clip_value })))
    }

    /// A gradient times the factor, clamped, in candle operations.
    pub(super) fn scaled(&self, grad: &Tensor) -> Result<Tensor> {
        let grad = grad.detach().broadcast_mul(&self.factor.to_dtype(grad.dtype())?)?;
        Ok(match self.clip_value {
            Some(bound) => grad.clamp(-bound, bound)?,
            None => grad,
        })
    }

    /// `new`, or `old` if the step changes nothing: tensors of one shape and dtype.
    pub(super) fn unless_skipped(&self, old: &Tensor, new: &Tensor) -> Result<Tensor> {
        Ok(self.skips.broadcast_as(new.shape())?.where_cond(old, new)?)
    }

    /// What kernels read.
    #[cfg(feature = "cuda")]
    pub(super) fn in_kernels(&self) -> &Tensor {
        &self.for_kernels
    }
}

/// A scale in the host's memory.
pub(super) enum OnHost {
    /// The step changes nothing.
    Skip,
    /// It is this.
    Scale(GradScale),
}

/// The scale that an update in candle operations or by a kernel is given.
#[derive(Clone, Copy)]
pub(super) enum Given<'a> {
    Known(&'a GradScale),
    Late(&'a LateScale),
}

impl<'a> Given<'a> {
    /// The scale, for values on the CPU.
    pub(super) fn known(self) -> Result<&'a GradScale> {
        match self {
            Self::Known(scale) => Ok(scale),
            Self::Late(late) => Err(crate::Error::other(format!(
                "the scale of gradients is on {:?}, and the values that the optimizer updates are on the CPU: call \
                 `Optimizer::step` with a scale that the host knows",
                late.device().location()
            ))),
        }
    }

    /// A gradient times the factor, clamped, in candle operations.
    pub(super) fn scaled(self, grad: &Tensor) -> Result<Tensor> {
        match self {
            Self::Known(scale) => super::elementwise::scaled_grad(grad, scale),
            Self::Late(late) => late.scaled(grad),
        }
    }

    /// As [`LateScale::unless_skipped`]. A step whose scale is known is not skipped.
    pub(super) fn unless_skipped(self, old: &Tensor, new: Tensor) -> Result<Tensor> {
        match self {
            Self::Known(_) => Ok(new),
            Self::Late(late) => late.unless_skipped(old, &new),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::clip_factor;

    fn late(loss: f64, norm: f64, max: Option<f64>, before: Option<&LateScale>) -> LateScale {
        let [loss, square] = [loss, norm * norm].map(|x| Tensor::new(x, &Device::Cpu).unwrap());
        let scale = GradScale { factor: 0.3, clip_value: None };
        LateScale::new((&loss, &square), &scale, max, before).unwrap()
    }

    fn factor(scale: &LateScale) -> Option<f64> {
        match scale.on_host().unwrap().unwrap() {
            OnHost::Skip => None,
            OnHost::Scale(scale) => Some(scale.factor),
        }
    }

    #[test]
    fn factors_are_those_of_the_host_to_the_bit() {
        for norm in [0.0, 1e-9, 0.1, 0.999_999, 1.0, 1.000_001, 3.7, 1e20] {
            for max in [1e-3, 0.7, 1.0, 2.5, 1e30, f64::INFINITY] {
                let square: f64 = norm * norm;
                let expected = 0.3 * clip_factor(square.sqrt(), max);
                let found = factor(&late(1.0, norm, Some(max), None));
                assert_eq!(found, Some(expected), "{norm} {max}");
            }
            assert_eq!(factor(&late(1.0, norm, None, None)), Some(0.3));
        }
    }

    #[test]
    fn a_step_is_skipped_if_loss_or_norm_is_not_finite_and_so_are_those_after_it() {
        for bad in [f64::NAN, f64::INFINITY] {
            for (loss, norm) in [(bad, 1.0), (-bad, 1.0), (1.0, bad), (bad, bad)] {
                let first = late(loss, norm, Some(1.0), None);
                assert_eq!(factor(&first), None, "{loss} {norm}");
                let second = late(1.0, 1.0, Some(1.0), Some(&first));
                assert_eq!(factor(&second), None, "{loss} {norm}");
                assert_eq!(factor(&late(1.0, 1.0, None, Some(&second))), None, "{loss} {norm}");
            }
        }
        let fine = late(1.0, 1.0, None, None);
        assert_eq!(factor(&late(1.0, 1.0, None, Some(&fine))), Some(0.3));
    }
}
