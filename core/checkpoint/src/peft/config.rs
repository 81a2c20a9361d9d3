//! `adapter_config.json`.

use std::collections::BTreeSet;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::super::weights::MAX_COMPANION;
use super::source::layer_of;
use super::{ADAPTER_CONFIG, AdapterLabels};
use crate::json::read_json;
use crate::{Error, Result};
use fulgurite_engine::module::{
    AdapterBias, Adapters, ModuleTree, any_pattern_matches, expert_path, pattern_names,
};

/// The key of adapters whose base has transposed matrices.
const FAN_IN_FAN_OUT: &str = "fan_in_fan_out";

/// The key of layers whose [`alpha`](PeftConfig::lora_alpha) differs.
const ALPHA_PATTERN: &str = "alpha_pattern";

/// PEFT's tasks whose adapters have a head that is trained whole, and its names.
const WITH_HEADS: [&str; 2] = ["SEQ_CLS", "TOKEN_CLS"];
const HEADS: [&str; 2] = ["classifier", "score"];

/// Keys of `adapter_config.json` that do not change the output of a trained adapter.
///
/// The fields of [`PeftConfig`] are not listed.
const WITHOUT_EFFECT: [&str; 18] = [
    ALPHA_PATTERN, // Checked by its keys.
    "auto_mapping",
    "corda_config",
    "ensure_weight_tying",
    FAN_IN_FAN_OUT, // The adapter's matrices are the same.
    "eva_config",
    "init_lora_weights", // Checked by its value.
    "layers_pattern",    // The layers with tensors count.
    "layers_to_transform",
    "loftq_config",
    "lora_ga_config",
    "megatron_core",
    "parent_library",
    "peft_version",
    "qalora_group_size",
    "rank_pattern", // The tensors' shapes give the ranks.
    "revision",
    "runtime_config",
];

/// Values of `init_lora_weights` that leave the base weights unchanged.
const PLAIN_INITS: [&str; 4] = ["eva", "gaussian", "mica", "orthogonal"];

/// `adapter_config.json`, as PEFT's `LoraConfig` writes it.
///
/// Other fields are ignored if they do not change the adapter's output, and refused otherwise.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PeftConfig {
    /// Always `LORA`.
    pub peft_type: String,
    /// The rank.
    pub r: usize,
    /// [`Adapters::alpha`].
    pub lora_alpha: f64,
    /// [`Adapters::dropout`].
    #[serde(default)]
    pub lora_dropout: f64,
    /// [`Adapters::rslora`].
    #[serde(default)]
    pub use_rslora: bool,
    /// [`Adapters::dora`].
    #[serde(default)]
    pub use_dora: bool,
    /// The layers with an adapter: ends of their paths as a list, a regular expression, or
    /// `all-linear`.
    #[serde(default)]
    pub target_modules: serde_json::Value,
    /// [`Adapters::exclude`].
    #[serde(default)]
    pub exclude_modules: serde_json::Value,
    /// Ends of the paths of modules that are trained whole. PEFT compares them letter by letter:
    /// `norm` also matches `input_layernorm`.
    #[serde(default)]
    pub modules_to_save: Option<Vec<String>>,
    /// `none`, `all` or `lora_only`.
    #[serde(default = "no_bias")]
    pub bias: String,
    /// The base model.
    #[serde(default)]
    pub base_model_name_or_path: Option<String>,
    /// The model's task, such as `CAUSAL_LM`.
    #[serde(default)]
    pub task_type: Option<String>,
    /// Whether training is disabled.
    #[serde(default)]
    pub inference_mode: bool,
    #[serde(flatten)]
    rest: serde_json::Map<String, serde_json::Value>,
}

fn no_bias() -> String {
    "none".to_owned()
}

