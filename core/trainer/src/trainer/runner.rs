//! A module with its data behind a trait object, so that the training loop is compiled once in this
//! crate and not in each program.

use std::any::Any;

use candle_core::{Device, Tensor};
use toml::Table;

use super::hooks::Hook;
use super::{BatchOf, HookContext, LightningModule, OptimizerSetup, RunConfigOf, StepContext};
use crate::Result;
use crate::fabric::Fabric;
use fulgurite_config::to_table;
use fulgurite_engine::data::{DataModule, Split};
use fulgurite_engine::parallel::ContextParallel;
use fulgurite_nn::Loss;

/// A batch to be made.
pub(super) struct BatchRequest<'a> {
    pub(super) split: Split,
    pub(super) indices: &'a [u64],
    pub(super) device: &'a Device,
    /// The ranks that share sequences with this one; `None` if sequences are whole.
    pub(super) context: Option<&'a ContextParallel>,
}

/// Runs a training step: is given the forward, and runs it and the backward.
pub(super) type RunStep<'a> = dyn FnMut(&mut dyn FnMut() -> Result<Loss>) -> Result<()> + 'a;

/// A module with its data.
pub(super) trait ModuleRunner {
    fn num_samples(&self, split: Split) -> u64;

    fn configure_optimizers(&self, configured: OptimizerSetup) -> Result<OptimizerSetup>;

    /// Makes the batch and calls `run` with the forward. The batch lives until `run` returns.
    fn training_step(
        &mut self,
        request: &BatchRequest,
        ctx: &mut StepContext,
        run: &mut RunStep,
    ) -> Result<()>;

    /// Makes the batch and computes its validation loss.
    fn validation_step(&mut self, request: &BatchRequest, ctx: &mut StepContext) -> Result<Loss>;

    /// Makes the batch and computes its test loss.
    fn test_step(&mut self, request: &BatchRequest, ctx: &mut StepContext) -> Result<Loss>;

    /// Makes the batch and predicts for it.
    fn predict_step(&mut self, request: &BatchRequest, ctx: &mut StepContext) -> Result<Tensor>;

    /// A [`TypedRunner`].
    fn as_any(&self) -> &dyn Any;

    /// A [`TypedRunner`].
    fn as_any_mut(&mut self) -> &mut dyn Any;

    /// Calls one of the module's hooks.
    fn call_hook(&mut self, hook: Hook, ctx: &mut HookContext) -> Result<()>;
}

/// The result of setting a module up.
pub(super) struct RunnerSetup {
    pub(super) runner: Box<dyn ModuleRunner>,
    /// The `[model]` table after [`configure_from_data`](LightningModule::configure_from_data).
    pub(super) model: Table,
    /// The `[data]` table.
    pub(super) data: Table,
    pub(super) batch_size: usize,
    pub(super) shuffle: bool,
    /// [`DataModule::fingerprint`].
    pub(super) fingerprint: Option<String>,
}

/// Opens the data and sets up the module. Collective.
pub(super) fn set_up<M: LightningModule>(
    run: &RunConfigOf<M>,
    fabric: &mut Fabric,
) -> Result<RunnerSetup> {
    let data = M::Data::setup(&run.data, &fabric.data_context()?)?;
    let fingerprint = data.fingerprint()?;
    let mut model = run.model.clone();
    M::configure_from_data(&mut model, &data)?;
    let module = fabric.setup_module(|b| M::configure_model(&model, b))?;
    if let Some(path) = M::pretrained(&model) {
        fabric.load_raw(&path, true)?;
    }
    Ok(RunnerSetup {
        runner: Box::new(TypedRunner { module, data }),
        model: to_table(&model)?,
        data: to_table(&run.data)?,
        batch_size: M::Data::batch_size(&run.data),
        shuffle: M::Data::shuffle(&run.data),
        fingerprint,
    })
}

/// A module with its data, of certain types.
pub(super) struct TypedRunner<M: LightningModule> {
    pub(super) module: M,
    pub(super) data: M::Data,
}

impl<M: LightningModule> TypedRunner<M> {
    /// Makes the batch; under context parallelism, this rank's part of it.
    fn batch(&self, request: &BatchRequest) -> Result<BatchOf<M>> {
        let batch = self.data.batch(request.split, request.indices, request.device)?;
        match request.context {
            Some(context) => M::Data::shard_sequence(batch, context),
            None => Ok(batch),
        }
    }
}

impl<M: LightningModule> ModuleRunner for TypedRunner<M> {
    fn num_samples(&self, split: Split) -> u64 {
        self.data.len(split)
    }

    fn configure_optimizers(&self, configured: OptimizerSetup) -> Result<OptimizerSetup> {
        self.module.configure_optimizers(configured)
    }

    fn training_step(
        &mut self,
        request: &BatchRequest,
        ctx: &mut StepContext,
        run: &mut RunStep,
    ) -> Result<()> {
        let batch = self.batch(request)?;
        run(&mut || self.module.training_step(&batch, ctx))
    }

    fn validation_step(&mut self, request: &BatchRequest, ctx: &mut StepContext) -> Result<Loss> {
        let batch = self.batch(request)?;
        self.module.validation_step(&batch, ctx)
    }

    fn test_step(&mut self, request: &BatchRequest, ctx: &mut StepContext) -> Result<Loss> {
        let batch = self.batch(request)?;
        self.module.test_step(&batch, ctx)
    }

    fn predict_step(&mut self, request: &BatchRequest, ctx: &mut StepContext) -> Result<Tensor> {
        let batch = self.batch(request)?;
        self.module.predict_step(&batch, ctx)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }

    fn call_hook(&mut self, hook: Hook, ctx: &mut HookContext) -> Result<()> {
        hook.call(&mut self.module, &mut ctx.with_data(&self.data))
    }
}
