//! [`Loaded`].

use std::fmt;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use toml::Table;

use crate::fabric::Fabric;
use crate::run::{RunConfig, TrainerConfig};
use crate::trainer::LightningModule;
use crate::{Error, Result};
use fulgurite_checkpoint::{DistributedCheckpoint, LoadOptions, TensorSource as _};
use fulgurite_config::ConfigLayers;
use fulgurite_engine::autograd::no_grad;
use fulgurite_engine::collective::Solo;

/// A module with the weights of a checkpoint, in this process alone.
///
/// Created by [`LightningModule::load_from_checkpoint`].
pub struct Loaded<M> {
    module: M,
    /// Holds the parameters.
    fabric: Fabric,
}

impl<M: LightningModule> Loaded<M> {
    /// Builds the module by the configuration in the checkpoint.
    pub(crate) fn from_checkpoint(path: &Path, options: &LoadOptions) -> Result<Self> {
        let source = DistributedCheckpoint::open(path)?;
        let saved = &source.manifest().config;
        let unfit = |message: String| Error::checkpoint(source.location(), message);
        let saved = Table::try_from(saved).ok().filter(|table| table.contains_key("model"));
        let Some(mut saved) = saved else {
            return Err(unfit(
                "it has no configuration of a run, as those of `Trainer::fit` have; build the module \
                 with `Fabric::setup_module` and fill it with `Fabric::load`"
                    .to_owned(),
            ));
        };
        // Device, strategy and data of the training do not matter here.
        saved.retain(|table, _| table == "model" || table == "seed" || table == "trainer");
        let mut trainer = Table::new();
        for key in ["precision", "keep_in_fp32", "adapters", "quantization"] {
            if let Some(value) = saved.get("trainer").and_then(|trainer| trainer.get(key)) {
                trainer.insert(key.to_owned(), value.clone());
            }
        }
        saved.insert("trainer".to_owned(), trainer.into());
        let run: RunConfig<M::Config, Table> =
            RunConfig::from_layers(ConfigLayers::new().defaults(saved)).map_err(|error| {
                unfit(format!("its configuration is of another program: {error}"))
            })?;
        let config = TrainerConfig {
            precision: run.trainer.precision,
            keep_in_fp32: run.trainer.keep_in_fp32.clone(),
            adapters: run.trainer.adapters.clone(),
            quantization: run.trainer.quantization.clone(),
            ..TrainerConfig::default()
        };
        let world = Arc::new(Solo::new("world", 0));
        let mut fabric = Fabric::with_world(world, &config, run.seed, None)?;
        let module = fabric.setup_module(|b| M::configure_model(&run.model, b))?;
        fabric.load_weights(|| Ok(&source), options)?;
        Ok(Self { module, fabric })
    }

    /// Computes with the module as in a validation: without a graph, without dropout.
    ///
    /// # Errors
    /// As `compute`.
    pub fn forward<T>(&self, compute: impl FnOnce(&M) -> Result<T>) -> Result<T> {
        let _no_grad = no_grad();
        let _scope = self.fabric.forward_scope(false, 0, 0);
        compute(&self.module)
    }

    /// Returns the fabric with the parameters ([`module_tree`](Fabric::module_tree)), which can
    /// save them ([`save_full`](Fabric::save_full)).
    pub fn fabric(&self) -> &Fabric {
        &self.fabric
    }
}

/// The module. To compute with it use [`forward`](Loaded::forward).
impl<M> Deref for Loaded<M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.module
    }
}

impl<M> fmt::Debug for Loaded<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loaded").finish_non_exhaustive()
    }
}
