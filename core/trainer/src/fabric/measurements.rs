//! Times and memory of a run.

use std::borrow::Cow;

use super::Fabric;
use crate::Result;
use crate::profiler::{LogExecutionTime, Phase, Profile};
use fulgurite_engine::accelerator::DeviceMemory;

/// Measurements of a run: times, the profile, the device's memory; see [`Fabric::measurements`].
pub struct Measurements<'a>(&'a Fabric);

impl Fabric {
    /// Returns the measurements of this run.
    pub fn measurements(&self) -> Measurements<'_> {
        Measurements(self)
    }
}

impl Measurements<'_> {
    /// When the program was started, in seconds since 1970; `None` if this Fabric was not launched.
    pub fn program_start(&self) -> Option<f64> {
        self.0.launched.as_ref().map(|launched| launched.program_start)
    }

    /// Returns a guard that logs on this rank how long it lived, like composer's
    /// `log_execution_time`.
    ///
    /// `FULGURITE_LOG=fulgurite::time=debug` shows these times. Fabric itself logs the time of
    /// setting up the model and of loading. For work in every step, use [`phase`](Self::phase).
    pub fn log_execution_time(&self, what: impl Into<Cow<'static, str>>) -> LogExecutionTime {
        LogExecutionTime::begin(self.0.global_rank(), what)
    }

    /// Begins a phase for `trainer.profiler` and NVIDIA's tools. Dropping the guard ends it.
    ///
    /// Returns `None` without a profiler or such a tool. A phase within another phase counts as
    /// part of the outer one.
    #[must_use = "a phase ends when its guard is dropped"]
    pub fn phase(&self, name: &'static str) -> Option<Phase> {
        self.0.runtime.phase(name)
    }

    /// Returns the profile since the last call; `None` without `trainer.profiler`. Collective.
    ///
    /// Also returns the text of a trace file if spans were traced. The trainer calls this at the
    /// end of a run.
    ///
    /// # Errors
    /// If a peer fails.
    pub fn profile(&self) -> Result<Option<(Profile, Option<String>)>> {
        let Some(profiler) = self.0.runtime.profiler() else { return Ok(None) };
        profiler.finish(&**self.0.world()).map(Some)
    }

    /// Like [`profile`](Self::profile), for this rank alone, because other ranks may have failed.
    /// `None` also if nothing was recorded.
    pub(crate) fn own_profile(&self) -> Result<Option<(Profile, Option<String>)>> {
        self.0.runtime.profiler().map_or(Ok(None), |profiler| profiler.finish_alone())
    }

    /// Returns the memory of this rank's device.
    ///
    /// `None` on the host, or if the device was given as a
    /// [`ModuleInit`](fulgurite_engine::module::ModuleInit).
    ///
    /// # Errors
    /// If the device does not answer.
    pub fn device_memory(&self) -> Result<Option<DeviceMemory>> {
        self.0.accelerator.as_ref().map_or(Ok(None), |accelerator| accelerator.memory())
    }

    /// Returns a description of the device; `None` as for [`device_memory`](Self::device_memory).
    pub(crate) fn device_description(&self) -> Option<String> {
        self.0.accelerator.as_ref().map(|accelerator| accelerator.description())
    }
}
