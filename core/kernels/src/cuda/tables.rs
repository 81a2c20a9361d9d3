//! Copies tables of plans to a GPU.
//!
//! To copy from pageable memory, the driver stages it first, and the host waits. So a table is
//! written to pinned memory, and a copy is queued to GPU memory of the same size. A [`Piece`] is
//! such a pair of buffers.
//!
//! The tables of one stream fill a piece from its beginning to its end. The stream copies and reads
//! them in order. The piece is free for any stream when the work queued up to then is done. Nothing
//! waits for that: without a free piece, another is allocated.
#![allow(unsafe_code)] // pinned memory, and copies of the driver

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda_backend::cudarc::driver::{
    CudaEvent, CudaSlice, CudaStream, DevicePtr as _, DriverError, PinnedHostSlice, result,
};

/// Bytes of a piece, unless a table is larger.
const PIECE: usize = 1 << 18;
/// Bytes that tables are aligned to.
pub(super) const ALIGN: usize = 256;

/// A buffer of pinned host memory and a GPU buffer of the same size.
struct Piece {
    host: PinnedHostSlice<u8>,
    device: CudaSlice<u8>,
}

/// Filled pieces, with events that fire when their last use is done.
static FILLED: Mutex<Vec<(Piece, CudaEvent)>> = Mutex::new(Vec::new());

/// Copies the tables of one stream.
pub(super) struct Tables {
    stream: Arc<CudaStream>,
    piece: Option<Piece>,
    /// Used bytes of the piece.
    used: usize,
}

impl Tables {
    pub(super) fn new(stream: Arc<CudaStream>) -> Self {
        Self { stream, piece: None, used: 0 }
    }

    /// Queues a copy of these bytes to the GPU, and returns the address there. Work that is queued
    /// on the stream before the next call may read them.
    pub(super) fn send(&mut self, bytes: &[u8]) -> Result<u64, DriverError> {
        self.stream.context().bind_to_thread()?;
        let mut start = self.used.next_multiple_of(ALIGN);
        let piece = match self.piece.take() {
            Some(piece) if start + bytes.len() <= piece.device.len() => piece,
            full => {
                if let Some(full) = full {
                    self.give_back(full)?;
                }
                start = 0;
                self.free(bytes.len())?
            }
        };
        self.used = start + bytes.len();
        let piece = self.piece.insert(piece);
        let host = &mut piece.host.as_mut_slice()?[start..start + bytes.len()];
        host.copy_from_slice(bytes);
        let to = piece.device.device_ptr(&self.stream).0 + start as u64;
        // SAFETY: the piece has room for the bytes in both memories. It belongs to this stream
        // until an event after this copy fires.
        unsafe { result::memcpy_htod_async(to, host, self.stream.cu_stream()) }?;
        Ok(to)
    }

    /// Frees a piece for other streams once all work queued on this stream is done.
    fn give_back(&self, piece: Piece) -> Result<(), DriverError> {
        match self.stream.record_event(None) {
            Ok(event) => {
                FILLED.lock().unwrap_or_else(PoisonError::into_inner).push((piece, event));
                Ok(())
            }
            Err(error) => {
                // Without an event, it is unknown when the piece is unused. So it is leaked.
                std::mem::forget(piece);
                Err(error)
            }
        }
    }

    /// Returns an unused piece of at least this size.
    fn free(&self, bytes: usize) -> Result<Piece, DriverError> {
        let context = self.stream.context();
        let mut filled = FILLED.lock().unwrap_or_else(PoisonError::into_inner);
        for index in 0..filled.len() {
            let (piece, done) = &filled[index];
            let fits = piece.host.context() == context && piece.device.len() >= bytes;
            if fits && done.try_is_complete()? {
                return Ok(filled.swap_remove(index).0);
            }
        }
        drop(filled);
        let bytes = bytes.next_power_of_two().max(PIECE);
        // SAFETY: all memory is written before it is read.
        let (host, device) = unsafe {
            (context.alloc_pinned_with_flags(bytes, 0)?, self.stream.alloc::<u8>(bytes)?)
        };
        Ok(Piece { host, device })
    }
}

impl Drop for Tables {
    fn drop(&mut self) {
        // The dropping thread need not be the computing thread. An error concerns the context, so
        // the next call reports it too.
        let bound = self.stream.context().bind_to_thread();
        match self.piece.take() {
            Some(piece) if bound.is_ok() => drop(self.give_back(piece)),
            piece => std::mem::forget(piece),
        }
    }
}
