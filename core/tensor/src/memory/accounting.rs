//! An allocator that counts large blocks.
#![allow(unsafe_code)] // an allocator

use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use super::address_space::{self, PAGE};
use super::trace;

/// Blocks of at least this many bytes are counted. Smaller ones are not tensors.
pub const COUNTED_BYTES: usize = 256;

/// A dry run takes blocks of at least this many bytes as address space, whose pages exist once they
/// are written.
const RESERVED_BYTES: usize = 64 << 10;

static HELD: AtomicI64 = AtomicI64::new(0);
static PEAK: AtomicI64 = AtomicI64::new(0);
static IS_ACCOUNTED: AtomicBool = AtomicBool::new(false);

/// An allocator whose large blocks ([`COUNTED_BYTES`]) are counted, for a `#[global_allocator]`.
///
/// The cost is an addition and a comparison for each large block.
#[derive(Debug, Clone, Copy, Default)]
pub struct Accounted<A>(pub A);

/// Whether the program's allocator is [`Accounted`].
pub fn is_accounted() -> bool {
    // The flag is set by the first large block.
    let block: Vec<u8> = Vec::with_capacity(std::hint::black_box(COUNTED_BYTES));
    drop(std::hint::black_box(block));
    IS_ACCOUNTED.load(Ordering::Relaxed)
}

/// Bytes of large blocks that the process holds; 0 without an [`Accounted`] allocator.
pub fn held() -> u64 {
    HELD.load(Ordering::Relaxed).max(0) as u64
}

/// The most bytes of large blocks that the process has held since [`reset_peak`].
pub fn peak() -> u64 {
    PEAK.load(Ordering::Relaxed).max(0) as u64
}

/// Restarts [`peak`] from what is held now, which is returned.
pub fn reset_peak() -> u64 {
    let held = HELD.load(Ordering::Relaxed);
    PEAK.store(held, Ordering::Relaxed);
    held.max(0) as u64
}

#[inline]
fn took(bytes: usize) {
    let held = HELD.fetch_add(bytes as i64, Ordering::Relaxed) + bytes as i64;
    if held > PEAK.load(Ordering::Relaxed) {
        PEAK.fetch_max(held, Ordering::Relaxed);
        IS_ACCOUNTED.store(true, Ordering::Relaxed);
    }
}

#[inline]
fn gave(bytes: usize) {
    HELD.fetch_sub(bytes as i64, Ordering::Relaxed);
}

/// Counts a block that was not allocated by the program's allocator, but will be freed by it.
pub fn adopt(bytes: usize) {
    if bytes >= COUNTED_BYTES && IS_ACCOUNTED.load(Ordering::Relaxed) {
        took(bytes);
    }
}

impl<A: GlobalAlloc> Accounted<A> {
    /// Allocates a large block during a trace.
    #[cold]
    unsafe fn alloc_traced(&self, layout: Layout, zeroed: bool) -> *mut u8 {
        let may_reserve =
            layout.size() >= RESERVED_BYTES && layout.align() <= PAGE && trace::reserves();
        let mapping = match may_reserve {
            true => address_space::reserve(layout.size()),
            false => std::ptr::null_mut(),
        };
        // If the system refuses the mapping, the inner allocator gets its turn.
        let reserved = !mapping.is_null();
        let block = if reserved {
            mapping
        } else if zeroed {
            // SAFETY: the caller's own promise.
            unsafe { self.0.alloc_zeroed(layout) }
        } else {
            // SAFETY: the caller's own promise.
            unsafe { self.0.alloc(layout) }
        };
        if !block.is_null() {
            trace::add(block as usize, layout.size(), reserved);
        }
        block
    }

    /// Frees a large block during a trace, or one that is left of a trace.
    #[cold]
    unsafe fn dealloc_traced(&self, block: *mut u8, layout: Layout) {
        if trace::remove(block as usize) {
            // SAFETY: reserved with this size, and nothing uses it any more.
            unsafe { address_space::release(block, layout.size()) };
        } else {
            // SAFETY: the caller's own promise; the block is the inner allocator's.
            unsafe { self.0.dealloc(block, layout) }
        }
    }
}

// SAFETY: blocks come from the inner allocator, which is called with the caller's arguments, or are
// reserved address space, which is page-aligned and zeroed, and is released as such.
unsafe impl<A: GlobalAlloc> GlobalAlloc for Accounted<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() < COUNTED_BYTES {
            // SAFETY: the caller's own promise.
            return unsafe { self.0.alloc(layout) };
        }
        took(layout.size());
        if trace::is_on() {
            // SAFETY: the caller's own promise.
            return unsafe { self.alloc_traced(layout, false) };
        }
        // SAFETY: the caller's own promise.
        unsafe { self.0.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() < COUNTED_BYTES {
            // SAFETY: the caller's own promise.
            return unsafe { self.0.alloc_zeroed(layout) };
        }
        took(layout.size());
        if trace::is_on() {
            // SAFETY: the caller's own promise.
            return unsafe { self.alloc_traced(layout, true) };
        }
        // SAFETY: the caller's own promise.
        unsafe { self.0.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if layout.size() >= COUNTED_BYTES {
            gave(layout.size());
            if trace::has_blocks() {
                // SAFETY: the caller's own promise.
                return unsafe { self.dealloc_traced(block, layout) };
            }
        }
        // SAFETY: the caller's own promise.
        unsafe { self.0.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if trace::has_blocks() && layout.size().max(size) >= COUNTED_BYTES {
            // A block may move between the allocators: as a new one, a copy, and a free.
            // SAFETY: the caller promises that the size is valid for the alignment.
            let wanted = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
            // SAFETY: the caller's own promise.
            let moved = unsafe { self.alloc(wanted) };
            if !moved.is_null() {
                // SAFETY: both are valid for the smaller size, and are different blocks.
                unsafe {
                    std::ptr::copy_nonoverlapping(block, moved, layout.size().min(size));
                    self.dealloc(block, layout);
                }
            }
            return moved;
        }
        if layout.size() >= COUNTED_BYTES {
            gave(layout.size());
        }
        if size >= COUNTED_BYTES {
            took(size);
        }
        // SAFETY: the caller's own promise.
        unsafe { self.0.realloc(block, layout, size) }
    }
}
