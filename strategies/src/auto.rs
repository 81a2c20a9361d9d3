//! The strategy `auto`, which depends on the number of ranks.

use fulgurite_engine::strategy::{BuildContext, Strategy, StrategyConfig};
use fulgurite_error::Result;
use serde::{Deserialize, Serialize};

use crate::{Ddp, SingleDevice};

/// `strategy = "auto"`: `single_device` on one rank, `ddp` on more.
#[derive(Debug, Clone, Default, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields)]
pub struct Auto {}

#[typetag::serde(name = "auto")]
impl StrategyConfig for Auto {
    fn build(&self, context: &BuildContext) -> Result<Box<dyn Strategy>> {
        if context.world_size == 1 {
            SingleDevice::default().build(context)
        } else {
            Ddp::default().build(context)
        }
    }
}

fulgurite_config::register_strategy!(
    "auto",
    Auto,
    "single_device on one rank, ddp on more",
    "\"auto\""
);
