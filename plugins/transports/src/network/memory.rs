//! Memory of tensors and buffers that messages are sent from and received into.
#![allow(unsafe_code)] // Addresses of tensors, whose locks are not held during an exchange.

use std::ops::Range;

use candle_core::Tensor;
use fulgurite_engine::autograd::storage::with_bytes_mut;
use fulgurite_error::Result;

use super::wire::{Incoming, Outgoing};

/// Memory that a collective has to itself until it ends: of a tensor that was given to it, which the caller
/// neither reads nor changes meanwhile (`Work`), or of a buffer of the worker.
#[derive(Debug, Clone, Copy)]
pub(super) struct Memory {
    start: *mut u8,
    len: usize,
}

// SAFETY: an address; whoever uses it says why that is sound.
unsafe impl Send for Memory {}

impl Memory {
    /// That of a contiguous tensor on the CPU, which must live as long as it is used.
    pub(super) fn of(tensor: &Tensor) -> Result<Self> {
        with_bytes_mut(tensor, Self::of_bytes)
    }

    pub(super) fn of_bytes(bytes: &mut [u8]) -> Self {
        Self { start: bytes.as_mut_ptr(), len: bytes.len() }
    }

    pub(super) fn len(self) -> usize {
        self.len
    }

    /// A part of it.
    pub(super) fn part(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: within the same memory, as was checked.
        Self { start: unsafe { self.start.add(range.start) }, len: range.len() }
    }

    pub(super) fn to(self, member: usize) -> Outgoing {
        let bytes = std::ptr::slice_from_raw_parts(self.start.cast_const(), self.len);
        Outgoing { to: member, bytes }
    }

    pub(super) fn from(self, member: usize) -> Incoming {
        Incoming { from: member, bytes: std::ptr::slice_from_raw_parts_mut(self.start, self.len) }
    }

    /// Copies another memory of the same length here, unless it is the same.
    pub(super) fn copy_from(self, other: Self) {
        assert_eq!(self.len, other.len, "a copy between memories of one length");
        if self.start != other.start {
            // SAFETY: both are valid for this length, and `copy` allows that they overlap. No exchange
            // is under way, so that nobody else accesses them.
            unsafe { std::ptr::copy(other.start.cast_const(), self.start, self.len) }
        }
    }

    /// Its bytes.
    ///
    /// # Safety
    /// While they are borrowed the memory lives, and nobody writes it.
    pub(super) unsafe fn bytes<'a>(self) -> &'a [u8] {
        // SAFETY: as the caller promises.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    /// Its bytes, to be written.
    ///
    /// # Safety
    /// While they are borrowed the memory lives, and nobody else reads or writes it.
    pub(super) unsafe fn bytes_mut<'a>(self) -> &'a mut [u8] {
        // SAFETY: as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

/// Buffers of a worker, aligned for every dtype and as long as was asked for once.
#[derive(Default)]
pub(super) struct Scratch(Vec<u64>);

impl Scratch {
    /// Its first `len` bytes, with arbitrary content. What it gave before must not be used any more.
    pub(super) fn take(&mut self, len: usize) -> Memory {
        let words = len.div_ceil(size_of::<u64>());
        if self.0.len() < words {
            self.0.resize(words, 0);
        }
        Memory::of_bytes(&mut bytemuck::cast_slice_mut(&mut self.0)[..len])
    }
}
