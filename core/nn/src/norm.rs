//! RMS norm and layer norm.

use candle_core::Tensor;

use super::gradients::accumulate_and_end_use;
use super::input;
use super::kernels::norm::Norm;
use super::residual::{FusedLayer, FusedOutput};
use super::styles::NormStyles;
use crate::{Error, Result};
use fulgurite_engine::module::{Module, ModuleBuilder};
use fulgurite_engine::parallel::LayerHandle;
use fulgurite_engine::parameter::{Init, Parameter};

/// RMS norm over the last dimension: `y = x / sqrt(mean(x^2) + eps) * weight`. Computed in f32 at
/// least.
#[derive(Debug, Clone)]
pub struct RmsNorm(NormLayer);

/// Layer norm over the last dimension: `y = (x - mean) / sqrt(variance + eps) * weight (+ bias)`.
/// Computed in f32 at least.
#[derive(Debug, Clone)]
pub struct LayerNorm(NormLayer);

/// The layer of both norms.
#[derive(Debug, Clone)]
struct NormLayer {
    norm: Norm,
    weight: Parameter,
    bias: Option<Parameter>,
    layer: LayerHandle,
}

/// Checks that a norm's epsilon is a number that can be added to a variance.
pub(super) fn check_eps(b: &ModuleBuilder, eps: f64) -> Result<()> {
    if eps >= 0.0 && eps <= f64::from(f32::MAX) {
        return Ok(());
    }
    let message = format!(
        "the norm's epsilon must be a number of 0 or more that f32 can hold, such as 1e-5; got {eps:?}"
    );
    Err(Error::module(b.path(), message))
}

impl RmsNorm {
    /// A norm over `width` elements. The weight starts at one.
    ///
    /// # Errors
    /// If there is a layer at the builder's path already.
    pub fn new(b: &ModuleBuilder, width: usize, eps: f64) -> Result<Self> {
        let layer = b.declare(NormStyles { kind: "RmsNorm", width })?;
        Ok(Self(NormLayer::new(b, width, Norm { center: false, eps }, false, layer)?))
    }

    /// The weight, `[width]`.
    pub fn weight(&self) -> &Parameter {
        &self.0.weight
    }
}

impl LayerNorm {
    /// A norm over `width` elements. The weight starts at one, the bias at zero.
    ///
    /// # Errors
    /// If there is a layer at the builder's path already.
    pub fn new(b: &ModuleBuilder, width: usize, eps: f64) -> Result<Self> {
        let layer = b.declare(NormStyles { kind: "LayerNorm", width })?;
        Ok(Self(NormLayer::new(b, width, Norm { center: true, eps }, true, layer)?))
    }

    /// A norm without a bias.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn without_bias(b: &ModuleBuilder, width: usize, eps: f64) -> Result<Self> {
        let layer = b.declare(NormStyles { kind: "LayerNorm", width })?;
        Ok(Self(NormLayer::new(b, width, Norm { center: true, eps }, false, layer)?))
    }

    /// The weight, `[width]`.
    pub fn weight(&self) -> &Parameter {
        &self.0.weight
    }

    /// The bias, `[width]`.
    pub fn bias(&self) -> Option<&Parameter> {
        self.0.bias.as_ref()
    }
}

impl NormLayer {
    fn new(
        b: &ModuleBuilder,
        width: usize,
        norm: Norm,
        with_bias: bool,
        layer: LayerHandle,
    ) -> Result<Self> {
        check_eps(b, norm.eps)?;
        b.keep_in_fp32(&layer);
        let weight = b.parameter("weight", [width], Init::ONES)?;
        let bias = with_bias.then(|| b.parameter("bias", [width], Init::ZEROS)).transpose()?;
        Ok(Self { norm, weight, bias, layer })
    }

    fn compute(&self, x: &Tensor) -> Result<FusedOutput> {
        FusedOutput::in_own_dtype(&self.layer, x, |x| self.compute_in_own_dtype(x))
    }

    fn compute_in_own_dtype(&self, x: &Tensor) -> Result<FusedOutput> {
        input::check_width(&self.layer, x, self.weight.elem_count())?;
        input::check_dtype(&self.layer, x, self.weight.compute_dtype())?;
        let (saved, input) = self.layer.redistribute_input(x)?;
        let bias = self.bias.as_ref().map(Parameter::value).transpose()?;
        let y = self.norm.forward(&saved, &self.weight.value()?, bias.as_ref())?;
        let (y, output) = self.layer.redistribute_output(y)?;
        let parameters = std::iter::once(&self.weight).chain(&self.bias);
        let layer = self.clone();
        Ok(FusedOutput::new(&self.layer, y, parameters, move |grad, wanted| {
            let grad = &output.backward(grad)?;
            let weight = layer.weight.value()?;
            let with_bias = layer.bias.is_some();
            let grads = layer.norm.backward(&saved, &weight, with_bias, grad)?;
            drop(weight);
            accumulate_and_end_use(&layer.weight, &grads.weight)?;
            if let (Some(bias), Some(grad)) = (&layer.bias, &grads.bias) {
                accumulate_and_end_use(bias, grad)?;
            }
            wanted.then(|| input.backward(&grads.x)).transpose()
        }))
    }
}

impl FusedLayer for RmsNorm {
    fn compute(&self, x: &Tensor) -> Result<FusedOutput> {
        self.0.compute(x)
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
}

impl Module for LayerNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.compute(x)?.record(x)
    }
}
