//! Layers on GPUs, by the plans that the tests run. Every function returns `None` for tensors that
//! no kernel supports: on another device, in f64, with too many rows, or rotated by tables of
//! another form.
#![allow(unsafe_code)] // launches, and memory that a launch overwrites completely

use candle_core::{CudaDevice, D, DType, Device, Shape, Tensor};
use fulgurite_error::{Error, Result};

use super::{address, run, unset};
use crate::plans::{
    self, CrossEntropy, LayerNorm, LayerNormBackward, RmsNorm, RmsNormBackward, Rope,
};
use crate::{Float, Plan};

/// Returns the device and the dtype of a tensor, or `None` if no layer kernel supports it.
pub(super) fn taken(tensor: &Tensor) -> Option<(&CudaDevice, Float)> {
    let Device::Cuda(device) = tensor.device() else { return None };
    let dtype = match tensor.dtype() {
        DType::F32 => Float::F32,
        DType::BF16 => Float::Bf16,
        DType::F16 => Float::F16,
        _ => return None,
    };
    (tensor.elem_count() > 0).then_some((device, dtype))
}

/// Whether layer kernels support this tensor: on a GPU, not empty, in f32, bf16 or f16.
pub fn takes(tensor: &Tensor) -> bool {
    taken(tensor).is_some()
}

/// Returns the number of rows and their length, with rows along the last dimension.
fn rows(tensor: &Tensor) -> Result<Option<(u32, u32)>> {
    let n = tensor.dim(D::Minus1)?;
    Ok(u32::try_from(tensor.elem_count() / n.max(1)).ok().zip(u32::try_from(n).ok()))
}

/// Returns uninitialised memory of this shape and dtype. A launch must overwrite it completely.
pub(super) fn output(like: &Tensor) -> Result<Tensor> {
    match like.device() {
        Device::Cuda(device) => unset(like.shape(), like.dtype(), device),
        _ => Err(Error::other("memory for a kernel was asked of another device than a GPU")),
    }
}

/// Returns uninitialised memory for an f32 per row. A launch must overwrite it completely.
fn of_rows(rows: u32, device: &CudaDevice) -> Result<Tensor> {
    unset(&Shape::from(rows as usize), DType::F32, device)
}

/// Checks that all tensors have the shape, dtype and device of the first.
pub(super) fn alike(tensors: &[&Tensor]) -> Result<()> {
    let same = |other: &&Tensor| {
        other.dims() == tensors[0].dims()
            && other.dtype() == tensors[0].dtype()
            && other.device().same_device(tensors[0].device())
    };
    match tensors.iter().all(same) {
        true => Ok(()),
        false => Err(Error::other(format!(
            "a kernel takes tensors of one shape and dtype on one device, got {:?}",
            tensors.iter().map(|t| (t.dims(), t.dtype())).collect::<Vec<_>>()
        ))),
    }
}

/// Returns a norm's weight of `n` elements in f32.
fn weight(weight: &Tensor, n: u32) -> Result<Tensor> {
    if weight.dims() != [n as usize] {
        return Err(Error::other(format!(
            "a norm of {n} elements has a weight of {:?}",
            weight.dims()
        )));
    }
    Ok(weight.to_dtype(DType::F32)?.contiguous()?)
}

/// Runs a plan whose addresses all belong to `held`: contiguous tensors of the plan's sizes.
pub(super) fn carry_out(plan: &Plan, device: &CudaDevice, held: &[&Tensor]) -> Result<()> {
    // SAFETY: the tensors are held until this returns, and the maker of the plan has checked their
    // sizes.
    let done = unsafe { run(plan, device) };
    let _ = held;
    done
}

/// The results of a norm.
#[derive(Debug)]
pub struct Normalized<const N: usize> {
    /// The output, in the dtype of the input.
    pub y: Tensor,
    /// The sum with the residual, if there is one.
    pub sum: Option<Tensor>,
    /// Statistics for the backward: one f32 per row.
    pub stats: [Tensor; N],
}

/// Returns the residual, which must match `x` in shape and dtype, and memory for the sum.
fn with_residual(x: &Tensor, residual: Option<&Tensor>) -> Result<Option<(Tensor, Tensor)>> {
    let Some(residual) = residual else { return Ok(None) };
    alike(&[x, residual])?;
    Ok(Some((residual.contiguous()?, output(x)?)))
}

/// Returns the address of a tensor, or 0 without a tensor.
fn address_or_0(tensor: Option<&Tensor>) -> Result<u64> {
    tensor.map_or(Ok(0), address)
}

