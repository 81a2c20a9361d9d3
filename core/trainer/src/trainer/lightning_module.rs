//! What a user implements.

use std::path::PathBuf;

use candle_core::Tensor;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{HookContext, StepContext};
use crate::module::ModuleBuilder;
use crate::nn::Loss;
use crate::optim::{OptimizerConfig, SchedulerConfig};
use crate::{Error, Result};

/// What a module is trained with.
#[derive(Debug)]
pub struct OptimizerSetup {
    /// The optimizer.
    pub optimizer: Box<dyn OptimizerConfig>,
    /// The learning-rate schedule.
    pub scheduler: Box<dyn SchedulerConfig>,
}

/// A model with its training and validation steps (Lightning's `LightningModule`).
///
/// Only [`configure_model`](LightningModule::configure_model) and
/// [`training_step`](LightningModule::training_step) must be written. Every rank calls every method
/// alike; none may depend on the rank in which collectives it causes (forward passes gather
/// parameters under FSDP), so a step that runs on one rank runs on all.
pub trait LightningModule: Sized {
    /// The `[model]` table of a configuration file. Use `#[serde(deny_unknown_fields, default)]`.
    type Config: Serialize + DeserializeOwned + Default + Clone;

    /// What one step computes on, as the data module makes it.
    type Batch;

    /// Describes the model; allocates nothing. Parameters get values later, when the strategy has
    /// decided which part of them this rank holds.
    ///
    /// # Errors
    /// If the configuration does not make sense; the message is shown to the user.
    fn configure_model(config: &Self::Config, builder: &ModuleBuilder) -> Result<Self>;

    /// Fills in what the configuration leaves open and the data decides (a vocabulary size). Called
    /// before [`configure_model`](Self::configure_model); `data` is the data module, to be
    /// downcast.
    fn configure_from_data(config: &mut Self::Config, data: &dyn std::any::Any) -> Result<()> {
        let _ = (config, data);
        Ok(())
    }

    /// Weights to start from, in whatever format [`open`](crate::checkpoint::open) takes: a Hugging
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
    fn training_step(&mut self, batch: &Self::Batch, ctx: &mut StepContext) -> Result<Loss>;

    /// Computes the loss of one validation batch, without a graph and with dropout off. By default
    /// what [`training_step`](Self::training_step) computes.
    fn validation_step(&mut self, batch: &Self::Batch, ctx: &mut StepContext) -> Result<Loss> {
        self.training_step(batch, ctx)
    }

    /// Computes the loss of one test batch; by default that of
    /// [`validation_step`](Self::validation_step).
    fn test_step(&mut self, batch: &Self::Batch, ctx: &mut StepContext) -> Result<Loss> {
        self.validation_step(batch, ctx)
    }

    /// Computes predictions for one batch.
    ///
    /// # Errors
    /// By default: there is nothing to predict.
    fn predict_step(&mut self, batch: &Self::Batch, ctx: &mut StepContext) -> Result<Tensor> {
        let _ = (batch, ctx);
        Err(Error::other("this module has no `predict_step`; implement it to predict"))
    }

    /// Once, when the model is set up.
    fn on_fit_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// Before the first step.
    fn on_train_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// Before the first step of each epoch.
    fn on_train_epoch_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// When gradients are complete, reduced and checked, before the optimizer uses them.
    fn on_before_optimizer_step(&mut self, ctx: &mut HookContext) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// After each optimizer step.
    fn on_train_step_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// After the last step of each epoch.
    fn on_train_epoch_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// Before a validation.
    fn on_validation_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// After a validation.
    fn on_validation_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// After the last step.
    fn on_train_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// At the very end, when everything is saved.
    fn on_fit_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        let _ = ctx;
        Ok(())
    }
}
