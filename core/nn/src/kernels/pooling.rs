//! Pooling over two dimensions: the largest element of each window, or its mean.
//!
//! Inputs and outputs have one row per channel of a sample, `[planes, height * width]`.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

use crate::backend::{to_accumulation_dtype, uses_cpu_kernels};
use crate::host::{Float as _, host, tensor, with_float};
use crate::{Error, Result};
#[cfg(feature = "cuda")]
use fulgurite_kernels::cuda;

/// Windows of one size; pairs are height and width. The padding is at most half of the kernel, so
/// each window has elements of the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Windows {
    pub(crate) kernel: [usize; 2],
    pub(crate) stride: [usize; 2],
    pub(crate) padding: [usize; 2],
}

/// The input's shape and the windows of one call.
#[derive(Debug, Clone)]
pub(crate) struct Pool {
    dtype: DType,
    batch: usize,
    channels: usize,
    /// Height and width of the input.
    input: [usize; 2],
    /// The input's rows in each row of windows, and the columns in each column of windows. None is
    /// empty.
    windows: [Vec<Range<usize>>; 2],
}

/// Tables over the places of a window and the outputs, `[kernel, outputs]`, on the input's device.
struct Places {
    /// The element of the plane, u32; 0 outside of the window.
    element: Tensor,
    /// 1 for an element of the window, 0 for a place outside; u8.
    inside: Tensor,
}

impl Windows {
    /// Lays the windows over an input.
    ///
    /// # Errors
    /// As [`Pool::new`], and if the input is smaller than a window.
    pub(crate) fn over(&self, x: &Tensor) -> Result<Pool> {
        Pool::new(x, |dim, input| {
            let (kernel, padding) = (self.kernel[dim], self.padding[dim]);
            let room = (input + 2 * padding).checked_sub(kernel);
            let Some(room) = room.filter(|_| input > 0) else {
                return Err(Error::other(format!(
                    "a pooling window of {kernel} elements is larger than the input, {} with its padding of \
                     {padding} on both sides; got a tensor of shape {:?}",
                    input + 2 * padding,
                    x.dims()
                )));
            };
            let starts = (0..=room).step_by(self.stride[dim]);
            Ok(starts
                .map(|start| start.saturating_sub(padding)..(start + kernel - padding).min(input))
                .collect())
        })
    }
}

impl Pool {
    /// Lays `output` rows and columns of windows over an input, with PyTorch's bounds: neighbours
    /// differ by at most one in size, and overlap where the input cannot be divided.
    ///
    /// # Errors
    /// As [`Pool::new`], and if the input has no elements.
    pub(crate) fn adaptive(x: &Tensor, output: [usize; 2]) -> Result<Self> {
        Self::new(x, |dim, input| {
            if input == 0 {
                return Err(Error::other(format!(
                    "adaptive pooling needs an image of at least one element, got a tensor of shape {:?}",
                    x.dims()
                )));
            }
            let window =
                |i: usize| i * input / output[dim]..((i + 1) * input).div_ceil(output[dim]);
            Ok((0..output[dim]).map(window).collect())
        })
    }

    /// The windows that `windows` returns for each dimension and the input's size there.
    ///
    /// # Errors
    /// If the input is not `[batch, channels, height, width]` of floating-point numbers, or its
    /// images have more elements than a u32 can count.
    fn new(
        x: &Tensor,
        windows: impl Fn(usize, usize) -> Result<Vec<Range<usize>>>,
    ) -> Result<Self> {
        let (&[batch, channels, height, width], true) = (x.dims(), x.dtype().is_float()) else {
            return Err(Error::other(format!(
                "pooling takes floating-point numbers of shape [batch, channels, height, width], got {:?} in {:?}",
                x.dims(),
                x.dtype()
            )));
        };
        if height.checked_mul(width).is_none_or(|elements| u32::try_from(elements).is_err()) {
            return Err(Error::other(format!(
                "pooling takes images of up to {} elements, got a tensor of shape {:?}",
                u32::MAX,
                x.dims()
            )));
        }
        let windows = [windows(0, height)?, windows(1, width)?];
        Ok(Self { dtype: x.dtype(), batch, channels, input: [height, width], windows })
    }

    fn input_shape(&self) -> (usize, usize, usize, usize) {
        (self.batch, self.channels, self.input[0], self.input[1])
    }

    fn planes(&self) -> usize {
        self.batch * self.channels
    }

    fn inputs(&self) -> usize {
        self.input[0] * self.input[1]
    }

