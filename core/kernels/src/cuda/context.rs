//! Contexts of threads, and the versions of what a process has loaded.
#![allow(unsafe_code)] // Calls of the driver

use candle_core::cuda_backend::cudarc::driver::{CudaContext, DriverError, result, sys};
use fulgurite_error::{Error, Result};

use super::nvrtc_version;
use crate::versions;

/// Makes the context this thread's, for drops and watchdog threads. cudarc's `bind_to_thread` would fail with an error that
/// another thread's drop has left; this function leaves that error to the threads that compute.
///
/// # Errors
/// Those of the driver, of this call.
pub fn make_current(context: &CudaContext) -> std::result::Result<(), DriverError> {
    if result::ctx::get_current()? != Some(context.cu_ctx()) {
        // SAFETY: a context that is held.
        unsafe { result::ctx::set_current(context.cu_ctx()) }?;
    }
    Ok(())
}

/// Checks that the driver runs what this program was built with and has loaded: [`versions::check`].
///
/// # Errors
/// If it does not, or does not say its version.
pub fn check_versions() -> Result<()> {
    let mut driver = 0;
    // SAFETY: a pointer to an integer that lives until it returns.
    unsafe { sys::cuDriverGetVersion(&raw mut driver) }
        .result()
        .map_err(|error| Error::other(format!("asking the driver for its version: {error}")))?;
    let toolkit = versions::version(sys::CUDA_VERSION as i32);
    versions::check(versions::version(driver), toolkit, nvrtc_version()?)
}