/// Computes `x * rstd * weight` over the last dimension; `x` includes `residual`, if given. `stats`
/// is `rstd`, the reciprocal root of the mean square plus `eps`.
///
/// # Errors
/// If shapes do not fit, or a launch fails.
pub fn rms_norm(
    x: &Tensor,
    residual: Option<&Tensor>,
    scale: &Tensor,
    eps: f64,
) -> Result<Option<Normalized<1>>> {
    let (Some((device, dtype)), Some((count, n))) = (taken(x), rows(x)?) else { return Ok(None) };
    let (x, scale) = (x.contiguous()?, weight(scale, n)?);
    let (residual, sum) = with_residual(&x, residual)?.unzip();
    let y = output(&x)?;
    let rstd = of_rows(count, device)?;
    let plan = plans::rms_norm(RmsNorm {
        dtype,
        x: address(&x)?,
        residual: address_or_0(residual.as_ref())?,
        weight: address(&scale)?,
        sum: address_or_0(sum.as_ref())?,
        y: address(&y)?,
        rstd: address(&rstd)?,
        rows: count,
        n,
        eps: eps as f32,
    });
    let held = [&x, &scale, &y, &rstd].into_iter().chain(&residual).chain(&sum);
    carry_out(&plan, device, &held.collect::<Vec<_>>())?;
    Ok(Some(Normalized { y, sum, stats: [rstd] }))
}

/// Computes the gradients of [`rms_norm`]: of the normalised tensor `x`, in its dtype, and of the
/// weight, in f32. `more` is another gradient of `x`, which is added.
///
/// # Errors
/// As [`rms_norm`].
pub fn rms_norm_backward(
    x: &Tensor,
    scale: &Tensor,
    rstd: &Tensor,
    grad: &Tensor,
    more: Option<&Tensor>,
) -> Result<Option<(Tensor, Tensor)>> {
    let (Some((device, dtype)), Some((count, n))) = (taken(x), rows(x)?) else { return Ok(None) };
    alike(&[x, grad, more.unwrap_or(grad)])?;
    if rstd.dims() != [count as usize] || rstd.dtype() != DType::F32 {
        return Err(Error::other(format!(
            "a norm of {count} rows has a factor of {:?}",
            rstd.shape()
        )));
    }
    let (x, grad) = (x.contiguous()?, grad.contiguous()?);
    let (scale, rstd) = (weight(scale, n)?, rstd.contiguous()?);
    let more = more.map(Tensor::contiguous).transpose()?;
    let dx = output(&x)?;
    let dweight = Tensor::zeros(n as usize, DType::F32, x.device())?;
    let plan = plans::rms_norm_backward(RmsNormBackward {
        dtype,
        x: address(&x)?,
        weight: address(&scale)?,
        rstd: address(&rstd)?,
        grad: address(&grad)?,
        more: address_or_0(more.as_ref())?,
        dx: address(&dx)?,
        dweight: address(&dweight)?,
        rows: count,
        n,
    });
    let held = [&x, &scale, &rstd, &grad, &dx, &dweight].into_iter().chain(&more);
    carry_out(&plan, device, &held.collect::<Vec<_>>())?;
    Ok(Some((dx, dweight)))
}

