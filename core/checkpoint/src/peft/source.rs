//! [`AdapterSource`]: the tensors of an adapter.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use candle_core::{DType, Device, Tensor};

use super::super::{SafetensorsSource, TensorInfo, TensorSource, TorchSource};
use super::experts::{Files, joined};
use super::{ADAPTER_CONFIG, ADAPTER_MODEL, PREFIX, PeftConfig};
use crate::{Error, Result};
use fulgurite_engine::module::{Adapters, ForeignNames, ForeignPart, ModuleTree, expert_stack};
use fulgurite_engine::shard::Region;

/// The tensor file of adapters from older versions of PEFT.
const TORCH_MODEL: &str = "adapter_model.bin";

/// An adapter's tensors in PEFT's format, under the model's names.
pub struct AdapterSource {
    tensors: Box<dyn TensorSource>,
    /// Names in the file, by their names in the model.
    names: BTreeMap<String, Files>,
    /// The weights of adapted layers, which PEFT writes for embeddings and heads.
    base: BTreeSet<String>,
    config: PeftConfig,
}

impl AdapterSource {
    /// Opens the directory of an adapter.
    ///
    /// # Errors
    /// If the configuration or the tensors are missing or damaged, or the configuration asks for an
    /// unsupported option, naming the key.
    pub fn open(dir: &Path) -> Result<Self> {
        Self::open_as(dir, None)
    }

    /// Opens the directory of an adapter under the names of a model, which may be
    /// [foreign](ModuleTree::foreign_names) in the file.
    ///
    /// The parts of a fused layer share its first matrix, and have their rows of the second one.
    ///
    /// # Errors
    /// As [`open`](Self::open), if a layer has other rows in the file, or if a matrix that was
    /// trained whole is transposed there.
    pub(super) fn open_for(dir: &Path, tree: &ModuleTree) -> Result<Self> {
        Self::open_as(dir, Some(tree))
    }

    fn open_as(dir: &Path, tree: Option<&ModuleTree>) -> Result<Self> {
        let config = PeftConfig::read(dir)?;
        config.check(&dir.join(ADAPTER_CONFIG))?;
        // As in PEFT, the pickle is read only if the safetensors file is missing.
        let torch = !dir.join(ADAPTER_MODEL).exists() && dir.join(TORCH_MODEL).exists();
        let tensors: Box<dyn TensorSource> = match torch {
            true => Box::new(TorchSource::open(dir.join(TORCH_MODEL))?),
            false => Box::new(SafetensorsSource::open(dir.join(ADAPTER_MODEL))?),
        };
        let (mut names, mut base) = (BTreeMap::<String, Files>::new(), BTreeSet::new());
        for theirs in tensors.names() {
            let fail = |message: String| Err(Error::checkpoint(tensors.location(), message));
            let Some(ours) = theirs.strip_prefix(PREFIX) else {
                return fail(format!("has a tensor `{theirs}`; names in it begin with `{PREFIX}`"));
            };
            // If the vocabulary was resized, PEFT also writes the parts of a saved module: the
            // untrained weight, and the trained weight a second time.
            let saved = ours.replace(".modules_to_save.", ".");
            let is_second = saved != ours && tensors.info(&format!("{PREFIX}{saved}")).is_some();
            if ours.contains(".original_module.") || is_second {
                continue;
            }
            let ours = plain(ours);
            let parts = match parts_of(&ours, theirs, tree) {
                Ok(parts) => parts,
                Err(message) => return fail(message),
            };
            let shape = tensors.info(theirs).map(|info| info.shape);
            let rows: usize = parts.iter().map(|(_, file)| file.rows()).sum();
            if rows > 0 && shape.as_deref().and_then(<[usize]>::first) != Some(&rows) {
                return fail(format!(
                    "has `{theirs}` of the shape {:?}, and the layer has {rows} outputs; is it an adapter of this model?",
                    shape.unwrap_or_default()
                ));
            }
            for (ours, file) in parts {
                if theirs.contains(".base_layer.") {
                    base.insert(ours.clone());
                }
                if let Some(other) = names.insert(ours.clone(), file) {
                    let other = other.first();
                    return fail(format!("has `{other}` and `{theirs}`, which are both `{ours}`"));
                }
            }
        }
        Ok(Self { tensors, names, base, config })
    }

