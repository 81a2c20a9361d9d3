//! Writing the directory of an adapter.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use candle_core::Tensor;
use serde::Serialize;

use super::super::GatherOptions;
use super::super::full::gather_cpu_state_dict;
use super::super::save::on_rank_zero;
use super::source::layer_of;
use super::{ADAPTER_CONFIG, ADAPTER_MODEL, PREFIX, PeftConfig};
use crate::{Error, Result};
use fulgurite_engine::collective::ProcessGroup;
use fulgurite_engine::module::{Adapters, ModuleTree, expert_path};
use fulgurite_engine::parameter::Parameter;

/// What an adapter's configuration says of its model.
#[derive(Debug, Clone, Copy)]
pub struct AdapterLabels<'a> {
    /// The base's name in the Hugging Face Hub or its path, if known.
    pub base_model: Option<&'a str>,
    /// PEFT's task, such as `CAUSAL_LM`.
    pub task_type: Option<&'a str>,
}

/// Writes a model's adapters, and the modules trained with them, to the directory `dir` for PEFT.
///
/// `PeftModel.from_pretrained(base, dir)` loads it. Existing files are replaced. Collective: rank 0
/// gathers the tensors and writes.
///
/// # Errors
/// On every rank if the directory cannot be written, or the model has no adapters.
pub fn save_adapter(
    dir: &Path,
    group: &dyn ProcessGroup,
    tree: &ModuleTree,
    coordinate: impl Fn(&str) -> usize,
    adapters: &Adapters,
    labels: AdapterLabels<'_>,
) -> Result<PathBuf> {
    let saved: BTreeSet<String> = saved(tree).map(|p| p.fqn().to_owned()).collect();
    if saved.is_empty() {
        return Err(Error::checkpoint(dir, "there is nothing to save: the model has no adapters"));
    }
    let options = GatherOptions::default().with_filter(move |fqn| saved.contains(fqn));
    let tensors = gather_cpu_state_dict(tree, coordinate, group, &options)?;
    on_rank_zero(group, || {
        let mut tensors: HashMap<String, Tensor> = tensors.into_iter().collect();
        // PEFT stores modules separately even if they share a weight in the base.
        for (alias, fqn) in tree.aliases() {
            if let Some(shared) = tensors.get(fqn).cloned() {
                tensors.insert(alias.to_owned(), shared);
            }
        }
        let tensors = apart(tensors)?;
        let tensors =
            tensors.into_iter().map(|(fqn, tensor)| (peft_name(tree, &fqn), tensor)).collect();
        let config = PeftConfig::new(adapters, tree, labels);
        write_named(dir, &tensors, &config)
    })?;
    Ok(dir.to_owned())
}

/// Returns the parameters that an adapter's files hold.
pub(super) fn saved(tree: &ModuleTree) -> impl Iterator<Item = &Parameter> {
    let any = tree.parameters().iter().any(Parameter::is_adapter);
    tree.parameters().iter().filter(move |p| any && (p.is_adapter() || p.requires_grad()))
}

/// Returns the tensors, with stacks of experts cut into one tensor for each expert.
fn apart(tensors: HashMap<String, Tensor>) -> Result<HashMap<String, Tensor>> {
    let mut all = HashMap::new();
    for (fqn, tensor) in tensors {
        match layer_of(&fqn).filter(|_| tensor.rank() == 3) {
            None => drop(all.insert(fqn, tensor)),
            Some(layer) => {
                for expert in 0..tensor.dim(0)? {
                    let name = format!("{}{}", expert_path(layer, expert), &fqn[layer.len()..]);
                    all.insert(name, tensor.get(expert)?);
                }
            }
        }
    }
    Ok(all)
}

/// Returns PEFT's name of a parameter. The bias of an adapted layer is one level deeper there.
fn peft_name(tree: &ModuleTree, fqn: &str) -> String {
    let adapted = |path: &str| {
        let layer = format!("{path}.lora_");
        tree.parameters().iter().any(|p| p.is_adapter() && p.fqn().starts_with(&layer))
    };
    match fqn.rsplit_once('.') {
        Some((path, "bias")) if adapted(path) => format!("{PREFIX}{path}.base_layer.bias"),
        _ => format!("{PREFIX}{fqn}"),
    }
}

/// Writes the directory of an adapter in PEFT's format from its tensors, by their names in the
/// model (`layers.0.mlp.lora_A.weight`). Existing files are replaced. Not collective.
///
/// # Errors
/// If the directory cannot be written.
pub fn write_adapter(
    dir: &Path,
    tensors: &HashMap<String, Tensor>,
    config: &impl Serialize,
) -> Result<()> {
    let named = tensors.iter().map(|(name, tensor)| (format!("{PREFIX}{name}"), tensor.clone()));
    write_named(dir, &named.collect(), config)
}

fn write_named(
    dir: &Path,
    tensors: &HashMap<String, Tensor>,
    config: &impl Serialize,
) -> Result<()> {
    std::fs::create_dir_all(dir).map_err(Error::io("creating", dir))?;
    let json = serde_json::to_vec_pretty(config)
        .map_err(|error| Error::other(format!("encoding {ADAPTER_CONFIG}: {error}")))?;
    // The configuration is written last, so that its presence marks a complete directory.
    let part = dir.join(format!(".{ADAPTER_MODEL}.part"));
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize_to_file(tensors, Some(metadata), &part)
        .map_err(|error| Error::checkpoint(&part, format!("cannot be written: {error}")))?;
    let file = dir.join(ADAPTER_MODEL);
    std::fs::rename(&part, &file).map_err(Error::io("renaming", &part))?;
    let part = dir.join(format!(".{ADAPTER_CONFIG}.part"));
    std::fs::write(&part, json).map_err(Error::io("writing", &part))?;
    let file = dir.join(ADAPTER_CONFIG);
    std::fs::rename(&part, &file).map_err(Error::io("renaming", &part))
}
