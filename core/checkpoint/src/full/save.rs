//! Saving full checkpoints, and gathering whole tensors in memory. All functions are collective.

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;

use candle_core::{DType, Tensor};

use super::super::manifest::SaveMeta;
use super::super::manifest::Section;
use super::super::save::on_rank_zero;
use super::super::tensor_file::FileKind;
use super::super::{CheckpointIO, ShardTensor, model_tensors, optimizer_tensors};
use super::gather::Gather;
use super::layout::plan_files;
use super::writer::{FullWriter, prepare};
use super::{FullOptions, GatherOptions};
use crate::{Error, Result};
use fulgurite_engine::collective::ProcessGroup;
use fulgurite_engine::module::ModuleTree;
use fulgurite_engine::optim::StateTensor;

/// Writes the full checkpoint `name` of `io` and returns its path.
///
/// It holds whole tensors of the model, and of the optimizer's state if `optimizer` has any.
///
/// Collective: every rank of `group` calls it with its tree, its coordinate in the mesh and its
/// states. Rank 0 gathers the tensors one by one, in declaration order, and writes them with its
/// own `meta`. It never holds more than one whole tensor. Parameters that the options leave out are
/// not gathered, and a tied parameter is written once, under its first name.
///
/// As with [`save`](super::super::save), the checkpoint appears under its name in one step when
/// everything is durable, replacing an older one of that name, full or distributed.
///
/// # Errors
/// On every rank, if it fails on any: [`Error::PeerFailed`] on ranks that did not fail. An earlier
/// checkpoint under `name` is still there then.
#[expect(clippy::too_many_arguments, reason = "as `save`, and what it leaves to its caller")]
pub fn save_full(
    io: &dyn CheckpointIO,
    group: &dyn ProcessGroup,
    name: &str,
    tree: &ModuleTree,
    coordinate: impl Fn(&str) -> usize,
    optimizer: &[StateTensor],
    options: &FullOptions,
    meta: &SaveMeta,
) -> Result<PathBuf> {
    let (mut extra, mut lock) = (Vec::new(), None);
    let staged = on_rank_zero(group, || {
        if let Some(config) = &options.config {
            extra.push(("config.json".to_owned(), config.bytes()?));
        }
        let (staged, held) = prepare(io, name)?;
        lock = held;
        Ok(staged)
    })?;
    let parts = chosen_model(tree, &coordinate, &options.gather).and_then(|model| {
        if model.is_empty() {
            return Err(Error::checkpoint(
                io.location(name),
                "there is nothing to save: the options leave out every parameter",
            ));
        }
        let states = chosen_states(tree, optimizer, &coordinate, &options.gather)?;
        Ok((model, states))
    });
    let models = parts.as_ref().map_or(0, |(model, _)| model.len());
    let parts = parts.map(|(model, states)| [model, states].concat());
    let dtype = options.gather.dtype;
    let gather = Gather::agree(group, parts, |i| dtype.filter(|_| i < models))?;
    let (model, states) = gather.tensors.split_at(models);
    let mut files = plan_files(Section::Model, model, options.max_shard_bytes);
    files.extend(plan_files(Section::Optimizer, states, options.max_shard_bytes));
    let order: Vec<usize> = files
        .iter()
        .flat_map(|file| {
            let first = if file.section == Section::Model { 0 } else { models };
            file.tensors.iter().map(move |i| first + i)
        })
        .collect();
    let (tensors, of_run) = ((model, states), (group.size(), meta));
    let mut writer = FullWriter::new(io, &staged, tensors, &files, of_run, FileKind::Full);
    let gathered = gather.run(order, |_, whole| writer.put(&whole));
    let finished = gathered.and_then(|()| {
        on_rank_zero(group, || {
            writer.finish(&extra)?;
            io.commit(&staged, name)
        })
    });
    if finished.is_err()
        && group.rank() == 0
        && let Err(error) = io.remove(&staged)
    {
        tracing::warn!("the next save will remove what this one leaves: {error}");
    }
    drop(lock);
    finished.map(|()| io.location(name))
}

/// Gathers the model on rank 0, as whole tensors in host memory by FQN.
///
/// The other ranks get an empty map. A tied parameter is there once, under its first name.
/// Collective. torchtune has a function of this name.
///
/// The parameters that `options` choose are gathered one by one, and only rank 0 keeps them.
///
/// # Errors
/// On every rank if it fails on any.
pub fn gather_cpu_state_dict(
    tree: &ModuleTree,
    coordinate: impl Fn(&str) -> usize,
    group: &dyn ProcessGroup,
    options: &GatherOptions,
) -> Result<BTreeMap<String, Tensor>> {
    gather_all(group, chosen_model(tree, &coordinate, options), options.dtype)
}

/// Gathers an optimizer's state on rank 0, as whole tensors in host memory.
///
/// Keys are [`optimizer_key`](super::super::optimizer_key)s; the other ranks get an empty map.
/// `options` choose by parameter; the dtype stays. Collective.
///
/// # Errors
/// On every rank if it fails on any.
pub fn gather_full_optimizer_state(
    tree: &ModuleTree,
    states: &[StateTensor],
    coordinate: impl Fn(&str) -> usize,
    group: &dyn ProcessGroup,
    options: &GatherOptions,
) -> Result<BTreeMap<String, Tensor>> {
    gather_all(group, chosen_states(tree, states, &coordinate, options), None)
}

fn gather_all(
    group: &dyn ProcessGroup,
    parts: Result<Vec<ShardTensor>>,
    dtype: Option<DType>,
) -> Result<BTreeMap<String, Tensor>> {
    let gather = Gather::agree(group, parts, |_| dtype)?;
    let mut gathered = BTreeMap::new();
    gather.run(0..gather.tensors.len(), |i, whole| {
        let tensor = &gather.tensors[i];
        gathered.insert(tensor.name.clone(), whole.reshape(tensor.shape.as_slice())?);
        Ok(())
    })?;
    Ok(gathered)
}

fn chosen_model(
    tree: &ModuleTree,
    coordinate: &impl Fn(&str) -> usize,
    options: &GatherOptions,
) -> Result<Vec<ShardTensor>> {
    let parameters = tree.parameters().iter().map(|p| (p.fqn(), p.requires_grad()));
    let buffers = tree.persistent_buffers().map(|buffer| (buffer.fqn(), false));
    let all = model_tensors(tree, coordinate)?.into_iter().zip(parameters.chain(buffers));
    let chosen = all.filter(|(_, (fqn, trained))| options.wants(fqn, *trained));
    Ok(chosen.map(|(tensor, _)| tensor).collect())
}

fn chosen_states(
    tree: &ModuleTree,
    states: &[StateTensor],
    coordinate: &impl Fn(&str) -> usize,
    options: &GatherOptions,
) -> Result<Vec<ShardTensor>> {
    let wanted = tree.parameters().iter().filter(|p| options.wants(p.fqn(), p.requires_grad()));
    let wanted: HashSet<&str> = wanted.map(|p| p.fqn()).collect();
    let unknown = |state: &&StateTensor| tree.parameter(&state.fqn).is_none();
    // States of parameters that the model lacks are kept, so that they are reported.
    let chosen = states.iter().filter(|s| wanted.contains(s.fqn.as_str()) || unknown(s));
    optimizer_tensors(tree, &chosen.cloned().collect::<Vec<_>>(), coordinate)
}
