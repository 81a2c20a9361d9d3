//! The device to check.

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
    /// The name in `trainer.accelerator` and in this program's options.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Cpu => "cpu",
        }
    }
}

/// The device to check.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct Target {
    /// Device to check; of several GPUs the first in CUDA_VISIBLE_DEVICES
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

    /// Checks that the device exists, without opening it.
    pub(crate) fn check(self) -> Result<()> {
        match self.config(json!({}))?.available()? {
            Available::Devices(devices) if devices.is_empty() => Err(Error::other(
                "there is no GPU that this process may use. Is there one, and what does \
                 CUDA_VISIBLE_DEVICES say?",
            )),
            _ => Ok(()),
        }
    }

    /// Opens the device as a rank does.
    pub(crate) fn open(self) -> Result<Box<dyn Accelerator>> {
        self.open_with(json!({}))
    }

    /// Number of such devices that this process may use; 1 for CPUs.
    #[cfg(feature = "cuda")]
    pub(crate) fn count(self) -> Result<usize> {
        match self.config(json!({}))?.available()? {
            Available::Devices(devices) => Ok(devices.len()),
            _ => Ok(1),
        }
    }

    /// Opens one of several devices.
    #[cfg(feature = "cuda")]
    pub(crate) fn open_at(self, index: usize) -> Result<Box<dyn Accelerator>> {
        self.config(json!({}))?.open(index)
    }

    /// Opens the device with options for the accelerator `cuda`.
    pub(crate) fn open_with(self, options: serde_json::Value) -> Result<Box<dyn Accelerator>> {
        self.config(options)?.open(0)
    }

    /// Opens the device and returns only its candle device.
    pub(crate) fn device(self) -> Result<Device> {
        Ok(self.open()?.device().clone())
    }
}
