//! Pooling over two dimensions: the largest element of each window, or its mean.
//!
//! Inputs and outputs have one row per channel of a sample, `[planes, height * width]`.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

use crate::backend::{to_accumulation_dtype, uses_cpu_kernels};
use crate::host::{Float as _, host, tensor, with_float};
use crate::{Error, Result};

/// The windows of a pooling; pairs are height and width. The padding is at most half of the kernel,
/// so each window has elements of the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Windows {
    pub(crate) kernel: [usize; 2],
    pub(crate) stride: [usize; 2],
    pub(crate) padding: [usize; 2],
}

/// The sizes of one call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    dtype: DType,
    batch: usize,
    channels: usize,
    /// Height and width of the input.
    input: [usize; 2],
    /// Height and width of the output.
    output: [usize; 2],
}

impl Sizes {
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
        self.output[0] * self.output[1]
    }

    /// Returns the output in its shape and dtype.
    fn of_output(&self, y: &Tensor) -> Result<Tensor> {
        Ok(y.to_dtype(self.dtype)?.reshape((
            self.batch,
            self.channels,
            self.output[0],
            self.output[1],
        ))?)
    }

    /// Returns the output of an empty batch, which candle's operations do not support.
    fn no_output(&self, like: &Tensor) -> Result<Tensor> {
        self.of_output(&Tensor::zeros((0, self.outputs()), like.dtype(), like.device())?)
    }

    /// Returns a gradient of the input in its shape and dtype.
    fn of_input(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.to_dtype(self.dtype)?.reshape(self.input_shape())?)
    }
}

/// Tables over the places of a window and the outputs, `[kernel, outputs]`, on the input's device.
struct Places {
    /// The element of the plane, u32; 0 for padding.
    element: Tensor,
    /// 1 for an element of the input, 0 for padding; u8.
    inside: Tensor,
}

impl Windows {
    /// Returns the sizes for an input.
    ///
    /// # Errors
    /// If the input is not `[batch, channels, height, width]` of floating-point numbers, is empty,
    /// or is smaller than a window.
    pub(crate) fn sizes(&self, x: &Tensor) -> Result<Sizes> {
        let (&[batch, channels, height, width], true) = (x.dims(), x.dtype().is_float()) else {
            return Err(Error::other(format!(
                "pooling takes floating-point numbers of shape [batch, channels, height, width], got {:?} in {:?}",
                x.dims(),
                x.dtype()
            )));
        };
        let input = [height, width];
        let mut output = [0; 2];
        for i in 0..2 {
            let room = (input[i] + 2 * self.padding[i]).checked_sub(self.kernel[i]);
            let Some(room) = room.filter(|_| input[i] > 0) else {
                return Err(Error::other(format!(
                    "a pooling window of {} elements is larger than the input, {} with its padding of {} on \
                     both sides; got a tensor of shape {:?}",
                    self.kernel[i],
                    input[i] + 2 * self.padding[i],
                    self.padding[i],
                    x.dims()
                )));
            };
            output[i] = room / self.stride[i] + 1;
        }
        if height.checked_mul(width).is_none_or(|elements| u32::try_from(elements).is_err()) {
            return Err(Error::other(format!(
                "pooling takes images of up to {} elements, got a tensor of shape {:?}",
                u32::MAX,
                x.dims()
            )));
        }
        let dtype = x.dtype();
        Ok(Sizes { dtype, batch, channels, input, output })
    }

    /// Returns the input's range along a dimension in the window of an output.
    fn range(&self, dim: usize, output: usize, sizes: &Sizes) -> Range<usize> {
        let start = output * self.stride[dim];
        let (end, padding) = (start + self.kernel[dim], self.padding[dim]);
        start.saturating_sub(padding)..(end - padding).min(sizes.input[dim])
    }

    /// Calls `f` with each output and the elements of its window, in order.
    #[inline(always)]
    fn each(&self, sizes: &Sizes, mut f: impl FnMut(usize, Range<usize>, Range<usize>)) {
        for row in 0..sizes.output[0] {
            let rows = self.range(0, row, sizes);
            for column in 0..sizes.output[1] {
                let output = row * sizes.output[1] + column;
                f(output, rows.clone(), self.range(1, column, sizes));
            }
        }
    }

