//! The configured device that a rank computes on.

use std::sync::Arc;

use super::Fabric;
use crate::run::{TrainerConfig, available_cores};
use crate::{Error, Result};
use candle_core::Device;
use fulgurite_config::registry::{self, kind};
use fulgurite_engine::accelerator::{
    Accelerator, AcceleratorConfig, Available, DeviceMemory, RankDevices, place,
};
use fulgurite_engine::collective::{ProcessGroup, all_gather_object};

impl TrainerConfig {
    /// Whether the configuration needs a plugin.
    ///
    /// With `"auto"` a program without plugins computes on the host.
    pub(crate) fn names_accelerator(&self) -> bool {
        self.accelerator.name != "auto" || !registry::names(kind::ACCELERATOR).is_empty()
    }

    /// Returns the chosen kind of device; `None` is the host.
    ///
    /// # Errors
    /// If the plugin is unknown, or an option is wrong.
    pub(super) fn accelerator(&self) -> Result<Option<Box<dyn AcceleratorConfig>>> {
        if !self.names_accelerator() {
            return Ok(None);
        }
        let named = self
            .accelerator
            .build::<Box<dyn AcceleratorConfig>>(kind::ACCELERATOR, "trainer.accelerator")?;
        Ok(Some(match named.chosen()? {
            Some(chosen) => chosen,
            None => named,
        }))
    }

    /// Returns how many devices of the chosen kind this process sees; `None` is the host.
    ///
    /// # Errors
    /// As [`accelerator`](Self::accelerator), and if this process can use no such device.
    pub(crate) fn visible_devices(&self) -> Result<Option<usize>> {
        let Some(accelerator) = self.accelerator()? else { return Ok(None) };
        match accelerator.available()? {
            Available::Host => Ok(None),
            Available::Devices(devices) if devices.is_empty() => Err(Error::Config(format!(
                "`trainer.accelerator` = \"{}\": this machine has no such device, or none that this process may use",
                accelerator.typetag_name()
            ))),
            Available::Devices(devices) => Ok(Some(devices.len())),
        }
    }

    /// Returns the number of ranks without a launcher: one per device, or one per core of the host.
    ///
    /// # Errors
    /// As [`visible_devices`](Self::visible_devices).
    pub(crate) fn ranks_if_alone(&self) -> Result<usize> {
        Ok(self.visible_devices()?.unwrap_or_else(available_cores))
    }

    /// Opens this rank's device; `None` is the host. Collective in programs that can use devices.
    ///
    /// # Errors
    /// As [`place`], and if the device cannot be opened.
    pub(super) fn open_accelerator(
        &self,
        world: &dyn ProcessGroup,
    ) -> Result<Option<Arc<dyn Accelerator>>> {
        let Some(accelerator) = self.accelerator()? else { return Ok(None) };
        let available = accelerator.available()?;
        if available == Available::Host && !may_differ(self)? {
            return Ok(None);
        }
        let own = RankDevices {
            host: host(),
            kind: accelerator.typetag_name().to_owned(),
            devices: match available {
                Available::Host => None,
                Available::Devices(devices) => Some(devices),
            },
        };
        let ranks = all_gather_object(world, &own)?;
        let index = place(&ranks, accelerator.is_shared())?[world.rank()];
        match own.devices {
            None => Ok(None),
            Some(_) => Ok(Some(accelerator.open(index)?.into())),
        }
    }
}

/// Whether other ranks of this program may choose a device while this rank chooses the host.
///
/// True with `"auto"`, if the program was built for any kind of device.
fn may_differ(config: &TrainerConfig) -> Result<bool> {
    if config.accelerator.name != "auto" {
        return Ok(false);
    }
    for name in registry::names(kind::ACCELERATOR).into_iter().filter(|&name| name != "auto") {
        let candidate = fulgurite_config::PluginValue::new(name);
        let candidate = candidate
            .build::<Box<dyn AcceleratorConfig>>(kind::ACCELERATOR, "trainer.accelerator")?;
        let is_host = || candidate.available().is_ok_and(|available| available == Available::Host);
        if candidate.priority().is_some() && candidate.is_built() && !is_host() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns this host's name.
///
/// Containers of one host have different names, and may see different devices.
pub(crate) fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

impl Fabric {
    /// Returns the device of this rank's parameters and batches, Lightning's `root_device`.
    pub fn device(&self) -> &Device {
        &self.init.device
    }

    /// Adds the device's memory use to an out-of-memory error.
    pub(crate) fn explain(&self, error: Error) -> Error {
        let Some(accelerator) =
            self.accelerator.as_ref().filter(|one| one.is_out_of_memory(&error))
        else {
            return error;
        };
        match accelerator.memory() {
            Ok(Some(memory)) => error.during(out_of_memory(&accelerator.description(), memory)),
            _ => error,
        }
    }
}

fn out_of_memory(device: &str, memory: DeviceMemory) -> String {
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    format!(
        "out of memory on {device}: of {:.2} GiB, tensors of this rank hold {:.2} GiB and have held at most {:.2}; \
         {:.2} GiB are free. Make `data.batch_size` smaller and `trainer.accumulate_grad_batches` larger, set \
         `trainer.activation_checkpointing`, or shard over more ranks",
        gib(memory.total_bytes),
        gib(memory.held_bytes),
        gib(memory.peak_bytes),
        gib(memory.free_bytes)
    )
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    #[test]
    fn out_of_memory_error_shows_memory_use() {
        let memory = DeviceMemory {
            held_bytes: 70 << 30,
            peak_bytes: 71 << 30,
            free_bytes: 1 << 29,
            total_bytes: 80 << 30,
        };
        let error = Error::module("layers.3", "CUDA_ERROR_OUT_OF_MEMORY");
        assert_says!(
            error.during(out_of_memory("NVIDIA H100", memory)),
            "module `layers.3`: CUDA_ERROR_OUT_OF_MEMORY … NVIDIA H100: of 80.00 GiB … 70.00 GiB … \
             71.00; 0.50 GiB … `data.batch_size` … `trainer.accumulate_grad_batches` …"
        );
    }
}
