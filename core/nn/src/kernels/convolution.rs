//! Convolution over two dimensions, as a product with a matrix of the input's windows.
//!
//! The windows are `[channels * kernel, batch * outputs]`, so one product per group covers the
//! whole batch. Their gradient is added to the input through the same list of places.

use candle_core::{Device, Tensor};
use rayon::prelude::*;

use crate::backend::{to_accumulation_dtype, uses_cpu_kernels};
use crate::gemm::{Mat, Threads, gemm};
use crate::host::{Float as _, host, tensor, with_float};
use crate::{Error, Result};
use fulgurite_engine::shard::checked_elem_count;

/// The shape of a convolution; pairs are height and width.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Convolution {
    pub(crate) kernel: [usize; 2],
    pub(crate) stride: [usize; 2],
    pub(crate) padding: [usize; 2],
    pub(crate) dilation: [usize; 2],
    pub(crate) groups: usize,
}

/// The gradients of a convolution; the input's only if requested.
pub(crate) struct ConvolutionGrads {
    pub(crate) x: Option<Tensor>,
    pub(crate) weight: Tensor,
}

/// The sizes of one call.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    batch: usize,
    channels: usize,
    /// Height and width of the input with its padding.
    padded: [usize; 2],
    /// Height and width of the output.
    output: [usize; 2],
    out_channels: usize,
}

impl Sizes {
    /// Returns the number of columns in the matrix of windows.
    fn places(&self) -> usize {
        self.batch * self.output[0] * self.output[1]
    }

    fn padded_len(&self) -> usize {
        self.batch * self.padded[0] * self.padded[1]
    }
}

impl Convolution {
    /// Returns the elements that a window covers along a dimension, and the padding of both sides;
    /// `None` on overflow.
    fn extent(&self, dim: usize) -> Option<[usize; 2]> {
        let window = self.dilation[dim].checked_mul(self.kernel[dim] - 1)?.checked_add(1)?;
        Some([window, self.padding[dim].checked_mul(2)?])
    }

    fn too_large(&self) -> Error {
        let Self { kernel, padding, dilation, .. } = self;
        Error::other(format!(
            "kernel {kernel:?}, dilation {dilation:?} and padding {padding:?} make windows or inputs larger \
             than can be counted"
        ))
    }

    /// Checks that the sizes do not overflow. The kernel is at least 1.
    ///
    /// # Errors
    /// If they overflow.
    pub(crate) fn check(&self) -> Result<()> {
        match (self.extent(0), self.extent(1)) {
            (Some(_), Some(_)) => Ok(()),
            _ => Err(self.too_large()),
        }
    }

    fn sizes(&self, x: &Tensor, weight: &Tensor) -> Result<Sizes> {
        let (batch, channels, height, width) = x.dims4()?;
        let (mut padded, mut output) = ([height, width], [0; 2]);
        for i in 0..2 {
            let [window, padding] = self.extent(i).ok_or_else(|| self.too_large())?;
            padded[i] = padded[i].checked_add(padding).ok_or_else(|| self.too_large())?;
            let Some(room) = padded[i].checked_sub(window) else {
                return Err(Error::other(format!(
                    "a window of {window} elements (kernel {}, dilation {}) is larger than the input, \
                     {} with its padding of {} on both sides; got a tensor of shape {:?}",
                    self.kernel[i],
                    self.dilation[i],
                    padded[i],
                    self.padding[i],
                    x.dims()
                )));
            };
            output[i] = room / self.stride[i] + 1;
        }
        let sizes = Sizes { batch, channels, padded, output, out_channels: weight.dim(0)? };
        let padded_len = checked_elem_count(&[batch, padded[0], padded[1]]);
        if padded_len.is_none_or(|len| u32::try_from(len).is_err()) {
            return Err(Error::other(format!(
                "a convolution takes up to {} positions of a batch at once, got a tensor of shape {:?}; \
                 use a smaller batch",
                u32::MAX,
                x.dims()
            )));
        }
        Ok(sizes)
    }

