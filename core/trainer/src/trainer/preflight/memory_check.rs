//! Checks whether a run fits into the machine's memory, before any rank is started.

use toml::Table;

use crate::run::{MemoryCheck, RunConfig};
use crate::{Error, Result, counted};
use fulgurite_config::registry::kind;
use fulgurite_engine::collective::{GroupMemory, Planned, ProcessGroup as _, ProcessGroupConfig};
use fulgurite_engine::module::ModuleTree;
use fulgurite_engine::strategy::{Bytes, RankMemory};
use fulgurite_launch::HostMemory;

/// Runs that need more than this multiple of the host's memory are refused. The full estimate is
/// reached only after every parameter was updated.
const REFUSED_ABOVE: f64 = 1.5;

/// Compares the memory that a host's ranks need with the memory that the host has.
///
/// Counts the model, its data, and the process groups; `groups` has made the splits that the ranks
/// will make.
///
/// # Errors
/// [`Error::Config`] that names the key, if the run needs far too much.
pub(crate) fn check_memory(
    run: &RunConfig<Table, Table>,
    tree: &ModuleTree,
    memory: RankMemory,
    data: u64,
    groups: &Planned,
) -> Result<()> {
    let check = run.trainer.memory_check;
    // The model is in device memory, whose size is unknown before the devices are opened.
    if run.trainer.visible_devices()?.is_some() {
        return Ok(());
    }
    let Some(host) = HostMemory::now().filter(|_| check != MemoryCheck::Off) else { return Ok(()) };
    let on_host = (groups.size() / run.trainer.num_nodes).max(1);
    let shared = shared_memory(run, groups, on_host)?;
    let model = memory.total().saturating_mul(on_host as u64);
    let all_data = data.saturating_mul(on_host as u64);
    let needed = model.saturating_add(all_data).saturating_add(shared.used);
    // The model uses addresses that the allocator has already reserved, as far as they suffice.
    let own = memory.total().saturating_add(data);
    let addresses = own.max(host.addresses_in_use).saturating_add(shared.mapped);
    let beyond_limit = host.address_space.is_some_and(|limit| addresses > limit);
    let too_large = beyond_limit || needed as f64 > REFUSED_ABOVE * host.total as f64;
    if !too_large && needed <= host.available {
        return Ok(());
    }
    let ranks = counted(on_host, "rank");
    let for_model = format!(
        "the model of {} parameters takes at least {} on each of this host's {ranks} under \
         `trainer.strategy` = \"{}\" ({memory}), {} together",
        tree.elem_count(),
        Bytes(memory.total()),
        run.trainer.strategy.name,
        Bytes(model),
    );
    let for_groups = format!(
        "the process groups of this host's {ranks} share {}, and each rank maps {}",
        Bytes(shared.used),
        Bytes(shared.mapped)
    );
    let (shared_most, model_most, data_most) = match beyond_limit {
        true => (shared.mapped, memory.total(), data),
        false => (shared.used, model, all_data),
    };
    let (key, what, advice) = if data_most > shared_most.max(model_most) {
        (
            "data",
            format!(
                "the data takes about {} on each of this host's {ranks}, {} together; {for_model}",
                Bytes(data),
                Bytes(all_data)
            ),
            "Keep the ids of text in files (`data.cache_dir`, or token files), start fewer ranks on a host",
        )
    } else if shared_most > model_most {
        (
            "trainer.devices",
            format!("{for_groups}; {for_model}"),
            "Start fewer ranks on a host, let the options of `trainer.process_group` make it share less",
        )
    } else {
        ("model", for_model, "Make `[model]` smaller, shard it over more ranks and hosts (`fsdp`)")
    };
    let limit = match host.address_space {
        Some(limit) => format!(
            ", a process may have {} of addresses (ulimit -v) and takes {} before it trains",
            Bytes(limit),
            Bytes(host.addresses_in_use)
        ),
        None => String::new(),
    };
    let message = format!(
        "{what}; the host has {}, of which {} are available{limit}. {advice}",
        Bytes(host.total),
        Bytes(host.available),
    );
    if too_large && check == MemoryCheck::Error {
        return Err(Error::Config(format!(
            "`{key}`: {message}, or set `trainer.memory_check = \"warn\"`"
        )));
    }
    tracing::warn!("{message}, or expect it to run out of memory");
    Ok(())
}

/// Returns the memory that the process groups share on a host, and the part that one rank maps.
fn shared_memory(
    run: &RunConfig<Table, Table>,
    planned: &Planned,
    on_host: usize,
) -> Result<GroupMemory> {
    let mut groups = planned.groups();
    if run.checkpoint.async_save {
        // Background saves have their own group.
        groups.push(planned.global_ranks().to_vec());
    }
    let transport = run
        .trainer
        .process_group
        .build::<Box<dyn ProcessGroupConfig>>(kind::PROCESS_GROUP, "trainer.process_group")?;
    let mut shared = GroupMemory::default();
    for group in groups {
        let here = group.iter().filter(|&&rank| rank < on_host).count();
        let memory = transport.memory(here);
        shared.used = shared.used.saturating_add(memory.used);
        if group.contains(&0) {
            shared.mapped = shared.mapped.saturating_add(memory.mapped);
        }
    }
    Ok(shared)
}
