//! No tensor parallelism.

use fulgurite_engine::mesh::DeviceMesh;
use fulgurite_engine::module::ModuleTree;
use fulgurite_engine::strategy::{ParallelizeConfig, ParallelizeFn};
use fulgurite_error::Result;
use serde::{Deserialize, Serialize};

/// `parallelize = "none"`: layers stay whole, and the strategy chooses the units.
#[derive(
    Debug,
    Clone,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    fulgurite_config_derive::Documented,
)]
#[serde(deny_unknown_fields, default)]
pub struct NoPlan {}

#[typetag::serde(name = "none")]
impl ParallelizeConfig for NoPlan {
    fn build(&self) -> Result<Box<dyn ParallelizeFn>> {
        Ok(Box::new(|_: &mut ModuleTree, _: &DeviceMesh| Ok(())))
    }
}

fulgurite_config::register_parallelize!(
    "none",
    NoPlan,
    "layers stay whole: no tensor parallelism",
    "\"none\""
);
