//! The scale of gradients in a step, whose loss and norm the host may not know yet.

use candle_core::{Device, Tensor};

use crate::execution::read;
use crate::{Error, Result};

/// Scaling and clipping of gradients, within the optimizer's one pass over memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GradScale {
    /// Gradients are multiplied by this first (one over the token count, times the clip factor).
    pub factor: f64,
    /// Then each element is clamped to plus or minus this.
    pub clip_value: Option<f64>,
}

impl Default for GradScale {
    fn default() -> Self {
        Self { factor: 1.0, clip_value: None }
    }
}

impl GradScale {
    /// # Errors
    /// If `clip_value` cannot be a bound.
    fn check(&self) -> Result<()> {
        match self.clip_value {
            Some(bound) if bound.is_nan() || bound < 0.0 => Err(Error::Config(format!(
                "trainer.gradient_clip_val must be zero or more when clipping by value, got {bound}"
            ))),
            _ => Ok(()),
        }
    }
}

/// The scale that an optimizer steps by: a [`GradScale`], which the host knows or the device will have
/// computed by then, or nothing at all, for a step that changes nothing.
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
///     let [loss_sum, squared_norm] = [loss_sum, squared_norm].map(|x| Tensor::new(x, &Device::Cpu));
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

/// A scale in the memory of the gradients' device. The factor follows from the norm, and the step changes nothing if its
/// loss or norm is not finite, all without the host.
#[derive(Debug, Clone)]
struct OnDevice {
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

impl From<GradScale> for StepScale {
    fn from(scale: GradScale) -> Self {
        Self(Place::Host(scale))
    }
}

impl StepScale {
    /// The scale of a step by the sum of its loss and the square of its mean gradient's norm, over all ranks: scalars of
    /// f64 on the device of its gradients.
    ///
    /// `scale` is what the host knows: the factor that makes the mean, and the bound of elements. Gradients are brought to a
    /// norm of at most `max_norm`, as by [`clip_factor`](super::clip_factor). If the scale of the step `before` made it
    /// skip, this one does too: the host finds out later.
    ///
    /// # Errors
    /// If the device fails, or they are on different ones.
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
        // 0 of finite numbers, NaN of others, which stays.
        let zeros = (&numbers * 0.0)?;
        let mut spoilt = (zeros.narrow(0, 0, 1)? + zeros.narrow(0, 1, 1)?)?;
        if let Some(Self(Place::Device(before))) = before {
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

    /// The scale, or `None` if the step changes nothing. Waits for the device if it has yet to compute it.
    ///
    /// # Errors
    /// If `clip_value` is no bound, and if the device fails.
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

    /// The sum of the loss and the norm of the mean gradient before clipping, over all ranks: a list of two of f64 on the
    /// device, to be [read later](read::later). `None` if the host gave the scale.
    pub fn numbers(&self) -> Option<&Tensor> {
        match &self.0 {
            Place::Host(_) => None,
            Place::Device(on_device) => Some(&on_device.numbers),
        }
    }

    /// The scale for values of which some are in the host's memory, or all on devices; `None` if the step changes nothing.
    pub(super) fn for_values(&self, on_host: bool) -> Result<Option<Self>> {
        match &self.0 {
            Place::Device(on_device) if !on_host && !on_device.numbers.device().is_cpu() => {
                Ok(Some(self.clone()))
            }
            _ => Ok(self.read()?.map(Self::from)),
        }
    }

    /// The scale that the host knows, for values in its memory: [`for_values`](Self::for_values) has read it.
    pub(super) fn known(&self) -> Result<&GradScale> {
        match &self.0 {
            Place::Host(scale) => Ok(scale),
            Place::Device(of) => Err(Error::other(format!(
                "the scale of gradients is on {:?}, and the values that the optimizer updates are on the CPU",
                of.numbers.device().location()
            ))),
        }
    }

    /// A gradient times the factor, clamped, in candle operations.
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

    /// `new`, or `old` if the step changes nothing: tensors of one shape and dtype.
    pub(super) fn unless_skipped(&self, old: &Tensor, new: Tensor) -> Result<Tensor> {
        match &self.0 {
            Place::Host(_) => Ok(new),
            Place::Device(of) => Ok(of.skips.broadcast_as(new.shape())?.where_cond(old, &new)?),
        }
    }

    /// What kernels read, if the host does not know the scale.
    #[cfg(feature = "cuda")]
    pub(super) fn in_kernels(&self) -> Option<&Tensor> {
        match &self.0 {
            Place::Host(_) => None,
            Place::Device(of) => Some(&of.for_kernels),
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::clip_factor;

    fn late(loss: f64, norm: f64, max: Option<f64>, before: Option<&StepScale>) -> StepScale {
        let [loss, square] = [loss, norm * norm].map(|x| Tensor::new(x, &Device::Cpu).unwrap());
        let scale = GradScale { factor: 0.3, clip_value: None };
        StepScale::on_device((&loss, &square), &scale, max, before).unwrap()
    }

    fn factor(scale: &StepScale) -> Option<f64> {
        scale.read().unwrap().map(|scale| scale.factor)
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
