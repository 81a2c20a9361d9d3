//! An allocator that counts the memory of the process and of each thread. A test binary installs
//! it:
//!
//! ```ignore
//! #[global_allocator]
//! static ALLOCATOR: Counting = Counting;
//! ```
#![allow(
    unsafe_code,
    reason = "a global allocator is unsafe to implement; this one counts and passes on"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicIsize, Ordering};

/// The system's allocator, counted.
pub struct Counting;

static LIVE: AtomicIsize = AtomicIsize::new(0);
static PEAK: AtomicIsize = AtomicIsize::new(0);

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static MOST_HELD: Cell<isize> = const { Cell::new(0) };
}

/// Bytes that all threads hold.
pub fn live() -> isize {
    LIVE.load(Ordering::SeqCst)
}

/// The most bytes that all threads held since [`reset_peak`].
pub fn peak() -> isize {
    PEAK.load(Ordering::SeqCst)
}

/// Restarts [`peak`] from the bytes held now, which are returned.
pub fn reset_peak() -> isize {
    let live = live();
    PEAK.store(live, Ordering::SeqCst);
    live
}

/// Runs `f`. Returns its result, and the maximum increase of this thread's bytes while it ran.
pub fn thread_peak<T>(f: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD.get();
    MOST_HELD.set(before);
    let value = f();
    (value, usize::try_from(MOST_HELD.get() - before).expect("at least what was held before"))
}

fn count(bytes: isize) {
    let live = LIVE.fetch_add(bytes, Ordering::SeqCst) + bytes;
    PEAK.fetch_max(live, Ordering::SeqCst);
    // An ending thread is no longer counted.
    let _ = HELD.try_with(|held| {
        held.set(held.get() + bytes);
        let _ = MOST_HELD.try_with(|most| most.set(most.get().max(held.get())));
    });
}

// SAFETY: every call is passed to the system's allocator unchanged; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's own promise about `layout`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's own promise about `layout`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's own promise about `pointer`, which came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as isize - layout.size() as isize);
        // SAFETY: the caller's own promise about `pointer` and `size`.
        unsafe { System.realloc(pointer, layout, size) }
    }
}