impl PeftConfig {
    /// Returns the configuration of a model's adapters.
    pub(super) fn new(adapters: &Adapters, tree: &ModuleTree, labels: AdapterLabels<'_>) -> Self {
        let plain = |patterns: &[String]| {
            !patterns.iter().any(|pattern| pattern.contains('*') || pattern.starts_with('.'))
        };
        let names =
            |patterns: &[String], path: &str| patterns.iter().any(|p| pattern_names(p, path));
        let own = tree.parameters().iter().filter(|p| p.is_adapter());
        let mut layers: Vec<String> = Vec::new();
        let mut stacks: BTreeSet<&str> = BTreeSet::new();
        for parameter in own {
            let Some(layer) = layer_of(parameter.fqn()) else { continue };
            let is_stack = parameter.global_shape().len() == 3;
            if is_stack {
                stacks.insert(layer);
            }
            layers.push(if is_stack { expert_path(layer, 0) } else { layer.to_owned() });
        }
        layers.dedup();
        let Adapters { targets, exclude, .. } = adapters;
        // To PEFT a pattern is the end of a layer's path. `*` is not special there, and layers
        // inside a named module do not match.
        let named = layers.iter().all(|layer| names(targets, layer));
        let excluded = |path: &&String| names(targets, path) && any_pattern_matches(exclude, path);
        let left_out = tree.modules().keys().filter(excluded).all(|path| names(exclude, path));
        let as_they_are = plain(targets) && plain(exclude) && named && left_out;
        let (targets, exclude) = match (as_they_are, stacks.is_empty()) {
            (true, _) => (targets.clone().into(), exclude.clone()),
            (false, true) => (layers.into(), Vec::new()),
            (false, false) => (expression(tree, &stacks).into(), Vec::new()),
        };
        let modules_to_save = saved_modules(adapters, tree);
        // For these tasks PEFT takes the head for trained, and asks for its values.
        let heads = modules_to_save
            .iter()
            .flatten()
            .filter(|path| HEADS.iter().any(|head| path.ends_with(head)));
        let needs_head = labels.task_type.is_some_and(|task| WITH_HEADS.contains(&task));
        let task_type = labels.task_type.filter(|_| !needs_head || heads.count() > 0);
        let bias = match adapters.bias {
            AdapterBias::None => "none",
            AdapterBias::All => "all",
            AdapterBias::AdapterOnly => "lora_only",
        };
        let exclude = match exclude.is_empty() {
            true => serde_json::Value::Null,
            false => exclude.into(),
        };
        let mut rest = serde_json::Map::new();
        if shares_saved(tree) {
            // PEFT then goes on training the modules as one.
            rest.insert("ensure_weight_tying".to_owned(), true.into());
        }
        rest.insert(FAN_IN_FAN_OUT.to_owned(), false.into());
        rest.insert("init_lora_weights".to_owned(), true.into());
        Self {
            peft_type: "LORA".to_owned(),
            r: adapters.rank,
            lora_alpha: adapters.alpha,
            lora_dropout: adapters.dropout,
            use_rslora: adapters.rslora,
            use_dora: adapters.dora,
            target_modules: targets,
            exclude_modules: exclude,
            modules_to_save,
            bias: bias.to_owned(),
            base_model_name_or_path: labels.base_model.map(str::to_owned),
            task_type: task_type.map(str::to_owned),
            inference_mode: true,
            rest,
        }
    }

