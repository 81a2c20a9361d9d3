//! Copies between the host and a GPU through pinned memory.
//!
//! A copy from or to pageable memory waits until the driver has staged it. Here the host writes a
//! piece into pinned memory and goes on while the GPU reads it, in the order of its one stream. A
//! thread makes the asynchronous copies to the host, on its own stream, which waits for the work
//! queued until then. Run on an emulated GPU (`.ci/gpu`), never on a real one.
#![allow(unsafe_code)] // Pinned memory, and copies of the driver.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use candle_core::cuda_backend::cudarc::driver::{
    CudaEvent, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, DriverError, PinnedHostSlice,
    result,
};
use candle_core::cuda_backend::{CudaDType, WrapErr as _};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaDevice, CudaStorage, DType, Device, Storage, Tensor, WithDType};
use fulgurite_engine::execution::transfer::{Arriving, HostCopies, HostCopy};
use fulgurite_error::{Error, Result};
use fulgurite_kernels::cuda::make_current;
use half::{bf16, f16};

/// Bytes of a piece.
const PIECE: usize = 8 << 20;
/// Number of pieces: the host uses one while the GPU has the others.
const PIECES: usize = 4;
/// Maximum number of f64 values in a small copy to the host.
const FEW: usize = 16;

/// The pinned memory of one GPU.
pub(crate) struct Pinned {
    device: CudaDevice,
    stream: Arc<CudaStream>,
    pieces: Mutex<Pieces>,
    /// Pinned memory for small copies that no copy uses now.
    few: Arc<Mutex<Vec<PinnedHostSlice<f64>>>>,
    /// Queue of the thread that makes copies to the host; started with the first copy.
    begun: Mutex<Option<Sender<Begun>>>,
}

/// A small copy of f64 values to the host, under way.
struct Few {
    /// `None` once dropped.
    memory: Option<PinnedHostSlice<f64>>,
    len: usize,
    /// Recorded after the copy.
    arrived: CudaEvent,
    /// The memory's free list.
    free: Arc<Mutex<Vec<PinnedHostSlice<f64>>>>,
}

impl Arriving for Few {
    fn numbers(&self) -> Result<Vec<f64>> {
        self.arrived.synchronize().map_err(Error::other)?;
        let memory = self.memory.as_ref().expect("it is there until the end");
        Ok(memory.as_slice().map_err(Error::other)?[..self.len].to_vec())
    }
}

impl Drop for Few {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        // Without a current context the query fails, and the memory would be lost.
        let current = make_current(self.arrived.context());
        if current.is_ok() && self.arrived.is_complete() {
            self.free.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
        } else {
            // The device has yet to write there and may hang. After an error, do not wait for it:
            // leak the memory.
            std::mem::forget(memory);
        }
    }
}

/// A copy to the host that was begun.
struct Begun {
    /// Held until it is copied, so that its memory is not reused before.
    source: Tensor,
    /// Recorded after the source's computation.
    computed: CudaEvent,
    copied: Sender<Result<Tensor>>,
}

#[derive(Default)]
struct Pieces {
    /// Allocated on first use.
    all: Vec<Piece>,
    next: usize,
}

struct Piece {
    memory: PinnedHostSlice<u8>,
    /// Recorded after the last copy that uses the memory.
    used: Option<CudaEvent>,
    /// Bytes at the start that copies to the device use.
    filled: usize,
}

impl Piece {
    /// Returns the memory, once no copy uses it.
    fn free(&mut self) -> std::result::Result<&mut [u8], DriverError> {
        if let Some(used) = self.used.take() {
            used.synchronize()?;
        }
        self.filled = 0;
        self.memory.as_mut_slice()
    }
}

impl Pieces {
    fn next(&mut self, stream: &CudaStream) -> std::result::Result<&mut Piece, DriverError> {
        while self.all.len() < PIECES {
            // SAFETY: bytes are written before they are read.
            let memory = unsafe { stream.context().alloc_pinned_with_flags(PIECE, 0) }?;
            self.all.push(Piece { memory, used: None, filled: 0 });
        }
        self.next = (self.next + 1) % PIECES;
        Ok(&mut self.all[self.next])
    }
}

impl Pieces {
    /// Returns a piece and an offset with room for `bytes` bytes that no copy uses. Appends to the
    /// last piece while it has room, so small copies wait for the device only once per round of
    /// pieces.
    fn place(
        &mut self,
        bytes: usize,
        stream: &CudaStream,
    ) -> std::result::Result<(&mut Piece, usize), DriverError> {
        let has_room = self.all.get(self.next).is_some_and(|piece| {
            piece.used.is_some() && piece.filled > 0 && piece.filled + bytes <= PIECE
        });
        if !has_room {
            self.next(stream)?.free()?;
        }
        let piece = &mut self.all[self.next];
        let start = piece.filled;
        // Keeps values of up to 8 bytes aligned.
        piece.filled += bytes.next_multiple_of(8);
        Ok((piece, start))
    }
}

