//! Products with a weight of shape `[out, in]`. `x` is `[.., in]`, results `[.., out]`.

use candle_core::{D, Tensor};
use rayon::prelude::*;

use crate::Result;
use crate::backend::{to_accumulation_dtype, uses_cpu_kernels};
use crate::gemm::{Mat, Threads, gemm, product};
use crate::gradients::accumulate_host;
use crate::host::{Float, add_rows, host, rows_per_piece, tensor, with_float};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::parameter::Parameter;
use fulgurite_engine::parameter::accumulation_dtype;

/// Whether and where the gradient of an input is computed.
pub(crate) enum InputGrad {
    /// Nothing; it is not needed.
    Skip,
    /// A new tensor.
    New,
    /// The gradient added in place to this tensor, which has the input's shape and no other user.
    AddTo(Tensor),
}

impl InputGrad {
    /// [`New`](Self::New) if the gradient is wanted, else [`Skip`](Self::Skip).
    pub(crate) fn new(wanted: bool) -> Self {
        if wanted { Self::New } else { Self::Skip }
    }

    /// Has the gradient added to `sum`, if there is one.
    pub(crate) fn add_to(self, sum: Option<Tensor>) -> Self {
        match (self, sum) {
            (Self::New, Some(sum)) => Self::AddTo(sum),
            (into, _) => into,
        }
    }
}

fn rows(x: &Tensor) -> Result<(usize, usize)> {
    let width = x.dim(D::Minus1)?;
    Ok((x.elem_count() / width.max(1), width))
}

fn with_width(x: &Tensor, width: usize) -> Vec<usize> {
    let mut dims = x.dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last = width;
    }
    dims
}

/// `x weight^T + bias`.
pub(crate) fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let (n, inputs) = rows(x)?;
    let outputs = weight.dim(0)?;
    let dims = with_width(x, outputs);
    if !uses_cpu_kernels(x) {
        let y = x.detach().reshape((n, inputs))?.matmul(&weight.t()?)?;
        let y = match bias {
            Some(bias) => y.broadcast_add(bias)?,
            None => y,
        };
        return Ok(y.reshape(dims)?);
    }
    let dtype = x.dtype();
    let (x, weight) = (to_accumulation_dtype(x)?, to_accumulation_dtype(weight)?);
    let bias = bias.map(to_accumulation_dtype).transpose()?;
    let y = with_float!(x.dtype(), T => {
        let (x, weight) = (host(&x)?, host(&weight)?);
        let weight = Mat::new(weight.slice::<T>()?, outputs, inputs).t();
        let x = Mat::new(x.slice()?, n, inputs);
        let y = match &bias {
            None => product(x, weight, Threads::All),
            Some(bias) => {
                let mut y = host(bias)?.slice::<T>()?.repeat(n);
                gemm(&mut y, x, weight, true, Threads::All);
                y
            }
        };
        tensor(y, dims)
    })?;
    Ok(y.to_dtype(dtype)?)
}

/// The gradient of `x`: `grad weight`.
pub(crate) fn input_grad(
    grad: &Tensor,
    weight: &Tensor,
    into: InputGrad,
) -> Result<Option<Tensor>> {
    let (n, outputs) = rows(grad)?;
    let inputs = weight.dim(1)?;
    let dims = with_width(grad, inputs);
    let sum = match into {
        InputGrad::Skip => return Ok(None),
        InputGrad::New => None,
        InputGrad::AddTo(sum) => Some(sum),
    };
    #[cfg(feature = "cuda")]
    if let Some(sum) = &sum
        && grad.device().is_cuda()
    {
        // In the product, which rounds once and has no launch of its own for the addition.
        let (rows, into) = (grad.reshape((n, outputs))?, sum.reshape((n, inputs))?);
        if fulgurite_kernels::cuda::add_input_grad(&rows, weight, &into)? {
            return Ok(Some(sum.clone()));
        }
    }
    let native = grad.dtype() == accumulation_dtype(grad.dtype());
    if !uses_cpu_kernels(grad) || (sum.is_some() && !native) {
        let fresh = match uses_cpu_kernels(grad) {
            true => return add(sum, input_grad(grad, weight, InputGrad::New)?),
            false => grad.reshape((n, outputs))?.matmul(weight)?.reshape(dims)?,
        };
        return add(sum, Some(fresh));
    }
    let dtype = grad.dtype();
    let (grad, weight) = (to_accumulation_dtype(grad)?, to_accumulation_dtype(weight)?);
    let dx = with_float!(grad.dtype(), T => {
        let (grad, weight) = (host(&grad)?, host(&weight)?);
        let grad = Mat::new(grad.slice::<T>()?, n, outputs);
        let weight = Mat::new(weight.slice()?, outputs, inputs);
        match sum {
            Some(sum) => {
                storage::with_host_mut(&sum, |out: &mut [T]| {
                    gemm(out, grad, weight, true, Threads::All);
                })?;
                Ok(sum)
            }
            None => {
                tensor(product(grad, weight, Threads::All), dims)
            }
        }
    })?;
    Ok(Some(dx.to_dtype(dtype)?))
}

