//! RMS norm and layer norm.

use std::sync::{Arc, OnceLock};

use candle_core::Tensor;

use super::functional::add;
use super::gradients::accumulate_and_end_use;
use super::input;
use super::kernels::norm::{Norm, NormGrads, NormOfSum};
use super::residual::{FusedLayer, FusedOutput, add_more};
use super::sizes::check_sizes;
use super::styles::NormStyles;
use crate::{Error, Result};
use fulgurite_engine::autograd::save_for_backward;
use fulgurite_engine::module::{Module, ModuleBuilder};
use fulgurite_engine::parallel::{LayerHandle, describe_layout};
use fulgurite_engine::parameter::{Init, Parameter};

/// RMS norm over the last dimension: `y = x / sqrt(mean(x^2) + eps) * weight`. Arithmetic is at
/// least in f32.
#[derive(Debug, Clone)]
pub struct RmsNorm(NormLayer);

/// Layer norm over the last dimension: `y = (x - mean) / sqrt(variance + eps) * weight (+ bias)`.
/// Arithmetic is at least in f32.
#[derive(Debug, Clone)]
pub struct LayerNorm(NormLayer);

/// The shared implementation of both norms.
#[derive(Debug, Clone)]
struct NormLayer {
    norm: Norm,
    weight: Parameter,
    bias: Option<Parameter>,
    layer: LayerHandle,
}

/// Whether a norm's epsilon can be added to a variance.
pub(super) fn is_eps(eps: f64) -> bool {
    eps >= 0.0 && eps <= f64::from(f32::MAX)
}

/// Checks that a norm's epsilon can be added to a variance.
pub(super) fn check_eps(b: &ModuleBuilder, eps: f64) -> Result<()> {
    if is_eps(eps) {
        return Ok(());
    }
    Err(Error::module(b.path(), eps_message(eps)))
}

/// Returns the error message for an epsilon that cannot be added to a variance.
pub(super) fn eps_message(eps: f64) -> String {
    format!(
        "the norm's epsilon must be a number of 0 or more that f32 can hold, such as 1e-5; got {eps:?}"
    )
}

impl RmsNorm {
    /// A norm over `width` elements. The weight starts at one.
    ///
    /// # Errors
    /// If `width` is 0, `eps` is negative or not finite, or the builder's path has a layer already.
    pub fn new(b: &ModuleBuilder, width: usize, eps: f64) -> Result<Self> {
        let norm = Norm { center: false, eps, unit_offset: false };
        Ok(Self(NormLayer::new(b, "RmsNorm", width, norm, false)?))
    }

    /// A norm with the factor `1 + weight`, as in Gemma. The weight starts at zero. The factor is
    /// computed in f32 also if the weight is in half precision.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_unit_offset(b: &ModuleBuilder, width: usize, eps: f64) -> Result<Self> {
        let norm = Norm { center: false, eps, unit_offset: true };
        Ok(Self(NormLayer::new(b, "RmsNorm", width, norm, false)?))
    }

    /// The weight, `[width]`.
    pub fn weight(&self) -> &Parameter {
        &self.0.weight
    }

    /// Returns the norm of `x + residual`, and the sum, which continues the residual stream, as one
    /// operation. On the CPU, the outputs and the gradients have the same bits as two operations.
    /// On GPUs, forward and backward save one pass over memory each.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use fulgurite_core::module::{ModuleBuilder, ModuleInit};
    /// # use fulgurite_core::autograd::storage;
    /// use fulgurite_core::nn::RmsNorm;
    ///
    /// let b = ModuleBuilder::new(ModuleInit::default());
    /// let norm = RmsNorm::new(&b.pp("norm"), 4, 0.0)?;
    /// # for slot in b.finish()?.slots() {
    /// #     storage::allocate(slot.compute()?)?;
    /// #     storage::copy_from(slot.compute()?, &Tensor::ones(4, DType::F32, &Device::Cpu)?)?;
    /// # }
    /// let x = Tensor::ones((3, 4), DType::F32, &Device::Cpu)?;
    /// let attended = Tensor::ones((3, 4), DType::F32, &Device::Cpu)?;
    /// let (normalized, x) = norm.forward_residual(&attended, &x)?;
    /// assert_eq!(x.to_vec2::<f32>()?, [[2.0; 4]; 3]);
    /// assert_eq!(normalized.to_vec2::<f32>()?, [[1.0; 4]; 3]);
    /// # Ok::<(), fulgurite_core::Error>(())
    /// ```
    ///
    /// Under a tensor-parallel plan, both inputs have the norm's input layout, and the sum keeps
    /// it.
    ///
    /// # Errors
    /// As `forward`, and if `x` and `residual` differ in shape, dtype or layout.
    pub fn forward_residual(&self, x: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        self.0.forward_residual(x, residual)
    }
}

