//! The traits [`Accelerator`] and [`AcceleratorConfig`].

use std::any::Any;
use std::fmt::Debug;

use candle_core::Device;

use crate::{Error, Result};

/// What this process may compute on, of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Available {
    /// The host, which any number of ranks share: candle's CPU. Nothing is opened.
    Host,
    /// These devices, by identifiers that no other device has, such as UUIDs; there may be none.
    Devices(Vec<String>),
}

/// The memory of a device, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// What this process's tensors hold.
    pub held_bytes: u64,
    /// The most that they have held.
    pub peak_bytes: u64,
    /// What no process has taken.
    pub free_bytes: u64,
    /// What the device has.
    pub total_bytes: u64,
}

/// A moment on a device: of [`Accelerator::time_stamp`].
pub trait TimeStamp: Any + Send + Sync {
    /// Whether the device has come to it. Does not wait.
    ///
    /// # Errors
    /// If the device has failed.
    fn is_past(&self) -> Result<bool>;

    /// Microseconds from `earlier`, a stamp of the same device, to this one. Waits until the device has come to both.
    ///
    /// # Errors
    /// If the device has failed, or `earlier` is of another one.
    fn micros_since(&self, earlier: &dyn TimeStamp) -> Result<f64>;
}

/// The device that a rank computes on. No method communicates.
pub trait Accelerator: Debug + Send + Sync {
    /// Where tensors are made. All tensors of a rank are of this one device: candle takes a device that is
    /// opened a second time for another one.
    fn device(&self) -> &Device;

    /// What it is, for people: `NVIDIA H200`.
    fn description(&self) -> String;

    /// Its memory; `None` if that is the host's.
    ///
    /// # Errors
    /// If the device does not answer.
    fn memory(&self) -> Result<Option<DeviceMemory>> {
        Ok(None)
    }

    /// Stamps the moment at which all that was queued on the device until now has run. Nothing waits for it. `None`: the
    /// device does what it is told before the call returns, or has no clock.
    ///
    /// # Errors
    /// If the device does not answer.
    fn time_stamp(&self) -> Result<Option<Box<dyn TimeStamp>>> {
        Ok(None)
    }

    /// Whether an error says that the device has no memory left.
    fn is_out_of_memory(&self, error: &Error) -> bool {
        let _ = error;
        false
    }
}

/// A kind of device, and the options it is used with: `trainer.accelerator = "cuda"`.
///
/// Registered with `#[typetag::serde(name = "…")]` and
/// [`register_accelerator!`](fulgurite_config::register_accelerator). It must deserialise from its `type` tag
/// alone, since that is how [`detect`](super::detect()) makes the candidates.
#[typetag::serde(tag = "type")]
pub trait AcceleratorConfig: Debug + Send + Sync {
    /// Of those that can be used here, [`detect`](super::detect()) takes the one with the highest priority.
    /// `None`: it is only used if its name is given.
    fn priority(&self) -> Option<i32> {
        None
    }

    /// Whether this program can use it at all, on a machine that has it.
    fn is_built(&self) -> bool {
        true
    }

    /// What takes its place; `None`: nothing does. `"auto"` chooses so.
    ///
    /// # Errors
    /// If there is nothing to choose.
    fn chosen(&self) -> Result<Option<Box<dyn AcceleratorConfig>>> {
        Ok(None)
    }

    /// What this process may use. Opens nothing: the process that starts the ranks asks too.
    ///
    /// # Errors
    /// [`Error::Config`], if this program or this machine cannot use it, with the reason.
    fn available(&self) -> Result<Available>;

    /// Whether several ranks of a host may take one device.
    fn is_shared(&self) -> bool {
        false
    }

    /// Opens the device of this index in [`Available::Devices`], once in a rank.
    ///
    /// # Errors
    /// If it cannot be opened.
    fn open(&self, index: usize) -> Result<Box<dyn Accelerator>>;
}

fulgurite_config::plugin_kind!(
    dyn AcceleratorConfig,
    fulgurite_config::registry::kind::ACCELERATOR,
    "trainer.accelerator"
);
