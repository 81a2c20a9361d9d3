//! Softmax of scores with a mask or a bias, in f32.

use candle_core::{DType, Tensor};
use fulgurite_error::{Error, Result};

use super::address;
use super::layers::{carry_out, taken};
use crate::Float;
use crate::plans::{self, Broadcast};

/// The address and the strides of a mask or a bias of these scores.
fn broadcast(tensor: Option<&Tensor>, dtype: DType, sizes: [usize; 4]) -> Result<Broadcast> {
    let Some(tensor) = tensor else { return Ok(Broadcast::default()) };
    let dims = <[usize; 4]>::try_from(tensor.dims());
    let each = |(got, want): (usize, usize)| got == want || got == 1;
    let dims = dims.ok().filter(|dims| {
        let fits = dims.iter().copied().zip(sizes).all(each) && dims[3] == sizes[3];
        fits && tensor.dtype() == dtype && tensor.is_contiguous()
    });
    let Some(dims) = dims else {
        return Err(Error::other(format!(
            "scores of {sizes:?} were given a mask or a bias of {:?} in {:?}",
            tensor.dims(),
            tensor.dtype()
        )));
    };
    let (mut strides, mut step) = ([0; 3], dims[3]);
    for dim in (0..3).rev() {
        if dims[dim] > 1 {
            strides[dim] = u32::try_from(step).map_err(Error::other)?;
        }
        step *= dims[dim];
    }
    Ok(Broadcast { address: address(tensor)?, strides })
}

/// Replaces scores, contiguous f32 `[batch, heads, queries, keys]` without another user, by their
/// softmax. A query sees the keys whose mask (u8) is not 0; without any its row becomes zeros. The
/// bias (f32) is added to the scores. Both are `[batch or 1, heads or 1, queries or 1, keys]`.
/// Returns false if no kernel takes the scores.
///
/// # Errors
/// If shapes or dtypes do not fit, or the launch fails.
pub fn masked_softmax(
    scores: &Tensor,
    mask: Option<&Tensor>,
    bias: Option<&Tensor>,
) -> Result<bool> {
    let Some((device, Float::F32)) = taken(scores) else { return Ok(false) };
    let Ok(sizes) = <[usize; 4]>::try_from(scores.dims()) else { return Ok(false) };
    if u32::try_from(sizes[0] * sizes[1] * sizes[2]).is_err() || !scores.is_contiguous() {
        return Ok(false);
    }
    let of_mask = broadcast(mask, DType::U8, sizes)?;
    let of_bias = broadcast(bias, DType::F32, sizes)?;
    let plan = plans::masked_softmax(address(scores)?, sizes, of_mask, of_bias);
    let held: Vec<&Tensor> = std::iter::once(scores).chain(mask).chain(bias).collect();
    carry_out(&plan, device, &held)?;
    Ok(true)
}

/// Replaces the gradient of probabilities by the gradient of scores, times `scale`. The gradient is
/// contiguous f32 and has no other user. Returns false if no kernel takes the tensors.
///
/// # Errors
/// If the tensors differ in shape, or the launch fails.
pub fn masked_softmax_backward(probabilities: &Tensor, grad: &Tensor, scale: f64) -> Result<bool> {
    let Some((device, Float::F32)) = taken(grad) else { return Ok(false) };
    let keys = grad.dims().last().copied().unwrap_or(1);
    let rows = grad.elem_count() / keys.max(1);
    if u32::try_from(rows).is_err() || !grad.is_contiguous() || !probabilities.is_contiguous() {
        return Ok(false);
    }
    if probabilities.dims() != grad.dims() || probabilities.dtype() != DType::F32 {
        return Err(Error::other(format!(
            "probabilities of {:?} were given a gradient of {:?}",
            probabilities.dims(),
            grad.dims()
        )));
    }
    let addresses = (address(probabilities)?, address(grad)?);
    let plan = plans::masked_softmax_backward(addresses.0, addresses.1, [rows, keys], scale as f32);
    carry_out(&plan, device, &[probabilities, grad])?;
    Ok(true)
}
