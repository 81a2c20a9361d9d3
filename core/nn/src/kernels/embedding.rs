//! Embedding lookup and its gradient.

use bytemuck::allocation::zeroed_vec;
use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

use crate::backend::{to_accumulation_dtype, uses_cpu_kernels};
use crate::gradients::accumulate_host;
use crate::host::{Float, host, indices, with_float};
use crate::{Error, Result};
use fulgurite_engine::autograd::storage::{self, HostElement};
use fulgurite_engine::execution::dry_run::skips_pass;
use fulgurite_engine::execution::transfer;
use fulgurite_engine::parameter::Parameter;
#[cfg(feature = "cuda")]
use fulgurite_kernels::cuda;

/// Returns the ids on the host, after checking that each is below the number of rows.
pub(crate) fn checked_ids(ids: &Tensor, rows: usize) -> Result<Vec<u32>> {
    let ids = indices(ids, "ids")?;
    ids.into_iter()
        .map(|id| match u32::try_from(id) {
            Ok(small) if (small as usize) < rows => Ok(small),
            _ => Err(Error::other(format!(
                "id {id} is out of range for an embedding of {rows} rows; check the tokenizer's \
                 vocabulary against the model's"
            ))),
        })
        .collect()
}

/// The local id of a row on another rank.
const NOT_LOCAL: u32 = u32::MAX;

/// Converts ids to ids of this rank's `rows` rows, which begin at row `first` of the table. Other
/// ids become [`NOT_LOCAL`].
pub(crate) fn local_ids(mut ids: Vec<u32>, first: usize, rows: usize) -> Vec<u32> {
    for id in &mut ids {
        *id = match (*id as usize).checked_sub(first) {
            Some(row) if row < rows => row as u32,
            _ => NOT_LOCAL,
        };
    }
    ids
}

fn on_device(ids: Vec<u32>, like: &Tensor) -> Result<Tensor> {
    let n = ids.len();
    transfer::to_device(&Tensor::from_vec(ids, n, &Device::Cpu)?, like.device(), "ids")
}

/// Returns ids for tensor operations, with an arbitrary row for [`NOT_LOCAL`], and a factor that
/// zeroes these rows (`[ids, 1]`), if there are any.
fn portable_ids(ids: &[u32], like: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
    let here: Vec<u32> = ids.iter().map(|&id| if id == NOT_LOCAL { 0 } else { id }).collect();
    let here = on_device(here, like)?;
    if !ids.contains(&NOT_LOCAL) {
        return Ok((here, None));
    }
    let factor: Vec<f32> = ids.iter().map(|&id| f32::from(u8::from(id != NOT_LOCAL))).collect();
    let factor = Tensor::from_vec(factor, (ids.len(), 1), like.device())?;
    Ok((here, Some(factor.to_dtype(like.dtype())?)))
}

/// Returns row `ids[i]` of `weight` (`[rows, width]`) for each i, zeros for [`NOT_LOCAL`]:
/// `[ids, width]`.
pub(crate) fn lookup(ids: &[u32], weight: &Tensor) -> Result<Tensor> {
    let width = weight.dim(1)?;
    #[cfg(feature = "cuda")]
    if weight.device().is_cuda()
        && let Some(y) = cuda::pick_rows(weight, &on_device(ids.to_vec(), weight)?)?
    {
        return Ok(y);
    }
    if uses_cpu_kernels(weight) {
        match weight.dtype() {
            DType::F32 => return pick_rows::<f32>(ids, weight, width),
            DType::F64 => return pick_rows::<f64>(ids, weight, width),
            DType::BF16 => return pick_rows::<bf16>(ids, weight, width),
            DType::F16 => return pick_rows::<f16>(ids, weight, width),
            _ => {}
        }
    }
    let (ids, factor) = portable_ids(ids, weight)?;
    let y = weight.contiguous()?.index_select(&ids, 0)?;
    Ok(match factor {
        Some(factor) => y.broadcast_mul(&factor)?,
        None => y,
    })
}

/// [`lookup`] on the CPU.
fn pick_rows<T: HostElement + Send + Sync>(
    ids: &[u32],
    weight: &Tensor,
    width: usize,
) -> Result<Tensor> {
    let (weight, mut y) = (weight.detach().contiguous()?, zeroed_vec::<T>(ids.len() * width));
    if !skips_pass(2 * size_of_val(&y[..])) {
        storage::with_host(&weight, |weight: &[T]| {
            y.par_chunks_mut(width.max(1)).zip(ids).with_min_len(64).for_each(|(y, &id)| {
                if id != NOT_LOCAL {
                    y.copy_from_slice(&weight[id as usize * width..][..width]);
                }
            });
        })?;
    }
    Ok(Tensor::from_vec(y, (ids.len(), width), weight.device())?)
}