    /// Returns the place of each window element in one channel's padded input:
    /// `[kernel, batch, outputs]`.
    fn places(&self, sizes: &Sizes) -> Vec<u32> {
        let [height, width] = sizes.padded;
        let [rows, columns] = sizes.output;
        let mut places = Vec::with_capacity(self.kernel[0] * self.kernel[1] * sizes.places());
        for i in 0..self.kernel[0] {
            for j in 0..self.kernel[1] {
                for sample in 0..sizes.batch {
                    for row in 0..rows {
                        let y = row * self.stride[0] + i * self.dilation[0];
                        let start = (sample * height + y) * width + j * self.dilation[1];
                        let stride = self.stride[1];
                        places.extend((0..columns).map(|column| (start + column * stride) as u32));
                    }
                }
            }
        }
        places
    }

    /// Returns the padded input with the channels first, `[channels, batch * padded]`.
    fn pad(&self, x: &Tensor, sizes: &Sizes) -> Result<Tensor> {
        let [vertical, horizontal] = self.padding;
        let x = x.transpose(0, 1)?;
        let x = if vertical > 0 { x.pad_with_zeros(2, vertical, vertical)? } else { x };
        let x = if horizontal > 0 { x.pad_with_zeros(3, horizontal, horizontal)? } else { x };
        Ok(x.contiguous()?.reshape((sizes.channels, sizes.padded_len()))?)
    }

    /// Returns the weight with the output channels of each group as rows.
    fn matrix(&self, weight: &Tensor, sizes: &Sizes) -> Result<Tensor> {
        let outputs = sizes.out_channels / self.groups;
        Ok(weight.reshape((self.groups, outputs, weight.elem_count() / sizes.out_channels))?)
    }

    /// Computes the output; `x` is `[batch, channels, height, width]`, `weight`
    /// `[out, channels / groups, kernel..]`.
    pub(crate) fn forward(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let (dtype, sizes) = (x.dtype(), self.sizes(x, weight)?);
        let (x, weight) = (to_accumulation_dtype(x)?, to_accumulation_dtype(weight)?);
        let windows = self.windows(&x, &sizes)?;
        let y = products(&self.matrix(&weight, &sizes)?, &windows, [false, false])?;
        let [rows, columns] = sizes.output;
        let y = y.reshape((sizes.out_channels, sizes.batch, rows, columns))?.transpose(0, 1)?;
        Ok(y.contiguous()?.to_dtype(dtype)?)
    }

    /// Computes the gradients of the weight and, if `wanted`, of the input.
    pub(crate) fn backward(
        &self,
        x: &Tensor,
        weight: &Tensor,
        grad: &Tensor,
        wanted: bool,
    ) -> Result<ConvolutionGrads> {
        let (dtype, sizes) = (x.dtype(), self.sizes(x, weight)?);
        let shape = weight.shape().clone();
        let (x, weight) = (to_accumulation_dtype(x)?, to_accumulation_dtype(weight)?);
        let grad = to_accumulation_dtype(&grad.transpose(0, 1)?)?;
        let outputs = sizes.out_channels / self.groups;
        let grad = grad.reshape((self.groups, outputs, sizes.places()))?;
        // Recomputing the windows is cheaper than saving them.
        let of_weight = products(&grad, &self.windows(&x, &sizes)?, [false, true])?;
        let of_x = || -> Result<Tensor> {
            let of_windows = products(&self.matrix(&weight, &sizes)?, &grad, [true, false])?;
            let dx = self.add_windows(&of_windows, &sizes)?;
            let [height, width] = sizes.padded;
            let dx = dx.reshape((sizes.channels, sizes.batch, height, width))?;
            let [vertical, horizontal] = self.padding;
            let dx = dx.narrow(2, vertical, height - 2 * vertical)?;
            let dx = dx.narrow(3, horizontal, width - 2 * horizontal)?;
            Ok(dx.transpose(0, 1)?.contiguous()?.to_dtype(dtype)?)
        };
        let x = wanted.then(of_x).transpose()?;
        Ok(ConvolutionGrads { x, weight: of_weight.reshape(shape)? })
    }

