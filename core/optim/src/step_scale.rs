//! The scale of gradients in a step whose loss and norm the host may not know yet.

use candle_core::{Device, Tensor};

use crate::{Error, Result};
use fulgurite_tensor::execution::read;

/// Scaling and clipping of gradients, applied in the optimizer's one pass over memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GradScale {
    /// Factor of the gradients, applied first: one over the token count, times the clip factor.
    pub factor: f64,
    /// Bound of each scaled element: it is clamped to plus or minus this value.
    pub clip_value: Option<f64>,
}

impl Default for GradScale {
    fn default() -> Self {
        Self { factor: 1.0, clip_value: None }
    }
}

impl GradScale {
    /// # Errors
    /// If `clip_value` is negative or NaN.
    fn check(&self) -> Result<()> {
        match self.clip_value {
            Some(bound) if bound.is_nan() || bound < 0.0 => Err(Error::Config(format!(
                "trainer.gradient_clip_val must be zero or more when clipping by value, got {bound}"
            ))),
            _ => Ok(()),
        }
    }
}

/// The scale of one optimizer step: a [`GradScale`] on the host or on the device, or a skipped
/// step.
///
/// The device may not have computed its scale yet. A skipped step changes nothing.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fulgurite_core::optim::{GradScale, StepScale};
///
/// let known = StepScale::from(GradScale { factor: 0.5, clip_value: None });
/// assert_eq!(known.read()?.map(|scale| scale.factor), Some(0.5));
///
/// // A loss whose sum is 3, and gradients of norm 4 that are clipped to norm 1:
/// let of = |loss_sum: f64, squared_norm: f64| -> fulgurite_core::Result<StepScale> {
///     let [loss_sum, squared_norm] =
///         [loss_sum, squared_norm].map(|x| Tensor::new(x, &Device::Cpu));
///     StepScale::on_device((&loss_sum?, &squared_norm?), &GradScale::default(), Some(1.0), None)
/// };
/// assert!((of(3.0, 16.0)?.read()?.unwrap().factor - 0.25).abs() < 1e-6);
/// assert_eq!(of(f64::NAN, 16.0)?.read()?, None);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct StepScale(Place);

#[derive(Debug, Clone)]
enum Place {
    Host(GradScale),
    Device(OnDevice),
}

/// A scale in the memory of the gradients' device.
///
/// The device computes the factor from the norm, and skips the step if the loss or the norm is not
/// finite, without the host.
#[derive(Debug, Clone)]
struct OnDevice {
    /// The sum of the loss and the norm of the mean gradient: two f64.
    numbers: Tensor,
    /// One f64.
    factor: Tensor,
    /// One f64: NaN once a loss or a norm was not finite, else 0.
    spoilt: Tensor,
    /// One u8: whether `spoilt` is NaN.
    skips: Tensor,
    clip_value: Option<f64>,
    /// The words that kernels read, in f32: factor, bound, whether to skip, and an unused word.
    #[cfg(feature = "cuda")]
    for_kernels: Tensor,
}

impl From<GradScale> for StepScale {
    fn from(scale: GradScale) -> Self {
        Self(Place::Host(scale))
    }
}

impl StepScale {
    /// Computes the scale of a step on the device of its gradients.
    ///
    /// The inputs are the sum of the step's loss and the square of its mean gradient's norm, over
    /// all ranks, as f64 scalars. `scale` is known to the host: the factor that makes the mean, and
    /// the bound of elements. Gradients are scaled down to a norm of at most `max_norm`, as by
    /// [`clip_factor`](super::clip_factor).
    ///
    /// If the scale of the step `before` skipped that step, this one is skipped too, because the
    /// host learns of it later.
    ///
    /// # Errors
    /// If the device fails, or the tensors are on different devices.
    pub fn on_device(
        (loss_sum, squared_norm): (&Tensor, &Tensor),
        scale: &GradScale,
        max_norm: Option<f64>,
        before: Option<&Self>,
    ) -> Result<Self> {
        scale.check()?;
        let device = loss_sum.device();
        let norm = squared_norm.reshape(1)?.sqrt()?;
        let numbers = Tensor::cat(&[&loss_sum.reshape(1)?, &norm], 0)?;
        // `x * 0` is 0 if `x` is finite, else NaN, and NaN persists.
        let zeros = (&numbers * 0.0)?;
        let mut spoilt = (zeros.narrow(0, 0, 1)? + zeros.narrow(0, 1, 1)?)?;
        if let Some(Self(Place::Device(before))) = before {
            spoilt = (spoilt + &before.spoilt)?;
        }
        let factor = match max_norm.filter(|max| max.is_finite()) {
            Some(max) => {
                let limit = Tensor::full(max, 1, device)?;
                // The quotient is 1 while the norm is at most the limit.
                let norm = (norm + 1e-6)?.maximum(&limit)?;
                ((limit / norm)? * scale.factor)?
            }
            None => Tensor::full(scale.factor, 1, device)?,
        };
        let skips = spoilt.ne(&spoilt)?;
        Ok(Self(Place::Device(OnDevice {
            #[cfg(feature = "cuda")]
            for_kernels: for_kernels(&factor, scale.clip_value, &skips)?,
            numbers,
            factor,
            spoilt,
            skips,
            clip_value: scale.clip_value,
        })))
    }

