//! The allocator of programs with [`use_mimalloc!`](crate::use_mimalloc).
#![allow(unsafe_code)] // an allocator, and the foreign call that sets its option

use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicBool, Ordering};

use fulgurite_core::memory::Accounted;
use fulgurite_transports::SharedMemory;
use libmimalloc_sys::{mi_option_set_default, mi_option_t};
use mimalloc::MiMalloc;

/// Makes mimalloc the program's allocator, tuned for training. At the top level of the program:
///
/// ```
/// fulgurite::use_mimalloc!();
/// # fn main() {}
/// ```
///
/// - Freed memory is kept for the next tensor instead of returned to the system. A step allocates
///   the memory that the previous step freed. Page faults on returned memory took an eighth of a
///   step of a 30-million-parameter decoder. `MIMALLOC_PURGE_DELAY` (milliseconds) in the
///   environment overrides this.
/// - Collectives between processes of one host access each other's gradients, buckets and shards
///   directly ([`SharedMemory`]). Programs with another allocator copy through a region, with the
///   same results.
/// - Tensors and buffers are counted: the `plan` of a run's summary, `fulgurite plan`
///   ([`Accounted`]).
///
/// A program has one global allocator. Programs with their own allocator leave this line out; they
/// may wrap their own in [`SharedMemory`] for the second advantage. Needs the feature `mimalloc` (a
/// default).
#[macro_export]
macro_rules! use_mimalloc {
    () => {
        #[global_allocator]
        static FULGURITE_ALLOCATOR: $crate::allocator::Allocator = $crate::allocator::ALLOCATOR;
    };
}

/// The allocator of [`use_mimalloc!`](crate::use_mimalloc).
pub type Allocator = Accounted<SharedMemory<KeepFreed>>;

/// The value of the allocator.
pub const ALLOCATOR: Allocator = Accounted(SharedMemory(KeepFreed(())));

/// mimalloc that keeps freed memory.
#[derive(Debug)]
pub struct KeepFreed(());

/// `mi_option_purge_delay`, which the bindings leave out.
const PURGE_DELAY: mi_option_t = 15;

static CONFIGURED: AtomicBool = AtomicBool::new(false);

#[cold]
fn configure() {
    CONFIGURED.store(true, Ordering::Relaxed);
    // SAFETY: sets an integer in the allocator, unless the environment has set it, and allocates
    // nothing. A thread that frees memory at the same time reads the old or the new value.
    unsafe { mi_option_set_default(PURGE_DELAY, -1) }
}

// SAFETY: every call is passed to mimalloc unchanged.
unsafe impl GlobalAlloc for KeepFreed {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // Configured by the first allocation, hence before any memory is freed.
        if !CONFIGURED.load(Ordering::Relaxed) {
            configure();
        }
        // SAFETY: mimalloc requires exactly the caller's promises.
        unsafe { MiMalloc.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as in `alloc`.
        unsafe { MiMalloc.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as in `alloc`.
        unsafe { MiMalloc.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: as in `alloc`.
        unsafe { MiMalloc.realloc(ptr, layout, new_size) }
    }
}
