//! The traits [`Accelerator`] and [`AcceleratorConfig`].

use std::any::Any;
use std::fmt::Debug;

use candle_core::Device;

use crate::{Error, Result};

/// The devices of one kind that this process may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Available {
    /// The host, which any number of ranks share: candle's CPU device. There is nothing to open.
    Host,
    /// Devices by identifiers unique to each, such as UUIDs. The list may be empty.
    Devices(Vec<String>),
}

/// The memory of a device, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Held by this process's tensors.
    pub held_bytes: u64,
    /// The largest `held_bytes` so far.
    pub peak_bytes: u64,
    /// Not taken by any process.
    pub free_bytes: u64,
    /// The device's capacity.
    pub total_bytes: u64,
}

/// A moment on a device, made by [`Accelerator::time_stamp`].
pub trait TimeStamp: Any + Send + Sync {
    /// Whether the device has reached this moment. Does not wait.
    ///
    /// # Errors
    /// If the device has failed.
    fn is_past(&self) -> Result<bool>;

    /// Microseconds from `earlier`, a stamp of the same device, to this one. Waits until the device
    /// has reached both.
    ///
    /// # Errors
    /// If the device has failed, or `earlier` belongs to another device.
    fn micros_since(&self, earlier: &dyn TimeStamp) -> Result<f64>;
}

/// The device that a rank computes on. No method communicates.
pub trait Accelerator: Debug + Send + Sync {
    /// The candle device on which tensors are made. All tensors of a rank must use this one handle:
    /// candle treats a device that is opened twice as two devices.
    fn device(&self) -> &Device;

    /// A description for people, such as `NVIDIA H200`.
    fn description(&self) -> String;

    /// The device's own memory; `None` if it uses the host's.
    ///
    /// # Errors
    /// If the device does not answer.
    fn memory(&self) -> Result<Option<DeviceMemory>> {
        Ok(None)
    }

    /// Stamps the moment at which all work now queued on the device is done, without waiting for
    /// it. `None` if the device works synchronously or lacks a clock.
    ///
    /// # Errors
    /// If the device does not answer.
    fn time_stamp(&self) -> Result<Option<Box<dyn TimeStamp>>> {
        Ok(None)
    }

    /// Whether an error says that the device ran out of memory.
    fn is_out_of_memory(&self, error: &Error) -> bool {
        let _ = error;
        false
    }
}

/// A kind of device and its options: `trainer.accelerator = "cuda"`.
///
/// Registered with `#[typetag::serde(name = "…")]` and
/// [`register_accelerator!`](fulgurite_config::register_accelerator). It must deserialise from its
/// `type` tag alone, because [`detect`](super::detect()) makes its candidates from names.
#[typetag::serde(tag = "type")]
pub trait AcceleratorConfig: Debug + Send + Sync {
    /// Priority in [`detect`](super::detect()), which takes the highest among usable accelerators.
    /// `None`: used only if named.
    fn priority(&self) -> Option<i32> {
        None
    }

    /// Whether this program was built with support for it.
    fn is_built(&self) -> bool {
        true
    }

    /// The accelerator to use instead, as `"auto"` chooses one; `None`: this one.
    ///
    /// # Errors
    /// If no accelerator can be chosen.
    fn chosen(&self) -> Result<Option<Box<dyn AcceleratorConfig>>> {
        Ok(None)
    }

    /// The devices this process may use. Opens none, since the process that starts the ranks asks
    /// too.
    ///
    /// # Errors
    /// [`Error::Config`] with the reason, if this program or machine cannot use it.
    fn available(&self) -> Result<Available>;

    /// Whether several ranks of a host may share a device.
    fn is_shared(&self) -> bool {
        false
    }

    /// Opens the device with this index in [`Available::Devices`], once in a rank.
    ///
    /// # Errors
    /// If the device cannot be opened.
    fn open(&self, index: usize) -> Result<Box<dyn Accelerator>>;
}

fulgurite_config::plugin_kind!(
    dyn AcceleratorConfig,
    fulgurite_config::registry::kind::ACCELERATOR,
    "trainer.accelerator"
);
