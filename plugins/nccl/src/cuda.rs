//! NVIDIA GPUs, over CUDA's driver. Has run on emulated GPUs (`.ci/gpu`), never on a real one.
#![allow(unsafe_code)] // Calls of the driver, and addresses of tensors.

use std::any::Any;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::{
    CudaEvent, CudaSlice, CudaStream, DevicePtr as _, result,
};
use candle_core::{CudaDevice, Device, Storage, Tensor};
use fulgurite_core::accelerator::{CudaTimeStamp, TimeStamp};
use fulgurite_core::{Error, Result};
use fulgurite_kernels::cuda::{Queue, make_current};
use fulgurite_kernels::plans::{self, Copied};

use crate::streams::{Copy, Event, Memory, Stream, Streams};

/// Highest stream priority; CUDA clamps it to its range. A collective's kernels get multiprocessors
/// before further blocks of matrix products that were launched earlier.
const HIGHEST: i32 = -100;

/// The GPU of the tensors. Computes on candle's stream; memory is from its stream-ordered pool.
#[derive(Debug, Clone, Copy, Default)]
pub struct Cuda;

fn failed(what: &'static str) -> impl Fn(result::DriverError) -> Error {
    move |error| Error::other(format!("{what}: {error}"))
}

fn cuda(device: &Device) -> Result<&CudaDevice> {
    match device {
        Device::Cuda(device) => Ok(device),
        other => Err(Error::other(format!("{other:?} is no GPU of NVIDIA"))),
    }
}

/// Keeps the memory of a launch alive, with the stream on which later work on it is queued.
struct Held {
    tensor: Option<Tensor>,
    buffer: Option<CudaSlice<u8>>,
    compute: Arc<CudaStream>,
}

impl Drop for Held {
    fn drop(&mut self) {
        // Another thread than the computing one may drop it, and memory is freed in the thread's
        // current context. An error here is an error of the context, which the next call reports
        // too.
        let _ = make_current(self.compute.context());
        drop((self.tensor.take(), self.buffer.take()));
    }
}

impl Streams for Cuda {
    fn reaches(&self, tensor: &Tensor) -> bool {
        tensor.device().is_cuda()
    }

    fn bind(&self, device: &Device) -> Result<()> {
        let context = cuda(device)?.cuda_stream().context().clone();
        context.bind_to_thread().map_err(failed("using a GPU"))
    }

    fn stream(&self, device: &Device) -> Result<Box<dyn Stream>> {
        let device = cuda(device)?;
        let compute = device.cuda_stream();
        let own = compute.context().new_stream_with_priority(HIGHEST);
        let own = own.map_err(failed("making a stream"))?;
        let queue = Mutex::new(Queue::new(device, &own));
        Ok(Box::new(GpuStream { own, compute, queue }))
    }

    fn memory(&self, tensor: &Tensor, _written: bool) -> Result<Memory> {
        let compute = cuda(tensor.device())?.cuda_stream();
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else {
            return Err(Error::other("a tensor of a GPU whose memory is elsewhere"));
        };
        let (start, length) = match &storage.slice {
            CudaStorageSlice::U8(slice) => (slice.device_ptr(&compute).0, slice.len()),
            CudaStorageSlice::U32(slice) => (slice.device_ptr(&compute).0, slice.len()),
            CudaStorageSlice::I32(slice) => (slice.device_ptr(&compute).0, slice.len()),
            CudaStorageSlice::I64(slice) => (slice.device_ptr(&compute).0, slice.len()),
            CudaStorageSlice::BF16(slice) => (slice.device_ptr(&compute).0, slice.len()),
            CudaStorageSlice::F16(slice) => (slice.device_ptr(&compute).0, slice.len()),
            CudaStorageSlice::F32(slice) => (slice.device_ptr(&compute).0, slice.len()),
            CudaStorageSlice::F64(slice) => (slice.device_ptr(&compute).0, slice.len()),
            _ => return Err(Error::other(format!("NCCL has no dtype {:?}", tensor.dtype()))),
        };
        if layout.start_offset() + tensor.elem_count() > length {
            return Err(Error::other("a tensor whose memory is released is communicated"));
        }
        let offset = layout.start_offset() * tensor.dtype().size_in_bytes();
        let address = (start as usize + offset) as *mut c_void;
        let held = Held { tensor: Some(tensor.clone()), buffer: None, compute };
        Ok(Memory { address, holder: Box::new(held) })
    }

    fn allocate(&self, device: &Device, bytes: usize) -> Result<Memory> {
        let compute = cuda(device)?.cuda_stream();
        // SAFETY: every byte is written before it is read, except padding, whose values are never
        // used.
        let buffer = unsafe { compute.alloc::<u8>(bytes.max(1)) };
        let buffer = buffer.map_err(failed("allocating memory for a collective"))?;
        let address = buffer.device_ptr(&compute).0 as *mut c_void;
        let held = Held { tensor: None, buffer: Some(buffer), compute };
        Ok(Memory { address, holder: Box::new(held) })
    }

    fn wait(&self, event: &dyn Event, _memory: &[Memory]) -> Result<()> {
        let GpuEvent { event, compute } = gpu_event(event)?;
        compute.wait(event).map_err(failed("waiting for a collective"))
    }
}

struct GpuStream {
    own: Arc<CudaStream>,
    compute: Arc<CudaStream>,
    /// Launches copies on `own`.
    queue: Mutex<Queue>,
}

impl Stream for GpuStream {
    fn handle(&self) -> *mut c_void {
        self.own.cu_stream().cast()
    }

    fn follow_compute(&self) -> Result<()> {
        self.own.join(&self.compute).map_err(failed("ordering two streams"))
    }

    fn follow(&self, event: &dyn Event) -> Result<()> {
        self.own.wait(&gpu_event(event)?.event).map_err(failed("ordering two streams"))
    }

    unsafe fn copy(&self, copies: &[Copy]) -> Result<()> {
        let copied =
            |copy: &Copy| Copied::bytes(copy.target as u64, copy.source as u64, copy.bytes as u64);
        let plan = plans::copies(copies.iter().map(copied));
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: as the caller promises.
        unsafe { queue.run(&plan) }
    }

    fn record(&self) -> Result<Box<dyn Event>> {
        let event = self.own.record_event(None).map_err(failed("recording an event"))?;
        Ok(Box::new(GpuEvent { event, compute: self.compute.clone() }))
    }

    fn stamp(&self) -> Result<Option<Arc<dyn TimeStamp>>> {
        Ok(Some(Arc::new(CudaTimeStamp::record(&self.own)?)))
    }
}

struct GpuEvent {
    event: CudaEvent,
    compute: Arc<CudaStream>,
}

fn gpu_event(event: &dyn Event) -> Result<&GpuEvent> {
    let event: &dyn Any = event;
    event.downcast_ref().ok_or_else(|| Error::other("an event of another device"))
}

impl Event for GpuEvent {
    fn is_done(&self) -> Result<bool> {
        // Not cudarc's method, which would give the watchdog an error left behind by another
        // thread's `Drop`.
        make_current(self.event.context()).map_err(failed("using a GPU"))?;
        self.event.try_is_complete().map_err(failed("asking a GPU for an event"))
    }
}
