//! Which units are gathered on their own.

use fulgurite_core::module::{ModuleTree, glob_match};
use fulgurite_core::{Error, Result};

use super::Settings;

/// Whether each unit is gathered on its own: as a parallelize function chose in the tree; if it chose
/// nothing, not even the root, as `shard_conditions` say; without those, every unit.
pub(super) fn choose(settings: &Settings, tree: &ModuleTree) -> Result<Vec<bool>> {
    let units = tree.units();
    if tree.has_fully_shard_choice() {
        return Ok(units.iter().map(|unit| tree.is_fully_sharded(unit.path())).collect());
    }
    let chosen = if settings.shard_conditions.is_empty() {
        vec![true; units.len()]
    } else {
        let matches = |path: &str| settings.shard_conditions.iter().any(|p| glob_match(p, path));
        units.iter().map(|unit| matches(unit.path())).collect()
    };
    if chosen.contains(&true) || settings.allow_root_only {
        return Ok(chosen);
    }
    let paths: Vec<&str> = units.iter().map(|unit| unit.path()).collect();
    Err(Error::other(if paths.is_empty() {
        "no layer modules were sharded: the model has no units. Build the blocks that are worth \
         gathering on their own with `ModuleBuilder::unit`, or set \
         `trainer.strategy.allow_root_only = true` to gather the whole model at once"
            .to_owned()
    } else {
        format!(
            "no layer modules were sharded: `shard_conditions` ({}) chose none of the model's units \
             ({}). A pattern is a whole path, in which `*` is one segment",
            settings.shard_conditions.join(", "),
            paths.join(", ")
        )
    }))
}