/// Computes `(x - mean) * rstd * weight + bias` over the last dimension; `x` includes `residual`,
/// if given. `stats` are `mean` and `rstd`, the reciprocal root of the variance plus `eps`.
///
/// # Errors
/// As [`rms_norm`].
pub fn layer_norm(
    x: &Tensor,
    residual: Option<&Tensor>,
    scale: &Tensor,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Option<Normalized<2>>> {
    let (Some((device, dtype)), Some((count, n))) = (taken(x), rows(x)?) else { return Ok(None) };
    let (x, scale) = (x.contiguous()?, weight(scale, n)?);
    let bias = bias.map(|bias| weight(bias, n)).transpose()?;
    let (residual, sum) = with_residual(&x, residual)?.unzip();
    let y = output(&x)?;
    let (mean, rstd) = (of_rows(count, device)?, of_rows(count, device)?);
    let plan = plans::layer_norm(LayerNorm {
        dtype,
        x: address(&x)?,
        residual: address_or_0(residual.as_ref())?,
        weight: address(&scale)?,
        bias: address_or_0(bias.as_ref())?,
        sum: address_or_0(sum.as_ref())?,
        y: address(&y)?,
        mean: address(&mean)?,
        rstd: address(&rstd)?,
        rows: count,
        n,
        eps: eps as f32,
    });
    let held = [&x, &scale, &y, &mean, &rstd].into_iter().chain(&residual).chain(&bias).chain(&sum);
    carry_out(&plan, device, &held.collect::<Vec<_>>())?;
    Ok(Some(Normalized { y, sum, stats: [mean, rstd] }))
}

/// Computes the gradients of [`layer_norm`]: of the normalised tensor `x`, in its dtype, and of the
/// weight and the bias, if any, in f32. `more` is another gradient of `x`, which is added.
///
/// # Errors
/// As [`rms_norm`].
pub fn layer_norm_backward(
    x: &Tensor,
    scale: &Tensor,
    with_bias: bool,
    [mean, rstd]: [&Tensor; 2],
    grad: &Tensor,
    more: Option<&Tensor>,
) -> Result<Option<(Tensor, Tensor, Option<Tensor>)>> {
    let (Some((device, dtype)), Some((count, n))) = (taken(x), rows(x)?) else { return Ok(None) };
    alike(&[x, grad, more.unwrap_or(grad)])?;
    for of_rows in [mean, rstd] {
        if of_rows.dims() != [count as usize] || of_rows.dtype() != DType::F32 {
            let shape = of_rows.shape();
            return Err(Error::other(format!(
                "a norm of {count} rows has a mean or factor of {shape:?}"
            )));
        }
    }
    let (x, grad, scale) = (x.contiguous()?, grad.contiguous()?, weight(scale, n)?);
    let (mean, rstd) = (mean.contiguous()?, rstd.contiguous()?);
    let more = more.map(Tensor::contiguous).transpose()?;
    let dx = output(&x)?;
    let zeros = || Tensor::zeros(n as usize, DType::F32, x.device());
    let (dweight, dbias) = (zeros()?, with_bias.then(zeros).transpose()?);
    let plan = plans::layer_norm_backward(LayerNormBackward {
        dtype,
        x: address(&x)?,
        weight: address(&scale)?,
        mean: address(&mean)?,
        rstd: address(&rstd)?,
        grad: address(&grad)?,
        more: address_or_0(more.as_ref())?,
        dx: address(&dx)?,
        dweight: address(&dweight)?,
        dbias: address_or_0(dbias.as_ref())?,
        rows: count,
        n,
    });
    let held = [&x, &scale, &mean, &rstd, &grad, &dx, &dweight].into_iter();
    carry_out(&plan, device, &held.chain(&more).chain(&dbias).collect::<Vec<_>>())?;
    Ok(Some((dx, dweight, dbias)))
}

/// Adds `x` to `sum`, which must be contiguous and have no other user. Returns `None`, and changes
/// nothing, if no kernel supports it.
///
/// # Errors
/// As [`rms_norm`].
pub fn add(sum: &Tensor, x: &Tensor) -> Result<Option<()>> {
    let Some((device, dtype)) = taken(sum) else { return Ok(None) };
    if !sum.is_contiguous() {
        return Ok(None);
    }
    alike(&[sum, x])?;
    let x = x.contiguous()?;
    let plan = plans::add(dtype, address(sum)?, address(&x)?, sum.elem_count() as u64);
    carry_out(&plan, device, &[sum, &x])?;
    Ok(Some(()))
}

/// Rotates `x` (`[.., positions, .., width]`) by angles, given as cosines and sines
/// (`[positions, width / 2]`). With `inverse` it rotates by the negative angles. `dim` is the
/// dimension of positions.
///
/// # Errors
/// As [`rms_norm`].
pub fn rope(
    x: &Tensor,
    [cosine, sine]: [&Tensor; 2],
    dim: usize,
    inverse: bool,
) -> Result<Option<Tensor>> {
    let (Some((device, dtype)), Some((_, width))) = (taken(x), rows(x)?) else { return Ok(None) };
    if dim + 2 > x.rank() {
        return Ok(None);
    }
    let positions = x.dim(dim)?;
    let inner: usize = x.dims()[dim + 1..x.rank() - 1].iter().product();
    let table = [positions, width as usize / 2];
    if cosine.dims() != table || sine.dims() != table || width % 2 == 1 {
        return Ok(None);
    }
    let (Ok(count), Ok(inner)) = (u32::try_from(positions), u32::try_from(inner)) else {
        return Ok(None);
    };
    let x = x.contiguous()?;
    let [cosine, sine] = [cosine, sine].map(|t| t.to_dtype(DType::F32)?.contiguous());
    let (cosine, sine, y) = (cosine?, sine?, output(&x)?);
    let plan = plans::rope(Rope {
        dtype,
        x: address(&x)?,
        y: address(&y)?,
        cosine: address(&cosine)?,
        sine: address(&sine)?,
        rows: (x.elem_count() / width as usize) as u64,
        width,
        positions: count,
        inner,
        inverse,
    });
    carry_out(&plan, device, &[&x, &cosine, &sine, &y])?;
    Ok(Some(y))
}

/// Returns the operands of the cross entropy plan, or `None` if there are too many rows or columns.
fn logits(
    dtype: Float,
    logits: &Tensor,
    [targets, lse]: [&Tensor; 2],
    smoothing: f64,
) -> Result<Option<CrossEntropy>> {
    let (rows, classes) = logits.dims2()?;
    for (beside, expected) in [(targets, DType::U32), (lse, DType::F32)] {
        if beside.dims() != [rows] || beside.dtype() != expected || !beside.is_contiguous() {
            return Err(Error::other(format!(
                "cross entropy of {rows} rows was given {expected:?} of {:?}, {:?}",
                beside.dims(),
                beside.dtype()
            )));
        }
    }
    let (Ok(rows), Ok(classes)) = (u32::try_from(rows), u32::try_from(classes)) else {
        return Ok(None);
    };
    let (logits, targets, lse) = (address(logits)?, address(targets)?, address(lse)?);
    Ok(Some(CrossEntropy { dtype, logits, targets, lse, rows, classes, smoothing }))
}

/// Computes the cross entropy summed over the rows of `logits` (`[rows, classes]`), as an f64
/// scalar, and each row's log-sum-exp, in f32. `targets` (u32, `[rows]`) are classes, or
/// [`IGNORED`](plans::IGNORED).
///
/// # Errors
/// As [`rms_norm`]. A target beyond the classes is no error; it makes the sum NaN.
pub fn cross_entropy(
    logits_of: &Tensor,
    targets: &Tensor,
    smoothing: f64,
) -> Result<Option<(Tensor, Tensor)>> {
    let Some((device, dtype)) = taken(logits_of) else { return Ok(None) };
    let logits_of = logits_of.contiguous()?;
    let lse = unset(&Shape::from(logits_of.dim(0)?), DType::F32, device)?;
    let total = unset(&Shape::from(()), DType::F64, device)?;
    let Some(of) = logits(dtype, &logits_of, [targets, &lse], smoothing)? else { return Ok(None) };
    let plan = plans::cross_entropy(of, address(&total)?);
    carry_out(&plan, device, &[&logits_of, targets, &lse, &total])?;
    Ok(Some((total, lse)))
}

/// Replaces the logits by the gradient of [`cross_entropy`], times `grad` (a scalar). The logits
/// are contiguous and have no other user. The columns are the classes from `first` on, out of
/// `all`.
///
/// # Errors
/// As [`cross_entropy`].
pub fn cross_entropy_backward(
    logits_of: &Tensor,
    [targets, lse]: [&Tensor; 2],
    [first, all]: [usize; 2],
    smoothing: f64,
    grad: &Tensor,
) -> Result<bool> {
    let Some((device, dtype)) = taken(logits_of) else { return Ok(false) };
    if !logits_of.is_contiguous() || grad.elem_count() != 1 {
        return Err(Error::other(
            "the gradient of a cross entropy takes contiguous logits and a scalar",
        ));
    }
    let (Ok(first), Ok(all)) = (u32::try_from(first), u32::try_from(all)) else { return Ok(false) };
    let grad = grad.to_dtype(DType::F32)?.contiguous()?;
    let Some(of) = logits(dtype, logits_of, [targets, lse], smoothing)? else { return Ok(false) };
    let plan = plans::cross_entropy_backward(of, address(&grad)?, first, all);
    carry_out(&plan, device, &[logits_of, targets, lse, &grad])?;
    Ok(true)
}

/// Adds each row of `grad` (`[ids.len(), width]`) to the row of its id in `out` (f32, flat, rows of
/// `width`). Rows of one id are added in their order. Rows whose id is [`IGNORED`](plans::IGNORED)
/// are skipped. Returns false if no kernel supports the tensors.
///
/// # Errors
/// As [`rms_norm`], and if an id is beyond the rows of `out`.
pub fn embedding_grad(grad: &Tensor, ids: &[u32], out: &Tensor) -> Result<bool> {
    let Some((device, dtype)) = taken(grad) else { return Ok(false) };
    let (count, width) = grad.dims2()?;
    let fits = |id: &u32| *id == plans::IGNORED || (*id as usize + 1) * width <= out.elem_count();
    if count != ids.len() || !ids.iter().all(fits) {
        return Err(Error::other(format!(
            "an embedding's gradient of {:?} was given {} ids, of rows of {} elements in all",
            grad.dims(),
            ids.len(),
            out.elem_count()
        )));
    }
    let Ok(width) = u32::try_from(width) else { return Ok(false) };
    if out.dtype() != DType::F32 || !out.is_contiguous() || !out.device().same_device(grad.device())
    {
        return Ok(false);
    }
    let grad = grad.contiguous()?;
    let plan = plans::embedding_grad(dtype, address(&grad)?, ids, width, address(out)?);
    carry_out(&plan, device, &[&grad, out])?;
    Ok(true)
}
