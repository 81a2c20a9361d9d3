//! No tensor parallelism.

use fulgurite_core::Result;
use fulgurite_core::mesh::DeviceMesh;
use fulgurite_core::module::ModuleTree;
use fulgurite_core::strategy::{ParallelizeConfig, ParallelizeFn};
use serde::{Deserialize, Serialize};

/// `parallelize = "none"`: layers stay whole, and the strategy chooses the units.
#[derive(
    Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, fulgurite_core::config::Documented,
)]
#[serde(deny_unknown_fields, default)]
pub struct NoPlan {}

#[typetag::serde(name = "none")]
impl ParallelizeConfig for NoPlan {
    fn build(&self) -> Result<Box<dyn ParallelizeFn>> {
        Ok(Box::new(|_: &mut ModuleTree, _: &DeviceMesh| Ok(())))
    }
}

fulgurite_core::register_parallelize!(
    "none",
    NoPlan,
    "layers stay whole: no tensor parallelism",
    "\"none\""
);
