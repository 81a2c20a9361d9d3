//! A stream as a C library sees it, in place of a `cudaStream_t`.

use std::ffi::{c_int, c_void};

/// A task, called until it returns a value other than 0. Then `free` is called once.
pub type Poll = unsafe extern "C" fn(*mut c_void) -> c_int;
/// Frees a task's argument.
pub type Free = unsafe extern "C" fn(*mut c_void);

/// A stream, by its address.
#[repr(C)]
pub struct RawStream {
    /// Appends a task to the stream.
    pub push: unsafe extern "C" fn(*const RawStream, Poll, Free, *mut c_void),
}
