//! `adapter_config.json`.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::super::weights::MAX_COMPANION;
use super::ADAPTER_CONFIG;
use crate::{Error, Result};
use fulgurite_engine::module::{
    AdapterBias, Adapters, ModuleTree, any_pattern_matches, pattern_names,
};
use fulgurite_error::files::read_regular;

/// What PEFT's `LoraConfig` writes to `adapter_config.json`, as far as it is known here. Other fields are
/// ignored when they are read if they change nothing of what an adapter computes, and refused otherwise.
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
    /// The layers with an adapter: ends of their paths, as a list.
    pub target_modules: serde_json::Value,
    /// [`Adapters::exclude`].
    #[serde(default)]
    pub exclude_modules: serde_json::Value,
    /// [`Adapters::modules_to_save`].
    #[serde(default)]
    pub modules_to_save: Option<Vec<String>>,
    /// `none`, `all` or `lora_only`.
    #[serde(default = "no_bias")]
    pub bias: String,
    /// The model that it is an adapter of.
    #[serde(default)]
    pub base_model_name_or_path: Option<String>,
    /// What the model is for, such as `CAUSAL_LM`.
    #[serde(default)]
    pub task_type: Option<String>,
    /// Whether it is not to be trained on.
    #[serde(default)]
    pub inference_mode: bool,
    #[serde(flatten)]
    rest: serde_json::Map<String, serde_json::Value>,
}

fn no_bias() -> String {
    "none".to_owned()
}

impl PeftConfig {
    /// The configuration of the adapters of a model.
    pub(super) fn new(adapters: &Adapters, tree: &ModuleTree, base_model: Option<&str>) -> Self {
        let plain = |patterns: &[String]| {
            !patterns.iter().any(|pattern| pattern.contains('*') || pattern.starts_with('.'))
        };
        let names =
            |patterns: &[String], path: &str| patterns.iter().any(|p| pattern_names(p, path));
        let owner = |fqn: &str| fqn.rsplit_once('.').map_or("", |(path, _)| path).to_owned();
        let own = tree.parameters().iter().filter(|p| p.is_adapter());
        let mut layers: Vec<String> = own
            .filter_map(|p| p.fqn().rfind(".lora_").map(|at| p.fqn()[..at].to_owned()))
            .collect();
        layers.dedup();
        let Adapters { targets, exclude, .. } = adapters;
        // To PEFT a pattern is the end of a layer's path, without `*`, and means nothing under it.
        let named = layers.iter().all(|layer| names(targets, layer));
        let excluded = |path: &&String| names(targets, path) && any_pattern_matches(exclude, path);
        let left_out = tree.modules().keys().filter(excluded).all(|path| names(exclude, path));
        let as_they_are = plain(targets) && plain(exclude) && named && left_out;
        let (targets, exclude) = match as_they_are {
            true => (targets.clone(), exclude.clone()),
            false => (layers, Vec::new()),
        };
        let modules_to_save = match adapters.modules_to_save.as_slice() {
            [] => None,
            patterns if plain(patterns) => Some(patterns.to_vec()),
            _ => {
                let own =
                    tree.trainable().filter(|p| !p.is_adapter() && !p.fqn().ends_with(".bias"));
                let mut paths: Vec<String> = own.map(|p| owner(p.fqn())).collect();
                paths.dedup();
                Some(paths)
            }
        };
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
        rest.insert("fan_in_fan_out".to_owned(), false.into());
        rest.insert("init_lora_weights".to_owned(), true.into());
        Self {
            peft_type: "LORA".to_owned(),
            r: adapters.rank,
            lora_alpha: adapters.alpha,
            lora_dropout: adapters.dropout,
            use_rslora: adapters.rslora,
            use_dora: adapters.dora,
            target_modules: targets.into(),
            exclude_modules: exclude,
            modules_to_save,
            bias: bias.to_owned(),
            base_model_name_or_path: base_model.map(str::to_owned),
            task_type: Some("CAUSAL_LM".to_owned()),
            inference_mode: true,
            rest,
        }
    }

    /// Reads the configuration of the adapter in a directory.
    ///
    /// # Errors
    /// If there is none, or it is not JSON of this kind.
    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join(ADAPTER_CONFIG);
        let bytes = read_regular(&path, MAX_COMPANION)?;
        serde_json::from_slice(&bytes).map_err(|error| {
            Error::checkpoint(
                &path,
                format!("is no configuration of a LoRA adapter of PEFT: {error}"),
            )
        })
    }

    /// The adapters that it stands for; `path` is where it was read, for messages.
    ///
    /// # Errors
    /// If it asks for what is not there: other adapters than LoRA and DoRA, ranks that differ between layers,
    /// targets as a regular expression, transposed weights, and the like.
    pub fn adapters(&self, path: &Path) -> Result<Adapters> {
        let wrong = |message: String| Err(Error::checkpoint(path, message));
        if self.peft_type != "LORA" {
            return wrong(format!(
                "is an adapter of the type {}; only LORA can be loaded",
                self.peft_type
            ));
        }
        let off = |value: &serde_json::Value| match value {
            serde_json::Value::Null => true,
            serde_json::Value::Bool(on) => !on,
            serde_json::Value::Object(fields) => fields.is_empty(),
            serde_json::Value::Array(items) => items.is_empty(),
            _ => false,
        };
        const REFUSED: [&str; 12] = [
            "fan_in_fan_out",
            "rank_pattern",
            "alpha_pattern",
            "layers_to_transform",
            "layer_replication",
            "target_parameters",
            "trainable_token_indices",
            "lora_bias",
            "use_qalora",
            "alora_invocation_tokens",
            "arrow_config",
            "layers_pattern",
        ];
        if let Some(key) =
            REFUSED.iter().find(|key| self.rest.get(**key).is_some_and(|value| !off(value)))
        {
            return wrong(format!("sets `{key}`, which adapters do not have here"));
        }
        let list = |key: &str, value: &serde_json::Value| -> Result<Vec<String>> {
            if value.is_null() {
                return Ok(Vec::new());
            }
            serde_json::from_value(value.clone()).map_err(|_| {
                let message = format!(
                    "`{key}` is {value}: a regular expression or a word for many layers is not known here; \
                     write the names of layers as a list"
                );
                Error::checkpoint(path, message)
            })
        };
        let mut targets = list("target_modules", &self.target_modules)?;
        targets.sort();
        let bias = match self.bias.as_str() {
            "none" => AdapterBias::None,
            "all" => AdapterBias::All,
            "lora_only" => AdapterBias::AdapterOnly,
            other => return wrong(format!("`bias` is {other:?}; expected none, all or lora_only")),
        };
        Ok(Adapters {
            rank: self.r,
            alpha: self.lora_alpha,
            rslora: self.use_rslora,
            dora: self.use_dora,
            dropout: self.lora_dropout,
            targets,
            exclude: list("exclude_modules", &self.exclude_modules)?,
            modules_to_save: self.modules_to_save.clone().unwrap_or_default(),
            bias,
        })
    }
}
