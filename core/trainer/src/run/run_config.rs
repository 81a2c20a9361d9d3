//! [`RunConfig`].

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use toml::Table;

use super::{AdapterConfig, QuantizationConfig, TrainerConfig};
use super::{CheckpointConfig, ElasticConfig, LoadConfig};
use crate::{Error, Result};
use fulgurite_config::reference::Section;
use fulgurite_config::registry::{self, kind};
use fulgurite_config::{
    ConfigLayers, ConfigType, Documented as _, KeyDoc, PluginValue, documented_keys, to_table,
};

/// The configuration of a run. `M` is the type of the table `[model]`, `D` of `[data]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig<M, D> {
    /// `seed`, from which every random number of the run follows.
    #[serde(default = "default_seed")]
    pub seed: u64,
    /// `module`: which module is trained, in a program that has several.
    #[serde(default)]
    pub module: Option<PluginValue>,
    /// `[model]`.
    pub model: M,
    /// `[data]`.
    pub data: D,
    /// `[optimizer]`.
    #[serde(default = "default_optimizer")]
    pub optimizer: PluginValue,
    /// `[scheduler]`.
    #[serde(default = "default_scheduler")]
    pub scheduler: PluginValue,
    /// `[trainer]`.
    #[serde(default)]
    pub trainer: TrainerConfig,
    /// `[checkpoint]`.
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
}

fn default_seed() -> u64 {
    42
}

fn default_optimizer() -> PluginValue {
    PluginValue::new("adamw")
}

fn default_scheduler() -> PluginValue {
    PluginValue::new("constant")
}

impl<M, D> RunConfig<M, D> {
    /// Reads and checks a run. Tables that no layer has are empty.
    ///
    /// An empty table is accepted if all keys of the model or data type have defaults.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) that names the key, and the file or override that
    /// set it.
    pub fn from_layers(layers: ConfigLayers) -> Result<Self>
    where
        M: DeserializeOwned + 'static,
        D: DeserializeOwned + 'static,
    {
        let layers = layers
            .prepend_defaults(to_table(&RunConfig::default())?)
            .known_table("model", documented_keys::<M>().unwrap_or_default())
            .known_table("data", documented_keys::<D>().unwrap_or_default());
        layers.check_variables()?;
        // Compiled once in this crate, since it does not depend on `M` and `D`.
        let run: RunConfig<Table, Table> = layers.parse()?;
        let run = run.with(layers.parse_table("model")?, layers.parse_table("data")?);
        run.validate()?;
        Ok(run)
    }

    /// Records the name of the module that is trained. A module without a name is none of several.
    ///
    /// # Errors
    /// If the key `module` names another module, or has other keys than `type`.
    pub fn set_module(&mut self, name: Option<&str>) -> Result<()> {
        if let Some(given) = &self.module {
            if name != Some(given.name.as_str()) {
                let own = match name {
                    Some(name) => format!("\"{name}\""),
                    None => "its own module".to_owned(),
                };
                return Err(Error::Config(format!(
                    "`module.type`: this program does not train \"{}\", but {own}; leave the key out",
                    given.name
                )));
            }
            if let Some(key) = given.options.keys().next() {
                return Err(Error::Config(format!(
                    "`module.{key}`: unknown key; the only key of `module` is `type`. Keys of the model are in \
                     `[model]`"
                )));
            }
        }
        self.module = name.map(PluginValue::new);
        Ok(())
    }

    /// Returns the run with other `[model]` and `[data]` tables.
    pub(crate) fn with<N, E>(self, model: N, data: E) -> RunConfig<N, E> {
        let Self { seed, module, optimizer, scheduler, trainer, checkpoint, .. } = self;
        RunConfig { seed, module, model, data, optimizer, scheduler, trainer, checkpoint }
    }

    /// Returns the run with empty `[model]` and `[data]` tables.
    pub(crate) fn untyped(&self) -> RunConfig<Table, Table> {
        RunConfig {
            seed: self.seed,
            module: self.module.clone(),
            model: Table::new(),
            data: Table::new(),
            optimizer: self.optimizer.clone(),
            scheduler: self.scheduler.clone(),
            trainer: self.trainer.clone(),
            checkpoint: self.checkpoint.clone(),
        }
    }

    /// Returns the run with the tables `[model]` and `[data]` as TOML.
    ///
    /// # Errors
    /// If TOML cannot hold one of the numbers.
    pub(crate) fn tables(&self) -> Result<RunConfig<Table, Table>>
    where
        M: Serialize,
        D: Serialize,
    {
        Ok(self.untyped().with(to_table(&self.model)?, to_table(&self.data)?))
    }