impl Pinned {
    pub(crate) fn new(device: &CudaDevice) -> Self {
        let stream = device.cuda_stream();
        Self {
            device: device.clone(),
            stream,
            pieces: Mutex::default(),
            few: Arc::default(),
            begun: Mutex::default(),
        }
    }

    /// Allocates GPU memory with these values.
    fn upload<T: CudaDType + DeviceRepr>(&self, values: &[T]) -> candle_core::Result<CudaStorage> {
        // SAFETY: all of it is written below, on the stream that every reader uses.
        let mut target = unsafe { self.stream.alloc::<T>(values.len()) }.w()?;
        {
            let (mut at, _in_use) = target.device_ptr_mut(&self.stream);
            let mut pieces = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
            for part in bytes(values).chunks(PIECE) {
                let (piece, start) = pieces.place(part.len(), &self.stream).w()?;
                let memory = &mut piece.memory.as_mut_slice().w()?[start..start + part.len()];
                memory.copy_from_slice(part);
                // SAFETY: `target` has room for the part at this address, and nothing touches this
                // part of the piece before the event recorded next.
                unsafe { result::memcpy_htod_async(at, memory, self.stream.cu_stream()) }.w()?;
                piece.used = Some(self.stream.record_event(None).w()?);
                at += part.len() as u64;
            }
        }
        Ok(CudaStorage::wrap_cuda_slice(target, self.device.clone()))
    }

    /// Hands a copy to the copying thread.
    fn begin(&self, begun: Begun) -> Result<()> {
        let mut sender = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        if sender.is_none() {
            let stream = self.stream.context().new_stream().w()?;
            let (send, receive) = channel();
            thread::Builder::new()
                .name("copies-to-host".to_owned())
                .spawn(move || copy_to_host(&stream, &receive))
                .map_err(|error| Error::other(format!("starting the thread of copies: {error}")))?;
            *sender = Some(send);
        }
        let gone = || Error::other("the thread of copies to the host has ended");
        sender.as_ref().and_then(|sender| sender.send(begun).ok()).ok_or_else(gone)
    }
}

/// Makes the copies in order, until the sender is dropped.
fn copy_to_host(stream: &Arc<CudaStream>, begun: &Receiver<Begun>) {
    let mut pieces = Pieces::default();
    for Begun { source, computed, copied } in begun {
        let mut copy = || -> Result<Tensor> {
            // This thread also frees the source's memory.
            stream.context().bind_to_thread().w()?;
            stream.wait(&computed).w()?;
            to_host(&source, stream, &mut pieces)
        };
        let values = copy();
        if values.is_err() {
            // Part of it may still be under way, from memory that is freed next.
            let _ = stream.synchronize();
        }
        drop(source);
        // The step may have been given up, so the receiver may be gone.
        let _ = copied.send(values);
    }
}

/// Copies `len` values of a storage, from `start` on, to the host by `stream`. Waits for them.
fn download<T: CudaDType + DeviceRepr + WithDType + Default>(
    storage: &CudaStorage,
    (start, len): (usize, usize),
    stream: &Arc<CudaStream>,
    pieces: &mut Pieces,
) -> candle_core::Result<Vec<T>> {
    let source = storage.as_cuda_slice::<T>()?.slice(start..start + len);
    let (from, _in_use) = source.device_ptr(stream);
    let mut values = vec![T::default(); len];
    let mut parts = bytes_mut(&mut values).chunks_mut(PIECE);
    let mut at = from;
    // The GPU writes one piece while the host reads the previous one.
    let mut before: Option<(usize, &mut [u8])> = None;
    loop {
        let part = parts.next();
        let started = match &part {
            None => None,
            Some(part) => {
                let piece = pieces.next(stream).w()?;
                let memory = &mut piece.free().w()?[..part.len()];
                // SAFETY: the source has the part at this address, and nothing touches the piece
                // before the event recorded next.
                unsafe { result::memcpy_dtoh_async(memory, at, stream.cu_stream()) }.w()?;
                piece.used = Some(stream.record_event(None).w()?);
                at += part.len() as u64;
                Some(pieces.next)
            }
        };
        if let Some((piece, target)) = before.take() {
            let memory = pieces.all[piece].free().w()?;
            target.copy_from_slice(&memory[..target.len()]);
        }
        match started.zip(part) {
            Some(pending) => before = Some(pending),
            None => return Ok(values),
        }
    }
}

