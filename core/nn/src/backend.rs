//! Which of an operation's two implementations computes: the kernels written for the CPU, or tensor
//! operations.

use candle_core::Tensor;

use crate::Result;
use fulgurite_engine::execution;
use fulgurite_engine::execution::ContextGuard;
use fulgurite_engine::parameter::accumulation_dtype;

/// In a thread's execution context: layers compute with tensor operations, on the CPU too.
struct Portable;

/// Makes layers compute with tensor operations on this thread, on the CPU too, until the guard is
/// dropped: the way they compute on every other device. For comparing the two.
#[must_use = "the hand-written kernels are back as soon as the guard is dropped"]
pub fn force_portable() -> ContextGuard {
    execution::enter(Portable)
}

/// Whether the hand-written CPU kernels compute for this tensor.
pub(super) fn on_host(x: &Tensor) -> bool {
    x.device().is_cpu() && execution::value::<Portable>().is_none()
}

/// The tensor detached, contiguous and in its accumulation dtype. Copies only what is not so.
pub(super) fn wide(x: &Tensor) -> Result<Tensor> {
    Ok(x.detach().to_dtype(accumulation_dtype(x.dtype()))?.contiguous()?)
}