/// Adds `grad` (`[ids, width]`) to the rows of the gradient of `weight`, without ending the use.
pub(crate) fn lookup_grad(weight: &Parameter, ids: &[u32], grad: &Tensor) -> Result<()> {
    if !weight.takes_grad() {
        return Ok(());
    }
    let [rows, width] = *weight.compute_shape() else {
        return Err(Error::parameter(weight.fqn(), "an embedding has two dimensions"));
    };
    #[cfg(feature = "cuda")]
    if grad.device().is_cuda() && grad.elem_count() > 0 {
        let grad = grad.reshape(((), width))?;
        weight.accumulate_with(|out, add| {
            if !add {
                out.zero_set()?;
            }
            if cuda::embedding_grad(&grad, ids, out)? {
                return Ok(());
            }
            // Another dtype: the same path as on other devices.
            let (ids, factor) = portable_ids(ids, out)?;
            let grad = grad.to_dtype(out.dtype())?;
            let grad = match factor {
                Some(factor) => grad.broadcast_mul(&factor)?,
                None => grad,
            };
            let sum = out.reshape((rows, width))?.index_add(&ids, &grad, 0)?;
            storage::copy_from(out, &sum)
        })?;
        return Ok(());
    }
    let grad = to_accumulation_dtype(grad)?;
    if !uses_cpu_kernels(&grad) {
        let device: &Device = grad.device();
        let (ids, factor) = portable_ids(ids, &grad)?;
        let grad = grad.reshape(((), width))?;
        let grad = match factor {
            Some(factor) => grad.broadcast_mul(&factor)?,
            None => grad,
        };
        let zeros = Tensor::zeros((rows, width), grad.dtype(), device)?;
        return weight.accumulate(&zeros.index_add(&ids, &grad, 0)?);
    }
    with_float!(grad.dtype(), T => {
        let grad = host(&grad)?;
        let grad = grad.slice::<T>()?;
        accumulate_host::<T>(weight, |out, add| {
            scatter(out, ids, grad, width, add);
            Ok(())
        })
    })
}

/// Returns column `ids[i]` of `weight` (`[width, rows]`) for each i, zeros for [`NOT_LOCAL`]:
/// `[ids, width]`.
pub(crate) fn column_lookup(ids: &[u32], weight: &Tensor) -> Result<Tensor> {
    let (ids, factor) = portable_ids(ids, weight)?;
    let y = weight.contiguous()?.index_select(&ids, 1)?.t()?.contiguous()?;
    Ok(match factor {
        Some(factor) => y.broadcast_mul(&factor)?,
        None => y,
    })
}

/// Adds `grad` (`[ids, width]`) to the columns of the gradient of `weight` (`[width, rows]`),
/// without ending the use.
pub(crate) fn column_lookup_grad(weight: &Parameter, ids: &[u32], grad: &Tensor) -> Result<()> {
    if !weight.takes_grad() {
        return Ok(());
    }
    let grad = to_accumulation_dtype(grad)?;
    let (ids, factor) = portable_ids(ids, &grad)?;
    let grad = match factor {
        Some(factor) => grad.broadcast_mul(&factor)?,
        None => grad,
    };
    let zeros = Tensor::zeros(weight.compute_shape(), grad.dtype(), grad.device())?;
    weight.accumulate(&zeros.index_add(&ids, &grad.t()?.contiguous()?, 1)?)
}

/// Sums the rows of `grad` by id. Each thread goes through all ids, in order, for its piece of the
/// table, so sums do not depend on the number of threads.
fn scatter<T: Float>(out: &mut [T], ids: &[u32], grad: &[T], width: usize, add: bool) {
    if width == 0 || skips_pass(size_of_val(out) + size_of_val(grad)) {
        return;
    }
    let rows = (out.len() / width).div_ceil(rayon::current_num_threads()).max(1);
    out.par_chunks_mut(rows * width).enumerate().for_each(|(i, out)| {
        if !add {
            out.fill(T::ZERO);
        }
        let (first, end) = (i * rows, i * rows + out.len() / width);
        for (&id, grad) in ids.iter().zip(grad.chunks_exact(width)) {
            let id = id as usize;
            if (first..end).contains(&id) {
                let out = &mut out[(id - first) * width..][..width];
                out.iter_mut().zip(grad).for_each(|(out, &g)| *out += g);
            }
        }
    });
}
