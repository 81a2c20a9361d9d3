//! Expert parallelism: experts on ranks of their own, and their shards.

use std::sync::Arc;

use fulgurite_engine::collective::ProcessGroup;
use fulgurite_engine::mesh::{DP_SHARD_CP, DeviceMesh};
use fulgurite_engine::module::ModuleTree;
use fulgurite_engine::parameter::Parameter;
use fulgurite_engine::shard::{Cut, Placement, ShardSpec};
use fulgurite_error::{Error, Result};

/// The ranks that have the same experts as this one. Each holds a shard of them.
///
/// Of the ranks that share a model's parameters, `size` neighbours have all experts together. Rank
/// `c` along that dimension has part `c % size`, and shard `c / size` of it, as in torchtitan's
/// mesh of `efsdp` × `ep`.
#[derive(Clone)]
pub(super) struct ExpertShards(Arc<dyn ProcessGroup>);

impl ExpertShards {
    /// Divides the experts of `tree` among each `size` neighbours; `None` if that is 1. Collective
    /// over the ranks that share parameters.
    ///
    /// # Errors
    /// If the model has no experts. If `size` does not divide the ranks or the experts. If a peer
    /// fails.
    pub(super) fn new(
        size: usize,
        tree: &mut ModuleTree,
        mesh: &DeviceMesh,
    ) -> Result<Option<Self>> {
        if size == 1 {
            return Ok(None);
        }
        if tree.experts().is_empty() {
            return Err(Error::Config(format!(
                "`trainer.strategy.expert_parallel_size` = {size}: the model has no mixture of experts; leave the key \
                 out"
            )));
        }
        let sharing = mesh.group(DP_SHARD_CP)?;
        check_size(size, sharing.size())?;
        let all: Vec<usize> = (0..sharing.size()).collect();
        let neighbours: Vec<Vec<usize>> = all.chunks(size).map(<[usize]>::to_vec).collect();
        let apart = |part| all.iter().copied().filter(|rank| rank % size == part).collect();
        // Groups of their own: shards are gathered while rows are exchanged.
        let ranks = sharing.split(&neighbours, "expert_parallel")?;
        let shards = sharing.split(&(0..size).map(apart).collect::<Vec<_>>(), "expert_shards")?;
        tree.distribute_experts(mesh, DP_SHARD_CP, &ranks)?;
        Ok(Some(Self(shards)))
    }

    /// The ranks with shards of the same experts, in the order of the shards.
    pub(super) fn ranks(&self) -> &Arc<dyn ProcessGroup> {
        &self.0
    }
}

/// Checks `expert_parallel_size` on `sharing` ranks that share parameters.
pub(crate) fn check_size(size: usize, sharing: usize) -> Result<()> {
    if size > 0 && sharing.is_multiple_of(size) {
        return Ok(());
    }
    let divisors = (1..=sharing).filter(|n| sharing.is_multiple_of(*n));
    let divisors: Vec<String> = divisors.map(|n| n.to_string()).collect();
    Err(Error::Mesh(format!(
        "`expert_parallel_size` = {size} must divide the number of ranks that share parameters \
         (`data_parallel_shard_size` × `context_parallel_size`), which is {sharing}: it can be {}",
        divisors.join(", ")
    )))
}

/// The number of ranks with different experts of a parameter; 1 for other parameters.
pub(super) fn expert_parts(parameter: &Parameter) -> usize {
    let spec = parameter.spec();
    spec.cuts.iter().find(|cut| cut.mesh_dim == DP_SHARD_CP).map_or(1, |cut| cut.size)
}

/// Adds the cut into shards to the spec of a parameter whose experts are divided among `parts` of
/// the `ranks` that share parameters.
pub(super) fn with_shards(spec: ShardSpec, ranks: usize, parts: usize) -> ShardSpec {
    let cut = Cut::new(DP_SHARD_CP, ranks / parts, Placement::Shard(0));
    spec.with_cut(cut.with_stride(parts))
}
