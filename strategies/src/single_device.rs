//! One process with the whole model.

use fulgurite_engine::strategy::{BuildContext, Strategy, StrategyConfig};
use fulgurite_error::Result;
use serde::{Deserialize, Serialize};

use crate::mesh_strategy::{MeshStrategy, Settings, Sharding};

/// `strategy = "single_device"`: one process, no communication.
#[derive(Debug, Clone, Default, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields)]
pub struct SingleDevice {}

#[typetag::serde(name = "single_device")]
impl StrategyConfig for SingleDevice {
    fn build(&self, _context: &BuildContext) -> Result<Box<dyn Strategy>> {
        Ok(Box::new(MeshStrategy::new(Settings {
            one_rank_only: true,
            ..Settings::new("single_device", [Some(1); 4], Sharding::Never)
        })))
    }
}

fulgurite_config::register_strategy!(
    "single_device",
    SingleDevice,
    "one process with the whole model",
    "\"single_device\""
);
