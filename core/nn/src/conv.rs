//! Convolutions.

use candle_core::Tensor;

use super::gradients::accumulate_and_end_use;
use super::input::{Dim, check_dims};
use super::kernels::convolution::Convolution;
use super::sizes::check_sizes;
use super::styles::WholeLayer;
use crate::{Error, Result};
use fulgurite_engine::module::{Module, ModuleBuilder};
use fulgurite_engine::parallel::LayerHandle;
use fulgurite_engine::parameter::{Init, Parameter};

/// The options of a [`Conv2d`], with PyTorch's defaults. Pairs are height and width.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Conv2dConfig {
    /// Step between windows. By default 1.
    pub stride: [usize; 2],
    /// Zeros on both sides. By default 0.
    pub padding: [usize; 2],
    /// Step between the elements of a window. By default 1.
    pub dilation: [usize; 2],
    /// Number of independent groups of channels; it divides inputs and outputs. By default 1.
    pub groups: usize,
    /// Whether there is a bias. By default yes.
    pub bias: bool,
}

impl Default for Conv2dConfig {
    fn default() -> Self {
        Self { stride: [1; 2], padding: [0; 2], dilation: [1; 2], groups: 1, bias: true }
    }
}

/// The options of a [`Conv1d`], with PyTorch's defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conv1dConfig {
    /// Step between windows. By default 1.
    pub stride: usize,
    /// Zeros on both sides. By default 0.
    pub padding: usize,
    /// Step between the elements of a window. By default 1.
    pub dilation: usize,
    /// Number of independent groups of channels; it divides inputs and outputs. By default 1.
    pub groups: usize,
    /// Whether there is a bias. By default yes.
    pub bias: bool,
}

impl Default for Conv1dConfig {
    fn default() -> Self {
        Self { stride: 1, padding: 0, dilation: 1, groups: 1, bias: true }
    }
}

/// A convolution over images, from `[batch, inputs, height, width]` to
/// `[batch, outputs, rows, columns]`, with
/// `rows = (height + 2 padding - dilation (kernel - 1) - 1) / stride + 1`.
///
/// `weight` is `[outputs, inputs / groups, kernel height, kernel width]` and `bias` is `[outputs]`,
/// as in PyTorch. bf16 and f16 are computed in f32. Tensor-parallel plans leave the layer whole.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fulgurite_core::module::{Module, ModuleBuilder, ModuleInit};
/// # use fulgurite_core::autograd::storage;
/// use fulgurite_core::nn::{Conv2d, Conv2dConfig};
///
/// let b = ModuleBuilder::new(ModuleInit::default());
/// let config = Conv2dConfig { stride: [2, 2], padding: [1, 1], ..Conv2dConfig::default() };
/// let conv = Conv2d::new(&b.pp("stem"), 3, 16, [3, 3], config)?;
/// # for slot in b.finish()?.slots() { storage::allocate(slot.compute()?)?; }
/// let images = Tensor::zeros((8, 3, 32, 32), DType::F32, &Device::Cpu)?;
/// assert_eq!(conv.forward(&images)?.dims(), [8, 16, 16, 16]);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Conv2d(ConvLayer);

/// A convolution over sequences, from `[batch, inputs, time]` to `[batch, outputs, steps]`, with
/// `steps = (time + 2 padding - dilation (kernel - 1) - 1) / stride + 1`.
///
/// `weight` is `[outputs, inputs / groups, kernel]` and `bias` is `[outputs]`, as in PyTorch. See
/// [`Conv2d`].
#[derive(Debug, Clone)]
pub struct Conv1d(ConvLayer);

/// The shared implementation of both layers.
#[derive(Debug, Clone)]
struct ConvLayer {
    weight: Parameter,
    bias: Option<Parameter>,
    convolution: Convolution,
    inputs: usize,
    layer: LayerHandle,
}

impl Conv2d {
    /// A convolution with windows of `kernel` (height and width). Initial weight and bias are
    /// uniform within `1 / sqrt(inputs / groups * kernel elements)`.
    ///
    /// # Errors
    /// If channels, kernel, stride, dilation or groups are 0, sizes overflow, groups do not divide
    /// inputs and outputs, or the builder's path has a layer already.
    pub fn new(
        b: &ModuleBuilder,
        inputs: usize,
        outputs: usize,
        kernel: [usize; 2],
        config: Conv2dConfig,
    ) -> Result<Self> {
        let Conv2dConfig { stride, padding, dilation, groups, bias } = config;
        let convolution = Convolution { kernel, stride, padding, dilation, groups };
        Ok(Self(ConvLayer::new(b, "Conv2d", [inputs, outputs], convolution, &kernel, bias)?))
    }

    /// The weight, `[outputs, inputs / groups, kernel height, kernel width]`.
    pub fn weight(&self) -> &Parameter {
        &self.0.weight
    }

    /// The bias, `[outputs]`.
    pub fn bias(&self) -> Option<&Parameter> {
        self.0.bias.as_ref()
    }
}

