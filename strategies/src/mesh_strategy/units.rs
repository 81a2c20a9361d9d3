//! The choice of units to gather, to keep after forward and to prefetch.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use fulgurite_engine::collective::ProcessGroup;
use fulgurite_engine::module::{ModuleTree, Reshard};
use fulgurite_error::{Error, Result};

use super::Settings;
use super::sharded::PrefetchLists;

/// Whether each unit is gathered on its own: by the tree's choices of a parallelize function if it
/// chose any unit, even the root; else by `shard_conditions`; else every unit.
pub(super) fn choose(settings: &Settings, tree: &ModuleTree) -> Result<Vec<bool>> {
    let units = tree.units();
    if tree.has_fully_shard_choice() {
        return Ok(units.iter().map(|unit| tree.is_fully_sharded(unit.path())).collect());
    }
    let chosen = if settings.shard_conditions.is_empty() {
        vec![true; units.len()]
    } else {
        let mut matching = BTreeSet::new();
        for pattern in &settings.shard_conditions {
            let mut of_pattern = tree.units_matching(pattern).peekable();
            if of_pattern.peek().is_none() {
                let paths: Vec<&str> = units.iter().map(|unit| unit.path()).collect();
                return Err(Error::Config(format!(
                    "`trainer.strategy.shard_conditions`: `{pattern}` matches no unit of the model; it has {}",
                    if paths.is_empty() { "none".to_owned() } else { paths.join(", ") }
                )));
            }
            matching.extend(of_pattern.map(|unit| unit.path().to_owned()));
        }
        units.iter().map(|unit| matching.contains(unit.path())).collect()
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
             ({})",
            settings.shard_conditions.join(", "),
            paths.join(", ")
        )
    }))
}

/// Groups of neighbouring ranks that keep parts of units after forward, by group size.
pub(super) type PartGroups = BTreeMap<usize, Arc<dyn ProcessGroup>>;

/// The treatment after forward of each unit in `chosen`, and the groups that keep parts. Collective
/// over `group`, the ranks that share parameters.
pub(super) fn reshard(
    settings: &Settings,
    tree: &ModuleTree,
    chosen: &[bool],
    group: &Arc<dyn ProcessGroup>,
) -> Result<(Vec<Reshard>, PartGroups)> {
    let last = chosen.iter().rposition(|&chosen| chosen);
    let [of_most, of_last] = settings.reshard_after_forward.units();
    let mut groups = PartGroups::new();
    let mut reshard = Vec::with_capacity(chosen.len());
    for (index, unit) in tree.units().iter().enumerate() {
        let own = tree.fully_shard_options(unit.path());
        let own = own.and_then(|options| options.reshard_after_forward);
        let of_unit = own.unwrap_or(if Some(index) == last { of_last } else { of_most });
        reshard.push(match of_unit {
            Reshard::Ranks(ranks) if chosen[index] => {
                let (of_unit, size) =
                    (check_ranks(unit.path(), ranks, group.size())?, group.size());
                if of_unit == Reshard::Ranks(ranks) && !groups.contains_key(&ranks) {
                    let neighbours = (0..size).step_by(ranks).map(|r| (r..r + ranks).collect());
                    let partition: Vec<Vec<usize>> = neighbours.collect();
                    groups.insert(ranks, group.split(&partition, "reshard_after_forward")?);
                }
                of_unit
            }
            of_unit => of_unit,
        });
    }
    Ok((reshard, groups))
}

/// Converts the number of ranks that keep parts into the treatment after forward.
fn check_ranks(path: &str, ranks: usize, size: usize) -> Result<Reshard> {
    if ranks == size {
        return Ok(Reshard::Always);
    }
    match ranks {
        1 => Ok(Reshard::Never),
        2.. if size.is_multiple_of(ranks) => Ok(Reshard::Ranks(ranks)),
        _ => {
            let divisors = (1..=size).filter(|n| size.is_multiple_of(*n));
            let divisors: Vec<String> = divisors.map(|n| n.to_string()).collect();
            Err(Error::module(
                path,
                format!(
                    "`reshard_after_forward` = {ranks} must divide the number of ranks that share \
                     parameters, which is {size}: it can be {} (1 is as `false`, {size} as `true`)",
                    divisors.join(", ")
                ),
            ))
        }
    }
}

/// The prefetch lists of a parallelize function, by group. `units` has each unit's group, if the
/// unit is gathered on its own.
pub(super) fn prefetch_lists(
    tree: &ModuleTree,
    units: &[Option<usize>],
) -> Result<Vec<PrefetchLists>> {
    let group_of = |path: &str| {
        let index = tree.units().iter().position(|unit| unit.path() == path)?;
        units[index]
    };
    let mut lists = Vec::new();
    for unit in tree.units() {
        let of_unit = [unit.units_to_forward_prefetch(), unit.units_to_backward_prefetch()];
        if of_unit.iter().all(Vec::is_empty) {
            continue;
        }
        let own_group = |path: &str| {
            group_of(path).ok_or_else(|| {
                let own = tree.units().iter().zip(units).filter(|(_, group)| group.is_some());
                let own: Vec<&str> = own.map(|(unit, _)| unit.path()).collect();
                Error::module(
                    unit.path(),
                    format!(
                        "its prefetch lists are about `{path}`, which is not gathered on its own; \
                         units that are: {}",
                        own.join(", ")
                    ),
                )
            })
        };
        let group = own_group(unit.path())?;
        let [forward, backward] =
            of_unit.map(|list| list.iter().map(|path| own_group(path)).collect::<Result<_>>());
        lists.push(PrefetchLists { group, forward: forward?, backward: backward? });
    }
    Ok(lists)
}