    fn outputs(&self) -> usize {
        self.windows[0].len() * self.windows[1].len()
    }

    /// Returns the output in its shape and dtype.
    fn as_output(&self, y: &Tensor) -> Result<Tensor> {
        let [rows, columns] = [self.windows[0].len(), self.windows[1].len()];
        Ok(y.to_dtype(self.dtype)?.reshape((self.batch, self.channels, rows, columns))?)
    }

    /// Returns the output of an empty batch, which candle's operations do not support.
    fn no_output(&self, like: &Tensor) -> Result<Tensor> {
        self.as_output(&Tensor::zeros((0, self.outputs()), like.dtype(), like.device())?)
    }

    /// Returns a gradient of the input in its shape and dtype.
    fn as_input(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.to_dtype(self.dtype)?.reshape(self.input_shape())?)
    }

    /// Calls `f` with each output and the rows and columns of its window, in order.
    #[inline(always)]
    fn each(&self, mut f: impl FnMut(usize, Range<usize>, Range<usize>)) {
        let [rows, columns] = &self.windows;
        for (i, window) in rows.iter().enumerate() {
            for (j, across) in columns.iter().enumerate() {
                f(i * columns.len() + j, window.clone(), across.clone());
            }
        }
    }

    fn places(&self, device: &Device) -> Result<Places> {
        let largest = |dim: usize| self.windows[dim].iter().map(Range::len).max().unwrap_or(0);
        let kernel = [largest(0), largest(1)];
        let (mut element, mut inside) = (Vec::new(), Vec::new());
        for i in 0..kernel[0] {
            for j in 0..kernel[1] {
                self.each(|_, rows, columns| {
                    let within = i < rows.len() && j < columns.len();
                    let place = (rows.start + i) * self.input[1] + columns.start + j;
                    element.push(if within { place as u32 } else { 0 });
                    inside.push(u8::from(within));
                });
            }
        }
        let shape = (kernel[0] * kernel[1], self.outputs());
        Ok(Places {
            element: Tensor::from_vec(element, shape, &Device::Cpu)?.to_device(device)?,
            inside: Tensor::from_vec(inside, shape, &Device::Cpu)?.to_device(device)?,
        })
    }

    /// The windows for the kernels. A row or column of the input is in consecutive windows, since
    /// windows go forward.
    #[cfg(feature = "cuda")]
    fn on_gpu(&self, device: &Device) -> Result<cuda::PoolWindows> {
        let (mut windows, mut covers) = (Vec::new(), Vec::new());
        for (ranges, input) in self.windows.iter().zip(self.input) {
            windows.extend(ranges.iter().map(|range| range.start as u32));
            windows.extend(ranges.iter().map(|range| range.end as u32));
            let first = |at: usize| ranges.partition_point(|range| range.end <= at) as u32;
            let behind = |at: usize| ranges.partition_point(|range| range.start <= at) as u32;
            covers.extend((0..input).map(first));
            covers.extend((0..input).map(behind));
        }
        let list = |values: Vec<u32>| -> Result<Tensor> {
            let count = values.len();
            Ok(Tensor::from_vec(values, count, &Device::Cpu)?.to_device(device)?)
        };
        Ok(cuda::PoolWindows {
            outputs: [self.windows[0].len(), self.windows[1].len()],
            inputs: self.input,
            windows: list(windows)?,
            covers: list(covers)?,
        })
    }

    /// Returns the elements of each window, `[planes, kernel, outputs]`.
    fn gather(x: &Tensor, places: &Places) -> Result<Tensor> {
        let (kernel, outputs) = places.element.dims2()?;
        let windows = x.index_select(&places.element.flatten_all()?, 1)?;
        Ok(windows.reshape((x.dim(0)?, kernel, outputs))?)
    }

    /// Returns the input as planes, in the accumulation dtype.
    fn as_planes(&self, x: &Tensor) -> Result<Tensor> {
        Ok(to_accumulation_dtype(x)?.reshape((self.planes(), self.inputs()))?)
    }

    /// Returns the largest element of each window, and its index in the plane (u32
    /// `[planes, outputs]`). Of equal elements the first wins, as in PyTorch. A NaN is the largest.
    pub(crate) fn max(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let x = self.as_planes(x)?;
        if self.planes() == 0 {
            return Ok((self.no_output(&x)?, Tensor::zeros((0, 1), DType::U32, x.device())?));
        }
        #[cfg(feature = "cuda")]
        if x.device().is_cuda()
            && let Some((y, picked)) = cuda::max_pool(&x, &self.on_gpu(x.device())?)?
        {
            return Ok((self.as_output(&y)?, picked));
        }
        let (y, picked) = match uses_cpu_kernels(&x) {
            true => self.max_on_cpu(&x)?,
            false => self.max_portable(&x)?,
        };
        Ok((self.as_output(&y)?, picked))
    }

    fn max_on_cpu(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let shape = (self.planes(), self.outputs());
        with_float!(x.dtype(), T => {
            let host_x = host(x)?;
            let x = host_x.slice::<T>()?;
            let mut y = vec![T::ZERO; shape.0 * shape.1];
            let mut picked = vec![0u32; y.len()];
            let planes = y.par_chunks_mut(shape.1).zip(picked.par_chunks_mut(shape.1));
            planes.zip(x.par_chunks(self.inputs())).for_each(|((y, picked), x)| {
                self.each(|output, rows, columns| {
                    let mut at = rows.start * self.input[1] + columns.start;
                    let mut largest = x[at];
                    for row in rows {
                        for i in columns.clone().map(|column| row * self.input[1] + column) {
                            if x[i] > largest || x[i].partial_cmp(&x[i]).is_none() {
                                (largest, at) = (x[i], i);
                            }
                        }
                    }
                    (y[output], picked[output]) = (largest, at as u32);
                });
            });
            Ok((tensor(y, shape)?, Tensor::from_vec(picked, shape, &Device::Cpu)?))
        })
    }

    fn max_portable(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let places = self.places(x.device())?;
        let windows = Self::gather(x, &places)?;
        let shape = windows.shape().clone();
        let inside = places.inside.unsqueeze(0)?.broadcast_as(&shape)?.contiguous()?;
        let lowest = Tensor::new(f32::NEG_INFINITY, x.device())?.to_dtype(x.dtype())?;
        let lowest = lowest.broadcast_as(&shape)?.contiguous()?;
        let known = inside.where_cond(&windows, &lowest)?;
        let is_nan = known.ne(&known)?;
        let is_largest = (known.broadcast_ge(&known.max_keepdim(1)?)? * &inside)?;
        let kernel = places.element.dim(0)? as u32;
        let number = Tensor::arange(0, kernel, x.device())?.reshape((1, (), 1))?;
        let number = number.broadcast_as(&shape)?.contiguous()?;
        let last = number.ones_like()?.affine(f64::from(kernel), 0.0)?;
        let first = |of: &Tensor| of.where_cond(&number, &last)?.min_keepdim(1);
        let (first_nan, first_largest) = (first(&is_nan)?, first(&is_largest)?);
        let no_nan = first_nan.eq(f64::from(kernel))?;
        let first = no_nan.where_cond(&first_largest, &first_nan)?;
        let elements = places.element.unsqueeze(0)?.broadcast_as(&shape)?.contiguous()?;
        let picked = elements.gather(&first, 1)?.squeeze(1)?;
        Ok((x.gather(&picked, 1)?, picked))
    }

    /// Computes the gradient of the input of [`max`](Self::max), which picked these elements.
    pub(crate) fn max_backward(&self, picked: &Tensor, grad: &Tensor) -> Result<Tensor> {
        let shape = (self.planes(), self.inputs());
        if self.planes() == 0 {
            return Ok(Tensor::zeros(self.input_shape(), self.dtype, grad.device())?);
        }
        let grad = to_accumulation_dtype(grad)?.reshape((self.planes(), self.outputs()))?;
        #[cfg(feature = "cuda")]
        if grad.device().is_cuda()
            && let Some(dx) = cuda::max_pool_backward(picked, &grad, &self.on_gpu(grad.device())?)?
        {
            return self.as_input(&dx);
        }
        let dx = if uses_cpu_kernels(&grad) {
            with_float!(grad.dtype(), T => {
                let (host_grad, host_picked) = (host(&grad)?, host(picked)?);
                let (grad, picked) = (host_grad.slice::<T>()?, host_picked.slice::<u32>()?);
                let mut dx = vec![T::ZERO; shape.0 * shape.1];
                let planes = grad.par_chunks(self.outputs()).zip(picked.par_chunks(self.outputs()));
                dx.par_chunks_mut(shape.1).zip(planes).for_each(|(dx, (grad, picked))| {
                    grad.iter().zip(picked).for_each(|(&grad, &at)| dx[at as usize] += grad);
                });
                tensor(dx, shape)
            })?
        } else {
            Tensor::zeros(shape, grad.dtype(), grad.device())?.scatter_add(picked, &grad, 1)?
        };
        self.as_input(&dx)
    }

    /// Returns the factor of each window's sum: `1 / divisor`, or by default 1 by its elements.
    fn weights(&self, divisor: Option<usize>) -> Vec<f64> {
        let mut weights = vec![0.0; self.outputs()];
        self.each(|output, rows, columns| {
            let elements = divisor.unwrap_or(rows.len() * columns.len());
            weights[output] = 1.0 / elements as f64;
        });
        weights
    }

    fn weights_tensor(&self, divisor: Option<usize>, like: &Tensor) -> Result<Tensor> {
        let weights = self.weights(divisor);
        let weights = Tensor::from_vec(weights, (1, self.outputs()), &Device::Cpu)?;
        Ok(weights.to_dtype(like.dtype())?.to_device(like.device())?)
    }

    /// Returns the mean of each window: its sum by `divisor`, or by default by its elements.
    pub(crate) fn mean(&self, x: &Tensor, divisor: Option<usize>) -> Result<Tensor> {
        let x = self.as_planes(x)?;
        if self.planes() == 0 {
            return self.no_output(&x);
        }
        #[cfg(feature = "cuda")]
        if x.device().is_cuda()
            && let Some(y) = cuda::mean_pool(&x, divisor, &self.on_gpu(x.device())?)?
        {
            return self.as_output(&y);
        }
        let y = if uses_cpu_kernels(&x) {
            let weights = self.weights(divisor);
            with_float!(x.dtype(), T => {
                let host_x = host(&x)?;
                let x = host_x.slice::<T>()?;
                let mut y = vec![T::ZERO; self.planes() * self.outputs()];
                let planes = y.par_chunks_mut(self.outputs()).zip(x.par_chunks(self.inputs()));
                planes.for_each(|(y, x)| {
                    self.each(|output, rows, columns| {
                        let rows = rows.map(|row| &x[row * self.input[1]..][columns.clone()]);
                        let sum = rows.flatten().fold(T::ZERO, |sum, &x| sum + x);
                        y[output] = sum * weights[output] as T;
                    });
                });
                tensor(y, (self.planes(), self.outputs()))
            })?
        } else {
            let places = self.places(x.device())?;
            let inside = places.inside.to_dtype(x.dtype())?;
            let windows = Self::gather(&x, &places)?.broadcast_mul(&inside)?;
            windows.sum(1)?.broadcast_mul(&self.weights_tensor(divisor, &x)?)?
        };
        self.as_output(&y)
    }

    /// Computes the gradient of the input of [`mean`](Self::mean).
    pub(crate) fn mean_backward(&self, divisor: Option<usize>, grad: &Tensor) -> Result<Tensor> {
        let shape = (self.planes(), self.inputs());
        if self.planes() == 0 {
            return Ok(Tensor::zeros(self.input_shape(), self.dtype, grad.device())?);
        }
        let grad = to_accumulation_dtype(grad)?.reshape((self.planes(), self.outputs()))?;
        #[cfg(feature = "cuda")]
        if grad.device().is_cuda()
            && let Some(dx) =
                cuda::mean_pool_backward(&grad, divisor, &self.on_gpu(grad.device())?)?
        {
            return self.as_input(&dx);
        }
        let dx = if uses_cpu_kernels(&grad) {
            let weights = self.weights(divisor);
            with_float!(grad.dtype(), T => {
                let host_grad = host(&grad)?;
                let grad = host_grad.slice::<T>()?;
                let mut dx = vec![T::ZERO; shape.0 * shape.1];
                let planes = dx.par_chunks_mut(shape.1).zip(grad.par_chunks(self.outputs()));
                planes.for_each(|(dx, grad)| {
                    self.each(|output, rows, columns| {
                        let part = grad[output] * weights[output] as T;
                        for row in rows {
                            let dx = &mut dx[row * self.input[1]..][columns.clone()];
                            dx.iter_mut().for_each(|dx| *dx += part);
                        }
                    });
                });
                tensor(dx, shape)
            })?
        } else {
            let places = self.places(grad.device())?;
            let weights = self.weights_tensor(divisor, &grad)?;
            let parts = grad.broadcast_mul(&weights)?.unsqueeze(1)?;
            let parts =
                parts.broadcast_mul(&places.inside.to_dtype(grad.dtype())?.unsqueeze(0)?)?;
            let zeros = Tensor::zeros(shape, grad.dtype(), grad.device())?;
            zeros.index_add(&places.element.flatten_all()?, &parts.flatten_from(1)?, 1)?
        };
        self.as_input(&dx)
    }
}
