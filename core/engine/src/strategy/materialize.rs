//! Initial values, replication and checks of parameters, for strategies.

use candle_core::{DType, Device, Tensor};
use twox_hash::XxHash3_64;

use crate::{Error, Result};
use fulgurite_collective::collective::{
    Difference, ProcessGroup, all_gather_object, first_difference,
};
use fulgurite_collective::mesh::DeviceMesh;
use fulgurite_collective::shard::{Cut, Placement, Region};
use fulgurite_module::module::ModuleTree;
use fulgurite_module::parameter::{LocalShard, Parameter, ParameterSlot, about_buffer};
use fulgurite_tensor::autograd::storage;
use fulgurite_tensor::execution::dry_run;
use fulgurite_tensor::memory::{self, MemoryKind};

/// Gives this rank every parameter whole (under tensor parallelism, its whole part), with initial
/// values. Parameters that compute in their own dtype are updated in place. Others keep a copy
/// that [`refresh_compute`] casts. Not collective.
pub fn replicate(slots: &[ParameterSlot], seed: u64) -> Result<()> {
    let _kind = memory::of_kind(MemoryKind::Parameters);
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

/// Like [`replicate`], and records in each parameter's spec that the ranks along `dim` are
/// replicas. Not collective.
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

/// The initial values of a region of a parameter, flat. For a part of a quantised weight, packs the
/// weight's initial values.
pub fn initial_values(parameter: &Parameter, seed: u64, region: &Region) -> Result<Tensor> {
    if let Some(packed) = parameter.packed() {
        let (init, rows) = (parameter.init(), packed.rows(region));
        let (dtype, host) = (DType::F32, Device::Cpu);
        let weight = init.values(seed, &packed.weight, &packed.shape, &rows, dtype, &host)?;
        return Ok(packed.pack(region, &weight)?.to_device(parameter.device())?);
    }
    parameter.init().values(
        seed,
        parameter.fqn(),
        parameter.global_shape(),
        region,
        parameter.dtype(),
        parameter.device(),
    )
}

/// Gives this rank the model's buffers, with initial values. Called by the runtime that owns the
/// strategy. Not collective.
///
/// # Errors
/// If values cannot be copied to the buffers' device.
pub fn buffers(tree: &ModuleTree, seed: u64) -> Result<()> {
    tree.buffers().iter().try_for_each(|buffer| buffer.materialize(seed))
}

/// Checks that buffers have the same bits on all ranks. Collective if the model has any.
///
/// # Errors
/// On every rank if buffers differ; the message names the first rank and buffer that differ from
/// rank 0's.
pub fn verify_same_buffers(tree: &ModuleTree, group: &dyn ProcessGroup) -> Result<()> {
    if tree.buffers().is_empty() || group.size() == 1 {
        return Ok(());
    }
    let digests = tree.buffers().iter().map(|buffer| digest(&buffer.value()?));
    let digests = digests.collect::<Result<Vec<_>>>()?;
    match first_other(group, &digests)? {
        None => Ok(()),
        Some((rank, i)) => Err(about_buffer(
            tree.buffers()[i].fqn(),
            format_args!("its values on rank {rank} differ from those on rank 0"),
        )),
    }
}

fn digest(values: &Tensor) -> Result<u64> {
    // Large values are unset there, and take no memory.
    if dry_run::is_on() {
        return Ok(0);
    }
    let values = values.flatten_all()?.contiguous()?.to_device(&Device::Cpu)?;
    storage::with_bytes(&values, XxHash3_64::oneshot)
}

/// The first rank whose digests differ from rank 0's, and the index of its first differing digest.
fn first_other(group: &dyn ProcessGroup, digests: &Vec<u64>) -> Result<Option<(usize, usize)>> {
    let all = all_gather_object(group, digests)?;
    let first = |(rank, other): (usize, &Vec<u64>)| {
        Some((rank, (0..digests.len()).find(|&i| other.get(i) != all[0].get(i))?))
    };
    Ok(all.iter().enumerate().find_map(first))
}

/// Casts the local values of replicated parameters into their compute tensors of another dtype, in
/// place. On a GPU, one launch casts all.
pub fn refresh_compute(slots: &[ParameterSlot]) -> Result<()> {
    let cast = |slot: &ParameterSlot| Ok((slot.compute()?.detach(), slot.local()?.values));
    let apart = slots.iter().filter(|slot| slot.dtype() != slot.compute_dtype());
    let apart = apart.filter(|slot| !slot.is_elsewhere());
    let copied = apart.map(cast).collect::<Result<Vec<_>>>()?;
    let pairs: Vec<_> = copied.iter().map(|(compute, values)| (compute, values)).collect();
    storage::copy_all(&pairs)
}

/// Checks that all ranks built the same model: names, shapes, dtypes, initial values, frozen
/// parameters and buffers. Collective.
///
/// # Errors
/// On every rank if models differ; the message names the first rank and parameter that differ from
/// rank 0's.
pub fn verify_same_model(tree: &ModuleTree, group: &dyn ProcessGroup) -> Result<()> {
    let describe = |p: &Parameter| {
        let frozen = if p.requires_grad() { "" } else { ", frozen" };
        let compute = match p.compute_dtype() {
            dtype if dtype == p.dtype() => String::new(),
            dtype => format!(" computing in {dtype:?}"),
        };
        format!("`{}` {:?} {:?}{compute}{frozen}", p.fqn(), p.global_shape(), p.dtype())
    };
    let mut lines: Vec<String> = tree.parameters().iter().map(describe).collect();
    lines.extend(tree.buffers().iter().map(|buffer| {
        let saved = if buffer.is_persistent() { "" } else { ", not persistent" };
        let (shape, dtype) = (buffer.shape(), buffer.dtype());
        format!("the buffer `{}` {shape:?} {dtype:?}{saved}", buffer.fqn())
    }));
    lines.extend(tree.aliases().map(|(alias, first)| format!("`{alias}`, tied to `{first}`")));
    lines.extend(tree.units().iter().map(|unit| format!("the unit `{}`", unit.path())));
    // Initial values come last, so that any other difference is named first.
    let start = |fqn: &str, init: &str| format!("`{fqn}` starting as {init}");
    lines.extend(tree.parameters().iter().map(|p| start(p.fqn(), &format!("{:?}", p.init()))));
    lines.extend(tree.buffers().iter().map(|buffer| start(buffer.fqn(), buffer.starts_with())));
    match first_difference(group, &lines)? {
        None => Ok(()),
        Some(Difference { rank, index, here, there }) => Err(Error::other(format!(
            "the ranks built different models: part {index} is {here} on rank 0 and {there} on rank \
             {rank}; `configure_model` must not depend on the rank"
        ))),
    }
}

/// Checks that parameters have the same bits on all ranks. Collective.
///
/// # Errors
/// On every rank if values differ; the message names the first rank and parameter that differ from
/// rank 0's.
pub fn verify_same_values(parameters: &[Parameter], group: &dyn ProcessGroup) -> Result<()> {
    let mut digests = Vec::with_capacity(parameters.len());
    for parameter in parameters {
        digests.push(digest(&parameter.local()?.values)?);
    }
    match first_other(group, &digests)? {
        None => Ok(()),
        Some((rank, i)) => Err(Error::parameter(
            parameters[i].fqn(),
            format!("its values on rank {rank} differ from those on rank 0"),
        )),
    }
}
