//! The device interface of a process group: memory, streams and events.
//!
//! A device has one *compute stream*, on which a rank queues all its computation, and any number of
//! other streams. Events order them. The feature `cuda` implements it for GPUs; tests implement it
//! for host memory.
#![allow(unsafe_code)] // Addresses of memory go from thread to thread.

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use fulgurite_engine::accelerator::TimeStamp;
use fulgurite_error::Result;

/// Memory of a device by its address, and the value that keeps it alive.
pub struct Memory {
    /// Address of the first byte.
    pub address: *mut c_void,
    /// Dropped when the streams are done with the memory, or when the compute stream waits for the
    /// ones still using it.
    pub holder: Box<dyn Any + Send>,
}

// SAFETY: only streams access the address, no thread does; the holder is `Send`.
unsafe impl Send for Memory {}

/// A copy of bytes within a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copy {
    /// Address to copy to.
    pub target: *mut c_void,
    /// Address to copy from.
    pub source: *const c_void,
    /// Number of bytes.
    pub bytes: usize,
}

/// The device of a rank.
pub trait Streams: Send + Sync {
    /// Whether the tensor is in memory that NCCL reaches. Other tensors use the host's process
    /// group.
    fn reaches(&self, tensor: &Tensor) -> bool;

    /// Makes `device` the current device of this thread.
    ///
    /// # Errors
    /// Errors of the device.
    fn bind(&self, device: &Device) -> Result<()>;

    /// Makes a new stream.
    ///
    /// # Errors
    /// Errors of the device.
    fn stream(&self, device: &Device) -> Result<Box<dyn Stream>>;

    /// Returns the memory of a contiguous, non-empty tensor. `written` says whether it is also
    /// written.
    ///
    /// # Errors
    /// If the tensor is without memory.
    fn memory(&self, tensor: &Tensor, written: bool) -> Result<Memory>;

    /// Allocates memory of arbitrary content, allocated and freed in the order of the compute
    /// stream.
    ///
    /// # Errors
    /// If the device is out of memory.
    fn allocate(&self, device: &Device, bytes: usize) -> Result<Memory>;

    /// Makes later work of the compute stream run after `event`. Results written to `memory` before
    /// `event` are in its tensors from then on.
    ///
    /// # Errors
    /// Errors of the device.
    fn wait(&self, event: &dyn Event, memory: &[Memory]) -> Result<()>;
}

/// A stream beside the compute stream. Queued work runs even after the stream is dropped.
pub trait Stream: Send + Sync {
    /// NCCL's stream argument: a `cudaStream_t`.
    fn handle(&self) -> *mut c_void;

    /// Makes later work of this stream run after the work queued so far on the compute stream.
    ///
    /// # Errors
    /// Errors of the device.
    fn follow_compute(&self) -> Result<()>;

    /// Makes later work of this stream run after an event of another stream.
    ///
    /// # Errors
    /// Errors of the device.
    fn follow(&self, event: &dyn Event) -> Result<()>;

    /// Queues copies within the device. They may run in any order or at once.
    ///
    /// # Safety
    /// Targets and sources are valid device memory of the given size until the copies have run. No
    /// target overlaps another target or a source.
    ///
    /// # Errors
    /// Errors of the device.
    unsafe fn copy(&self, copies: &[Copy]) -> Result<()>;

    /// Records an event that is done when all work queued so far has run.
    ///
    /// # Errors
    /// Errors of the device.
    fn record(&self) -> Result<Box<dyn Event>>;

    /// Records the time at which all work queued so far has run, like [`Accelerator::time_stamp`]
    /// for the compute stream. Returns `None` if the device cannot measure time.
    ///
    /// [`Accelerator::time_stamp`]: fulgurite_engine::accelerator::Accelerator::time_stamp
    ///
    /// # Errors
    /// Errors of the device.
    fn stamp(&self) -> Result<Option<Arc<dyn TimeStamp>>> {
        Ok(None)
    }
}

/// A point in the work of a stream.
pub trait Event: Any + Send + Sync {
    /// Whether the stream has reached it. Does not wait.
    ///
    /// # Errors
    /// Errors of the device, from any of its work.
    fn is_done(&self) -> Result<bool>;
}