impl Pinned {
    /// Queues a copy of these values to the host on the stream.
    fn begin_few(
        &self,
        storage: &CudaStorage,
        start: usize,
        len: usize,
    ) -> candle_core::Result<Few> {
        let source = storage.as_cuda_slice::<f64>()?.slice(start..start + len);
        let (from, _in_use) = source.device_ptr(&self.stream);
        let free = self.few.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut memory = match free {
            Some(memory) => memory,
            // SAFETY: the values are written before they are read.
            None => unsafe { self.stream.context().alloc_pinned_with_flags(FEW, 0) }.w()?,
        };
        let target = &mut memory.as_mut_slice().w()?[..len];
        // SAFETY: the source has the values at this address, and the memory is neither read nor
        // handed out before the event recorded next.
        unsafe { result::memcpy_dtoh_async(target, from, self.stream.cu_stream()) }.w()?;
        let arrived = self.stream.record_event(None).w()?;
        Ok(Few { memory: Some(memory), len, arrived, free: self.few.clone() })
    }
}

/// The values as bytes.
fn bytes<T: DeviceRepr>(values: &[T]) -> &[u8] {
    // SAFETY: device types are plain numbers without padding.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

fn bytes_mut<T: DeviceRepr>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as in `bytes`; every bit pattern is valid for these types.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

impl HostCopies for Pinned {
    fn to_device(&self, tensor: &Tensor) -> Result<Tensor> {
        let (storage, layout) = tensor.storage_and_layout();
        let (Storage::Cpu(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets())
        else {
            return Err(Error::other("what goes to a device is contiguous, and on the host"));
        };
        let uploaded = match storage {
            CpuStorage::U8(values) => self.upload(&values[start..end]),
            CpuStorage::U32(values) => self.upload(&values[start..end]),
            CpuStorage::I64(values) => self.upload(&values[start..end]),
            CpuStorage::BF16(values) => self.upload(&values[start..end]),
            CpuStorage::F16(values) => self.upload(&values[start..end]),
            CpuStorage::F32(values) => self.upload(&values[start..end]),
            CpuStorage::F64(values) => self.upload(&values[start..end]),
            _ => {
                return Ok(tensor
                    .force_contiguous()?
                    .to_device(&Device::Cuda(self.device.clone()))?);
            }
        };
        let storage = Storage::Cuda(uploaded?);
        Ok(Tensor::from_storage(storage, tensor.shape().clone(), BackpropOp::none(), false))
    }

    fn begin_few_to_host(&self, numbers: &Tensor) -> Result<Option<Box<dyn Arriving>>> {
        let (storage, layout) = numbers.storage_and_layout();
        let (Storage::Cuda(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets())
        else {
            return Err(Error::other("what comes from a device is contiguous, and on it"));
        };
        if numbers.dtype() != DType::F64 || end - start > FEW {
            return Ok(None);
        }
        Ok(Some(Box::new(self.begin_few(storage, start, end - start)?)))
    }

    fn to_host(&self, tensor: &Tensor) -> Result<Tensor> {
        let mut pieces = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        to_host(tensor, &self.stream, &mut pieces)
    }

    fn begin_to_host(&self, tensor: &Tensor) -> Result<HostCopy> {
        let (copied, result) = channel();
        let computed = self.stream.record_event(None).w()?;
        self.begin(Begun { source: tensor.detach(), computed, copied })?;
        Ok(HostCopy::new(move || {
            let gone = |_| Error::other("the thread of copies to the host has ended");
            result.recv().map_err(gone)?
        }))
    }
}

/// Copies a contiguous GPU tensor to the host by `stream`.
fn to_host(tensor: &Tensor, stream: &Arc<CudaStream>, pieces: &mut Pieces) -> Result<Tensor> {
    let (storage, layout) = tensor.storage_and_layout();
    let (Storage::Cuda(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets())
    else {
        return Err(Error::other("what comes from a device is contiguous, and on it"));
    };
    let part = (start, end - start);
    let shape = tensor.shape();
    let host = |storage| Tensor::from_storage(storage, shape.clone(), BackpropOp::none(), false);
    Ok(host(Storage::Cpu(match tensor.dtype() {
        DType::U8 => CpuStorage::U8(download(storage, part, stream, pieces)?),
        DType::U32 => CpuStorage::U32(download(storage, part, stream, pieces)?),
        DType::I64 => CpuStorage::I64(download(storage, part, stream, pieces)?),
        DType::BF16 => CpuStorage::BF16(download::<bf16>(storage, part, stream, pieces)?),
        DType::F16 => CpuStorage::F16(download::<f16>(storage, part, stream, pieces)?),
        DType::F32 => CpuStorage::F32(download(storage, part, stream, pieces)?),
        DType::F64 => CpuStorage::F64(download(storage, part, stream, pieces)?),
        _ => return Ok(tensor.force_contiguous()?.to_device(&Device::Cpu)?),
    })))
}
