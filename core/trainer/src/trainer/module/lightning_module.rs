//! [`LightningModule`], which users implement.

use std::path::{Path, PathBuf};

use candle_core::Tensor;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::run::{LoadConfig, RunConfig};
use crate::trainer::{Callback, Hooks, Loaded, OptimizerSetup, Optimizers, StepContext};
use crate::{Error, Result};
use fulgurite_checkpoint::{LoadOptions, TensorSource};
use fulgurite_engine::data::DataModule;
use fulgurite_engine::module::ModuleBuilder;
use fulgurite_nn::Loss;

/// The batch type of a module's data module.
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
///     fn training_step(
///         &mut self,
///         (x, y): &(Tensor, Tensor),
///         _: &mut StepContext,
///     ) -> Result<Loss> {
///         let error = (self.layer.forward(x)? - y)?;
///         Ok(Loss::new(error.sqr()?.sum_all()?, y.elem_count() as f64))
///     }
/// }
///
/// impl<D> Hooks<D> for Line<D> {} // no hooks
/// ```
///
/// Only [`configure_model`](LightningModule::configure_model) and
/// [`training_step`](LightningModule::training_step) are required. All ranks call the same methods
/// in the same order, and a method must cause the same collectives on every rank. For example, a
/// forward under FSDP gathers parameters, so it must run on all ranks or none.
pub trait LightningModule: Hooks<<Self as LightningModule>::Data> + Sized + 'static {
    /// The `[model]` table of a configuration file. Use `#[serde(deny_unknown_fields, default)]`.
    type Config: Serialize + DeserializeOwned + Default + Clone + Send + Sync;

    /// The data module. Modules that work with several data modules are generic over them.
    type Data: DataModule;

    /// Returns the module's name in `module.type`, which checkpoints record, if it has one.
    ///
    /// Tools find by it what a checkpoint's model is.
    fn module_type() -> Option<&'static str> {
        None
    }

    /// Returns the key of `[model]` that names a model with a configuration of its own.
    ///
    /// If a user sets it, a program's defaults of `[model]` do not count: they are for a model
    /// made from scratch, and would go before the values of the named one.
    fn pretrained_key() -> Option<&'static str> {
        None
    }

    /// Returns PEFT's `task_type`, which files of adapters have for its `Auto` classes. By default
    /// `CAUSAL_LM`; `None` for a task that PEFT does not know.
    fn peft_task_type() -> Option<&'static str> {
        Some("CAUSAL_LM")
    }

    /// Describes the model without allocating memory.
    ///
    /// Parameters get values later, when the strategy has decided which shards this rank holds.
    ///
    /// # Errors
    /// If the configuration is inconsistent; the message is shown to the user.
    fn configure_model(config: &Self::Config, builder: &ModuleBuilder) -> Result<Self>;

    /// Sets configuration values that depend on the data, such as a vocabulary size.
    ///
    /// Called before [`configure_model`](Self::configure_model).
    ///
    /// # Errors
    /// If data and configuration contradict each other.
    fn configure_from_data(config: &mut Self::Config, data: &Self::Data) -> Result<()> {
        let _ = (config, data);
        Ok(())
    }

    /// Returns the path of weights to start from, in any format that
    /// [`open`](fulgurite_checkpoint::open) supports.
    ///
    /// For example a Hugging Face directory, a checkpoint of this crate, or a file of `torch.save`.
    /// Names and shapes of the tensors must match the model.
    fn pretrained(config: &Self::Config) -> Option<PathBuf> {
        let _ = config;
        None
    }

    /// Returns the tensors of `source` under the names and in the shapes of the model.
    ///
    /// `source` holds weights in another format than this crate's: those of
    /// [`pretrained`](Self::pretrained), or of `trainer.ckpt_path`. By default names and shapes are
    /// equal. Called on the ranks that read the weights, which may be only the first; not
    /// collective. Reads headers only.
    ///
    /// # Errors
    /// If the tensors do not belong to such a model.
    fn map_weights(
        config: &Self::Config,
        source: Box<dyn TensorSource>,
    ) -> Result<Box<dyn TensorSource>> {
        let _ = config;
        Ok(source)
    }

    /// Returns patterns of the parameters that weights to start from may lack, such as a new head.
    ///
    /// They keep their initial values, and a warning names them.
    fn new_parameters(config: &Self::Config) -> Vec<String> {
        let _ = config;
        Vec::new()
    }

    /// Loads the module with the weights of the checkpoint at `path`, in this process alone.
    ///
    /// For computation outside of a [`Trainer`](crate::trainer::Trainer). The module is built by
    /// the configuration that the checkpoint contains.
    ///
    /// # Errors
    /// If `path` holds no checkpoint of a run of this module.
    fn load_from_checkpoint(path: impl AsRef<Path>) -> Result<Loaded<Self>> {
        Loaded::from_checkpoint(path.as_ref(), &LoadOptions::default())
    }

    /// Like [`load_from_checkpoint`](Self::load_from_checkpoint), but selects and renames weights,
    /// as `[checkpoint.load]` does for a run.
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
    /// As [`load_from_checkpoint`](Self::load_from_checkpoint), and if a pattern is malformed or a
    /// strict load does not fit the model.
    fn load_from_checkpoint_with(
        path: impl AsRef<Path>,
        load: &LoadConfig,
    ) -> Result<Loaded<Self>> {
        load.validate()?;
        Loaded::from_checkpoint(path.as_ref(), &load.options())
    }

    /// Returns optimizers and schedules, by default those configured in `[optimizer]` and
    /// `[scheduler]`.
    ///
    /// Several [`Optimizers`] need manual optimization.
    ///
    /// # Errors
    /// If the module cannot be trained with them.
    fn configure_optimizers(&self, configured: OptimizerSetup) -> Result<Optimizers> {
        Ok(configured.into())
    }

    /// Returns whether the trainer runs the backward of [`training_step`](Self::training_step)'s
    /// loss and steps the optimizer.
    ///
    /// With `false` (Lightning's manual optimization) `training_step` does so by
    /// [`StepContext::optimize`] or its parts. The loss that it returns is reported as `train_loss`
    /// without a backward. A step of the trainer is one call of `training_step`, however often
    /// optimizers step in it, and schedules follow the trainer's steps.
    ///
    /// The hooks around backward and update are not called, because `training_step` already borrows
    /// the module. Put their work into `training_step`.
    fn automatic_optimization(&self) -> bool {
        true
    }

    /// Returns whether [`predict_step`](Self::predict_step) runs its forwards through the stages of
    /// a pipeline by itself ([`Fabric::pipeline`](crate::fabric::Fabric::pipeline)), because it
    /// computes the model more than once. All ranks of the pipeline then call it together. Its
    /// result counts on the ranks of the last stage.
    fn predicts_in_stages(&self) -> bool {
        false
    }

    /// Returns the module's own callbacks. They replace the run's callbacks with the same
    /// [key](Callback::state_key).
    fn configure_callbacks(&self) -> Vec<Box<dyn Callback>> {
        Vec::new()
    }

    /// Computes the loss of one micro-batch.
    ///
    /// [`Loss`] has sum and count; the trainer computes the mean over the global batch and runs the
    /// backward.
    fn training_step(&mut self, batch: &BatchOf<Self>, ctx: &mut StepContext) -> Result<Loss>;

    /// Computes the loss of one validation batch, without a graph and without dropout.
    ///
    /// By default calls [`training_step`](Self::training_step).
    fn validation_step(&mut self, batch: &BatchOf<Self>, ctx: &mut StepContext) -> Result<Loss> {
        self.training_step(batch, ctx)
    }

    /// Computes the loss of one test batch. By default calls
    /// [`validation_step`](Self::validation_step).
    fn test_step(&mut self, batch: &BatchOf<Self>, ctx: &mut StepContext) -> Result<Loss> {
        self.validation_step(batch, ctx)
    }

    /// Computes predictions for one batch.
    ///
    /// # Errors
    /// The default always fails.
    fn predict_step(&mut self, batch: &BatchOf<Self>, ctx: &mut StepContext) -> Result<Tensor> {
        let _ = (batch, ctx);
        Err(Error::other("this module has no `predict_step`; implement it to predict"))
    }

    /// Returns the names of the values in a row of [`predict_step`](Self::predict_step)'s output,
    /// such as classes, which files of predictions show. None by default.
    fn output_names(&self) -> Vec<String> {
        Vec::new()
    }

    /// Returns the JSON of each row of the last [`predict_step`](Self::predict_step)'s output,
    /// which files of JSON lines have as `outputs`. By default `None`: they have the row's numbers.
    fn output_values(&self) -> Option<&[serde_json::Value]> {
        None
    }
}
