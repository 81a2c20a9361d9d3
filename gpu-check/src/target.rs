//! The device that is checked.

use candle_core::Device;
use clap::{Args, ValueEnum};
use fulgurite::core::accelerator::{Accelerator, AcceleratorConfig, Available};
use fulgurite_error::{Error, Result};
use serde_json::json;

/// A kind of device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    /// A GPU of NVIDIA
    Cuda,
    /// The host, against itself
    Cpu,
}

impl Kind {
    /// As `trainer.accelerator` and this program's options have it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Cpu => "cpu",
        }
    }
}

/// The device that is checked.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct Target {
    /// What is checked; of several GPUs the first in CUDA_VISIBLE_DEVICES
    #[arg(long, value_enum, default_value = "cuda")]
    pub(crate) device: Kind,
}

impl Target {
    fn config(self, options: serde_json::Value) -> Result<Box<dyn AcceleratorConfig>> {
        let mut config = json!({ "type": self.device.name() });
        if let (Some(config), Kind::Cuda, serde_json::Value::Object(options)) =
            (config.as_object_mut(), self.device, options)
        {
            config.extend(options);
        }
        serde_json::from_value(config).map_err(Error::other)
    }

    /// Checks that there is such a device; opens none.
    pub(crate) fn check(self) -> Result<()> {
        match self.config(json!({}))?.available()? {
            Available::Devices(devices) if devices.is_empty() => Err(Error::other(
                "there is no GPU that this process may use. Is there one, and what does \
                 CUDA_VISIBLE_DEVICES say?",
            )),
            _ => Ok(()),
        }
    }

    /// Opens it, as a rank does.
    pub(crate) fn open(self) -> Result<Box<dyn Accelerator>> {
        self.open_with(json!({}))
    }

    /// How many of these there are that this process may use; of CPUs, one.
    #[cfg(feature = "cuda")]
    pub(crate) fn count(self) -> Result<usize> {
        match self.config(json!({}))?.available()? {
            Available::Devices(devices) => Ok(devices.len()),
            _ => Ok(1),
        }
    }

    /// Opens one of several.
    #[cfg(feature = "cuda")]
    pub(crate) fn open_at(self, index: usize) -> Result<Box<dyn Accelerator>> {
        self.config(json!({}))?.open(index)
    }

    /// Opens it with options of the accelerator `cuda`.
    pub(crate) fn open_with(self, options: serde_json::Value) -> Result<Box<dyn Accelerator>> {
        self.config(options)?.open(0)
    }

    /// Its device, for steps that need no more.
    pub(crate) fn device(self) -> Result<Device> {
        Ok(self.open()?.device().clone())
    }
}
