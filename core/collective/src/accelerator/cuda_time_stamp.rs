//! The [`CudaTimeStamp`] of NVIDIA GPUs.

use std::any::Any;

use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, DriverError, sys};

use super::TimeStamp;
use crate::{Error, Result};

/// A moment on a stream of an NVIDIA GPU. Stamps of all streams of a GPU are comparable.
pub struct CudaTimeStamp(CudaEvent);

impl CudaTimeStamp {
    /// Stamps the moment at which all work now queued on `stream` is done.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn record(stream: &CudaStream) -> Result<Self> {
        // cudarc's default events do not record the time.
        let with_time = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        stream.record_event(with_time).map(Self).map_err(failed("stamping a GPU's time"))
    }
}

fn failed(what: &'static str) -> impl Fn(DriverError) -> Error {
    move |error| Error::other(format!("{what}: {error}"))
}

impl TimeStamp for CudaTimeStamp {
    fn is_past(&self) -> Result<bool> {
        let is_past = || {
            self.0.context().bind_to_thread()?;
            self.0.try_is_complete()
        };
        is_past().map_err(failed("asking a GPU for an event"))
    }

    fn micros_since(&self, earlier: &dyn TimeStamp) -> Result<f64> {
        let earlier: &dyn Any = earlier;
        let Some(Self(earlier)) = earlier.downcast_ref() else {
            return Err(Error::other("a time stamp of another device than a GPU"));
        };
        let millis = earlier.elapsed_ms(&self.0).map_err(failed("reading a GPU's times"))?;
        Ok(f64::from(millis) * 1e3)
    }
}
