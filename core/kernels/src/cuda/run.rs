//! Launches plans on the stream of tensors.
#![allow(unsafe_code)] // launches of kernels

use std::sync::PoisonError;

use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DevicePtr as _};
use candle_core::cuda_backend::{CudaStorageSlice as Slice, WrapErr as _};
use candle_core::{CudaDevice, Storage, Tensor};
use fulgurite_error::{Error, Result};

use super::Queue;
use crate::Plan;

/// Returns the address of a contiguous CUDA tensor's first element, for a plan. It is valid until
/// the tensor is freed or its storage exchanged. Work that other threads queue on the device's one
/// stream is ordered with it.
///
/// # Errors
/// If the tensor is not on a GPU, not contiguous, or of a dtype that no kernel supports.
pub fn address(tensor: &Tensor) -> Result<u64> {
    let layout = tensor.layout();
    if !layout.is_contiguous() {
        return Err(Error::other(format!("a kernel needs a contiguous tensor, got {layout:?}")));
    }
    first_element(tensor)
}

/// Returns the address of a CUDA tensor's first element, also for a view.
pub(super) fn first_element(tensor: &Tensor) -> Result<u64> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        return Err(Error::other("a kernel for GPUs was given a tensor that is not on one"));
    };
    fn start<T>(slice: &CudaSlice<T>, stream: &CudaStream) -> u64 {
        slice.device_ptr(stream).0
    }
    let stream = storage.device.cuda_stream();
    let start = match &storage.slice {
        Slice::F32(slice) => start(slice, &stream),
        Slice::F64(slice) => start(slice, &stream),
        Slice::BF16(slice) => start(slice, &stream),
        Slice::F16(slice) => start(slice, &stream),
        Slice::U32(slice) => start(slice, &stream),
        Slice::U8(slice) => start(slice, &stream),
        _ => return Err(Error::other(format!("no kernel takes dtype {:?}", tensor.dtype()))),
    };
    Ok(start + (layout.start_offset() * tensor.dtype().size_in_bytes()) as u64)
}

/// Adds the requested size to an allocation error; the driver's error lacks it.
pub(super) fn asked_for(bytes: usize, error: candle_core::Error) -> Error {
    Error::from(error).during(format_args!("{bytes} bytes were asked for, by a kernel"))
}

/// Queues all launches and products of a plan on the stream that computes tensors, and returns
/// without waiting.
///
/// # Safety
/// As [`Queue::run`].
///
/// # Errors
/// As [`Queue::run`].
pub unsafe fn run(plan: &Plan, device: &CudaDevice) -> Result<()> {
    if plan.work().is_empty() {
        return Ok(());
    }
    let queue = Queue::of_tensors(device);
    let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the caller's promise.
    unsafe { queue.run(plan) }
}

/// Returns the total memory of this device in bytes, a constant.
///
/// # Errors
/// If the driver reports an error.
pub fn total_memory(device: &CudaDevice) -> Result<usize> {
    Ok(device.cuda_stream().context().total_mem().w()?)
}
