//! The choice between an operation's two implementations: kernels written for the CPU, and tensor
//! operations for every device.

use candle_core::Tensor;

use crate::Result;
use fulgurite_engine::autograd::storage;
use fulgurite_engine::execution;
use fulgurite_engine::execution::ContextGuard;
use fulgurite_engine::parameter::accumulation_dtype;

/// Marks an execution context in which [`force_portable`] is active.
struct ForcePortable;

/// Makes layers on this thread use tensor operations on the CPU too, as on every other device,
/// until the guard is dropped. Meant for comparing the two implementations.
#[must_use = "the hand-written kernels are back as soon as the guard is dropped"]
pub fn force_portable() -> ContextGuard {
    execution::enter(ForcePortable)
}

/// Whether operations on this tensor use the kernels written for the CPU.
pub(super) fn uses_cpu_kernels(x: &Tensor) -> bool {
    x.device().is_cpu() && execution::value::<ForcePortable>().is_none()
}

/// Returns the tensor detached, contiguous and in its accumulation dtype, copying only if
/// necessary.
pub(super) fn to_accumulation_dtype(x: &Tensor) -> Result<Tensor> {
    Ok(storage::cast(&x.detach(), accumulation_dtype(x.dtype()))?.contiguous()?)
}
