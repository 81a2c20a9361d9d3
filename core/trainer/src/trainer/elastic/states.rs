//! The states of a training in the memory of its hosts, from which its next generation may go on.
//!
//! Each host keeps the files of its own ranks and of the ranks of the host before it. States are
//! ordered by the generation that wrote them and then by step: a host that comes back may have
//! states of a generation that the others have left behind. States from before a restart of the job
//! do not count: its steps began again at a checkpoint.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::Result;
use fulgurite_checkpoint::{
    CheckpointIO, Hosts, HostsReader, OnHosts, parts_on_host, whole_on_hosts,
};
use fulgurite_config::PluginValue;
use fulgurite_config::registry::kind;
use fulgurite_engine::checkpoint_io::CheckpointIOConfig;
use fulgurite_engine::collective::{ProcessGroup, all_gather_object};
use fulgurite_launch::{attempt, generation, job_memories, job_memory, job_memory_id};

/// The directory in a host's memory.
const STATES: &str = "states";
/// Begins the names of states that are made while the training goes on.
const COPY: &str = "copy";
/// Begins the names of states that ranks write for the generation that begins.
const WRITTEN: &str = "written";

/// The name of this generation's copy after a step.
pub(super) fn copy_name(step: u64) -> String {
    name(COPY, generation(), step)
}

/// The name of the state that this generation begins with.
pub(super) fn written_name(step: u64) -> String {
    name(WRITTEN, generation(), step)
}

fn name(kind: &str, generation: u64, step: u64) -> String {
    format!("{kind}-{:04}-{generation:08}-{step:012}", restarts())
}

/// How often the job was started again.
fn restarts() -> u64 {
    attempt().map_or(0, |attempt| attempt.restart_count)
}

/// The generation and the step of a state; `None` if it is from before a restart.
fn age(name: &str) -> Option<(u64, u64)> {
    let mut parts = name.split('-').skip(1).map(str::parse::<u64>);
    let mut next = || parts.next()?.ok();
    let (of_start, generation, step) = (next()?, next()?, next()?);
    (of_start == restarts()).then_some((generation, step))
}

/// Gathers the hosts of the ranks. Collective.
pub(super) fn hosts(world: &Arc<dyn ProcessGroup>) -> Result<Hosts> {
    let alone = || format!("rank {}", world.rank());
    Hosts::gather(&**world, &job_memory_id().unwrap_or_else(alone))
}

/// For messages: where the copies are.
pub(super) fn describe_copies(hosts: &Hosts) -> String {
    match hosts.count() {
        1 => "the copies in the host's memory".to_owned(),
        _ => "the copies in the hosts' memory".to_owned(),
    }
}

/// Opens a directory of this host for checkpoints.
pub(super) fn open(place: &Path) -> Result<Arc<dyn CheckpointIO>> {
    PluginValue::new("local")
        .build::<Box<dyn CheckpointIOConfig>>(kind::CHECKPOINT_IO, "checkpoint.io")?
        .build(place)
}

/// The directories of this host for states, the best first. They need not exist.
pub(super) fn places() -> Vec<PathBuf> {
    job_memories().into_iter().map(|dir| dir.join(STATES)).collect()
}

/// Returns the directory of this host with room for `bytes`, in memory if possible.
pub(super) fn place_with_room(bytes: u64) -> Option<PathBuf> {
    Some(job_memory(bytes)?.join(STATES))
}

/// Removes all states in this host's memory. Called on one rank of the host.
pub(crate) fn remove_states() {
    for place in places() {
        if place.is_dir()
            && let Err(error) = std::fs::remove_dir_all(&place)
        {
            tracing::warn!("{} stays until the end of the job: {error}", place.display());
        }
    }
}

/// A state in the memory of the hosts, with all its files.
#[derive(Debug, Clone)]
pub(crate) struct MemoryState {
    pub(super) step: u64,
    files: OnHosts,
    hosts: Hosts,
}

/// What is in the memory of the hosts.
pub(super) struct Memory {
    /// The newest state with all its files.
    pub(super) newest: Option<MemoryState>,
    /// Whether there are files of states at all.
    pub(super) has_parts: bool,
}

impl Memory {
    /// Looks on all hosts. Collective.
    pub(super) fn of(world: &Arc<dyn ProcessGroup>, hosts: &Hosts) -> Result<Self> {
        let mut own = Vec::new();
        if hosts.leads(world.rank()) {
            for place in places() {
                own.append(&mut parts_on_host(&*open(&place)?)?);
            }
        }
        let mut all = all_gather_object(&**world, &own)?;
        let parts: Vec<_> =
            (0..hosts.count()).map(|host| std::mem::take(&mut all[hosts.leader(host)])).collect();
        let whole = whole_on_hosts(&parts).into_iter();
        let aged = whole.filter_map(|files| Some((age(&files.name)?, files)));
        let newest = aged.max_by_key(|(age, _)| *age).map(|((_, step), files)| MemoryState {
            step,
            files,
            hosts: hosts.clone(),
        });
        Ok(Self { newest, has_parts: parts.iter().any(|parts| !parts.is_empty()) })
    }
}

impl MemoryState {
    pub(crate) fn name(&self) -> &str {
        &self.files.name
    }

    /// Opens the state, for each rank to read its part. Collective.
    pub(crate) fn open(&self, world: &dyn ProcessGroup) -> Result<HostsReader> {
        self.files.open(world, &self.hosts, open)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_generation_is_newer() {
        let [old, new] = [name(COPY, 1, 30), name(WRITTEN, 2, 20)];
        assert_eq!((age(&old), age(&new)), (Some((1, 30)), Some((2, 20))));
        assert!(age(&new) > age(&old));
        assert_eq!(age(&old.replace("-0000-", "-0001-")), None, "of another start of the job");
        assert_eq!(age("step-00000010"), None);
    }
}
