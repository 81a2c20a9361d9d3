//! The copies of shards in the memory of the hosts, planned.

use std::collections::BTreeMap;

use serde::Serialize;

use super::rank_run::Model;
use crate::run::TrainerConfig;
use fulgurite_checkpoint::Hosts;
use fulgurite_engine::mesh::{DATA_PARALLEL_REPLICATE, DeviceMesh};
use fulgurite_engine::shard::ShardSpec;

/// Copies of shards in the memory of the hosts (`trainer.elastic.replicas`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PlannedCopies {
    /// Optimizer steps between two copies.
    pub every_n_steps: u64,
    /// Bytes in the memory of the host that holds most: two copies, while one replaces the other,
    /// and what its ranks copy from.
    pub host_bytes: u64,
    /// Bytes that all ranks together send to other hosts for a copy; 0 on one host.
    pub sent_bytes: u64,
}

/// The bytes of a checkpoint: for each parameter, by name, and of other state.
#[derive(Debug, Clone, Default)]
pub(super) struct StateBytes {
    parameters: BTreeMap<String, (ShardSpec, usize)>,
    /// The bytes of state that is whole on the first rank.
    of_first_rank: u64,
}

impl StateBytes {
    /// Adds a tensor with the shape of a parameter.
    pub(super) fn add(&mut self, fqn: &str, spec: ShardSpec, bytes_per_element: usize) {
        let (_, bytes) = self.parameters.entry(fqn.to_owned()).or_insert((spec, 0));
        *bytes += bytes_per_element;
    }

    pub(super) fn add_whole(&mut self, bytes: u64) {
        self.of_first_rank += bytes;
    }

    /// The bytes of a whole checkpoint.
    pub(super) fn all(&self) -> u64 {
        let bytes = |(spec, per_element): &(ShardSpec, usize)| {
            (spec.shape.iter().product::<usize>() * per_element) as u64
        };
        self.parameters.values().map(bytes).sum::<u64>() + self.of_first_rank
    }

    /// The bytes of a rank's part.
    fn of(&self, mesh: &DeviceMesh, rank: usize) -> u64 {
        let coordinate = |dim: &str| mesh.coordinate_of(rank, dim).unwrap_or(0);
        let bytes = |(spec, per_element): &(ShardSpec, usize)| {
            (spec.owned_region(coordinate).elem_count() * per_element) as u64
        };
        let own = self.parameters.values().map(bytes).sum::<u64>();
        if rank == 0 { own + self.of_first_rank } else { own }
    }
}

/// Number of replicas, each of which has the whole state.
pub(super) fn replicas(mesh: &DeviceMesh) -> usize {
    let (names, sizes) = (mesh.layout().names(), mesh.layout().sizes());
    let place = names.iter().position(|name| name == DATA_PARALLEL_REPLICATE);
    place.map_or(1, |place| sizes[place])
}

/// Returns the copies of a run, whose models are as the ranks of the classes have seen them. `None`
/// if the configuration asks for none, or each rank has everything.
pub(super) fn planned_copies<'a>(
    config: &TrainerConfig,
    models: impl Iterator<Item = &'a Model>,
    ranks_per_host: usize,
) -> Option<PlannedCopies> {
    let elastic = &config.elastic;
    if !elastic.enabled || elastic.replicas == 0 {
        return None;
    }
    let mut all = StateBytes::default();
    let mut mesh = None;
    for model in models {
        mesh = mesh.or(model.mesh.as_ref());
        all.of_first_rank = all.of_first_rank.max(model.state.of_first_rank);
        // A stage of a pipeline knows the state of its own parameters.
        for (fqn, (spec, bytes)) in &model.state.parameters {
            let known = all.parameters.entry(fqn.clone()).or_insert((spec.clone(), 0));
            known.1 = known.1.max(*bytes);
        }
    }
    let mesh = mesh?;
    let world_size = mesh.layout().world_size();
    if replicas(mesh) == world_size {
        return None;
    }
    let parts: Vec<u64> = (0..world_size).map(|rank| all.of(mesh, rank)).collect();
    let of_rank = |rank: usize| (rank / ranks_per_host.max(1)).to_string();
    let hosts = Hosts::new(&(0..world_size).map(of_rank).collect::<Vec<_>>());
    let buffers = |host| hosts.ranks(host).iter().map(|rank| parts[*rank]).sum::<u64>();
    let files = hosts.bytes(&parts).into_iter().enumerate();
    Some(PlannedCopies {
        every_n_steps: elastic.replicate_every_n_steps,
        host_bytes: files.map(|(host, bytes)| 2 * bytes + buffers(host)).max().unwrap_or(0),
        sent_bytes: if hosts.count() > 1 { parts.iter().sum() } else { 0 },
    })
}