    /// Reads the adapter configuration in a directory.
    ///
    /// # Errors
    /// If the file is missing, or is not JSON of this kind.
    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join(ADAPTER_CONFIG);
        serde_json::from_value(read_json::<serde_json::Value>(&path, MAX_COMPANION)?).map_err(
            |error| {
                Error::checkpoint(
                    &path,
                    format!("is no configuration of a LoRA adapter of PEFT: {error}"),
                )
            },
        )
    }

    /// Returns the factor of the output of a layer's adapter of this rank.
    pub fn scale(&self, layer: &str, rank: usize) -> f64 {
        let of_layer = self.alphas().find(|(pattern, _)| ends_with(layer, pattern));
        let (alpha, rank) = (of_layer.map_or(self.lora_alpha, |(_, alpha)| alpha), rank as f64);
        alpha / if self.use_rslora { rank.sqrt() } else { rank }
    }

    /// The layers whose alpha differs, and their alphas.
    fn alphas(&self) -> impl Iterator<Item = (String, f64)> {
        let table = self.rest.get(ALPHA_PATTERN).and_then(serde_json::Value::as_object);
        table
            .into_iter()
            .flatten()
            .filter_map(|(pattern, alpha)| Some((pattern.replace(r"\.", "."), alpha.as_f64()?)))
    }

    /// Whether the alphas of layers differ.
    pub(super) fn has_alpha_pattern(&self) -> bool {
        self.rest.get(ALPHA_PATTERN).is_some_and(|value| !is_off(value))
    }

    /// Whether the ranks of layers differ.
    pub(super) fn has_rank_pattern(&self) -> bool {
        self.rest.get("rank_pattern").is_some_and(|value| !is_off(value))
    }

    /// Whether the weights of adapted layers are transposed in the base, as GPT-2's are.
    pub(super) fn has_transposed_base(&self) -> bool {
        self.rest.get(FAN_IN_FAN_OUT) == Some(&true.into())
    }

    /// Whether PEFT trains modules that share a weight as one.
    pub(super) fn ensures_weight_tying(&self) -> bool {
        self.rest.get("ensure_weight_tying") == Some(&true.into())
    }

    /// Returns the module trained whole that `path` names or lies in.
    pub(super) fn saved_module<'p>(&self, path: &'p str) -> Option<&'p str> {
        saved_module(self.modules_to_save.as_deref().unwrap_or_default(), path)
    }

    /// Checks that an adapter of this configuration computes `scale B A x`; `path` is for messages.
    ///
    /// # Errors
    /// If it asks for anything else, or sets an unknown key, naming the key.
    pub(super) fn check(&self, path: &Path) -> Result<()> {
        let wrong = |message: String| Err(Error::checkpoint(path, message));
        if self.peft_type != "LORA" {
            return wrong(format!(
                "is an adapter of the type {}; only LORA can be loaded",
                self.peft_type
            ));
        }
        if self.r == 0 || !self.lora_alpha.is_finite() {
            let (r, alpha) = (self.r, self.lora_alpha);
            return wrong(format!(
                "has `r` = {r} and `lora_alpha` = {alpha}, of which no scale follows"
            ));
        }
        // PEFT takes them for regular expressions.
        let is_plain = |c: char| c.is_alphanumeric() || "._-".contains(c);
        let table = self.rest.get(ALPHA_PATTERN).filter(|table| !is_off(table));
        let entries = table.map(|table| table.as_object().map_or(usize::MAX, serde_json::Map::len));
        if entries.is_some_and(|entries| self.alphas().count() != entries) {
            return wrong(format!("has `{ALPHA_PATTERN}` that is no table of numbers"));
        }
        if let Some((pattern, _)) = self.alphas().find(|(key, _)| !key.chars().all(is_plain)) {
            return wrong(format!(
                "has `{pattern}` in `{ALPHA_PATTERN}`, and only paths of layers and their ends can be read; write \
                 them out"
            ));
        }
        match self.rest.get("init_lora_weights") {
            None | Some(serde_json::Value::Null | serde_json::Value::Bool(_)) => {}
            Some(serde_json::Value::String(init))
                if PLAIN_INITS.contains(&init.to_lowercase().as_str()) => {}
            Some(init) => {
                return wrong(format!(
                    "sets `init_lora_weights` = {init}, which may have changed the weights of the base when the \
                     adapter was made: beside the base as it is it computes something else. Write it again from \
                     PEFT with `save_pretrained(dir, path_initial_model_for_weight_conversion=...)`, which makes \
                     a plain adapter of it"
                ));
            }
        }
        let refused = self
            .rest
            .iter()
            .find(|(key, value)| !is_off(value) && !WITHOUT_EFFECT.contains(&key.as_str()));
        match refused {
            None => Ok(()),
            Some((key, value)) => wrong(format!(
                "sets `{key}` = {value}, which adapters do not have here; merge it in PEFT \
                 (`merge_and_unload`), or take the key out if it changes nothing"
            )),
        }
    }

    /// Returns the patterns of a list of layers; `None` for a regular expression or a keyword.
    pub(super) fn list(value: &serde_json::Value) -> Option<Vec<String>> {
        match value {
            serde_json::Value::Null => Some(Vec::new()),
            value => serde_json::from_value(value.clone()).ok(),
        }
    }

    /// Whether `target_modules` and `exclude_modules` alone determine the layers with an adapter.
    pub(super) fn lists_targets(&self) -> bool {
        let key = self.rest.get("layers_to_transform");
        key.is_none_or(is_off) && self.target_modules.is_array()
    }

    /// Whether the lists of layers name this layer, by PEFT's rule.
    ///
    /// A pattern is a whole path, or its end after a dot. Returns `None` if they are not lists, or
    /// if `layers_to_transform` limits them.
    pub(super) fn targets(&self, layer: &str) -> Option<bool> {
        if !self.lists_targets() {
            return None;
        }
        let names =
            |patterns: Vec<String>| patterns.iter().any(|pattern| ends_with(layer, pattern));
        let targets = names(Self::list(&self.target_modules)?);
        let excluded = names(Self::list(&self.exclude_modules)?);
        Some(targets && !excluded)
    }

    /// Returns the choice of trained biases; `path` is for messages.
    pub(super) fn bias(&self, path: &Path) -> Result<AdapterBias> {
        match self.bias.as_str() {
            "none" => Ok(AdapterBias::None),
            "all" => Ok(AdapterBias::All),
            "lora_only" => Ok(AdapterBias::AdapterOnly),
            other => {
                let message = format!("`bias` is {other:?}; expected none, all or lora_only");
                Err(Error::checkpoint(path, message))
            }
        }
    }
}

