//! What a rank contributes to a checkpoint.

use std::collections::BTreeMap;

use candle_core::Tensor;

use crate::{Error, Result};
use fulgurite_engine::module::ModuleTree;
use fulgurite_engine::optim::StateTensor;
use fulgurite_engine::shard::{Region, ShardSpec};

/// The part of one tensor that this rank writes.
#[derive(Debug, Clone)]
pub struct ShardTensor {
    /// The tensor's name in the checkpoint.
    pub name: String,
    /// The values of the part, in its row-major order; a view, not a copy.
    pub values: Tensor,
    /// Which part it is. Over all ranks, the parts cover the tensor, each element once; an empty
    /// one is not written.
    pub region: Region,
    /// The tensor's global shape.
    pub shape: Vec<usize>,
}

/// What this rank writes of a model: of every parameter, frozen ones included, the part it
/// [owns](ShardSpec::owned_region). `coordinate` is this rank's place along each mesh dimension.
///
/// Not collective. The tensors share memory with the parameters.
///
/// # Errors
/// If a parameter was not set up yet.
pub fn model_tensors(
    tree: &ModuleTree,
    coordinate: impl Fn(&str) -> usize,
) -> Result<Vec<ShardTensor>> {
    tree.parameters()
        .iter()
        .map(|parameter| {
            let local = parameter.local()?;
            let name = parameter.fqn();
            owned(name, &local.values, &local.region, &parameter.spec(), &coordinate)
        })
        .collect()
}

/// What this rank writes of an optimizer's state, cut as the parameters of `tree` are; the names
/// are [`optimizer_key`]s. Not collective.
///
/// # Errors
/// If a state tensor is of a parameter that `tree` does not have, or of another shape than it.
pub fn optimizer_tensors(
    tree: &ModuleTree,
    states: &[StateTensor],
    coordinate: impl Fn(&str) -> usize,
) -> Result<Vec<ShardTensor>> {
    states
        .iter()
        .map(|state| {
            let Some(parameter) = tree.parameter(&state.fqn) else {
                let message =
                    format!("has state `{}` in the optimizer but is not in the model", state.name);
                return Err(Error::parameter(&state.fqn, message));
            };
            let spec = parameter.spec();
            if spec.shape != state.shape {
                let message = format!(
                    "has shape {:?}, and its optimizer state `{}` has {:?}",
                    spec.shape, state.name, state.shape
                );
                return Err(Error::parameter(&state.fqn, message));
            }
            let name = optimizer_key(&state.fqn, state.name);
            owned(&name, &state.values, &state.region, &spec, &coordinate)
        })
        .collect()
}

/// The name of an optimizer's state tensor in a checkpoint.
///
/// ```
/// use fulgurite_core::checkpoint::optimizer_key;
/// assert_eq!(optimizer_key("model.norm.weight", "exp_avg"), "state.model.norm.weight.exp_avg");
/// ```
pub fn optimizer_key(fqn: &str, name: &str) -> String {
    format!("state.{fqn}.{name}")
}

/// The parameter and the name of the state tensor that [`optimizer_key`] made a key of; `None` if
/// it is not one.
///
/// ```
/// use fulgurite_core::checkpoint::parse_optimizer_key;
/// assert_eq!(parse_optimizer_key("state.norm.weight.exp_avg"), Some(("norm.weight", "exp_avg")));
/// assert_eq!(parse_optimizer_key("norm.weight"), None);
/// ```
pub fn parse_optimizer_key(key: &str) -> Option<(&str, &str)> {
    key.strip_prefix("state.")?.rsplit_once('.')
}

/// How the mesh cuts each parameter: [`SaveMeta::specs`](super::SaveMeta::specs).
pub fn specs(tree: &ModuleTree) -> BTreeMap<String, ShardSpec> {
    tree.parameters().iter().map(|p| (p.fqn().to_owned(), p.spec())).collect()
}

/// The owned part of a local one.
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
        // Owned parts are chunks of the first dimension, hence one run and no copy.
        if let [part] = parts.as_slice() { part.clone() } else { Tensor::cat(&parts, 0)? }
    };
    Ok(ShardTensor { name: name.to_owned(), values, region: owned, shape: spec.shape.clone() })
}
