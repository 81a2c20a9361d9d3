//! The allocator of programs that link this crate.
#![allow(unsafe_code)] // setting an option of the allocator is a foreign call

use fulgurite_transports::SharedMemory;
use libmimalloc_sys::{mi_option_set, mi_option_t};

#[global_allocator]
static ALLOCATOR: SharedMemory<mimalloc::MiMalloc> = SharedMemory(mimalloc::MiMalloc);

/// `mi_option_purge_delay`, which the bindings leave out.
const PURGE_DELAY: mi_option_t = 15;

/// Keeps freed memory for the next tensor instead of giving it back to the system: a step allocates
/// what the step before it freed, and faulting its pages in again took an eighth of the step.
/// `MIMALLOC_PURGE_DELAY` (milliseconds) in the environment overrides it.
#[ctor::ctor(unsafe)]
fn keep_freed_memory() {
    if std::env::var_os("MIMALLOC_PURGE_DELAY").is_none() {
        // SAFETY: sets an integer of the allocator, which it reads when memory is freed; no thread
        // runs yet that could.
        unsafe { mi_option_set(PURGE_DELAY, -1) }
    }
}
