//! Dropout of tensors.

use candle_core::Tensor;
use fulgurite_error::{Error, Result};

use super::address;
use super::layers::{carry_out, output, taken};
use crate::plans::{self, Dropout};

/// Multiplies each element of `x` by 0 or `1 / (1 - p)`. `of` must have the rows of `x`. Returns
/// `None` if no kernel supports the tensor.
///
/// # Errors
/// If the rows do not match `x`, memory runs out, or a launch fails.
pub fn dropout(x: &Tensor, of: Dropout<'_>) -> Result<Option<Tensor>> {
    let Some((device, dtype)) = taken(x) else { return Ok(None) };
    let n = x.elem_count() as u64;
    if of.width.checked_mul(of.starts.len() as u64) != Some(n) {
        return Err(Error::other(format!(
            "dropout of {n} elements was given {} rows of {}",
            of.starts.len(),
            of.width
        )));
    }
    let x = x.contiguous()?;
    let y = output(&x)?;
    let plan = plans::dropout(dtype, address(&x)?, address(&y)?, n, of);
    carry_out(&plan, device, &[&x, &y])?;
    Ok(Some(y))
}
