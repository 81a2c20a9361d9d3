//! Address space for the large blocks of dry runs.
//!
//! A dry run takes and frees a million blocks of few sizes. Freed ones are kept for the next of
//! their size, without memory, because the system takes longer to make and remove a mapping.
#![allow(unsafe_code)] // mappings of the system

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::trace;

/// The least size of a page, to which mappings are aligned.
pub(super) const PAGE: usize = 4096;

/// The most blocks that are kept. The system has a limit of mappings, 65,530 by default.
const KEPT: usize = 4096;

#[cfg(any(target_os = "linux", target_os = "android"))]
const HUGE_PAGE: usize = 2 << 20;

/// The mapping is not counted as memory that the system promises.
#[cfg(any(target_os = "linux", target_os = "android"))]
const RESERVE: libc::c_int = libc::MAP_NORESERVE;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const RESERVE: libc::c_int = 0;

/// Free blocks by their size: addresses of mappings whose pages read as zeros.
#[derive(Default)]
struct Free {
    blocks: HashMap<usize, Vec<usize>>,
    count: usize,
}

static FREE: Mutex<Option<Free>> = Mutex::new(None);

fn free() -> MutexGuard<'static, Option<Free>> {
    FREE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Zeroed address space, which takes memory page by page when it is written. Null if there is none.
pub(super) fn reserve(bytes: usize) -> *mut u8 {
    let kept = trace::inside(|| {
        let mut free = free();
        let free = free.as_mut()?;
        let block = free.blocks.get_mut(&bytes)?.pop()?;
        free.count -= 1;
        Some(block)
    });
    match kept {
        Some(block) => std::ptr::with_exposed_provenance_mut(block),
        None => map(bytes),
    }
}

/// Gives back a block of this size.
///
/// # Safety
/// The block is from [`reserve`] with this size, and nothing uses it any more.
pub(super) unsafe fn release(block: *mut u8, bytes: usize) {
    // After the dry run nothing would take the block.
    // SAFETY: as the caller promises.
    if !trace::reserves() || !unsafe { keep(block, bytes) } {
        // SAFETY: as the caller promises.
        unsafe { libc::munmap(block.cast(), bytes) };
    }
}

/// Keeps a block for the next of its size, if there is room. Pages that were written are given
/// back, and read as zeros from then on.
///
/// # Safety
/// As [`release`].
#[cfg(any(target_os = "linux", target_os = "android"))]
unsafe fn keep(block: *mut u8, bytes: usize) -> bool {
    // SAFETY: as the caller promises.
    if unsafe { libc::madvise(block.cast(), bytes, libc::MADV_DONTNEED) } != 0 {
        return false;
    }
    trace::inside(|| {
        let mut free = free();
        let free = free.get_or_insert_default();
        let has_room = free.count < KEPT;
        if has_room {
            free.count += 1;
            free.blocks.entry(bytes).or_default().push(block.expose_provenance());
        }
        has_room
    })
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
unsafe fn keep(_: *mut u8, _: usize) -> bool {
    false
}

/// Removes the blocks that are kept.
pub(super) fn forget() {
    let Some(free) = free().take() else { return };
    for (bytes, blocks) in free.blocks {
        for block in blocks {
            let block: *mut u8 = std::ptr::with_exposed_provenance_mut(block);
            // SAFETY: a mapping of this size that nobody has.
            unsafe { libc::munmap(block.cast(), bytes) };
        }
    }
}

fn map(bytes: usize) -> *mut u8 {
    // SAFETY: an anonymous mapping at an address of the system's choice.
    let block = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | RESERVE,
            -1,
            0,
        )
    };
    if block == libc::MAP_FAILED {
        return std::ptr::null_mut();
    }
    // Avoids a huge page for a small write.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    if bytes >= HUGE_PAGE {
        // SAFETY: the mapping made above. Only advice: a failure changes nothing.
        unsafe { libc::madvise(block, bytes, libc::MADV_NOHUGEPAGE) };
    }
    block.cast()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn kept_blocks_return_zeroed() {
        // A size that no other test has.
        let bytes = 37 * PAGE;
        let first = reserve(bytes);
        assert!(!first.is_null());
        // SAFETY: within the block.
        unsafe { first.add(5 * PAGE + 3).write(7) };
        // SAFETY: reserved above.
        assert!(unsafe { keep(first, bytes) });
        let again = reserve(bytes);
        assert_eq!(again, first);
        // SAFETY: within the block.
        assert_eq!(unsafe { again.add(5 * PAGE + 3).read() }, 0);
        // SAFETY: reserved above.
        unsafe { release(again, bytes) };
        forget();
        assert!(free().is_none());
    }
}
