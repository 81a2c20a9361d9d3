//! Writing and reading the directory of an adapter.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};

use super::super::full::gather_cpu_state_dict;
use super::super::save::on_rank_zero;
use super::super::{
    GatherOptions, LoadOptions, LoadReport, ParameterFilter, SafetensorsSource, TensorInfo,
    TensorSource, load_into,
};
use super::{ADAPTER_CONFIG, ADAPTER_MODEL, PeftConfig};
use crate::{Error, Result};
use fulgurite_engine::collective::ProcessGroup;
use fulgurite_engine::module::{Adapters, ModuleTree};
use fulgurite_engine::parameter::Parameter;
use fulgurite_engine::shard::Region;

/// What PEFT's names begin with.
const PREFIX: &str = "base_model.model.";

/// Writes the adapters of a model, and what else is trained with them, to the directory `dir` in PEFT's format:
/// `PeftModel.from_pretrained(base, dir)` loads it. `base_model` is the base's name in the Hugging Face Hub or its
/// path, if it is known. Files of that name are replaced. Collective: rank 0 gathers the tensors and writes.
///
/// # Errors
/// On every rank if the directory cannot be written, or the model has no adapters.
pub fn save_adapter(
    dir: &Path,
    group: &dyn ProcessGroup,
    tree: &ModuleTree,
    coordinate: impl Fn(&str) -> usize,
    adapters: &Adapters,
    base_model: Option<&str>,
) -> Result<PathBuf> {
    let saved: BTreeSet<String> = saved(tree).map(|p| p.fqn().to_owned()).collect();
    if saved.is_empty() {
        return Err(Error::checkpoint(dir, "there is nothing to save: the model has no adapters"));
    }
    let options = GatherOptions::default().with_filter(move |fqn| saved.contains(fqn));
    let tensors = gather_cpu_state_dict(tree, coordinate, group, &options)?;
    on_rank_zero(group, || {
        let tensors: HashMap<String, Tensor> =
            tensors.into_iter().map(|(fqn, tensor)| (peft_name(tree, &fqn), tensor)).collect();
        let config = PeftConfig::new(adapters, tree, base_model);
        write(dir, &tensors, &config)
    })?;
    Ok(dir.to_owned())
}

/// The parameters that belong to the adapters' files.
fn saved(tree: &ModuleTree) -> impl Iterator<Item = &Parameter> {
    let any = tree.parameters().iter().any(Parameter::is_adapter);
    tree.parameters().iter().filter(move |p| any && (p.is_adapter() || p.requires_grad()))
}

/// PEFT's name of a parameter. It keeps the bias of a layer with an adapter one level deeper.
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

fn write(dir: &Path, tensors: &HashMap<String, Tensor>, config: &PeftConfig) -> Result<()> {
    std::fs::create_dir_all(dir).map_err(Error::io("creating", dir))?;
    let json = serde_json::to_vec_pretty(config)
        .map_err(|error| Error::other(format!("encoding {ADAPTER_CONFIG}: {error}")))?;
    // The configuration comes last: a directory that has one is whole.
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

/// The tensors of an adapter in PEFT's format, under the names that they have in a model.
pub struct AdapterSource {
    tensors: SafetensorsSource,
    /// The names in the file, by those in the model.
    names: BTreeMap<String, String>,
    config: PeftConfig,
}

impl AdapterSource {
    /// Opens the directory of an adapter.
    ///
    /// # Errors
    /// If one of the two files is missing or damaged.
    pub fn open(dir: &Path) -> Result<Self> {
        let config = PeftConfig::read(dir)?;
        let tensors = SafetensorsSource::open(dir.join(ADAPTER_MODEL))?;
        let mut names = BTreeMap::new();
        for theirs in tensors.names() {
            let Some(ours) = theirs.strip_prefix(PREFIX) else {
                let message = format!("has a tensor `{theirs}`; names in it begin with `{PREFIX}`");
                return Err(Error::checkpoint(tensors.location(), message));
            };
            let ours = ours.replace(".base_layer.", ".").replace(".modules_to_save.default.", ".");
            names.insert(ours, theirs.to_owned());
        }
        Ok(Self { tensors, names, config })
    }

    /// What the adapter is.
    pub fn config(&self) -> &PeftConfig {
        &self.config
    }
}

impl TensorSource for AdapterSource {
    fn location(&self) -> &Path {
        self.tensors.location()
    }

    fn names(&self) -> Vec<&str> {
        self.names.keys().map(String::as_str).collect()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.tensors.info(self.names.get(name)?)
    }

    fn read(&self, name: &str, region: &Region, dtype: DType, device: &Device) -> Result<Tensor> {
        let theirs = self.names.get(name).map_or(name, String::as_str);
        self.tensors.read(theirs, region, dtype, device)
    }
}

/// Fills the adapters of a model, and what else is trained with them, from a directory of PEFT's. Every rank
/// calls it and reads its own parts; not collective. To be followed by the strategy's
/// [`finish_load`](fulgurite_engine::strategy::Strategy::finish_load).
///
/// # Errors
/// If the directory is no adapter, its scale is another one than that of the model's adapters, one is a DoRA and the
/// other is not, or a tensor is
/// missing, unexpected or of another shape. Nothing is changed then.
pub fn load_adapter(dir: &Path, tree: &ModuleTree, adapters: &Adapters) -> Result<LoadReport> {
    let source = AdapterSource::open(dir)?;
    let theirs = source.config().adapters(dir)?;
    let same = |a: f64, b: f64| (a - b).abs() <= 1e-6 * b.abs();
    if theirs.rank != adapters.rank || !same(theirs.scale(), adapters.scale()) {
        return Err(Error::checkpoint(
            dir,
            format!(
                "is an adapter of rank {} whose output is scaled by {}, and the model has adapters of rank {} \
                 and scale {}; take its configuration with `trainer.adapters.from`",
                theirs.rank,
                theirs.scale(),
                adapters.rank,
                adapters.scale()
            ),
        ));
    }
    if theirs.dora != adapters.dora {
        let (with, without) = match theirs.dora {
            true => ("has magnitudes (DoRA)", "have none"),
            false => ("has no magnitudes (it is no DoRA)", "have some"),
        };
        return Err(Error::checkpoint(
            dir,
            format!(
                "{with}, and the model's adapters {without}; set `trainer.adapters.dora = {}`, or take its \
                 configuration with `trainer.adapters.from`",
                theirs.dora
            ),
        ));
    }
    let wanted: BTreeSet<String> = saved(tree).map(|p| p.fqn().to_owned()).collect();
    if let Some(name) = source.names().into_iter().find(|name| !wanted.contains(*name)) {
        return Err(Error::checkpoint(
            source.location(),
            format!(
                "has a tensor `{name}`, for which the model has no adapter; nothing was loaded"
            ),
        ));
    }
    let filter = ParameterFilter::new("the adapters", move |fqn| wanted.contains(fqn));
    load_into(&source, tree, LoadOptions { filter: Some(filter), ..LoadOptions::default() })
}