impl Conv1d {
    /// A convolution with windows of `kernel` elements. Initial weight and bias are uniform within
    /// `1 / sqrt(inputs / groups * kernel)`.
    ///
    /// # Errors
    /// As [`Conv2d::new`].
    pub fn new(
        b: &ModuleBuilder,
        inputs: usize,
        outputs: usize,
        kernel: usize,
        config: Conv1dConfig,
    ) -> Result<Self> {
        let Conv1dConfig { stride, padding, dilation, groups, bias } = config;
        let convolution = Convolution {
            kernel: [1, kernel],
            stride: [1, stride],
            padding: [0, padding],
            dilation: [1, dilation],
            groups,
        };
        Ok(Self(ConvLayer::new(b, "Conv1d", [inputs, outputs], convolution, &[kernel], bias)?))
    }

    /// The weight, `[outputs, inputs / groups, kernel]`.
    pub fn weight(&self) -> &Parameter {
        &self.0.weight
    }

    /// The bias, `[outputs]`.
    pub fn bias(&self) -> Option<&Parameter> {
        self.0.bias.as_ref()
    }
}

impl ConvLayer {
    fn new(
        b: &ModuleBuilder,
        kind: &'static str,
        [inputs, outputs]: [usize; 2],
        convolution: Convolution,
        kernel: &[usize],
        with_bias: bool,
    ) -> Result<Self> {
        let Convolution { stride, dilation, groups, .. } = convolution;
        if [convolution.kernel, stride, dilation].as_flattened().contains(&0) {
            let message = format!(
                "kernel {kernel:?}, stride {stride:?} and dilation {dilation:?} must all be at least 1"
            );
            return Err(Error::module(b.path(), message));
        }
        check_sizes(
            b,
            &[("input channels", inputs), ("output channels", outputs), ("groups", groups)],
        )?;
        convolution.check().map_err(|error| error.in_module(b.path()))?;
        if inputs % groups != 0 || outputs % groups != 0 {
            let message = format!(
                "{groups} groups do not divide {inputs} input and {outputs} output channels"
            );
            return Err(Error::module(b.path(), message));
        }
        let layer = b.declare(WholeLayer(kind))?;
        let mut shape = vec![outputs, inputs / groups];
        shape.extend(kernel);
        let windows = kernel.iter().fold(inputs / groups, |n, size| n.saturating_mul(*size));
        let init = Init::kaiming_uniform(windows);
        let weight = b.parameter("weight", shape, init)?;
        let bias = with_bias.then(|| b.parameter("bias", [outputs], init)).transpose()?;
        Ok(Self { weight, bias, convolution, inputs, layer })
    }

    /// Returns the weight with two dimensions in the kernel.
    fn kernel(&self) -> Result<Tensor> {
        let weight = self.weight.value()?;
        let [outputs, inputs] = [weight.dim(0)?, weight.dim(1)?];
        let [height, width] = self.convolution.kernel;
        Ok(weight.reshape((outputs, inputs, height, width))?)
    }

    /// Computes the forward of an input with these dimensions.
    fn forward(&self, x: &Tensor, dims: &[Dim]) -> Result<Tensor> {
        check_dims(&self.layer, x, dims)?;
        let (saved, input) = self.layer.redistribute_input(x)?;
        // A sequence is an image of height 1.
        let is_sequence = dims.len() == 3;
        let image = move |x: &Tensor| if is_sequence { x.unsqueeze(2) } else { Ok(x.clone()) };
        let saved = image(&saved)?;
        let y = self.layer.run(|| {
            let y = self.convolution.forward(&saved, &self.kernel()?)?;
            match &self.bias {
                Some(bias) => Ok(y.broadcast_add(&bias.value()?.reshape((1, (), 1, 1))?)?),
                None => Ok(y),
            }
        })?;
        let y = if is_sequence { y.squeeze(2)? } else { y };
        let parameters: Vec<&Parameter> = std::iter::once(&self.weight).chain(&self.bias).collect();
        let (layer, tracked) = (self.clone(), self.layer.takes_gradient(x));
        self.layer.record(&[x], &parameters, y, move |_, grad| {
            let grad = &image(grad)?;
            let grads = layer.convolution.backward(&saved, &layer.kernel()?, grad, tracked)?;
            accumulate_and_end_use(&layer.weight, &grads.weight)?;
            if let Some(bias) = &layer.bias {
                accumulate_and_end_use(bias, &channel_sums(grad)?)?;
            }
            let dx = grads.x.map(|dx| {
                let dx = if is_sequence { dx.squeeze(2)? } else { dx };
                input.backward(&dx)
            });
            Ok(vec![dx.transpose()?])
        })
    }
}

/// Returns the sum of each channel (dimension 1), in the accumulation dtype.
pub(super) fn channel_sums(x: &Tensor) -> Result<Tensor> {
    let x = super::backend::to_accumulation_dtype(&x.transpose(0, 1)?)?;
    Ok(x.flatten_from(1)?.sum(1)?)
}

impl Module for Conv2d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let inputs = Dim::Size(self.0.inputs);
        let dims = [Dim::Any("batch"), inputs, Dim::Any("height"), Dim::Any("width")];
        self.0.forward(x, &dims)
    }
}

impl Module for Conv1d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let inputs = Dim::Size(self.0.inputs);
        self.0.forward(x, &[Dim::Any("batch"), inputs, Dim::Any("time")])
    }
}
