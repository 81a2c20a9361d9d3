//! [`EveryOther`], a parallelize function.

use fulgurite_core::Result;
use fulgurite_core::mesh::DeviceMesh;
use fulgurite_core::module::ModuleTree;
use fulgurite_core::strategy::{ParallelizeConfig, ParallelizeFn};
use serde::{Deserialize, Serialize};

/// Makes every other unit a unit of FSDP; the rest belongs to the root unit, which stays gathered
/// during a step. Less communication than with all units, less memory than without any.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EveryOther {}

#[typetag::serde(name = "every_other")]
impl ParallelizeConfig for EveryOther {
    fn build(&self) -> Result<Box<dyn ParallelizeFn>> {
        Ok(Box::new(every_other))
    }
}

fulgurite_core::register_parallelize!(
    "every_other",
    EveryOther,
    "every other unit is sharded on its own, the rest with the root",
    "\"every_other\""
);

fn every_other(model: &mut ModuleTree, _mesh: &DeviceMesh) -> Result<()> {
    let units: Vec<_> = model.units().iter().map(|unit| unit.path().to_owned()).collect();
    units.iter().step_by(2).try_for_each(|path| model.fully_shard_matching(path))
}
