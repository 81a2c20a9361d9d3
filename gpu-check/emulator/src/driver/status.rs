//! Return values of driver functions.

use std::ffi::{CStr, c_char, c_int};

/// `CUresult`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Status(c_int);

macro_rules! statuses {
    ($($name:ident = $number:literal $text:literal;)*) => {
        impl Status {
            $(pub(crate) const $name: Self = Self($number);)*

            fn names(self) -> (&'static CStr, &'static CStr) {
                match self {
                    $(Self::$name => ($text, $text),)*
                    _ => (c"CUDA_ERROR_UNKNOWN", c"an error that the GPU emulator does not know"),
                }
            }
        }
    };
}

statuses! {
    SUCCESS = 0 c"CUDA_SUCCESS";
    INVALID_VALUE = 1 c"CUDA_ERROR_INVALID_VALUE";
    OUT_OF_MEMORY = 2 c"CUDA_ERROR_OUT_OF_MEMORY";
    NO_DEVICE = 100 c"CUDA_ERROR_NO_DEVICE";
    INVALID_DEVICE = 101 c"CUDA_ERROR_INVALID_DEVICE";
    INVALID_CONTEXT = 201 c"CUDA_ERROR_INVALID_CONTEXT";
    INVALID_HANDLE = 400 c"CUDA_ERROR_INVALID_HANDLE";
    NOT_FOUND = 500 c"CUDA_ERROR_NOT_FOUND";
    NOT_READY = 600 c"CUDA_ERROR_NOT_READY";
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(status: Status, name: *mut *const c_char) -> Status {
    // SAFETY: the caller's.
    unsafe { *name = status.names().0.as_ptr() };
    Status::SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(status: Status, text: *mut *const c_char) -> Status {
    // SAFETY: the caller's.
    unsafe { *text = status.names().1.as_ptr() };
    Status::SUCCESS
}
