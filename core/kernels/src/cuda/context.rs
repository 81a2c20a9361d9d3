//! CUDA contexts of threads, and the versions of the loaded libraries.
#![allow(unsafe_code)] // Calls of the driver

use candle_core::cuda_backend::cudarc::driver::{CudaContext, DriverError, result, sys};
use fulgurite_error::{Error, Result};

use super::nvrtc_version;
use crate::versions;

/// Makes the context current on this thread, for drops and watchdog threads. Unlike cudarc's
/// `bind_to_thread`, it does not report (and so consume) an error that another thread's drop has
/// recorded. The computing threads still see that error.
///
/// # Errors
/// If the driver reports an error for this call.
pub fn make_current(context: &CudaContext) -> std::result::Result<(), DriverError> {
    if result::ctx::get_current()? != Some(context.cu_ctx()) {
        // SAFETY: a context that is held.
        unsafe { result::ctx::set_current(context.cu_ctx()) }?;
    }
    Ok(())
}

/// Checks that the driver supports this program's toolkit and the loaded NVRTC:
/// [`versions::check`].
///
/// # Errors
/// If it does not, or does not report its version.
pub fn check_versions() -> Result<()> {
    let mut driver = 0;
    // SAFETY: a pointer to an integer that lives until it returns.
    unsafe { sys::cuDriverGetVersion(&raw mut driver) }
        .result()
        .map_err(|error| Error::other(format!("asking the driver for its version: {error}")))?;
    let toolkit = versions::version(sys::CUDA_VERSION as i32);
    versions::check(versions::version(driver), toolkit, nvrtc_version()?)
}
