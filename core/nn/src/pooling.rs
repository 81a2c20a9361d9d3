//! Pooling.

use candle_core::Tensor;

use super::kernels::pooling::{Pool, Windows};
use crate::{Error, Result};
use fulgurite_engine::module::Module;
use fulgurite_engine::parallel::record_function;

/// The options of a [`MaxPool2d`], with PyTorch's defaults. Pairs are height and width.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MaxPool2dConfig {
    /// Step between windows. By default the kernel, so windows do not overlap.
    pub stride: Option<[usize; 2]>,
    /// Elements on both sides that are never the maximum, at most half of the kernel. By default 0.
    pub padding: [usize; 2],
}

/// The options of an [`AvgPool2d`], with PyTorch's defaults. Pairs are height and width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AvgPool2dConfig {
    /// Step between windows. By default the kernel, so windows do not overlap.
    pub stride: Option<[usize; 2]>,
    /// Zeros on both sides, at most half of the kernel. By default 0.
    pub padding: [usize; 2],
    /// Whether the zeros of the padding count as elements of a window. By default yes.
    pub count_include_pad: bool,
}

impl Default for AvgPool2dConfig {
    fn default() -> Self {
        Self { stride: None, padding: [0; 2], count_include_pad: true }
    }
}

/// The largest element of each window, from `[batch, channels, height, width]` to
/// `[batch, channels, rows, columns]`, with `rows = (height + 2 padding - kernel) / stride + 1`.
///
/// The gradient goes to the largest element, the first of equals. (The gradient of candle's own
/// `max_pool2d` is too small, by a factor of the window's size.)
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fulgurite_core::module::Module;
/// use fulgurite_core::nn::{MaxPool2d, MaxPool2dConfig};
///
/// let pool = MaxPool2d::new([2, 2], MaxPool2dConfig::default())?;
/// let x = Tensor::arange(0f32, 16.0, &Device::Cpu)?.reshape((1, 1, 4, 4))?;
/// assert_eq!(pool.forward(&x)?.flatten_all()?.to_vec1::<f32>()?, [5.0, 7.0, 13.0, 15.0]);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MaxPool2d(Windows);

/// The mean of each window. Shapes are as for [`MaxPool2d`].
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fulgurite_core::module::Module;
/// use fulgurite_core::nn::{AvgPool2d, AvgPool2dConfig};
///
/// let options = AvgPool2dConfig::default();
/// let config = AvgPool2dConfig { stride: Some([2, 2]), padding: [1, 1], ..options };
/// let pool = AvgPool2d::new([3, 3], config)?;
/// let x = Tensor::ones((8, 16, 32, 32), DType::F32, &Device::Cpu)?;
/// assert_eq!(pool.forward(&x)?.dims(), [8, 16, 16, 16]);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AvgPool2d {
    windows: Windows,
    count_padding: bool,
}

/// The largest element of each window, as [`MaxPool2d`], with an output of a given size for images
/// of any size. Windows are as for [`AdaptiveAvgPool2d`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdaptiveMaxPool2d([usize; 2]);

/// The mean of each window, from `[batch, channels, height, width]` to `[batch, channels, rows,
/// columns]` of a given size, for images of any size.
///
/// The windows are PyTorch's: window `i` of `rows` reaches from `floor(i height / rows)` to
/// `ceil((i + 1) height / rows)`. Windows overlap where `rows` does not divide the height.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fulgurite_core::module::Module;
/// use fulgurite_core::nn::AdaptiveAvgPool2d;
///
/// let pool = AdaptiveAvgPool2d::new([1, 2])?;
/// let x = Tensor::new(&[[[[0f32, 2.0, 7.0]]]], &Device::Cpu)?;
/// assert_eq!(pool.forward(&x)?.flatten_all()?.to_vec1::<f32>()?, [1.0, 4.5]);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdaptiveAvgPool2d([usize; 2]);

impl AdaptiveMaxPool2d {
    /// A pooling to an output of this size (rows and columns).
    ///
    /// # Errors
    /// If a size is 0, or the output has more elements than a u32 can count.
    pub fn new(output: [usize; 2]) -> Result<Self> {
        check_output("AdaptiveMaxPool2d", output).map(Self)
    }
}

