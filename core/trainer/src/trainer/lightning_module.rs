//! What a user implements.

use std::path::PathBuf;

use candle_core::Tensor;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Hooks, StepContext};
use crate::run::RunConfig;
use crate::{Error, Result};
use fulgurite_engine::data::DataModule;
use fulgurite_engine::module::ModuleBuilder;
use fulgurite_engine::optim::{OptimizerConfig, SchedulerConfig};
use fulgurite_nn::Loss;

/// What a module is trained with.
#[derive(Debug)]
pub struct OptimizerSetup {
    /// The optimizer.
    pub optimizer: Box<dyn OptimizerConfig>,
    /// The learning-rate schedule.
    pub scheduler: Box<dyn SchedulerConfig>,
}

/// What a module's steps take: the batches of its data module.
pub type BatchOf<M> = <<M as LightningModule>::Data as DataModule>::Batch;

/// The configuration of a run of a module: with its `[model]` table and its data module's `[data]`.
pub type RunConfigOf<M> =
    RunConfig<<M as LightningModule>::Config, <<M as LightningModule>::Data as DataModule>::Config>;

/// A model with its training and validation steps (Lightning's `LightningModule`).
///
/// ```
/// use candle_core::Tensor;
/// use fulgurite_core::Result;
/// use fulgurite_core::data::DataModule;
/// use fulgurite_core::module::{Module as _, ModuleBuilder};
/// use fulgurite_core::nn::{Linear, Loss};
/// use fulgurite_core::trainer::{Hooks, LightningModule, StepContext};
/// use std::marker::PhantomData;
///
/// /// A line through points, from any data module that has such.
/// struct Line<D> { layer: Linear, data: PhantomData<D> }
///
/// #[derive(Clone, Default, serde::Serialize, serde::Deserialize)]
/// #[serde(deny_unknown_fields)]
/// struct LineConfig {}
///
/// impl<D: DataModule<Batch = (Tensor, Tensor)>> LightningModule for Line<D> {
///     type Config = LineConfig;
///     type Data = D; // or one data module's name, for a module that is made for it
///
///     fn configure_model(_: &LineConfig, b: &ModuleBuilder) -> Result<Self> {
///         Ok(Self { layer: Linear::new(&b.pp("line"), 1, 1)?, data: PhantomData })
///     }
///
///     fn training_step(&mut self, (x, y): &(Tensor, Tensor), _: &mut StepContext) -> Result<Loss> {
///         let error = (self.layer.forward(x)? - y)?;
///         Ok(Loss::new(error.sqr()?.sum_all()?, y.elem_count() as f64))
///     }
/// }
///
/// impl<D> Hooks<D> for Line<D> {} // has none
/// ```
///
/// Only [`configure_model`](LightningModule::configure_model) and
/// [`training_step`](LightningModule::training_step) must be written. Every rank calls every method
/// alike; none may depend on the rank in which collectives it causes (forward passes gather
/// parameters under FSDP), so a step that runs on one rank runs on all.
pub trait LightningModule: Hooks<<Self as LightningModule>::Data> + Sized + 'static {
    /// The `[model]` table of a configuration file. Use `#[serde(deny_unknown_fields, default)]`.
    type Config: Serialize + DeserializeOwned + Default + Clone;

    /// The data that the module is trained on. A module that works with several data modules is generic
    /// over them.
    type Data: DataModule;

    /// Describes the model; allocates nothing. Parameters get values later, when the strategy has
    /// decided which part of them this rank holds.
    ///
    /// # Errors
    /// If the configuration does not make sense; the message is shown to the user.
    fn configure_model(config: &Self::Config, builder: &ModuleBuilder) -> Result<Self>;

    /// Fills in what the configuration leaves open and the data decides (a vocabulary size). Called
    /// before [`configure_model`](Self::configure_model).
    ///
    /// # Errors
    /// If data and configuration do not go together.
    fn configure_from_data(config: &mut Self::Config, data: &Self::Data) -> Result<()> {
        let _ = (config, data);
        Ok(())
    }

    /// Weights to start from, in whatever format [`open`](fulgurite_checkpoint_format::open) takes: a Hugging
    /// Face directory, a checkpoint of this crate, a file of `torch.save`, …. Names, shapes and
    /// number of the tensors are to be the model's.
    fn pretrained(config: &Self::Config) -> Option<PathBuf> {
        let _ = config;
        None
    }

    /// The optimizer and the schedule: by default what `[optimizer]` and `[scheduler]` say.
    ///
    /// # Errors
    /// If the module cannot be trained with them.
    fn configure_optimizers(&self, configured: OptimizerSetup) -> Result<OptimizerSetup> {
        Ok(configured)
    }

    /// Computes the loss of one micro-batch. [`Loss`] carries sum and count; the mean over the
    /// global batch and the backward are the trainer's.
    fn training_step(&mut self, batch: &BatchOf<Self>, ctx: &mut StepContext) -> Result<Loss>;

    /// Computes the loss of one validation batch, without a graph and with dropout off. By default
    /// what [`training_step`](Self::training_step) computes.
    fn validation_step(&mut self, batch: &BatchOf<Self>, ctx: &mut StepContext) -> Result<Loss> {
        self.training_step(batch, ctx)
    }

    /// Computes the loss of one test batch; by default that of
    /// [`validation_step`](Self::validation_step).
    fn test_step(&mut self, batch: &BatchOf<Self>, ctx: &mut StepContext) -> Result<Loss> {
        self.validation_step(batch, ctx)
    }

    /// Computes predictions for one batch.
    ///
    /// # Errors
    /// By default: there is nothing to predict.
    fn predict_step(&mut self, batch: &BatchOf<Self>, ctx: &mut StepContext) -> Result<Tensor> {
        let _ = (batch, ctx);
        Err(Error::other("this module has no `predict_step`; implement it to predict"))
    }
}
