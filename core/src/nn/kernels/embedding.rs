//! Looking rows up and summing their gradients.

use candle_core::{Device, Tensor};
use rayon::prelude::*;

use crate::nn::arm::{on_host, wide, wide_dtype};
use crate::nn::host::{Float, host, indices, tensor, with_float};
use crate::nn::record::accumulate_host;
use crate::parameter::Parameter;
use crate::{Error, Result};

/// The ids on the host, each checked against the size of the table.
pub(in crate::nn) fn checked_ids(ids: &Tensor, rows: usize) -> Result<Vec<u32>> {
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

/// Row `ids[i]` of `weight` (`[rows, width]`) for each i, flat: `[ids, width]`.
pub(in crate::nn) fn lookup(ids: &[u32], weight: &Tensor) -> Result<Tensor> {
    let width = weight.dim(1)?;
    if !on_host(weight) || weight.dtype() != wide_dtype(weight.dtype()) {
        let ids = Tensor::from_slice(ids, ids.len(), weight.device())?;
        return Ok(weight.contiguous()?.index_select(&ids, 0)?);
    }
    let weight = wide(weight)?;
    with_float!(weight.dtype(), T => {
        let weight = host(&weight)?;
        let weight = weight.slice::<T>()?;
        let mut y = vec![T::ZERO; ids.len() * width];
        y.par_chunks_mut(width.max(1)).zip(ids).with_min_len(64).for_each(|(y, &id)| {
            y.copy_from_slice(&weight[id as usize * width..][..width]);
        });
        tensor(y, (ids.len(), width))
    })
}

/// Adds `grad` (`[ids, width]`) to the rows of the gradient of `weight`. The use is not ended.
pub(in crate::nn) fn lookup_grad(weight: &Parameter, ids: &[u32], grad: &Tensor) -> Result<()> {
    if !weight.requires_grad() {
        return Ok(());
    }
    let [rows, width] = *weight.global_shape() else {
        return Err(Error::parameter(weight.fqn(), "an embedding has two dimensions"));
    };
    let grad = wide(grad)?;
    if !on_host(&grad) {
        let device: &Device = grad.device();
        let ids = Tensor::from_slice(ids, ids.len(), device)?;
        let zeros = Tensor::zeros((rows, width), grad.dtype(), device)?;
        return weight.accumulate(&zeros.index_add(&ids, &grad.reshape(((), width))?, 0)?);
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

/// Each piece of the table takes its rows from all ids, in order: the sums depend on no thread.
fn scatter<T: Float>(out: &mut [T], ids: &[u32], grad: &[T], width: usize, add: bool) {
    if width == 0 {
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