/// Whether a layer's path is this one, or ends with it after a dot.
fn ends_with(layer: &str, path: &str) -> bool {
    let rest = layer.strip_suffix(path);
    rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// Whether a value switches its key off.
fn is_off(value: &serde_json::Value) -> bool {
    match value {
        serde_json::Value::Null => true,
        serde_json::Value::Bool(on) => !on,
        serde_json::Value::Object(fields) => fields.is_empty(),
        serde_json::Value::Array(items) => items.is_empty(),
        _ => false,
    }
}

/// Returns the outermost module, of `path` and its ancestors, whose path ends with a pattern.
fn saved_module<'p>(patterns: &[String], path: &'p str) -> Option<&'p str> {
    let ends = path.match_indices('.').map(|(end, _)| end).chain([path.len()]);
    let mut modules = ends.map(|end| &path[..end]);
    modules.find(|module| patterns.iter().any(|pattern| module.ends_with(pattern.as_str())))
}

/// The regular expression of all layers with an adapter. Experts are layers by themselves, or in
/// `transformers` 5 a stack, whose path lacks their number.
fn expression(tree: &ModuleTree, stacks: &BTreeSet<&str>) -> String {
    let adapters = tree.parameters().iter().filter(|p| p.is_adapter());
    let layers: BTreeSet<&str> = adapters.filter_map(|p| layer_of(p.fqn())).collect();
    let path = |layer: &&str| match layer.rsplit_once('.').filter(|_| stacks.contains(layer)) {
        Some((path, name)) => format!(r"{}\.(\d+\.)?{name}", path.replace('.', r"\.")),
        None => layer.replace('.', r"\."),
    };
    layers.iter().map(path).collect::<Vec<_>>().join("|")
}

/// Whether modules that are trained whole share a weight.
fn shares_saved(tree: &ModuleTree) -> bool {
    let trained = |fqn: &str| tree.parameter(fqn).is_some_and(|p| p.requires_grad());
    tree.aliases().any(|(_, fqn)| trained(fqn))
}

/// Returns the modules that a model trains whole beside its adapters, as patterns for PEFT.
///
/// The patterns match no other modules in PEFT. Modules that share a weight are all listed: PEFT
/// trains and saves them one by one.
fn saved_modules(adapters: &Adapters, tree: &ModuleTree) -> Option<Vec<String>> {
    let owner = |fqn: &str| fqn.rsplit_once('.').map_or("", |(path, _)| path).to_owned();
    let trained: BTreeSet<&str> = tree
        .trainable()
        .filter(|p| !p.is_adapter() && !p.fqn().ends_with(".bias"))
        .map(|p| p.fqn())
        .collect();
    let shared = tree.aliases().filter(|(_, fqn)| trained.contains(fqn)).map(|(alias, _)| alias);
    let mut paths: Vec<String> = trained.iter().copied().chain(shared).map(owner).collect();
    paths.sort();
    paths.dedup();
    let all =
        tree.parameters().iter().map(|p| p.fqn()).chain(tree.aliases().map(|(alias, _)| alias));
    let all: BTreeSet<String> = all.map(owner).collect();
    let patterns = &adapters.modules_to_save;
    let found: Vec<String> =
        all.into_iter().filter(|path| saved_module(patterns, path).is_some()).collect();
    if paths.is_empty() {
        return None;
    }
    Some(if found == paths { patterns.clone() } else { paths })
}
