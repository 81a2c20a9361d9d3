//! Which implementation an operation computes with.

use std::cell::Cell;
use std::marker::PhantomData;

use candle_core::{DType, Tensor};

use crate::Result;

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

/// What an operation on this dtype accumulates in: f64 for f64, f32 for the others.
pub(super) fn wide_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// The tensor detached, contiguous and in its accumulation dtype. Copies only what is not so.
pub(super) fn wide(x: &Tensor) -> Result<Tensor> {
    Ok(x.detach().to_dtype(wide_dtype(x.dtype()))?.contiguous()?)
}
