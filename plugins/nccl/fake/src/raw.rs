//! A stream as a library of C gets it, in place of a `cudaStream_t`.

use std::ffi::{c_int, c_void};

/// A task: called until it returns another value than 0. Then `free` is called, once.
pub type Poll = unsafe extern "C" fn(*mut c_void) -> c_int;
/// Frees what a task is called with.
pub type Free = unsafe extern "C" fn(*mut c_void);

/// What a stream's address points to.
#[repr(C)]
pub struct RawStream {
    /// Appends a task to the stream.
    pub push: unsafe extern "C" fn(*const RawStream, Poll, Free, *mut c_void),
}