impl LayerNorm {
    /// A norm over `width` elements. The weight starts at one, the bias at zero.
    ///
    /// # Errors
    /// If `width` is 0, `eps` is negative or not finite, or the builder's path has a layer already.
    pub fn new(b: &ModuleBuilder, width: usize, eps: f64) -> Result<Self> {
        Ok(Self(NormLayer::new(
            b,
            "LayerNorm",
            width,
            Norm { center: true, eps, unit_offset: false },
            true,
        )?))
    }

    /// A norm without a bias.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn without_bias(b: &ModuleBuilder, width: usize, eps: f64) -> Result<Self> {
        Ok(Self(NormLayer::new(
            b,
            "LayerNorm",
            width,
            Norm { center: true, eps, unit_offset: false },
            false,
        )?))
    }

    /// The weight, `[width]`.
    pub fn weight(&self) -> &Parameter {
        &self.0.weight
    }

    /// The bias, `[width]`.
    pub fn bias(&self) -> Option<&Parameter> {
        self.0.bias.as_ref()
    }

    /// Returns the norm of `x + residual`, and the sum, like [`RmsNorm::forward_residual`].
    ///
    /// # Errors
    /// As [`RmsNorm::forward_residual`].
    pub fn forward_residual(&self, x: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        self.0.forward_residual(x, residual)
    }
}

impl NormLayer {
    fn new(
        b: &ModuleBuilder,
        kind: &'static str,
        width: usize,
        norm: Norm,
        with_bias: bool,
    ) -> Result<Self> {
        check_eps(b, norm.eps)?;
        check_sizes(b, &[("width", width)])?;
        let layer = b.declare(NormStyles { kind, width })?;
        let weight = b.parameter("weight", [width], norm.initial_weight())?;
        let bias = with_bias.then(|| b.parameter("bias", [width], Init::ZEROS)).transpose()?;
        Ok(Self { norm, weight, bias, layer })
    }

    fn compute(&self, x: &Tensor) -> Result<FusedOutput> {
        input::check_width(&self.layer, x, self.weight.elem_count())?;
        let (saved, input) = self.layer.redistribute_input(x)?;
        let bias = self.bias.as_ref().map(Parameter::value).transpose()?;
        let (y, stats) = self.norm.forward(&saved, &self.weight.value()?, bias.as_ref())?;
        let (y, output) = self.layer.redistribute_output(y)?;
        let parameters = std::iter::once(&self.weight).chain(&self.bias);
        let layer = self.clone();
        let converts = self.layer.redistributes_input() || x.dtype() != saved.dtype();
        FusedOutput::adding(&self.layer, x, y, parameters, move |grad, wanted, more| {
            let more = more.filter(|_| wanted);
            let (inside, outside) = if converts { (None, more) } else { (more, None) };
            let grad = &output.backward(grad)?;
            let weight = layer.weight.value()?;
            let with_bias = layer.bias.is_some();
            let grads = layer.norm.backward(&saved, &weight, with_bias, &stats, grad, inside)?;
            drop(weight);
            layer.accumulate(&grads)?;
            add_more(wanted.then(|| input.backward(&grads.x)).transpose()?, outside)
        })
    }

