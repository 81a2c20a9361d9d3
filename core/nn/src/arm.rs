//! Which implementation an operation computes with.

use std::cell::Cell;
use std::marker::PhantomData;

use candle_core::Tensor;

use crate::Result;
use crate::parameter::accumulation_dtype;

thread_local! {
    static FORCED: Cell<bool> = const { Cell::new(false) };
}

/// Makes layers compute with tensor operations on this thread, on the CPU too, until the guard is
/// dropped: the way they compute on every other device. For comparing the two.
#[must_use = "the hand-written kernels are back as soon as the guard is dropped"]
pub fn force_portable() -> PortableGuard {
    PortableGuard { previous: FORCED.replace(true), _thread_bound: PhantomData }
}

/// Restores what was in force when [`force_portable`] was called.
#[derive(Debug)]
pub struct PortableGuard {
    previous: bool,
    _thread_bound: PhantomData<*const ()>,
}

impl Drop for PortableGuard {
    fn drop(&mut self) {
        FORCED.set(self.previous);
    }
}

/// Whether the hand-written CPU kernels compute for this tensor.
pub(super) fn on_host(x: &Tensor) -> bool {
    x.device().is_cpu() && !FORCED.get()
}

/// The tensor detached, contiguous and in its accumulation dtype. Copies only what is not so.
pub(super) fn wide(x: &Tensor) -> Result<Tensor> {
    Ok(x.detach().to_dtype(accumulation_dtype(x.dtype()))?.contiguous()?)
}