impl AdaptiveAvgPool2d {
    /// A pooling to an output of this size (rows and columns).
    ///
    /// # Errors
    /// If a size is 0, or the output has more elements than a u32 can count.
    pub fn new(output: [usize; 2]) -> Result<Self> {
        check_output("AdaptiveAvgPool2d", output).map(Self)
    }
}

/// Returns the size of the output of an adaptive pooling, after checks.
fn check_output(kind: &str, output: [usize; 2]) -> Result<[usize; 2]> {
    let elements = output[0].checked_mul(output[1]).and_then(|n| u32::try_from(n).ok());
    match elements {
        None | Some(0) => Err(Error::other(format!(
            "{kind}: the output's rows and columns must be at least 1, with at most {} elements; got {output:?}",
            u32::MAX
        ))),
        Some(_) => Ok(output),
    }
}

impl MaxPool2d {
    /// A pooling with windows of `kernel` (height and width).
    ///
    /// # Errors
    /// If a kernel or stride size is 0, or the padding is more than half of the kernel.
    pub fn new(kernel: [usize; 2], config: MaxPool2dConfig) -> Result<Self> {
        windows("MaxPool2d", kernel, config.stride, config.padding).map(Self)
    }
}

impl AvgPool2d {
    /// A pooling with windows of `kernel` (height and width).
    ///
    /// # Errors
    /// If a kernel or stride size is 0, or the padding is more than half of the kernel.
    pub fn new(kernel: [usize; 2], config: AvgPool2dConfig) -> Result<Self> {
        let AvgPool2dConfig { stride, padding, count_include_pad } = config;
        let windows = windows("AvgPool2d", kernel, stride, padding)?;
        Ok(Self { windows, count_padding: count_include_pad })
    }
}

/// Returns the windows, after checks.
fn windows(
    kind: &str,
    kernel: [usize; 2],
    stride: Option<[usize; 2]>,
    padding: [usize; 2],
) -> Result<Windows> {
    let stride = stride.unwrap_or(kernel);
    // Larger than any image, but small enough that adding paddings does not overflow.
    const MAX: usize = u32::MAX as usize;
    if [kernel, stride].as_flattened().iter().any(|size| !(1..=MAX).contains(size)) {
        return Err(Error::other(format!(
            "{kind}: kernel {kernel:?} and stride {stride:?} must be from 1 to {MAX}"
        )));
    }
    if (0..2).any(|i| padding[i] > kernel[i] / 2) {
        return Err(Error::other(format!(
            "{kind}: padding {padding:?} must be at most half of the kernel {kernel:?}, so that every window has \
             elements of the input"
        )));
    }
    Ok(Windows { kernel, stride, padding })
}

/// Returns the largest element of each window, in the graph.
fn max_pool(x: &Tensor, pool: Pool) -> Result<Tensor> {
    let (y, picked) = pool.max(x)?;
    record_function(&[x], y, move |_, grad| Ok(vec![Some(pool.max_backward(&picked, grad)?)]))
}

/// Returns the sum of each window by `divisor`, or by default its mean, in the graph.
fn mean_pool(x: &Tensor, pool: Pool, divisor: Option<usize>) -> Result<Tensor> {
    let y = pool.mean(x, divisor)?;
    record_function(&[x], y, move |_, grad| Ok(vec![Some(pool.mean_backward(divisor, grad)?)]))
}

impl Module for MaxPool2d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        max_pool(x, self.0.over(x)?)
    }
}

impl Module for AvgPool2d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let [height, width] = self.windows.kernel;
        mean_pool(x, self.windows.over(x)?, self.count_padding.then_some(height * width))
    }
}

impl Module for AdaptiveMaxPool2d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        max_pool(x, Pool::adaptive(x, self.0)?)
    }
}

impl Module for AdaptiveAvgPool2d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        mean_pool(x, Pool::adaptive(x, self.0)?, None)
    }
}
