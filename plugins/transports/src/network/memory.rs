//! Memory of tensors and buffers for sending and receiving messages.
#![allow(unsafe_code)] // Addresses of tensors, whose locks are not held during an exchange.

use std::ops::Range;

use candle_core::Tensor;
use fulgurite_core::Result;
use fulgurite_core::autograd::storage::with_bytes_mut;

use super::wire::{Incoming, Outgoing};

/// Memory that a collective owns exclusively until it ends. It is a tensor's, which the caller
/// neither reads nor changes meanwhile (`Work`), or a buffer of the worker.
#[derive(Debug, Clone, Copy)]
pub(super) struct Memory {
    start: *mut u8,
    len: usize,
}

// SAFETY: a plain address. Each use of it states why it is sound.
unsafe impl Send for Memory {}

impl Memory {
    /// Memory of a contiguous tensor on the CPU, which must outlive its use.
    pub(super) fn of(tensor: &Tensor) -> Result<Self> {
        with_bytes_mut(tensor, Self::of_bytes)
    }

    pub(super) fn of_bytes(bytes: &mut [u8]) -> Self {
        Self { start: bytes.as_mut_ptr(), len: bytes.len() }
    }

    pub(super) fn len(self) -> usize {
        self.len
    }

    /// A part of the memory.
    pub(super) fn part(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: within the same memory, as checked.
        Self { start: unsafe { self.start.add(range.start) }, len: range.len() }
    }

    pub(super) fn to(self, member: usize) -> Outgoing {
        let bytes = std::ptr::slice_from_raw_parts(self.start.cast_const(), self.len);
        Outgoing { to: member, bytes }
    }

    pub(super) fn from(self, member: usize) -> Incoming {
        Incoming { from: member, bytes: std::ptr::slice_from_raw_parts_mut(self.start, self.len) }
    }

    /// Copies another memory of the same length, unless both are the same.
    pub(super) fn copy_from(self, other: Self) {
        assert_eq!(self.len, other.len, "a copy between memories of one length");
        if self.start != other.start {
            // SAFETY: both are valid for this length, and `copy` allows overlaps. No exchange is
            // under way, so no other thread accesses them.
            unsafe { std::ptr::copy(other.start.cast_const(), self.start, self.len) }
        }
    }

    /// Returns the bytes.
    ///
    /// # Safety
    /// While they are borrowed, the memory is valid and no thread writes to it.
    pub(super) unsafe fn bytes<'a>(self) -> &'a [u8] {
        // SAFETY: as the caller promises.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    /// Returns the bytes for writing.
    ///
    /// # Safety
    /// While they are borrowed, the memory is valid and no other code accesses it.
    pub(super) unsafe fn bytes_mut<'a>(self) -> &'a mut [u8] {
        // SAFETY: as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

/// Buffer of a worker, aligned for every dtype. It grows to the longest request.
#[derive(Default)]
pub(super) struct Scratch(Vec<u64>);

impl Scratch {
    /// Returns the first `len` bytes, with arbitrary content. Earlier results must no longer be
    /// used.
    pub(super) fn take(&mut self, len: usize) -> Memory {
        let words = len.div_ceil(size_of::<u64>());
        if self.0.len() < words {
            self.0.resize(words, 0);
        }
        Memory::of_bytes(&mut bytemuck::cast_slice_mut(&mut self.0)[..len])
    }
}
