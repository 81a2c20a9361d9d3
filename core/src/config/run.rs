//! The configuration of a whole run.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use toml::Table;

use super::{ConfigLayers, ConfigType, KeyDoc, PluginValue, to_table};
use crate::checkpoint::{CheckpointIO, CheckpointIOConfig};
use crate::optim::{OptimizerConfig, SchedulerConfig};
use crate::registry::{self, kind};
use crate::trainer::TrainerConfig;
use crate::{Error, Result};

/// A whole run: `M` is the model's table, `D` the data's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig<M, D> {
    /// `seed`: every random number of the run follows from it.
    #[serde(default = "default_seed")]
    pub seed: u64,
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

crate::config_struct! {
    /// When and where checkpoints are saved: the table `[checkpoint]`.
    #[derive(Debug, Clone, PartialEq)]
    pub struct CheckpointConfig {
        /// Optimizer steps from one checkpoint to the next; without it none is saved on the way.
        pub every_n_steps: Option<u64> = None,
        /// Where checkpoints go; by default `checkpoints` in the run's directory.
        pub dir: Option<PathBuf> = None,
        /// Whether a checkpoint is saved when training ends.
        pub save_last: bool = true,
        /// How checkpoints reach storage.
        pub io: PluginValue = PluginValue::new("local"),
    }
}

impl CheckpointConfig {
    /// Checkpoints in `dir`, by the configured way.
    ///
    /// # Errors
    /// If the way is not linked or its options are wrong.
    pub fn open(&self, dir: &Path) -> Result<Arc<dyn CheckpointIO>> {
        self.io
            .build::<Box<dyn CheckpointIOConfig>>(kind::CHECKPOINT_IO, "checkpoint.io")?
            .build(dir)
    }
}

impl<M, D> RunConfig<M, D> {
    /// Reads and checks a run. Sections that no layer mentions are empty tables, so a model or data
    /// type whose keys all have defaults needs none.
    ///
    /// # Errors
    /// [`Error::Config`] naming the key, and the file or override that it is from.
    pub fn from_layers(layers: ConfigLayers) -> Result<Self>
    where
        M: DeserializeOwned,
        D: DeserializeOwned,
    {
        let run: Self = layers.under(to_table(&RunConfig::default())?).parse()?;
        run.validate()?;
        Ok(run)
    }

    /// Checks what the types alone cannot: ranges, and keys that depend on one another.
    ///
    /// # Errors
    /// [`Error::Config`] naming the key.
    pub fn validate(&self) -> Result<()> {
        self.trainer.validate()?;
        if self.checkpoint.every_n_steps == Some(0) {
            return Err(Error::Config(
                "`checkpoint.every_n_steps`: must be at least 1; leave it out to save none on the \
                 way"
                .to_owned(),
            ));
        }
        Ok(())
    }

    /// Checks that everything chosen by name is linked into the program and takes its options,
    /// before any process is started or any tensor made.
    ///
    /// # Errors
    /// [`Error::UnknownPlugin`], [`Error::DuplicatePlugin`], or [`Error::Config`] for an option.
    pub fn check_plugins(&self) -> Result<()> {
        registry::validate()?;
        self.optimizer.build::<Box<dyn OptimizerConfig>>(kind::OPTIMIZER, "optimizer")?;
        self.scheduler.build::<Box<dyn SchedulerConfig>>(kind::SCHEDULER, "scheduler")?;
        let io = &self.checkpoint.io;
        io.build::<Box<dyn CheckpointIOConfig>>(kind::CHECKPOINT_IO, "checkpoint.io")?;
        self.trainer.check_plugins()
    }
}

/// A run whose model and data are described elsewhere: all defaults, both sections empty.
impl Default for RunConfig<Table, Table> {
    fn default() -> Self {
        Self {
            seed: default_seed(),
            model: Table::new(),
            data: Table::new(),
            optimizer: default_optimizer(),
            scheduler: default_scheduler(),
            trainer: TrainerConfig::default(),
            checkpoint: CheckpointConfig::default(),
        }
    }
}

/// The reference's rows for the top level. (The macro that writes them for other tables knows no
/// generics.)
pub(super) fn top_level() -> Vec<KeyDoc> {
    let key = |name: &'static str, ty, doc| KeyDoc { name: name.into(), ty, doc };
    vec![
        key(
            "seed",
            u64::describe(),
            "Every random number of the run (initial weights, dropout, shuffling) follows from it.",
        ),
        key("model", Table::describe(), "The model's own keys."),
        key("data", Table::describe(), "The data's own keys."),
        key("optimizer", PluginValue::describe(), "The optimizer and its options."),
        key("scheduler", PluginValue::describe(), "The schedule of the learning rate."),
        key("trainer", Table::describe(), "How the model is trained; see `[trainer]` below."),
        key("checkpoint", Table::describe(), "What is saved; see `[checkpoint]` below."),
    ]
}
