//! Pooling over two dimensions, in f32.

use candle_core::{CudaDevice, DType, Shape, Tensor};
use fulgurite_error::{Error, Result};

use super::layers::{carry_out, taken};
use super::{address, unset};
use crate::Float;
use crate::plans::{self, Pooling};

/// The windows of a pooling on a GPU.
#[derive(Debug)]
pub struct PoolWindows {
    /// Rows and columns of windows.
    pub outputs: [usize; 2],
    /// Height and width of the input.
    pub inputs: [usize; 2],
    /// The ranges of the windows, as [`Pooling::windows`](plans::Pooling::windows).
    pub windows: Tensor,
    /// The ranges that have each row and column, as [`Pooling::covers`](plans::Pooling::covers).
    pub covers: Tensor,
}

impl PoolWindows {
    /// Returns the device and the sizes of planes, which `x` has in rows of `elements`; `None` if
    /// no kernel takes them.
    fn of<'a>(
        &self,
        x: &'a Tensor,
        [height, width]: [usize; 2],
    ) -> Result<Option<(&'a CudaDevice, Pooling)>> {
        let Some((device, Float::F32)) = taken(x) else { return Ok(None) };
        let (planes, elements) = x.dims2()?;
        for (lists, sizes) in [(&self.windows, self.outputs), (&self.covers, self.inputs)] {
            let wanted = 2 * (sizes[0] + sizes[1]);
            if lists.dtype() != DType::U32 || lists.dims() != [wanted] || !lists.is_contiguous() {
                return Err(Error::other(format!("pooling takes {wanted} bounds, got {lists:?}")));
            }
        }
        if elements != height * width {
            return Err(Error::other(format!(
                "pooling takes planes of {height} by {width} elements, got {:?}",
                x.dims()
            )));
        }
        let small = |sizes: [usize; 2]| Some([to_u32(sizes[0])?, to_u32(sizes[1])?]);
        let of_windows = [self.outputs, self.inputs].map(small);
        let [Some(outputs), Some(inputs)] = of_windows else { return Ok(None) };
        let fits = |sizes: [u32; 2]| sizes[0].checked_mul(sizes[1]).is_some();
        if !fits(outputs) || !fits(inputs) {
            return Ok(None);
        }
        let (windows, covers) = (address(&self.windows)?, address(&self.covers)?);
        let pooling = Pooling { planes: planes as u64, outputs, inputs, windows, covers };
        Ok(Some((device, pooling)))
    }

    /// Uninitialised memory for planes, which a launch overwrites completely.
    fn planes(
        &self,
        planes: u64,
        sizes: [usize; 2],
        dtype: DType,
        device: &CudaDevice,
    ) -> Result<Tensor> {
        unset(&Shape::from((planes as usize, sizes[0] * sizes[1])), dtype, device)
    }
}

fn to_u32(size: usize) -> Option<u32> {
    u32::try_from(size).ok()
}

/// Returns the largest element of each window of `x` (`[planes, height * width]`), and its place in
/// the plane (u32). `None` if no kernel takes the tensor.
///
/// # Errors
/// If sizes do not fit, memory runs out, or the launch fails.
pub fn max_pool(x: &Tensor, of: &PoolWindows) -> Result<Option<(Tensor, Tensor)>> {
    let x = x.contiguous()?;
    let Some((device, pooling)) = of.of(&x, of.inputs)? else { return Ok(None) };
    let y = of.planes(pooling.planes, of.outputs, DType::F32, device)?;
    let picked = of.planes(pooling.planes, of.outputs, DType::U32, device)?;
    let plan = plans::max_pool(&pooling, address(&x)?, address(&y)?, address(&picked)?);
    carry_out(&plan, device, &[&x, &y, &picked, &of.windows])?;
    Ok(Some((y, picked)))
}

/// Returns the gradient of the input of [`max_pool`], which picked these elements.
///
/// # Errors
/// As [`max_pool`].
pub fn max_pool_backward(
    picked: &Tensor,
    grad: &Tensor,
    of: &PoolWindows,
) -> Result<Option<Tensor>> {
    let grad = grad.contiguous()?;
    let Some((device, pooling)) = of.of(&grad, of.outputs)? else { return Ok(None) };
    if picked.dims() != grad.dims() || picked.dtype() != DType::U32 {
        return Err(Error::other(format!("pooling picked {picked:?} for {:?}", grad.dims())));
    }
    let picked = picked.contiguous()?;
    let dx = of.planes(pooling.planes, of.inputs, DType::F32, device)?;
    let plan =
        plans::max_pool_backward(&pooling, address(&picked)?, address(&grad)?, address(&dx)?);
    carry_out(&plan, device, &[&picked, &grad, &dx, &of.covers])?;
    Ok(Some(dx))
}

/// Returns the sum of each window of `x` by `divisor`, or without one by its elements.
///
/// # Errors
/// As [`max_pool`].
pub fn mean_pool(x: &Tensor, divisor: Option<usize>, of: &PoolWindows) -> Result<Option<Tensor>> {
    let Ok(divisor) = divisor.map(u32::try_from).transpose() else { return Ok(None) };
    let x = x.contiguous()?;
    let Some((device, pooling)) = of.of(&x, of.inputs)? else { return Ok(None) };
    let y = of.planes(pooling.planes, of.outputs, DType::F32, device)?;
    let plan = plans::mean_pool(&pooling, divisor, address(&x)?, address(&y)?);
    carry_out(&plan, device, &[&x, &y, &of.windows])?;
    Ok(Some(y))
}

/// Returns the gradient of the input of [`mean_pool`].
///
/// # Errors
/// As [`max_pool`].
pub fn mean_pool_backward(
    grad: &Tensor,
    divisor: Option<usize>,
    of: &PoolWindows,
) -> Result<Option<Tensor>> {
    let Ok(divisor) = divisor.map(u32::try_from).transpose() else { return Ok(None) };
    let grad = grad.contiguous()?;
    let Some((device, pooling)) = of.of(&grad, of.outputs)? else { return Ok(None) };
    let dx = of.planes(pooling.planes, of.inputs, DType::F32, device)?;
    let plan = plans::mean_pool_backward(&pooling, divisor, address(&grad)?, address(&dx)?);
    carry_out(&plan, device, &[&grad, &dx, &of.windows, &of.covers])?;
    Ok(Some(dx))
}
