//! [`LightningModule`], which users implement.

use std::path::{Path, PathBuf};

use candle_core::Tensor;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::run::{LoadConfig, RunConfig};
use crate::trainer::{Callback, Hooks, Loaded, OptimizerSetup, Optimizers, StepContext};
use crate::{Error, Result};
use fulgurite_checkpoint_format::LoadOptions;
use fulgurite_engine::data::DataModule;
use fulgurite_engine::module::ModuleBuilder;
use fulgurite_nn::Loss;

/// The batches of a module's data module.
pub type BatchOf<M> = <<M as LightningModule>::Data as DataModule>::Batch;

/// The configuration of a run of a module, with the types of its `[model]` table and its data
/// module's `[data]` table.
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
/// /// Linear regression, on any data module with batches of inputs and outputs.
/// struct Line<D> { layer: Linear, data: PhantomData<D> }
///
/// #[derive(Clone, Default, serde::Serialize, serde::Deserialize)]
/// #[serde(deny_unknown_fields)]
/// struct LineConfig {}
///
/// impl<D: DataModule<Batch = (Tensor, Tensor)>> LightningModule for Line<D> {
///     type Config = LineConfig;
///     type Data = D; // or a certain data module
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
/// [`training_step`](LightningModule::training_step) have no default. All ranks call the same
/// methods in the same order, and a method must cause the same collectives on every rank: under
/// FSDP a forward gathers parameters, so it must not run on some ranks only.
pub trait LightningModule: Hooks<<Self as LightningModule>::Data> + Sized + 'static {
    /// The `[model]` table of a configuration file. Use `#[serde(deny_unknown_fields, default)]`.
    type Config: Serialize + DeserializeOwned + Default + Clone;

    /// The data module. A module that works with several is generic over them.
    type Data: DataModule;

    /// Describes the model; allocates nothing. Parameters get values later, when the strategy has
    /// decided which part of them this rank holds.
    ///
    /// # Errors
    /// If the configuration does not make sense; the message is shown to the user.
    fn configure_model(config: &Self::Config, builder: &ModuleBuilder) -> Result<Self>;

    /// Sets what depends on the data in the configuration, such as a vocabulary size. Called before
    /// [`configure_model`](Self::configure_model).
    ///
    /// # Errors
    /// If data and configuration contradict each other.
    fn configure_from_data(config: &mut Self::Config, data: &Self::Data) -> Result<()> {
        let _ = (config, data);
        Ok(())
    }

    /// The path of weights to start from, in any format that
    /// [`open`](fulgurite_checkpoint_format::open) takes: a Hugging Face directory, a checkpoint of
    /// this crate, a file of `torch.save`, …. Names and shapes of the tensors must be those of the
    /// model.
    fn pretrained(config: &Self::Config) -> Option<PathBuf> {
        let _ = config;
        None
    }

    /// The module with the weights of the checkpoint at `path`, built by the configuration that a run saved in
    /// it, in this process alone: to compute with it elsewhere than in a [`Trainer`](crate::trainer::Trainer).
    ///
    /// # Errors
    /// If there is no checkpoint of a run of this module.
    fn load_from_checkpoint(path: impl AsRef<Path>) -> Result<Loaded<Self>> {
        Loaded::from_checkpoint(path.as_ref(), &LoadOptions::default())
    }

    /// As [`load_from_checkpoint`](Self::load_from_checkpoint), with a part of the weights or under other names, as
    /// `[checkpoint.load]` has it for a run.
    ///
    /// ```
    /// # use fulgurite_core::Result;
    /// # use fulgurite_core::trainer::{LightningModule, Loaded};
    /// use fulgurite_core::run::LoadConfig;
    ///
    /// # fn example<Net: LightningModule>() -> Result<Loaded<Net>> {
    /// let load = LoadConfig { exclude: vec!["head".to_owned()], ..LoadConfig::default() };
    /// let net = Net::load_from_checkpoint_with("checkpoints/step-00000100", &load)?;
    /// # Ok(net)
    /// # }
    /// ```
    ///
    /// # Errors
    /// Also if a pattern is malformed, or a strict load does not fit the model.
    fn load_from_checkpoint_with(
        path: impl AsRef<Path>,
        load: &LoadConfig,
    ) -> Result<Loaded<Self>> {
        load.validate()?;
        Loaded::from_checkpoint(path.as_ref(), &load.options())
    }

    /// The optimizer and the schedule; by default those of `[optimizer]` and `[scheduler]`. Several
    /// [`Optimizers`] need manual optimization.
    ///
    /// # Errors
    /// If the module cannot be trained with them.
    fn configure_optimizers(&self, configured: OptimizerSetup) -> Result<Optimizers> {
        Ok(configured.into())
    }

    /// Whether the trainer runs the backward of [`training_step`](Self::training_step)'s loss and steps the
    /// optimizer. With `false` (Lightning's manual optimization) `training_step` does it, with
    /// [`StepContext::optimize`] or its parts; the loss that it returns is reported as `train_loss` and has no
    /// backward. A step of the trainer is a call of `training_step`, however often optimizers step in it, and
    /// schedules follow the trainer's steps. The hooks around backward and update are not called, neither the
    /// module's, which is borrowed by its own step then, nor those of callbacks, which could not be given it: what
    /// they would do belongs into `training_step`.
    fn automatic_optimization(&self) -> bool {
        true
    }

    /// Callbacks that the module brings. They take the places of the run's callbacks with the same
    /// [key](Callback::state_key).
    fn configure_callbacks(&self) -> Vec<Box<dyn Callback>> {
        Vec::new()
    }

    /// Computes the loss of one micro-batch. [`Loss`] has sum and count; the trainer computes the
    /// mean over the global batch and runs the backward.
    fn training_step(&mut self, batch: &BatchOf<Self>, ctx: &mut StepContext) -> Result<Loss>;

    /// Computes the loss of one validation batch, without a graph and without dropout. By default
    /// that of [`training_step`](Self::training_step).
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
    /// By default, always.
    fn predict_step(&mut self, batch: &BatchOf<Self>, ctx: &mut StepContext) -> Result<Tensor> {
        let _ = (batch, ctx);
        Err(Error::other("this module has no `predict_step`; implement it to predict"))
    }
}
