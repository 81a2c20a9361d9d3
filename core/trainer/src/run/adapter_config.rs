//! The configuration of adapters.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{Error, Result};
use fulgurite_checkpoint::AdapterSource;
use fulgurite_config::ConfigType;
use fulgurite_engine::module::{AdapterBias, Adapters};

/// Low-rank adapters (LoRA) that are trained while the model is frozen: the table
/// `[trainer.adapters]`. Layers are chosen by patterns: `q_proj` is every layer of that name,
/// `mlp` every layer in an `mlp`, `layers.3.self_attn.q_proj` that one layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct AdapterConfig {
    /// The layers that get an adapter: patterns of linear layers and embeddings, such as
    /// `["q_proj", "v_proj"]`, or `"all-linear"`: all linear layers but those of the head,
    /// which is called `lm_head`, `score` or `classifier`, and of `modules_to_save`.
    pub targets: AdapterTargets,
    /// The inner dimension of each adapter (PEFT's `r`); by default 8.
    pub rank: Option<usize>,
    /// The factor of the adapters' output, times the rank (PEFT's `lora_alpha`); by default the
    /// rank, for a factor of 1.
    pub alpha: Option<f64>,
    /// The probability of zeroing an element of the adapters' input in training; by default 0.
    pub dropout: Option<f64>,
    /// Whether `alpha` is divided by the root of the rank, instead of the rank (PEFT's
    /// `use_rslora`).
    pub rslora: bool,
    /// Whether the norms of the weights' rows are trained separately from their directions
    /// (DoRA, PEFT's `use_dora`). Only for linear layers.
    pub dora: bool,
    /// Layers without an adapter, even if `targets` matches them.
    pub exclude: Vec<String>,
    /// Modules that are trained whole beside the adapters, such as `["lm_head"]`.
    pub modules_to_save: Vec<String>,
    /// The biases that are trained beside the adapters: `"none"`, `"all"`, or `"lora_only"`,
    /// the biases of layers with an adapter.
    #[default(BiasMode::None)]
    pub bias: BiasMode,
    /// The directory of an adapter in PEFT's format to start from. Its `adapter_config.json`
    /// determines the adapter, so all other keys must be left out.
    pub from: Option<PathBuf>,
}

/// The layers that get an adapter: `trainer.adapters.targets`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected \"all-linear\" or a list of patterns")]
pub enum AdapterTargets {
    /// All linear layers but the head, as PEFT's `target_modules="all-linear"`.
    Kind(LayerKind),
    /// The layers that these patterns match.
    Patterns(Vec<String>),
}

/// A kind of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LayerKind {
    /// Linear layers.
    #[serde(rename = "all-linear")]
    AllLinear,
}

impl Default for AdapterTargets {
    fn default() -> Self {
        Self::Patterns(Vec::new())
    }
}

impl<S: Into<String>> FromIterator<S> for AdapterTargets {
    fn from_iter<I: IntoIterator<Item = S>>(patterns: I) -> Self {
        Self::Patterns(patterns.into_iter().map(Into::into).collect())
    }
}

impl ConfigType for AdapterTargets {
    fn describe() -> String {
        "list of strings, or `\"all-linear\"`".to_owned()
    }
}

/// The biases that are trained beside adapters: `trainer.adapters.bias`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BiasMode {
    /// No biases.
    #[default]
    None,
    /// All biases.
    All,
    /// The biases of layers with an adapter.
    LoraOnly,
}

impl ConfigType for BiasMode {
    fn describe() -> String {
        "`\"none\"`, `\"all\"` or `\"lora_only\"`".to_owned()
    }
}

impl ConfigType for AdapterConfig {
    fn describe() -> String {
        "table".to_owned()
    }
}

impl AdapterConfig {
    /// Returns the adapters to build a model with.
    ///
    /// # Errors
    /// [`Error::Config`] if a value is out of range, or `from` holds no adapter.
    pub fn adapters(&self) -> Result<Adapters> {
        let adapters = match &self.from {
            None => {
                let rank = self.rank.unwrap_or(8);
                let (targets, all_linear) = match &self.targets {
                    AdapterTargets::Kind(LayerKind::AllLinear) => (Vec::new(), true),
                    AdapterTargets::Patterns(patterns) => (patterns.clone(), false),
                };
                Adapters {
                    rank,
                    alpha: self.alpha.unwrap_or(rank as f64),
                    rslora: self.rslora,
                    dora: self.dora,
                    dropout: self.dropout.unwrap_or(0.0),
                    targets,
                    all_linear,
                    exclude: self.exclude.clone(),
                    modules_to_save: self.modules_to_save.clone(),
                    bias: match self.bias {
                        BiasMode::None => AdapterBias::None,
                        BiasMode::All => AdapterBias::All,
                        BiasMode::LoraOnly => AdapterBias::AdapterOnly,
                    },
                }
            }
            Some(dir) => self.read(dir)?,
        };
        adapters.validate()?;
        Ok(adapters)
    }

    fn read(&self, dir: &Path) -> Result<Adapters> {
        let alone = Self { from: self.from.clone(), ..Self::default() };
        if *self != alone {
            return Err(Error::Config(
                "`trainer.adapters.from`: the other keys follow from the adapter's own configuration; leave \
                 them out"
                    .to_owned(),
            ));
        }
        let read = || AdapterSource::open(dir)?.adapters();
        read().map_err(|error| Error::Config(format!("`trainer.adapters.from`: {error}")))
    }
}