    /// Returns the scale, or `None` if the step is skipped. Waits for the device if necessary.
    ///
    /// # Errors
    /// If `clip_value` is negative or NaN, or the device fails.
    pub fn read(&self) -> Result<Option<GradScale>> {
        let on_device = match &self.0 {
            Place::Host(scale) => {
                scale.check()?;
                return Ok(Some(*scale));
            }
            Place::Device(on_device) => on_device,
        };
        let both = Tensor::cat(&[&on_device.spoilt, &on_device.factor], 0)?;
        let both = match both.device() {
            Device::Cpu => read::host::<f64>(&both)?,
            _ => read::vec1(&both, "scale of the gradients")?,
        };
        let scale = GradScale { factor: both[1], clip_value: on_device.clip_value };
        Ok((!both[0].is_nan()).then_some(scale))
    }

    /// Returns the sum of the loss and the norm of the mean gradient before clipping, over all
    /// ranks.
    ///
    /// A tensor of two f64 on the device, to be [read later](read::later). `None` if the host gave
    /// the scale.
    pub fn numbers(&self) -> Option<&Tensor> {
        match &self.0 {
            Place::Host(_) => None,
            Place::Device(on_device) => Some(&on_device.numbers),
        }
    }

    /// Returns the scale for the values to update, or `None` if the step is skipped. `on_host` says
    /// whether any values are in host memory. It is called only if the scale is on a device.
    pub(super) fn for_values(&self, on_host: impl FnOnce() -> bool) -> Result<Option<Self>> {
        match &self.0 {
            Place::Device(on_device) if !on_device.numbers.device().is_cpu() && !on_host() => {
                Ok(Some(self.clone()))
            }
            _ => Ok(self.read()?.map(Self::from)),
        }
    }

    /// Returns the scale on the host, for values in host memory: [`for_values`](Self::for_values)
    /// has read it.
    pub(super) fn known(&self) -> Result<&GradScale> {
        match &self.0 {
            Place::Host(scale) => Ok(scale),
            Place::Device(of) => Err(Error::other(format!(
                "the scale of gradients is on {:?}, and the values that the optimizer updates are on the CPU",
                of.numbers.device().location()
            ))),
        }
    }

    /// Multiplies a gradient by the factor and clamps it, in candle operations.
    pub(super) fn scaled(&self, grad: &Tensor) -> Result<Tensor> {
        let (grad, bound) = match &self.0 {
            Place::Host(scale) => ((grad.detach() * scale.factor)?, scale.clip_value),
            Place::Device(of) => {
                let factor = of.factor.to_dtype(grad.dtype())?;
                (grad.detach().broadcast_mul(&factor)?, of.clip_value)
            }
        };
        Ok(match bound {
            Some(bound) => grad.clamp(-bound, bound)?,
            None => grad,
        })
    }

    /// Returns `new`, or `old` if the step is skipped. Both tensors have one shape and dtype.
    pub(super) fn unless_skipped(&self, old: &Tensor, new: Tensor) -> Result<Tensor> {
        match &self.0 {
            Place::Host(_) => Ok(new),
            Place::Device(of) => Ok(of.skips.broadcast_as(new.shape())?.where_cond(old, &new)?),
        }
    }

    /// Returns the words that kernels read, if the scale is on the device.
    #[cfg(feature = "cuda")]
    pub(super) fn in_kernels(&self) -> Option<&Tensor> {
        match &self.0 {
            Place::Host(_) => None,
            Place::Device(of) => Some(&of.for_kernels),
        }
    }
}

/// Builds the four words of [`StepScale`](fulgurite_kernels::plans::StepScale). A third word other
/// than zero skips the step.
#[cfg(feature = "cuda")]
fn for_kernels(factor: &Tensor, bound: Option<f64>, skips: &Tensor) -> Result<Tensor> {
    let f32 = candle_core::DType::F32;
    let bound = Tensor::full(bound.unwrap_or(f64::INFINITY) as f32, 1, factor.device())?;
    let unused = Tensor::zeros(1, f32, factor.device())?;
    let words = [factor.to_dtype(f32)?, bound, skips.to_dtype(f32)?, unused];
    Ok(Tensor::cat(&words, 0)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clip_factor;

    fn late(loss: f64, norm: f64, max: Option<f64>, before: Option<&StepScale>) -> StepScale {
        let [loss, square] = [loss, norm * norm].map(|x| Tensor::new(x, &Device::Cpu).unwrap());
        let scale = GradScale { factor: 0.3, clip_value: None };
        StepScale::on_device((&loss, &square), &scale, max, before).unwrap()
    }

    fn factor(scale: &StepScale) -> Option<f64> {
        scale.read().unwrap().map(|scale| scale.factor)
    }

    #[test]
    fn device_factors_equal_the_hosts() {
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
    fn non_finite_loss_or_norm_skips_later_steps() {
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