    /// Joins the adapters of experts to stacks, for layers whose weight is one stack: `is_stack` is
    /// asked with the weight's name.
    ///
    /// # Errors
    /// If the adapters of a stack are not of all its experts, in one shape.
    pub(super) fn with_stacks(self, is_stack: impl Fn(&str) -> bool) -> Result<Self> {
        let names = joined(self.names, &*self.tensors, is_stack)?;
        Ok(Self { names, ..self })
    }

    /// Whether a tensor is joined of those of experts.
    pub(super) fn is_stack(&self, name: &str) -> bool {
        matches!(self.names.get(name), Some(Files::Experts(_)))
    }

    /// The adapter's configuration.
    pub fn config(&self) -> &PeftConfig {
        &self.config
    }

    /// Returns the adapters to build a model with, so that it can be filled from this source.
    ///
    /// If a regular expression or `all-linear` selects the layers, they are the layers with
    /// tensors. Experts from 0 on (`experts.0.up_proj`, `experts.1.up_proj`) are named together
    /// (`experts.up_proj`).
    ///
    /// # Errors
    /// If the ranks of layers differ, or `bias` is an unknown word.
    pub fn adapters(&self) -> Result<Adapters> {
        let config = &self.config;
        let path = self.location().with_file_name(ADAPTER_CONFIG);
        if config.has_rank_pattern() || config.has_alpha_pattern() {
            let message = "sets `rank_pattern` or `alpha_pattern`: the ranks or factors of its layers differ, and \
                           adapters that are trained have one of each here. It can be merged into its base with `fulgurite checkpoint convert \
                           --adapter`";
            return Err(Error::checkpoint(path, message));
        }
        let listed =
            |value: &serde_json::Value| PeftConfig::list(value).filter(|_| config.lists_targets());
        let lists = (listed(&config.target_modules), listed(&config.exclude_modules));
        let (mut targets, exclude) = match lists {
            (Some(targets), Some(mut exclude)) if !self.is_translated() => {
                exclude.extend(self.named_and_saved().map(str::to_owned));
                (targets, exclude)
            }
            _ => (self.layers().into_iter().map(exactly).collect(), Vec::new()),
        };
        let mut stacks: BTreeMap<String, BTreeSet<usize>> = BTreeMap::new();
        for (stack, expert) in targets.iter().filter_map(|target| expert_stack(target)) {
            stacks.entry(stack).or_default().insert(expert);
        }
        stacks
            .retain(|_, experts| experts.len() > 1 && experts.iter().copied().eq(0..experts.len()));
        targets.retain(|target| {
            expert_stack(target).is_none_or(|(stack, _)| !stacks.contains_key(&stack))
        });
        targets.extend(stacks.into_keys());
        targets.sort();
        let saved: BTreeSet<&str> =
            self.others().filter_map(|name| self.saved_module(name)).collect();
        Ok(Adapters {
            rank: config.r,
            alpha: config.lora_alpha,
            rslora: config.use_rslora,
            dora: config.use_dora,
            dropout: config.lora_dropout,
            all_linear: false,
            targets,
            exclude,
            modules_to_save: saved.into_iter().map(exactly).collect(),
            bias: config.bias(&path)?,
        })
    }

    /// The path in the file of a tensor's module.
    fn path_in_file(&self, name: &str) -> String {
        let theirs = self.names.get(name).map_or(name, Files::first);
        let plain = plain(theirs.strip_prefix(PREFIX).unwrap_or(theirs));
        plain.rsplit_once('.').map_or_else(String::new, |(path, _)| path.to_owned())
    }

    /// Whether a layer has another name in the file.
    fn is_translated(&self) -> bool {
        self.names.iter().any(|(name, files)| {
            let theirs = files.first().strip_prefix(PREFIX).map(plain);
            let in_file = theirs.as_deref().and_then(layer_of);
            !matches!(files, Files::Experts(_)) && layer_of(name) != in_file
        })
    }

    /// The layers that the lists name, and that PEFT trains whole instead.
    fn named_and_saved(&self) -> impl Iterator<Item = &str> {
        let layers = self.others().filter(|name| self.saved_module(name).is_some());
        let layers = layers.filter_map(|name| name.strip_suffix(".weight"));
        layers.filter(|layer| self.config.targets(layer) == Some(true))
    }

