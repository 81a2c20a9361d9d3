//! The accelerator `auto`: the best one available.

use fulgurite_config::register_accelerator;
use fulgurite_engine::accelerator::{Accelerator, AcceleratorConfig, Available, detect};
use fulgurite_error::Result;
use serde::{Deserialize, Serialize};

/// The linked accelerator with the highest priority that has a device here.
#[derive(Debug, Clone, Default, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields)]
pub struct Auto {}

register_accelerator!(
    "auto",
    Auto,
    "The best there is: CUDA, if it is built in and has a device, else the CPU",
    r#""auto""#
);

#[typetag::serde(name = "auto")]
impl AcceleratorConfig for Auto {
    fn chosen(&self) -> Result<Option<Box<dyn AcceleratorConfig>>> {
        detect().map(Some)
    }

    fn available(&self) -> Result<Available> {
        detect()?.available()
    }

    fn open(&self, index: usize) -> Result<Box<dyn Accelerator>> {
        detect()?.open(index)
    }
}
