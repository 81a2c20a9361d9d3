//! Initial values and replication of parameters, for strategies.

use candle_core::Tensor;
use twox_hash::XxHash3_64;

use crate::autograd::storage;
use crate::collective::{Difference, ProcessGroup, all_gather_object, first_difference};
use crate::mesh::DeviceMesh;
use crate::module::ModuleTree;
use crate::parameter::{LocalShard, Parameter, ParameterSlot};
use crate::shard::{Cut, Placement, Region};
use crate::{Error, Result};

/// Gives this rank every parameter whole (under tensor parallelism, its whole part), with its initial
/// values. Parameters that compute in their own dtype are updated in place; others keep a copy that
/// [`refresh_compute`] casts. Not collective.
pub fn replicate(slots: &[ParameterSlot], seed: u64) -> Result<()> {
    for slot in slots {
        let region = slot.compute_region();
        let values = initial_values(slot, seed, &region)?;
        let compute = slot.compute()?;
        storage::allocate(compute)?;
        storage::copy_from(&compute.detach(), &values)?;
        let values = if slot.dtype() == slot.compute_dtype() {
            compute.detach().flatten_all()?
        } else {
            values
        };
        slot.set_local(LocalShard { values, region });
    }
    Ok(())
}

/// [`replicate`], which also records in each parameter's spec that the ranks along `dim` are replicas.
/// Not collective.
pub fn replicate_along(
    slots: &[ParameterSlot],
    seed: u64,
    mesh: &DeviceMesh,
    dim: &str,
) -> Result<()> {
    let size = mesh.size(dim)?;
    for slot in slots {
        slot.set_spec(slot.spec().with_cut(Cut::new(dim, size, Placement::Replicate)));
    }
    replicate(slots, seed)
}

/// The initial values of a region of a parameter, flat.
pub fn initial_values(parameter: &Parameter, seed: u64, region: &Region) -> Result<Tensor> {
    parameter.init().values(
        seed,
        parameter.fqn(),
        parameter.global_shape(),
        region,
        parameter.dtype(),
        parameter.device(),
    )
}

/// Copies the local values of replicated parameters into compute tensors of another dtype.
pub fn refresh_compute(slots: &[ParameterSlot]) -> Result<()> {
    for slot in slots.iter().filter(|slot| slot.dtype() != slot.compute_dtype()) {
        storage::copy_from(&slot.compute()?.detach(), &slot.local()?.values)?;
    }
    Ok(())
}

/// Checks that all ranks built the same model: names, shapes, dtypes, what is frozen. Collective.
///
/// # Errors
/// On every rank, naming the first rank and parameter that differ from rank 0's.
pub fn verify_same_model(tree: &ModuleTree, group: &dyn ProcessGroup) -> Result<()> {
    let describe = |p: &Parameter| {
        let frozen = if p.requires_grad() { "" } else { ", frozen" };
        format!("`{}` {:?} {:?}{frozen}", p.fqn(), p.global_shape(), p.dtype())
    };
    let mut lines: Vec<String> = tree.parameters().iter().map(describe).collect();
    lines.extend(tree.aliases().map(|(alias, first)| format!("`{alias}`, tied to `{first}`")));
    lines.extend(tree.units().iter().map(|unit| format!("the unit `{}`", unit.path())));
    match first_difference(group, &lines)? {
        None => Ok(()),
        Some(Difference { rank, index, here, there }) => Err(Error::other(format!(
            "the ranks built different models: part {index} is {here} on rank 0 and {there} on rank \
             {rank}; `configure_model` must not depend on the rank"
        ))),
    }
}

/// Checks that replicated parameters have the same bits on all ranks. Collective.
///
/// # Errors
/// On every rank, naming the first rank and parameter that differ from rank 0's.
pub fn verify_same_values(tree: &ModuleTree, group: &dyn ProcessGroup) -> Result<()> {
    let mut digests = Vec::with_capacity(tree.parameters().len());
    for parameter in tree.parameters() {
        let values = parameter.local()?.values.to_device(&candle_core::Device::Cpu)?;
        digests.push(storage::with_bytes(&values, XxHash3_64::oneshot)?);
    }
    let all = all_gather_object(group, &digests)?;
    for (rank, other) in all.iter().enumerate() {
        if let Some(i) = (0..digests.len()).find(|&i| other.get(i) != all[0].get(i)) {
            let fqn = tree.parameters()[i].fqn();
            let message = format!("its values on rank {rank} differ from those on rank 0");
            return Err(Error::parameter(fqn, message));
        }
    }
    Ok(())
}