    /// The module trained whole that a tensor belongs to, if it is one's.
    fn saved_module<'n>(&self, name: &'n str) -> Option<&'n str> {
        let path = name.rsplit_once('.').map_or("", |(path, _)| path);
        let in_file = self.path_in_file(name);
        match in_file == path {
            true => self.config.saved_module(path),
            false => self.config.saved_module(&in_file).map(|_| path),
        }
    }

    /// Returns the paths of the layers with an adapter.
    pub(super) fn layers(&self) -> BTreeSet<&str> {
        self.names.keys().filter_map(|name| layer_of(name)).collect()
    }

    /// Returns the tensors outside of adapters: modules trained whole, biases, and base weights.
    pub fn others(&self) -> impl Iterator<Item = &str> {
        self.names.keys().map(String::as_str).filter(|name| layer_of(name).is_none())
    }

    /// Whether a tensor is an untrained weight of the base that PEFT wrote beside the adapters.
    ///
    /// It may belong to an adapted layer, or to an embedding or head.
    pub fn is_of_base(&self, name: &str) -> bool {
        let parameter = name.rsplit_once('.').map_or(name, |(_, parameter)| parameter);
        let biases = self.config.bias != "none" && parameter == "bias";
        layer_of(name).is_none()
            && !biases
            && (self.base.contains(name) || self.saved_module(name).is_none())
    }
}

/// A name of a file without PEFT's segments.
fn plain(name: &str) -> String {
    let name = name.replace(".modules_to_save.default.", ".modules_to_save.");
    name.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
}

/// The model's tensors that a file's tensor is made of. Its name is `theirs`, and without PEFT's
/// segments `name`.
fn parts_of(
    name: &str,
    theirs: &str,
    tree: Option<&ModuleTree>,
) -> Result<Vec<(String, Files)>, String> {
    let Some((tree, foreign)) = tree.and_then(|tree| Some((tree, tree.foreign_names()?))) else {
        return Ok(vec![(name.to_owned(), Files::One(theirs.to_owned()))]);
    };
    let parts = parts_under(name, theirs, foreign)?;
    let is_known = |(part, _): &(String, Files)| tree.parameter(part).is_some();
    if parts.iter().any(is_known) {
        return Ok(parts);
    }
    // An adapter of the model without its head, which is the whole of its file.
    let full = parts_under(&format!("{}.{name}", foreign.prefix()), theirs, foreign)?;
    Ok(if full.iter().any(is_known) { full } else { parts })
}

/// As [`parts_of`], of a file whose names are those that the layout has for it.
fn parts_under(
    name: &str,
    theirs: &str,
    foreign: &dyn ForeignNames,
) -> Result<Vec<(String, Files)>, String> {
    let (tensor, suffix) = match layer_of(name) {
        Some(layer) => (format!("{layer}.weight"), &name[layer.len()..]),
        None => (name.to_owned(), ""),
    };
    let part = |ForeignPart { parameter, rows, is_transposed }: ForeignPart| {
        if suffix.is_empty() {
            if is_transposed {
                return Err(format!(
                    "has `{theirs}`, a matrix that was trained whole and is transposed in the model; merge the \
                     adapter in PEFT (`merge_and_unload`)"
                ));
            }
            let file = theirs.to_owned();
            let files = rows
                .map_or_else(|| Files::One(file.clone()), |rows| Files::Rows(file.clone(), rows));
            return Ok((parameter, files));
        }
        let layer = parameter.strip_suffix(".weight").unwrap_or(&parameter);
        // The first matrix takes the input, which all parts have.
        let is_first = suffix == ".lora_A.weight" || suffix == ".lora_embedding_A";
        let files = match rows.filter(|_| !is_first) {
            None => Files::One(theirs.to_owned()),
            Some(rows) => Files::Rows(theirs.to_owned(), rows),
        };
        Ok((format!("{layer}{suffix}"), files))
    };
    foreign.parts(&tensor).into_iter().map(part).collect()
}

/// Returns the pattern that matches this path only.
fn exactly(path: &str) -> String {
    format!(".{path}")
}

/// Returns the path of the layer that a tensor of an adapter belongs to.
pub(super) fn layer_of(name: &str) -> Option<&str> {
    name.rfind(".lora_").map(|at| &name[..at])
}

impl TensorSource for AdapterSource {
    fn location(&self) -> &Path {
        self.tensors.location()
    }

    fn names(&self) -> Vec<&str> {
        self.names.keys().map(String::as_str).collect()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.names.get(name)?.info(&*self.tensors)
    }

    fn read(&self, name: &str, region: &Region, dtype: DType, device: &Device) -> Result<Tensor> {
        match self.names.get(name) {
            Some(files) => files.read(&*self.tensors, region, dtype, device),
            None => self.tensors.read(name, region, dtype, device),
        }
    }
}
