//! Predicts a rank's memory before ranks exist.

use candle_core::DType;
use fulgurite_engine::mesh::{DP_SHARD_CP, DeviceMesh};
use fulgurite_engine::module::ModuleTree;
use fulgurite_engine::parameter::{Parameter, accumulation_dtype};
use fulgurite_engine::strategy::RankMemory;
use fulgurite_error::Result;

use super::{MeshStrategy, ignored, units};

/// The memory of this mesh's rank for a model already cut by tensor parallelism.
///
/// # Errors
/// If the model cannot be sharded this way.
pub(super) fn rank_memory(
    strategy: &MeshStrategy,
    tree: &ModuleTree,
    mesh: &DeviceMesh,
) -> Result<RankMemory> {
    let mut memory = without_outer(strategy, tree, mesh)?;
    if let Some(outer) = &strategy.settings.outer {
        memory.parameters += memory.updated_elements * outer.bytes_per_element();
    }
    Ok(memory)
}

fn without_outer(
    strategy: &MeshStrategy,
    tree: &ModuleTree,
    mesh: &DeviceMesh,
) -> Result<RankMemory> {
    let bytes = |elements: usize, dtype: DType| (elements as u64) * dtype.size_in_bytes() as u64;
    let whole = |memory: &mut RankMemory, parameter: &Parameter| {
        let (elements, dtype) = (parameter.compute_elem_count(), parameter.dtype());
        memory.parameters += bytes(elements, dtype);
        if parameter.compute_dtype() != dtype {
            memory.parameters += bytes(elements, parameter.compute_dtype());
        }
        if parameter.requires_grad() {
            memory.gradients += bytes(elements, accumulation_dtype(dtype));
            memory.updated_elements += elements as u64;
        }
    };
    let mut memory = RankMemory::default();
    if !strategy.shards(mesh)? {
        let own = tree.parameters().iter().filter(|parameter| !parameter.is_elsewhere());
        own.for_each(|parameter| whole(&mut memory, parameter));
        return Ok(memory);
    }
    let chosen = units::choose(&strategy.settings, tree)?;
    units::reshard(&strategy.settings, tree, &chosen, mesh.group(DP_SHARD_CP)?)?;
    // The root gathers all parameters outside of other gathered units.
    let mut gathered = vec![0; tree.units().len() + 1];
    let ignored = ignored::chosen(&strategy.settings, tree)?;
    for ((parameter, owner), ignored) in tree.parameters().iter().zip(tree.owners()).zip(ignored) {
        if parameter.is_elsewhere() {
            continue;
        }
        if ignored {
            whole(&mut memory, parameter);
            continue;
        }
        let unit = owner.filter(|&unit| chosen[unit]).map_or(0, |unit| unit + 1);
        gathered[unit] += bytes(parameter.compute_elem_count(), parameter.compute_dtype());
        let spec = MeshStrategy::sharded_spec(parameter, mesh)?;
        let elements = spec.region(|dim| mesh.coordinate(dim)).elem_count();
        memory.parameters += bytes(elements, parameter.dtype());
        if parameter.requires_grad() {
            let reduce_dtype = strategy.settings.mixed_precision.reduce_dtype_of(parameter.fqn());
            memory.gradients += bytes(elements, reduce_dtype.unwrap_or(parameter.dtype()));
            memory.updated_elements += elements as u64;
        }
    }
    memory.gathered_unit = gathered.into_iter().max().unwrap_or(0);
    Ok(memory)
}