fn add(sum: Option<Tensor>, fresh: Option<Tensor>) -> Result<Option<Tensor>> {
    Ok(match (sum, fresh) {
        (Some(sum), Some(fresh)) => Some((sum + fresh)?),
        (sum, fresh) => sum.or(fresh),
    })
}

/// Adds `grad^T x` to the gradient of a weight, without ending the use.
pub(crate) fn weight_grad(weight: &Parameter, x: &Tensor, grad: &Tensor) -> Result<()> {
    if !weight.takes_grad() {
        return Ok(());
    }
    let ((n, inputs), (_, outputs)) = (rows(x)?, rows(grad)?);
    if !uses_cpu_kernels(x) {
        let (x, grad) = (x.reshape((n, inputs))?, grad.reshape((n, outputs))?);
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() && n > 0 {
            return weight.accumulate_with(|out, add| {
                if fulgurite_kernels::cuda::weight_grad(&x, &grad, out, add)? {
                    return Ok(());
                }
                // Of other dtypes: as on other devices.
                let product = grad.t()?.matmul(&x)?.flatten_all()?.to_dtype(out.dtype())?;
                let sum = if add { (out + product)? } else { product };
                storage::copy_from(out, &sum)
            });
        }
        return weight.accumulate(&grad.t()?.matmul(&x)?);
    }
    let (x, grad) = (to_accumulation_dtype(x)?, to_accumulation_dtype(grad)?);
    with_float!(x.dtype(), T => {
        let (x, grad) = (host(&x)?, host(&grad)?);
        let x = Mat::new(x.slice::<T>()?, n, inputs);
        let grad = Mat::new(grad.slice::<T>()?, n, outputs);
        accumulate_host::<T>(weight, |out, add| {
            gemm(out, grad.t(), x, add, Threads::All);
            Ok(())
        })
    })
}

/// Adds the sum over the rows of `grad` to the gradient of a bias, without ending the use.
pub(crate) fn bias_grad(bias: &Parameter, grad: &Tensor) -> Result<()> {
    if !bias.takes_grad() {
        return Ok(());
    }
    let (n, outputs) = rows(grad)?;
    if !uses_cpu_kernels(grad) {
        return bias.accumulate(&to_accumulation_dtype(grad)?.reshape((n, outputs))?.sum(0)?);
    }
    let grad = to_accumulation_dtype(grad)?;
    with_float!(grad.dtype(), T => {
        let grad = host(&grad)?;
        let grad = grad.slice::<T>()?;
        accumulate_host::<T>(bias, |out, add| {
            column_sums(out, grad, add);
            Ok(())
        })
    })
}

/// Sums the rows of `grad` into `out`.
fn column_sums<T: Float>(out: &mut [T], grad: &[T], add: bool) {
    let width = out.len().max(1);
    let sums: Vec<Vec<T>> = grad
        .par_chunks(rows_per_piece(grad.len() / width) * width)
        .map(|rows| {
            let mut sum = vec![T::ZERO; width];
            add_rows(&mut sum, rows);
            sum
        })
        .collect();
    if !add {
        out.fill(T::ZERO);
    }
    sums.iter().for_each(|sum| add_rows(out, sum));
}
