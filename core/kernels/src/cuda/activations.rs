//! Activation functions on GPUs, of one tensor or as the gate of another. Every function returns
//! `None` for tensors that no kernel supports.

use candle_core::Tensor;
use fulgurite_error::Result;

use super::address;
use super::layers::{alike, carry_out, output, taken};
use crate::plans::{self, Activation};

/// Applies an activation function to each element.
///
/// # Errors
/// If shapes or dtypes differ, memory runs out, or a launch fails.
pub fn activation(function: Activation, x: &Tensor) -> Result<Option<Tensor>> {
    let Some((device, dtype)) = taken(x) else { return Ok(None) };
    let x = x.contiguous()?;
    let y = output(&x)?;
    let n = x.elem_count() as u64;
    let plan = plans::activation(dtype, function, address(&x)?, address(&y)?, n);
    carry_out(&plan, device, &[&x, &y])?;
    Ok(Some(y))
}

/// Computes the gradient of [`activation`]'s input.
///
/// # Errors
/// If shapes or dtypes differ, memory runs out, or a launch fails.
pub fn activation_backward(
    function: Activation,
    x: &Tensor,
    grad: &Tensor,
) -> Result<Option<Tensor>> {
    let Some((device, dtype)) = taken(x) else { return Ok(None) };
    alike(&[x, grad])?;
    let (x, grad) = (x.contiguous()?, grad.contiguous()?);
    let dx = output(&x)?;
    let n = x.elem_count() as u64;
    let inputs = [address(&x)?, address(&grad)?];
    let plan = plans::activation_backward(dtype, function, inputs, address(&dx)?, n);
    carry_out(&plan, device, &[&x, &grad, &dx])?;
    Ok(Some(dx))
}

/// Computes `silu(gate) * up`.
///
/// # Errors
/// If shapes or dtypes differ, memory runs out, or a launch fails.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Option<Tensor>> {
    let Some((device, dtype)) = taken(gate) else { return Ok(None) };
    alike(&[gate, up])?;
    let (gate, up) = (gate.contiguous()?, up.contiguous()?);
    let y = output(&gate)?;
    let addresses = [address(&gate)?, address(&up)?];
    let plan = plans::swiglu(dtype, addresses, address(&y)?, gate.elem_count() as u64);
    carry_out(&plan, device, &[&gate, &up, &y])?;
    Ok(Some(y))
}

/// Computes the gradients of [`swiglu`]'s inputs.
///
/// # Errors
/// If shapes or dtypes differ, memory runs out, or a launch fails.
pub fn swiglu_backward(
    gate: &Tensor,
    up: &Tensor,
    grad: &Tensor,
) -> Result<Option<(Tensor, Tensor)>> {
    let Some((device, dtype)) = taken(gate) else { return Ok(None) };
    alike(&[gate, up, grad])?;
    let (gate, up, grad) = (gate.contiguous()?, up.contiguous()?, grad.contiguous()?);
    let (dgate, dup) = (output(&gate)?, output(&up)?);
    let plan = plans::swiglu_backward(
        dtype,
        [address(&gate)?, address(&up)?, address(&grad)?],
        [address(&dgate)?, address(&dup)?],
        gate.elem_count() as u64,
    );
    carry_out(&plan, device, &[&gate, &up, &grad, &dgate, &dup])?;
    Ok(Some((dgate, dup)))
}

/// Computes `function(gate) * up`. SiLU has a kernel of its own, [`swiglu`].
///
/// # Errors
/// If shapes or dtypes differ, memory runs out, or a launch fails.
pub fn gated(function: Activation, gate: &Tensor, up: &Tensor) -> Result<Option<Tensor>> {
    let Some((device, dtype)) = taken(gate) else { return Ok(None) };
    alike(&[gate, up])?;
    let (gate, up) = (gate.contiguous()?, up.contiguous()?);
    let y = output(&gate)?;
    let (addresses, n) = ([address(&gate)?, address(&up)?], gate.elem_count() as u64);
    let plan = plans::gated(dtype, function, addresses, address(&y)?, n);
    carry_out(&plan, device, &[&gate, &up, &y])?;
    Ok(Some(y))
}

/// Computes the gradients of [`gated`]'s `gate` and `up`.
///
/// # Errors
/// If shapes or dtypes differ, memory runs out, or a launch fails.
pub fn gated_backward(
    function: Activation,
    gate: &Tensor,
    up: &Tensor,
    grad: &Tensor,
) -> Result<Option<(Tensor, Tensor)>> {
    let Some((device, dtype)) = taken(gate) else { return Ok(None) };
    alike(&[gate, up, grad])?;
    let (gate, up, grad) = (gate.contiguous()?, up.contiguous()?, grad.contiguous()?);
    let (dgate, dup) = (output(&gate)?, output(&up)?);
    let plan = plans::gated_backward(
        dtype,
        function,
        [address(&gate)?, address(&up)?, address(&grad)?],
        [address(&dgate)?, address(&dup)?],
        gate.elem_count() as u64,
    );
    carry_out(&plan, device, &[&gate, &up, &grad, &dgate, &dup])?;
    Ok(Some((dgate, dup)))
}