    fn places(&self, sizes: &Sizes, device: &Device) -> Result<Places> {
        let [height, width] = sizes.input;
        let (mut element, mut inside) = (Vec::new(), Vec::new());
        let at = |dim: usize, output: usize, i: usize| {
            (output * self.stride[dim] + i).checked_sub(self.padding[dim])
        };
        for i in 0..self.kernel[0] {
            for j in 0..self.kernel[1] {
                for row in 0..sizes.output[0] {
                    for column in 0..sizes.output[1] {
                        let place = match (at(0, row, i), at(1, column, j)) {
                            (Some(y), Some(x)) if y < height && x < width => Some(y * width + x),
                            _ => None,
                        };
                        element.push(place.unwrap_or(0) as u32);
                        inside.push(u8::from(place.is_some()));
                    }
                }
            }
        }
        let shape = (self.kernel[0] * self.kernel[1], sizes.outputs());
        Ok(Places {
            element: Tensor::from_vec(element, shape, &Device::Cpu)?.to_device(device)?,
            inside: Tensor::from_vec(inside, shape, &Device::Cpu)?.to_device(device)?,
        })
    }

    /// Returns the elements of each window, `[planes, kernel, outputs]`.
    fn gather(&self, x: &Tensor, places: &Places) -> Result<Tensor> {
        let (kernel, outputs) = places.element.dims2()?;
        let windows = x.index_select(&places.element.flatten_all()?, 1)?;
        Ok(windows.reshape((x.dim(0)?, kernel, outputs))?)
    }

    /// Returns the input as planes, in the accumulation dtype.
    fn planes(x: &Tensor, sizes: &Sizes) -> Result<Tensor> {
        Ok(to_accumulation_dtype(x)?.reshape((sizes.planes(), sizes.inputs()))?)
    }

    /// Returns the largest element of each window, and its index in the plane (u32
    /// `[planes, outputs]`). Of equal elements the first wins, as in PyTorch. A NaN is the largest.
    pub(crate) fn max(&self, x: &Tensor, sizes: &Sizes) -> Result<(Tensor, Tensor)> {
        let x = Self::planes(x, sizes)?;
        if sizes.planes() == 0 {
            return Ok((sizes.no_output(&x)?, Tensor::zeros((0, 1), DType::U32, x.device())?));
        }
        let (y, picked) = match uses_cpu_kernels(&x) {
            true => self.max_on_cpu(&x, sizes)?,
            false => self.max_portable(&x, sizes)?,
        };
        Ok((sizes.of_output(&y)?, picked))
    }

