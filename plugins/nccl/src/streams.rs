//! What a process group needs of a device: memory, streams and events.
//!
//! A device has one *compute stream*, on which all that a rank computes is queued, and any number of others. Events
//! order them. With the feature `cuda` there is one for GPUs; tests have another, for memory of the host.
#![allow(unsafe_code)] // Addresses of memory go from thread to thread.

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use fulgurite_engine::accelerator::TimeStamp;
use fulgurite_error::Result;

/// Memory of a device, by its address, and whatever keeps it there.
pub struct Memory {
    /// Of its first byte.
    pub address: *mut c_void,
    /// Dropped once the streams are done with the memory, or the compute stream waits for those that are not.
    pub holder: Box<dyn Any + Send>,
}

// SAFETY: an address, which streams access and no thread does; what holds it is `Send`.
unsafe impl Send for Memory {}

/// A copy of bytes within a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copy {
    /// Where they go.
    pub target: *mut c_void,
    /// Where they are.
    pub source: *const c_void,
    /// Their number.
    pub bytes: usize,
}

/// The device of a rank.
pub trait Streams: Send + Sync {
    /// Whether the tensor is in memory that NCCL reaches. The others go over the host's process group.
    fn reaches(&self, tensor: &Tensor) -> bool;

    /// Makes `device` the one that calls of this thread are about.
    ///
    /// # Errors
    /// Those of the device.
    fn bind(&self, device: &Device) -> Result<()>;

    /// A new stream.
    ///
    /// # Errors
    /// Those of the device.
    fn stream(&self, device: &Device) -> Result<Box<dyn Stream>>;

    /// The memory of a contiguous tensor that has elements. `written`: whether it is also written.
    ///
    /// # Errors
    /// If the tensor has no memory.
    fn memory(&self, tensor: &Tensor, written: bool) -> Result<Memory>;

    /// Memory of arbitrary content, allocated and freed in the order of the compute stream.
    ///
    /// # Errors
    /// If there is none left.
    fn allocate(&self, device: &Device, bytes: usize) -> Result<Memory>;

    /// Puts what the compute stream does from now on after `event`, and what was written to `memory` before that into
    /// the tensors that it is of.
    ///
    /// # Errors
    /// Those of the device.
    fn wait(&self, event: &dyn Event, memory: &[Memory]) -> Result<()>;
}

/// A stream beside the compute stream. Work that was queued on it runs also after it is dropped.
pub trait Stream: Send + Sync {
    /// What NCCL takes: a `cudaStream_t`.
    fn handle(&self) -> *mut c_void;

    /// Puts what this stream does from now on after what the compute stream has queued so far.
    ///
    /// # Errors
    /// Those of the device.
    fn follow_compute(&self) -> Result<()>;

    /// Puts what this stream does from now on after an event of another stream.
    ///
    /// # Errors
    /// Those of the device.
    fn follow(&self, event: &dyn Event) -> Result<()>;

    /// Queues copies within the device, all of them at once and in any order.
    ///
    /// # Safety
    /// Targets and sources are memory of the device, of so many bytes, until the copies have run. No target overlaps
    /// another one or a source.
    ///
    /// # Errors
    /// Those of the device.
    unsafe fn copy(&self, copies: &[Copy]) -> Result<()>;

    /// What is done when all that is queued so far has run.
    ///
    /// # Errors
    /// Those of the device.
    fn record(&self) -> Result<Box<dyn Event>>;

    /// The moment at which all that is queued so far has run, as [`Accelerator::time_stamp`] has it of the compute
    /// stream; `None`: the device has no clock.
    ///
    /// [`Accelerator::time_stamp`]: fulgurite_core::accelerator::Accelerator::time_stamp
    ///
    /// # Errors
    /// Those of the device.
    fn stamp(&self) -> Result<Option<Arc<dyn TimeStamp>>> {
        Ok(None)
    }
}

/// A moment of a stream.
pub trait Event: Any + Send + Sync {
    /// Whether it has come. Does not wait.
    ///
    /// # Errors
    /// Those of the device, of whatever work.
    fn is_done(&self) -> Result<bool>;
}
