//! The ranks that update a model together.

use std::sync::Arc;

use crate::{Error, Result};
use fulgurite_collective::collective::ProcessGroup;
use fulgurite_collective::mesh::{DeviceMesh, MeshLayout};
use fulgurite_collective::shard::{Cut, Placement, Region, ShardSpec};
use fulgurite_module::parameter::Parameter;

/// The ranks that together hold and update one copy of the model, for optimizers that compute with
/// whole tensors.
///
/// `Fabric` gives it to each optimizer before its first step
/// ([`Optimizer::set_ranks`](super::Optimizer::set_ranks)). They are all ranks of the job, or one
/// replica's if replicas train apart. Between two backwards no other collective uses the group.
#[derive(Clone)]
pub struct UpdateRanks {
    group: Arc<dyn ProcessGroup>,
    layout: MeshLayout,
}

impl UpdateRanks {
    /// The ranks of a mesh. Not collective.
    pub fn new(mesh: &DeviceMesh) -> Self {
        Self { group: mesh.world().clone(), layout: mesh.layout().clone() }
    }

    /// The group of the ranks, in the mesh's order.
    pub fn group(&self) -> &Arc<dyn ProcessGroup> {
        &self.group
    }

    /// The region of a parameter that a rank of the group holds.
    ///
    /// # Errors
    /// If a dimension outside of the group shards the parameter, or there is no such rank.
    pub fn region(&self, parameter: &Parameter, rank: usize) -> Result<Region> {
        self.at(parameter, rank, |spec, coordinate| spec.region(coordinate))
    }

    /// The part of [`region`](Self::region) that a rank owns: all ranks of the group together own
    /// each element once.
    ///
    /// # Errors
    /// As [`region`](Self::region).
    pub fn owned_region(&self, parameter: &Parameter, rank: usize) -> Result<Region> {
        self.at(parameter, rank, |spec, coordinate| spec.owned_region(coordinate))
    }

    fn at(
        &self,
        parameter: &Parameter,
        rank: usize,
        region: impl Fn(&ShardSpec, &dyn Fn(&str) -> usize) -> Region,
    ) -> Result<Region> {
        let names = self.layout.names();
        let mut spec = parameter.spec();
        let outside = |cut: &Cut| !names.contains(&cut.mesh_dim);
        let sharding = spec.cuts.iter().find(|cut| {
            outside(cut) && cut.size > 1 && matches!(cut.placement, Placement::Shard(_))
        });
        if let Some(cut) = sharding {
            return Err(Error::parameter(
                parameter.fqn(),
                format!(
                    "is sharded along `{}`, which is not a dimension of the ranks that update it ({})",
                    cut.mesh_dim,
                    names.join(", ")
                ),
            ));
        }
        spec.cuts.retain(|cut| !outside(cut));
        let coordinate = self.layout.coordinate(rank)?;
        let along = |dim: &str| {
            names.iter().position(|name| name == dim).map_or(0, |index| coordinate[index])
        };
        Ok(region(&spec, &along))
    }
}

impl std::fmt::Debug for UpdateRanks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UpdateRanks").field("layout", &self.layout).finish_non_exhaustive()
    }
}