    fn max_on_cpu(&self, x: &Tensor, sizes: &Sizes) -> Result<(Tensor, Tensor)> {
        let shape = (sizes.planes(), sizes.outputs());
        with_float!(x.dtype(), T => {
            let host_x = host(x)?;
            let x = host_x.slice::<T>()?;
            let mut y = vec![T::ZERO; shape.0 * shape.1];
            let mut picked = vec![0u32; y.len()];
            let planes = y.par_chunks_mut(shape.1).zip(picked.par_chunks_mut(shape.1));
            planes.zip(x.par_chunks(sizes.inputs())).for_each(|((y, picked), x)| {
                self.each(sizes, |output, rows, columns| {
                    let mut at = rows.start * sizes.input[1] + columns.start;
                    let mut largest = x[at];
                    for row in rows {
                        for i in columns.clone().map(|column| row * sizes.input[1] + column) {
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

    fn max_portable(&self, x: &Tensor, sizes: &Sizes) -> Result<(Tensor, Tensor)> {
        let places = self.places(sizes, x.device())?;
        let windows = self.gather(x, &places)?;
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
    pub(crate) fn max_backward(sizes: &Sizes, picked: &Tensor, grad: &Tensor) -> Result<Tensor> {
        let shape = (sizes.planes(), sizes.inputs());
        if sizes.planes() == 0 {
            return Ok(Tensor::zeros(sizes.input_shape(), sizes.dtype, grad.device())?);
        }
        let grad = to_accumulation_dtype(grad)?.reshape((sizes.planes(), sizes.outputs()))?;
        let dx = if uses_cpu_kernels(&grad) {
            with_float!(grad.dtype(), T => {
                let (host_grad, host_picked) = (host(&grad)?, host(picked)?);
                let (grad, picked) = (host_grad.slice::<T>()?, host_picked.slice::<u32>()?);
                let mut dx = vec![T::ZERO; shape.0 * shape.1];
                let planes = grad.par_chunks(sizes.outputs()).zip(picked.par_chunks(sizes.outputs()));
                dx.par_chunks_mut(shape.1).zip(planes).for_each(|(dx, (grad, picked))| {
                    grad.iter().zip(picked).for_each(|(&grad, &at)| dx[at as usize] += grad);
                });
                tensor(dx, shape)
            })?
        } else {
            Tensor::zeros(shape, grad.dtype(), grad.device())?.scatter_add(picked, &grad, 1)?
        };
        sizes.of_input(&dx)
    }

    /// Returns the reciprocal number of elements per window; padding counts if `count_padding`.
    fn weights(&self, sizes: &Sizes, count_padding: bool) -> Vec<f64> {
        let mut weights = vec![0.0; sizes.outputs()];
        self.each(sizes, |output, rows, columns| {
            let elements = match count_padding {
                true => self.kernel[0] * self.kernel[1],
                false => rows.len() * columns.len(),
            };
            weights[output] = 1.0 / elements as f64;
        });
        weights
    }

    fn weights_tensor(&self, sizes: &Sizes, count_padding: bool, like: &Tensor) -> Result<Tensor> {
        let weights = self.weights(sizes, count_padding);
        let weights = Tensor::from_vec(weights, (1, sizes.outputs()), &Device::Cpu)?;
        Ok(weights.to_dtype(like.dtype())?.to_device(like.device())?)
    }

    /// Returns the mean of each window.
    pub(crate) fn mean(&self, x: &Tensor, sizes: &Sizes, count_padding: bool) -> Result<Tensor> {
        let x = Self::planes(x, sizes)?;
        if sizes.planes() == 0 {
            return sizes.no_output(&x);
        }
        let y = if uses_cpu_kernels(&x) {
            let weights = self.weights(sizes, count_padding);
            with_float!(x.dtype(), T => {
                let host_x = host(&x)?;
                let x = host_x.slice::<T>()?;
                let mut y = vec![T::ZERO; sizes.planes() * sizes.outputs()];
                let planes = y.par_chunks_mut(sizes.outputs()).zip(x.par_chunks(sizes.inputs()));
                planes.for_each(|(y, x)| {
                    self.each(sizes, |output, rows, columns| {
                        let rows = rows.map(|row| &x[row * sizes.input[1]..][columns.clone()]);
                        let sum = rows.flatten().fold(T::ZERO, |sum, &x| sum + x);
                        y[output] = sum * weights[output] as T;
                    });
                });
                tensor(y, (sizes.planes(), sizes.outputs()))
            })?
        } else {
            let places = self.places(sizes, x.device())?;
            let inside = places.inside.to_dtype(x.dtype())?;
            let windows = self.gather(&x, &places)?.broadcast_mul(&inside)?;
            windows.sum(1)?.broadcast_mul(&self.weights_tensor(sizes, count_padding, &x)?)?
        };
        sizes.of_output(&y)
    }

    /// Computes the gradient of the input of [`mean`](Self::mean).
    pub(crate) fn mean_backward(
        &self,
        sizes: &Sizes,
        count_padding: bool,
        grad: &Tensor,
    ) -> Result<Tensor> {
        let shape = (sizes.planes(), sizes.inputs());
        if sizes.planes() == 0 {
            return Ok(Tensor::zeros(sizes.input_shape(), sizes.dtype, grad.device())?);
        }
        let grad = to_accumulation_dtype(grad)?.reshape((sizes.planes(), sizes.outputs()))?;
        let dx = if uses_cpu_kernels(&grad) {
            let weights = self.weights(sizes, count_padding);
            with_float!(grad.dtype(), T => {
                let host_grad = host(&grad)?;
                let grad = host_grad.slice::<T>()?;
                let mut dx = vec![T::ZERO; shape.0 * shape.1];
                let planes = dx.par_chunks_mut(shape.1).zip(grad.par_chunks(sizes.outputs()));
                planes.for_each(|(dx, grad)| {
                    self.each(sizes, |output, rows, columns| {
                        let part = grad[output] * weights[output] as T;
                        for row in rows {
                            let dx = &mut dx[row * sizes.input[1]..][columns.clone()];
                            dx.iter_mut().for_each(|dx| *dx += part);
                        }
                    });
                });
                tensor(dx, shape)
            })?
        } else {
            let places = self.places(sizes, grad.device())?;
            let weights = self.weights_tensor(sizes, count_padding, &grad)?;
            let parts = grad.broadcast_mul(&weights)?.unsqueeze(1)?;
            let parts =
                parts.broadcast_mul(&places.inside.to_dtype(grad.dtype())?.unsqueeze(0)?)?;
            let zeros = Tensor::zeros(shape, grad.dtype(), grad.device())?;
            zeros.index_add(&places.element.flatten_all()?, &parts.flatten_from(1)?, 1)?
        };
        sizes.of_input(&dx)
    }
}
