//! The tensors that a rank writes to a checkpoint.

use std::collections::BTreeMap;

use candle_core::Tensor;

use super::checksum::Checksum;
use super::shard_file::on_host;
use crate::{Error, Result};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::mesh::{
    CONTEXT_PARALLEL, DATA_PARALLEL_REPLICATE, DATA_PARALLEL_SHARD, PIPELINE_PARALLEL,
    TENSOR_PARALLEL,
};
use fulgurite_engine::module::ModuleTree;
use fulgurite_engine::optim::StateTensor;
use fulgurite_engine::parameter::Parameter;
use fulgurite_engine::shard::{Region, ShardSpec};

/// This rank's part of one tensor of a checkpoint.
#[derive(Debug, Clone)]
pub struct ShardTensor {
    /// The tensor's name in the checkpoint.
    pub name: String,
    /// The values of the part, flat in row-major order; a view, not a copy.
    pub values: Tensor,
    /// The part's region in the tensor. The parts of all ranks cover each element once; an empty
    /// part is not written.
    pub region: Region,
    /// The tensor's global shape.
    pub shape: Vec<usize>,
}

impl ShardTensor {
    /// Returns a digest of the values (XXH3-64). Equal bits have equal digests.
    ///
    /// # Errors
    /// If the values cannot be read from their device.
    pub fn digest(&self) -> Result<u64> {
        let values = on_host(&self.values)?;
        let mut hash = Checksum::default();
        storage::with_bytes(&values, |bytes| hash.update(bytes))?;
        Ok(hash.digest())
    }
}

/// Returns this rank's part of a model.
///
/// For every parameter, frozen or not, it is the region that the rank
/// [owns](ShardSpec::owned_region). On the first rank of the mesh the persistent buffers follow.
/// `coordinate` is this rank's coordinate in the mesh.
///
/// Not collective. The tensors share memory with the parameters.
///
/// # Errors
/// If a parameter was not set up yet.
pub fn model_tensors(
    tree: &ModuleTree,
    coordinate: impl Fn(&str) -> usize,
) -> Result<Vec<ShardTensor>> {
    model_parts(tree, &coordinate, &Parameter::spec)
}

/// Returns the parts of the model and of the optimizer's state that this rank owns in its replica.
///
/// As [`model_tensors`] and [`optimizer_tensors`] on a mesh without
/// [`DATA_PARALLEL_REPLICATE`]: the ranks of each replica have everything. For a checkpoint that
/// some ranks save after others were lost. Not collective.
///
/// # Errors
/// As [`optimizer_tensors`]. Also if replicas divide the optimizer's state between them.
pub fn replica_tensors(
    tree: &ModuleTree,
    states: &[StateTensor],
    coordinate: impl Fn(&str) -> usize,
) -> Result<(Vec<ShardTensor>, Vec<ShardTensor>)> {
    let spec = |parameter: &Parameter| {
        let mut spec = parameter.spec();
        spec.cuts.retain(|cut| cut.mesh_dim != DATA_PARALLEL_REPLICATE);
        spec
    };
    let in_replica = |dim: &str| if dim == DATA_PARALLEL_REPLICATE { 0 } else { coordinate(dim) };
    let model = model_parts(tree, &in_replica, &spec)?;
    Ok((model, optimizer_parts(tree, states, &in_replica, &spec)?))
}

fn model_parts(
    tree: &ModuleTree,
    coordinate: &impl Fn(&str) -> usize,
    spec: &impl Fn(&Parameter) -> ShardSpec,
) -> Result<Vec<ShardTensor>> {
    let parameters = tree.parameters().iter().map(|parameter| {
        let local = parameter.local()?;
        let name = parameter.fqn();
        owned(name, &local.values, &local.region, &spec(parameter), coordinate)
    });
    let buffers = tree
        .persistent_buffers()
        .map(|buffer| of_first_rank(buffer.fqn(), &buffer.value()?, buffer.shape(), coordinate));
    parameters.chain(buffers).collect()
}

/// Returns a replicated tensor whole on the first rank of the mesh, and empty on the others.
fn of_first_rank(
    name: &str,
    values: &Tensor,
    shape: &[usize],
    coordinate: &impl Fn(&str) -> usize,
) -> Result<ShardTensor> {
    let dims = [
        PIPELINE_PARALLEL,
        DATA_PARALLEL_REPLICATE,
        DATA_PARALLEL_SHARD,
        CONTEXT_PARALLEL,
        TENSOR_PARALLEL,
    ];
    let (name, shape, values) = (name.to_owned(), shape.to_vec(), values.detach().flatten_all()?);
    if dims.into_iter().all(|dim| coordinate(dim) == 0) {
        return Ok(ShardTensor { name, values, region: Region::full(&shape), shape });
    }
    // The empty region needs at least one dimension: without dimensions it has one element.
    let none = vec![0; shape.len().max(1)];
    let region = Region { offsets: none.clone(), sizes: none };
    Ok(ShardTensor { name, values: values.narrow(0, 0, 0)?, region, shape })
}