    /// Applies `trainer.fast_dev_run` and `trainer.overfit_batches`.
    pub(crate) fn effective(&self) -> Self
    where
        Self: Clone,
    {
        let mut run = Self { trainer: self.trainer.effective(), ..self.clone() };
        if run.trainer.fast_dev_run.batches().is_some() {
            run.checkpoint.save_last = false;
            (run.checkpoint.every_n_steps, run.checkpoint.save_top_k) = (None, None);
        }
        run
    }

    /// Returns the run as TOML.
    ///
    /// # Errors
    /// If TOML cannot hold one of the numbers.
    pub fn to_table(&self) -> Result<Table>
    where
        M: Serialize,
        D: Serialize,
    {
        to_table(&self.tables()?)
    }

    /// Checks ranges, and keys that depend on each other.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) that names the key.
    pub fn validate(&self) -> Result<()> {
        self.trainer.validate()?;
        self.checkpoint.validate()
    }

    /// Checks that all plugins are linked into the program and accept their options.
    ///
    /// Called before any process is started or any tensor made.
    ///
    /// # Errors
    /// [`Error::UnknownPlugin`](crate::Error::UnknownPlugin),
    /// [`Error::DuplicatePlugin`](crate::Error::DuplicatePlugin), or
    /// [`Error::Config`](crate::Error::Config) for an option.
    pub fn check_plugins(&self) -> Result<()> {
        registry::validate()?;
        self.optimizer.check(kind::OPTIMIZER, "optimizer")?;
        self.scheduler.check(kind::SCHEDULER, "scheduler")?;
        self.checkpoint.io.check(kind::CHECKPOINT_IO, "checkpoint.io")?;
        self.trainer.check_plugins()
    }
}

/// All defaults, with empty tables `[model]` and `[data]`.
impl Default for RunConfig<Table, Table> {
    fn default() -> Self {
        Self {
            seed: default_seed(),
            module: None,
            model: Table::new(),
            data: Table::new(),
            optimizer: default_optimizer(),
            scheduler: default_scheduler(),
            trainer: TrainerConfig::default(),
            checkpoint: CheckpointConfig::default(),
        }
    }
}

fulgurite_config::register_table!("", top_level);
fulgurite_config::register_table!("trainer", TrainerConfig::keys);
fulgurite_config::register_table!("trainer.adapters", AdapterConfig::keys);
fulgurite_config::register_table!("trainer.quantization", QuantizationConfig::keys);
fulgurite_config::register_table!("trainer.elastic", ElasticConfig::keys);
fulgurite_config::register_table!("checkpoint", CheckpointConfig::keys);
fulgurite_config::register_table!("checkpoint.load", LoadConfig::keys);

/// Returns the sections of the [reference](fulgurite_config::reference) for the tables of this
/// module.
///
/// # Errors
/// As [`Section::new`].
pub fn reference_sections() -> Result<Vec<Section>> {
    Ok(vec![
        Section::new("", top_level(), &RunConfig::<Table, Table>::default())?,
        Section::of::<TrainerConfig>("trainer")?,
        Section::of::<AdapterConfig>("trainer.adapters")?,
        Section::of::<QuantizationConfig>("trainer.quantization")?,
        Section::of::<ElasticConfig>("trainer.elastic")?,
        Section::of::<CheckpointConfig>("checkpoint")?,
        Section::of::<LoadConfig>("checkpoint.load")?,
    ])
}

/// The reference's rows for the top level. The macro that writes the other rows does not support
/// generics.
fn top_level() -> Vec<KeyDoc> {
    let key = |name: &'static str, ty, doc| KeyDoc { name: name.into(), ty, doc };
    vec![
        key(
            "seed",
            u64::describe(),
            "Every random number of the run (initial weights, dropout, shuffling) follows from it.",
        ),
        key(
            "module",
            Option::<PluginValue>::describe(),
            "Which module is trained, in a program that has several, such as `fulgurite`.",
        ),
        key("model", Table::describe(), "The model's own keys."),
        key("data", Table::describe(), "The data's own keys."),
        key("optimizer", PluginValue::describe(), "The optimizer and its options."),
        key("scheduler", PluginValue::describe(), "The schedule of the learning rate."),
        key("trainer", Table::describe(), "How the model is trained; see `[trainer]` below."),
        key("checkpoint", Table::describe(), "What is saved; see `[checkpoint]` below."),
    ]
}
