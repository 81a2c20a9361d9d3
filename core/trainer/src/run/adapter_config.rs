//! The configuration of adapters.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{Error, Result};
use fulgurite_checkpoint_format::AdapterSource;
use fulgurite_config::ConfigType;
use fulgurite_engine::module::{AdapterBias, Adapters};

fulgurite_config::config_struct! {
    /// Low-rank adapters (LoRA) that are trained while the model is frozen: the table `[trainer.adapters]`.
    /// Layers are chosen by patterns: `q_proj` is every layer of that name,
    /// `mlp` those in an `mlp`, `layers.3.self_attn.q_proj` that of one layer.
    #[derive(Debug, Clone, PartialEq)]
    pub struct AdapterConfig {
        /// The layers that get an adapter, such as `["q_proj", "v_proj"]`: linear layers and embeddings.
        pub targets: Vec<String> = Vec::new(),
        /// The inner dimension of each adapter (PEFT's `r`); 8 if it is left out.
        pub rank: Option<usize> = None,
        /// The factor of the adapters' output, times the rank (PEFT's `lora_alpha`); by default the rank, for
        /// a factor of 1.
        pub alpha: Option<f64> = None,
        /// The probability with which elements of the adapters' input are zeroed in training; 0 if it is left
        /// out.
        pub dropout: Option<f64> = None,
        /// Whether `alpha` is divided by the root of the rank, not by the rank (PEFT's `use_rslora`).
        pub rslora: bool = false,
        /// Whether the norms of the weights' rows are trained apart from their directions (DoRA, PEFT's
        /// `use_dora`): in linear layers.
        pub dora: bool = false,
        /// Layers that get none all the same.
        pub exclude: Vec<String> = Vec::new(),
        /// Modules that are trained whole beside the adapters, such as `["lm_head"]`.
        pub modules_to_save: Vec<String> = Vec::new(),
        /// Which biases are trained beside them: `"none"`, `"all"`, or `"lora_only"`, those of layers with an
        /// adapter.
        pub bias: BiasMode = BiasMode::None,
        /// The directory of an adapter in PEFT's format to start from. What it is follows from its
        /// `adapter_config.json`, so that all other keys are left out.
        pub from: Option<PathBuf> = None,
    }
}

/// Which biases are trained beside adapters: `trainer.adapters.bias`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BiasMode {
    /// None.
    #[default]
    None,
    /// All.
    All,
    /// Those of layers with an adapter.
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
    /// The adapters that a model is built with.
    ///
    /// # Errors
    /// [`Error::Config`] for a number that no adapter can have, and if there is no adapter where it is to start
    /// from.
    pub fn adapters(&self) -> Result<Adapters> {
        let adapters = match &self.from {
            None => {
                let rank = self.rank.unwrap_or(8);
                Adapters {
                    rank,
                    alpha: self.alpha.unwrap_or(rank as f64),
                    rslora: self.rslora,
                    dora: self.dora,
                    dropout: self.dropout.unwrap_or(0.0),
                    targets: self.targets.clone(),
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