/// Returns this rank's part of an optimizer's state, named by [`optimizer_key`].
///
/// It is sharded as the parameters of `tree`. State of another shape than its parameter's is whole
/// on every rank, and belongs to the first. Not collective.
///
/// # Errors
/// If `tree` lacks the parameter of a state tensor, or a part of a state tensor has another shape
/// than the parameter.
pub fn optimizer_tensors(
    tree: &ModuleTree,
    states: &[StateTensor],
    coordinate: impl Fn(&str) -> usize,
) -> Result<Vec<ShardTensor>> {
    optimizer_parts(tree, states, &coordinate, &Parameter::spec)
}

fn optimizer_parts(
    tree: &ModuleTree,
    states: &[StateTensor],
    coordinate: &impl Fn(&str) -> usize,
    spec: &impl Fn(&Parameter) -> ShardSpec,
) -> Result<Vec<ShardTensor>> {
    states
        .iter()
        .map(|state| {
            let Some(parameter) = tree.parameter(&state.fqn) else {
                let message =
                    format!("has state `{}` in the optimizer but is not in the model", state.name);
                return Err(Error::parameter(&state.fqn, message));
            };
            let spec = spec(parameter);
            let name = optimizer_key(&state.fqn, state.name);
            if spec.shape != state.shape {
                if state.region == Region::full(&state.shape) {
                    return of_first_rank(&name, &state.values, &state.shape, coordinate);
                }
                let message = format!(
                    "has shape {:?}, and this rank has a part of its optimizer state `{}`, of shape {:?}; \
                     state of another shape is whole on every rank",
                    spec.shape, state.name, state.shape
                );
                return Err(Error::parameter(&state.fqn, message));
            }
            owned(&name, &state.values, &state.region, &spec, coordinate)
        })
        .collect()
}

/// Returns the name of an optimizer's state tensor in a checkpoint.
///
/// ```
/// use fulgurite_core::checkpoint::optimizer_key;
/// assert_eq!(optimizer_key("model.norm.weight", "exp_avg"), "state.model.norm.weight.exp_avg");
/// ```
pub fn optimizer_key(fqn: &str, name: &str) -> String {
    format!("state.{fqn}.{name}")
}

/// Inverts [`optimizer_key`]: returns the parameter's FQN and the state tensor's name.
///
/// Returns `None` for any other key.
///
/// ```
/// use fulgurite_core::checkpoint::parse_optimizer_key;
/// assert_eq!(parse_optimizer_key("state.norm.weight.exp_avg"), Some(("norm.weight", "exp_avg")));
/// assert_eq!(parse_optimizer_key("norm.weight"), None);
/// ```
pub fn parse_optimizer_key(key: &str) -> Option<(&str, &str)> {
    key.strip_prefix("state.")?.rsplit_once('.')
}

/// Returns each parameter's sharding on the mesh, for [`SaveMeta::specs`](super::SaveMeta::specs).
pub fn shard_specs(tree: &ModuleTree) -> BTreeMap<String, ShardSpec> {
    tree.parameters().iter().map(|p| (p.fqn().to_owned(), p.spec())).collect()
}

/// Returns the part of this rank's values that it owns.
fn owned(
    name: &str,
    values: &Tensor,
    region: &Region,
    spec: &ShardSpec,
    coordinate: &impl Fn(&str) -> usize,
) -> Result<ShardTensor> {
    let owned = spec.owned_region(coordinate);
    let values = values.detach();
    let values = if owned.is_empty() {
        values.narrow(0, 0, 0)?
    } else if &owned == region {
        values
    } else {
        if region.sizes.len() != owned.sizes.len()
            || region.intersect(&owned).as_ref() != Some(&owned)
        {
            let message = "its mesh cuts do not fit the part that this rank holds".to_owned();
            return Err(Error::parameter(name, message));
        }
        let parts = owned.relative_to(region).runs(&region.sizes);
        let parts: Vec<_> = parts
            .iter()
            .map(|run| values.narrow(0, run.outer, run.len))
            .collect::<Result<_, _>>()?;
        // An owned part is a range of the first dimension, hence one run and no copy.
        if let [part] = parts.as_slice() { part.clone() } else { Tensor::cat(&parts, 0)? }
    };
    Ok(ShardTensor { name: name.to_owned(), values, region: owned, shape: spec.shape.clone() })
}