    /// Returns the windows of each group, `[groups, channels / groups * kernel, batch * outputs]`.
    fn windows(&self, x: &Tensor, sizes: &Sizes) -> Result<Tensor> {
        let (padded, places) = (self.pad(x, sizes)?, self.places(sizes));
        let rows = sizes.channels / self.groups * self.kernel[0] * self.kernel[1];
        let shape = (self.groups, rows, sizes.places());
        if !uses_cpu_kernels(&padded) {
            let n = places.len();
            let places = Tensor::from_vec(places, n, &Device::Cpu)?.to_device(padded.device())?;
            return Ok(padded.index_select(&places, 1)?.reshape(shape)?);
        }
        with_float!(padded.dtype(), T => {
            let host_x = host(&padded)?;
            let x = host_x.slice::<T>()?;
            let mut windows = vec![T::ZERO; sizes.channels * places.len()];
            if !windows.is_empty() {
                let of_channels = windows.par_chunks_mut(places.len());
                of_channels.zip(x.par_chunks(sizes.padded_len())).for_each(|(windows, x)| {
                    windows.iter_mut().zip(&places).for_each(|(w, &place)| *w = x[place as usize]);
                });
            }
            tensor(windows, shape)
        })
    }

    /// Computes the gradient of the padded input, `[channels, batch * padded]`, from the windows'
    /// gradient.
    fn add_windows(&self, windows: &Tensor, sizes: &Sizes) -> Result<Tensor> {
        let places = self.places(sizes);
        let shape = (sizes.channels, sizes.padded_len());
        if !uses_cpu_kernels(windows) {
            let n = places.len();
            let places = Tensor::from_vec(places, n, &Device::Cpu)?.to_device(windows.device())?;
            let zeros = Tensor::zeros(shape, windows.dtype(), windows.device())?;
            let windows = windows.reshape((sizes.channels, n))?;
            return Ok(zeros.index_add(&places, &windows, 1)?);
        }
        with_float!(windows.dtype(), T => {
            let host_windows = host(windows)?;
            let windows = host_windows.slice::<T>()?;
            let mut x = vec![T::ZERO; sizes.channels * sizes.padded_len()];
            if !windows.is_empty() {
                let of_channels = x.par_chunks_mut(sizes.padded_len());
                of_channels.zip(windows.par_chunks(places.len())).for_each(|(x, windows)| {
                    windows.iter().zip(&places).for_each(|(&w, &place)| x[place as usize] += w);
                });
            }
            tensor(x, shape)
        })
    }
}

/// Returns the product of each group's matrices, `[groups, rows, columns]`. Either may be
/// transposed first.
fn products(a: &Tensor, b: &Tensor, transposed: [bool; 2]) -> Result<Tensor> {
    if !uses_cpu_kernels(a) {
        let turn = |x: &Tensor, turned: bool| match turned {
            true => x.transpose(1, 2)?.contiguous(),
            false => x.contiguous(),
        };
        return Ok(turn(a, transposed[0])?.matmul(&turn(b, transposed[1])?)?);
    }
    let (groups, a_rows, a_columns) = a.dims3()?;
    let (_, b_rows, b_columns) = b.dims3()?;
    let rows = if transposed[0] { a_columns } else { a_rows };
    let columns = if transposed[1] { b_rows } else { b_columns };
    with_float!(a.dtype(), T => {
        let (host_a, host_b) = (host(a)?, host(b)?);
        let (a, b) = (host_a.slice::<T>()?, host_b.slice::<T>()?);
        let mut out = vec![T::ZERO; groups * rows * columns];
        let product = |i: usize, out: &mut [T], threads| {
            let a = Mat::new(&a[i * a_rows * a_columns..], a_rows, a_columns);
            let b = Mat::new(&b[i * b_rows * b_columns..], b_rows, b_columns);
            let a = if transposed[0] { a.t() } else { a };
            let b = if transposed[1] { b.t() } else { b };
            gemm(out, a, b, false, threads);
        };
        match groups {
            _ if out.is_empty() => {}
            1 => product(0, &mut out, Threads::All),
            _ => out
                .par_chunks_mut(rows * columns)
                .enumerate()
                .for_each(|(i, out)| product(i, out, Threads::One)),
        }
        tensor(out, (groups, rows, columns))
    })
}
