//! The accelerator `cpu`.

use candle_core::Device;
use fulgurite_config::register_accelerator;
use fulgurite_engine::accelerator::{Accelerator, AcceleratorConfig, Available};
use fulgurite_error::Result;
use serde::{Deserialize, Serialize};

/// The cores of the host, shared by its ranks.
#[derive(Debug, Clone, Default, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields)]
pub struct Cpu {}

register_accelerator!("cpu", Cpu, "The cores of the host", r#""cpu""#);

#[typetag::serde(name = "cpu")]
impl AcceleratorConfig for Cpu {
    fn priority(&self) -> Option<i32> {
        Some(0)
    }

    fn available(&self) -> Result<Available> {
        Ok(Available::Host)
    }

    fn open(&self, _: usize) -> Result<Box<dyn Accelerator>> {
        Ok(Box::new(Host))
    }
}

#[derive(Debug)]
struct Host;

impl Accelerator for Host {
    fn device(&self) -> &Device {
        &Device::Cpu
    }

    fn description(&self) -> String {
        "CPU".to_owned()
    }
}
