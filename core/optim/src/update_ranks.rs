//! The ranks that update a model together.

use std::collections::HashMap;
use std::sync::Arc;

use crate::{Error, Result};
use fulgurite_collective::collective::ProcessGroup;
use fulgurite_collective::mesh::DeviceMesh;
use fulgurite_collective::shard::{Placement, Region, ShardSpec};
use fulgurite_module::parameter::Parameter;

/// The ranks that together hold and update one copy of the model, for optimizers that compute with
/// whole tensors.
///
/// `Fabric` gives it to each optimizer before its first step
/// ([`Optimizer::set_ranks`](super::Optimizer::set_ranks)). They are all ranks of the job, or one
/// replica's if replicas train apart. While an optimizer steps, nothing else uses the group.
#[derive(Clone)]
pub struct UpdateRanks {
    group: Arc<dyn ProcessGroup>,
    mesh: DeviceMesh,
    /// The mesh's ranks of the group.
    members: Vec<usize>,
    /// The mesh's dimensions and views along which the group's ranks do not differ.
    outside: Vec<String>,
}

impl UpdateRanks {
    /// All ranks of a mesh. Not collective.
    ///
    /// # Errors
    /// As [`within`](Self::within).
    pub fn new(mesh: &DeviceMesh) -> Result<Self> {
        Self::within(mesh, mesh.world().clone())
    }

    /// The ranks of a group within a mesh. Not collective.
    ///
    /// # Errors
    /// If a rank of the group is not in the mesh.
    pub fn within(mesh: &DeviceMesh, group: Arc<dyn ProcessGroup>) -> Result<Self> {
        let all = mesh.world().global_ranks().iter().enumerate();
        let all: HashMap<usize, usize> = all.map(|(member, rank)| (*rank, member)).collect();
        let member = |rank: &usize| {
            let member = all.get(rank).copied();
            member.ok_or_else(|| Error::Mesh(format!("rank {rank} is not in the mesh")))
        };
        let members = group.global_ranks().iter().map(member).collect::<Result<Vec<_>>>()?;
        let mut outside = Vec::new();
        for name in mesh.names() {
            let coordinates = members.iter().map(|rank| mesh.coordinate_of(*rank, name));
            let coordinates = coordinates.collect::<Result<Vec<_>>>()?;
            if coordinates.iter().all(|coordinate| *coordinate == coordinates[0]) {
                outside.push(name.to_owned());
            }
        }
        Ok(Self { group, mesh: mesh.clone(), members, outside })
    }

    /// The group of the ranks.
    pub fn group(&self) -> &Arc<dyn ProcessGroup> {
        &self.group
    }

    /// Whether they are all ranks of the mesh, so that no replica trains apart.
    pub fn are_all(&self) -> bool {
        self.members.len() == self.mesh.world().size()
    }

    /// The region of a parameter that a rank of the group holds.
    ///
    /// # Errors
    /// If ranks outside of the group hold other shards, or there is no such rank.
    pub fn region(&self, parameter: &Parameter, rank: usize) -> Result<Region> {
        let (spec, member) = (self.spec(parameter)?, self.member(rank)?);
        Ok(spec.region(|dim| self.mesh.coordinate_of(member, dim).unwrap_or(0)))
    }

    /// The part of [`region`](Self::region) that a rank owns: all ranks of the group together own
    /// each element once.
    ///
    /// # Errors
    /// As [`region`](Self::region).
    pub fn owned_region(&self, parameter: &Parameter, rank: usize) -> Result<Region> {
        let (spec, member) = (self.spec(parameter)?, self.member(rank)?);
        Ok(spec.owned_region(|dim| self.mesh.coordinate_of(member, dim).unwrap_or(0)))
    }

    fn member(&self, rank: usize) -> Result<usize> {
        let none = || self.group.error("update", format!("there is no rank {rank}"));
        self.members.get(rank).copied().ok_or_else(none)
    }

    /// The parameter's cuts among the ranks of the group.
    fn spec(&self, parameter: &Parameter) -> Result<ShardSpec> {
        let mut spec = parameter.spec();
        for cut in &spec.cuts {
            let is_outside = self.outside.contains(&cut.mesh_dim);
            if is_outside && cut.size > 1 && matches!(cut.placement, Placement::Shard(_)) {
                return Err(Error::parameter(
                    parameter.fqn(),
                    format!(
                        "is sharded along `{}`, and the ranks of the group `{}` that update it have one shard",
                        cut.mesh_dim,
                        self.group.name()
                    ),
                ));
            }
        }
        spec.cuts.retain(|cut| !self.outside.contains(&cut.mesh_dim));
        Ok(spec)
    }
}

impl std::fmt::Debug for UpdateRanks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UpdateRanks").field("members", &self.members).finish_non_exhaustive()
    }
}
