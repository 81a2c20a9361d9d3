//! Tables of plans on their way to a GPU.
//!
//! The driver copies from memory that may be paged out only once it has staged it, and the host waits. So a table is
//! written to pinned memory, and a copy of it queued to memory of the GPU of the same size: a [`Piece`] is both. A piece
//! is filled from its beginning to its end by the tables of one stream, on which they are copied and read in order, and
//! is then free, for any stream, when what was queued there until then is done. Nothing waits for that: if no piece is free
//! there will be one more.
#![allow(unsafe_code)] // pinned memory, and copies of the driver

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda_backend::cudarc::driver::{
    CudaEvent, CudaSlice, CudaStream, DevicePtr as _, DriverError, PinnedHostSlice, result,
};

/// Bytes of a piece, unless a table is larger.
const PIECE: usize = 1 << 18;
/// Bytes that tables are aligned to.
pub(super) const ALIGN: usize = 256;

/// Memory of the host and of a GPU that a table is copied from and to.
struct Piece {
    host: PinnedHostSlice<u8>,
    device: CudaSlice<u8>,
}

/// Pieces that were filled, and when what uses them is done.
static FILLED: Mutex<Vec<(Piece, CudaEvent)>> = Mutex::new(Vec::new());

/// The way of a stream's tables.
pub(super) struct Tables {
    stream: Arc<CudaStream>,
    piece: Option<Piece>,
    /// Bytes of the piece that have been used.
    used: usize,
}

impl Tables {
    pub(super) fn new(stream: Arc<CudaStream>) -> Self {
        Self { stream, piece: None, used: 0 }
    }

    /// Queues a copy of these bytes to the GPU, and returns the address there. What is queued on the stream before the
    /// next call may read them.
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
        // SAFETY: the piece has room for the bytes in both memories, and is this stream's until an event that comes after
        // this copy says that it is done.
        unsafe { result::memcpy_htod_async(to, host, self.stream.cu_stream()) }?;
        Ok(to)
    }

    /// Lets others have a piece once all that this stream has queued is done.
    fn give_back(&self, piece: Piece) -> Result<(), DriverError> {
        match self.stream.record_event(None) {
            Ok(event) => {
                FILLED.lock().unwrap_or_else(PoisonError::into_inner).push((piece, event));
                Ok(())
            }
            Err(error) => {
                // Nobody knows when it is.
                std::mem::forget(piece);
                Err(error)
            }
        }
    }

    /// A piece of at least so many bytes that nothing uses.
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
        // SAFETY: what is read of them has been written before.
        let (host, device) = unsafe {
            (context.alloc_pinned_with_flags(bytes, 0)?, self.stream.alloc::<u8>(bytes)?)
        };
        Ok(Piece { host, device })
    }
}

impl Drop for Tables {
    fn drop(&mut self) {
        // It may be another thread than the one that computes. An error is one of the context, which the next call has too.
        let bound = self.stream.context().bind_to_thread();
        match self.piece.take() {
            Some(piece) if bound.is_ok() => drop(self.give_back(piece)),
            piece => std::mem::forget(piece),
        }
    }
}