    /// Adds the parameters' gradients and ends their uses.
    fn accumulate(&self, grads: &NormGrads) -> Result<()> {
        accumulate_and_end_use(&self.weight, &grads.weight)?;
        match (&self.bias, &grads.bias) {
            (Some(bias), Some(grad)) => accumulate_and_end_use(bias, grad),
            _ => Ok(()),
        }
    }

    fn forward_residual(&self, x: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        let dtype = self.layer.output_dtype(x.dtype());
        let [x, residual] = [x, residual].map(|x| self.layer.cast_input(x, dtype));
        let (x, residual) = (&x?, &residual?);
        self.check_residual(x, residual)?;
        if self.layer.redistributes_input() {
            // The sum keeps the layout of its terms; the norm's input is redistributed.
            let sum = add(x, residual)?;
            return Ok((self.compute(&sum)?.record(&sum)?, sum));
        }
        self.layer.check_sum([x, residual])?;
        let weight = self.weight.value()?;
        let bias = self.bias.as_ref().map(Parameter::value).transpose()?;
        let (outside, of_residual) = (x.detach(), residual.detach());
        let NormOfSum { y, sum, stats } =
            self.norm.forward_residual(&outside, &of_residual, &weight, bias.as_ref())?;
        drop((weight, bias));
        let (y, output) = self.layer.redistribute_output(y)?;
        let parameters: Vec<_> = std::iter::once(&self.weight).chain(&self.bias).collect();
        // The normalised sum. It is known once the sum is in the graph, because its memory moves
        // there.
        let saved = Arc::new(OnceLock::<Tensor>::new());
        let (layer, normalized) = (self.clone(), saved.clone());
        let backward = move |[grad, of_sum]: [Option<&Tensor>; 2]| {
            let Some(grad) = grad else { return Ok(vec![of_sum.cloned(); 2]) };
            let normalized =
                normalized.get().ok_or_else(|| Error::other("a norm's sum is unknown"))?;
            let grad = output.backward(grad)?;
            let (weight, with_bias) = (layer.weight.value()?, layer.bias.is_some());
            let grads =
                layer.norm.backward(normalized, &weight, with_bias, &stats, &grad, of_sum)?;
            drop(weight);
            layer.accumulate(&grads)?;
            Ok(vec![Some(grads.x); 2])
        };
        let [y, sum] =
            self.layer.record_with_sum([x, residual], &parameters, [y, sum], backward)?;
        save_for_backward(&[&sum]);
        saved.get_or_init(|| sum.detach());
        Ok((y, sum))
    }

    fn check_residual(&self, x: &Tensor, residual: &Tensor) -> Result<()> {
        input::check_width(&self.layer, x, self.weight.elem_count())?;
        if x.dims() == residual.dims() && x.dtype() == residual.dtype() {
            return Ok(());
        }
        let describe = |x: &Tensor| {
            let layout = describe_layout(x).map_or(String::new(), |layout| format!(" ({layout})"));
            format!("{:?} {:?}{layout}", x.dims(), x.dtype())
        };
        Err(Error::module(
            self.layer.path(),
            format_args!(
                "normalises the sum of its input and a residual, which must be alike: the input is {}, the residual {}",
                describe(x),
                describe(residual)
            ),
        ))
    }
}

impl FusedLayer for RmsNorm {
    fn compute(&self, x: &Tensor) -> Result<FusedOutput> {
        self.0.compute(x)
    }

    fn layer(&self) -> &LayerHandle {
        &self.0.layer
    }
}

impl Module for RmsNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.compute(x)?.record(x)
    }
}

impl FusedLayer for LayerNorm {
    fn compute(&self, x: &Tensor) -> Result<FusedOutput> {
        self.0.compute(x)
    }

    fn layer(&self) -> &LayerHandle {
        &self.0.layer
    }
}

impl Module for LayerNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.compute(x)?.record(x)
    }
}
