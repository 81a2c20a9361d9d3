//! A module with its data behind a trait object.
//!
//! The training loop is compiled once in this crate, instead of in each program.

use std::any::Any;
use std::path::Path;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use toml::Table;

use crate::fabric::{Fabric, SampleIdentity};
use crate::profiler::LogExecutionTime;
use crate::run::LoadConfig;
use crate::trainer::checkpoints::saved_state::SavedState;
use crate::trainer::module::hooks::Hook;
use crate::trainer::run_plan::open_data;
use crate::trainer::{
    BatchOf, Callback, HookContext, LightningModule, OptimizerSetup, Optimizers, RunConfigOf,
    StepContext,
};
use crate::{Error, Result};
use fulgurite_checkpoint::{
    self as checkpoint, FULL_MANIFEST, LoadOptions, MANIFEST, TensorSource,
};
use fulgurite_config::to_table;
use fulgurite_engine::collective::Agreement;
use fulgurite_engine::data::{
    DataModule, DataReport, Loader, SampleOrder, Samples, Split, Workers,
};
use fulgurite_engine::execution::{ContextGuard, dry_run};
use fulgurite_engine::memory::{self, MemoryKind};
use fulgurite_engine::module::ModuleBuilder;
use fulgurite_engine::parallel::ContextParallel;
use fulgurite_nn::{Documents, Loss};

/// The batches to make.
pub(crate) struct Loading {
    /// The samples of each batch, all of one split.
    pub(crate) plan: Box<dyn Iterator<Item = Samples> + Send>,
    pub(crate) device: Device,
    /// The ranks that share sequences with this one; `None` if sequences are whole.
    pub(crate) context: Option<ContextParallel>,
    pub(crate) workers: Workers,
}

/// Runs the forward that it is passed, in the scope of a training step.
pub(crate) type RunForward<'a> = dyn FnMut(&mut dyn FnMut() -> Result<Loss>) -> Result<Loss> + 'a;

/// A module with its data.
pub(crate) trait ModuleRunner {
    fn num_samples(&self, split: Split) -> u64;

    /// The data, for contexts of steps.
    fn data(&self) -> Arc<dyn Any + Send + Sync>;

    /// [`DataModule::train_order`].
    fn train_order(&self, seed: u64, shuffle: bool) -> Result<SampleOrder>;

    /// [`DataModule::validation_sets`].
    fn validation_sets(&self) -> Vec<String>;

    fn configure_optimizers(&self, configured: OptimizerSetup) -> Result<Optimizers>;

    fn automatic_optimization(&self) -> bool;

    fn predicts_in_stages(&self) -> bool;

    /// Returns the state that a checkpoint saves of the module besides weights.
    fn save_state(&mut self) -> Result<SavedState>;

    /// Loads the state that [`save_state`](Self::save_state) returned.
    fn load_state(&mut self, state: &SavedState) -> Result<()>;

    /// Begins to make batches for training.
    fn load_training(&mut self, loading: Loading) -> Result<()>;

    /// Begins to make batches for an evaluation.
    fn load_evaluation(&mut self, loading: Loading) -> Result<()>;

    /// Makes or waits for the next training batch, the input of
    /// [`training_step`](Self::training_step).
    fn next_training_batch(&mut self) -> Result<Samples>;

    /// Makes or waits for the next batch of an evaluation, the input of its steps.
    fn next_evaluation_batch(&mut self) -> Result<Samples>;

    /// Stops making batches for training, or for an evaluation.
    fn stop_loading(&mut self, training: bool);

    /// Computes the batch's loss, in the scope that `run` enters.
    fn training_step(&mut self, ctx: &mut StepContext, run: &mut RunForward) -> Result<Loss>;

    /// Keeps the next training batch for [`kept_training_step`](Self::kept_training_step), behind
    /// the kept batches.
    fn keep_training_batch(&mut self) -> Result<Samples>;

    /// Like [`training_step`](Self::training_step), of a kept batch, as often as wanted.
    fn kept_training_step(
        &mut self,
        index: usize,
        ctx: &mut StepContext,
        run: &mut RunForward,
    ) -> Result<Loss>;

    /// Forgets the kept batches.
    fn forget_kept_batches(&mut self);

    /// Computes the batch's validation loss. As often as wanted, like the other steps of an
    /// evaluation.
    fn validation_step(&mut self, ctx: &mut StepContext) -> Result<Loss>;

    /// Computes the batch's test loss.
    fn test_step(&mut self, ctx: &mut StepContext) -> Result<Loss>;

    /// Predicts for the batch.
    fn predict_step(&mut self, ctx: &mut StepContext) -> Result<Tensor>;

    /// [`LightningModule::output_names`].
    fn output_names(&self) -> Vec<String>;

    /// [`LightningModule::output_values`].
    fn output_values(&self) -> Option<&[serde_json::Value]>;

    /// [`DataModule::sample_name`] of a sample to predict.
    fn sample_name(&self, index: u64) -> Option<String>;

    /// Opens weights to start from, under the model's names.
    fn open_weights(&self, path: &Path) -> Result<Box<dyn TensorSource>>;

    /// The options of `[checkpoint.load]`, with the parameters that weights may lack.
    fn load_options(&self, config: &LoadConfig) -> LoadOptions;

    /// A [`TypedRunner`].
    fn as_any(&self) -> &dyn Any;

    /// A [`TypedRunner`].
    fn as_any_mut(&mut self) -> &mut dyn Any;

    /// Calls one of the module's hooks.
    fn call_hook(&mut self, hook: Hook, ctx: &mut HookContext) -> Result<()>;
}

/// Sets up a module of one type and its data.
pub(crate) struct RunnerFactory<'a> {
    /// [`DataModule::host_keys`].
    pub(crate) data_keys: &'static [&'static str],
    /// Whether the module can be set up again, in the next generation of an elastic training.
    pub(crate) can_repeat: bool,
    /// Sets the module up, given the program's part of the agreement between ranks. Collective.
    pub(crate) make: &'a mut dyn FnMut(&mut Fabric, Agreement) -> Result<RunnerSetup>,
}

/// The result of setting a module up.
pub(crate) struct RunnerSetup {
    pub(crate) runner: Box<dyn ModuleRunner>,
    /// The module's own callbacks.
    pub(crate) callbacks: Vec<Box<dyn Callback>>,
    /// The `[model]` table after [`configure_from_data`](LightningModule::configure_from_data).
    pub(crate) model: Table,
    /// The `[data]` table.
    pub(crate) data: Table,
    pub(crate) batch_size: usize,
    pub(crate) shuffle: bool,
    pub(crate) samples: SampleIdentity,
    /// [`DataModule::report`].
    pub(crate) report: Option<DataReport>,
    /// [`DataModule::items`].
    pub(crate) items: &'static str,
}

/// Opens the data and sets up the module. Collective.
pub(crate) fn set_up<M: LightningModule>(
    run: &RunConfigOf<M>,
    fabric: &mut Fabric,
    code: Agreement,
) -> Result<RunnerSetup> {
    let data: M::Data = open_data(&run.data, &fabric.data_context()?)?;
    let mut model = run.model.clone();
    M::configure_from_data(&mut model, &data)?;
    let build = &mut |b: &ModuleBuilder| M::configure_model(&model, b);
    set_up_with::<M>(run, &model, (fabric, code), build, data)
}

/// Sets up the module that `build` creates, with this data. Collective.
///
/// `code` is the agreement between ranks on the program's code, without the module's.
pub(crate) fn set_up_with<M: LightningModule>(
    run: &RunConfigOf<M>,
    model: &M::Config,
    (fabric, mut code): (&mut Fabric, Agreement),
    build: &mut dyn FnMut(&ModuleBuilder) -> Result<M>,
    data: M::Data,
) -> Result<RunnerSetup> {
    let (shuffle, report) = (M::Data::shuffle(&run.data), data.report());
    let samples = SampleIdentity::of(&data, shuffle && !run.trainer.in_order())?;
    let (world, mut callbacks) = (fabric.world().clone(), Vec::new());
    let module = fabric.setup_module(|b| {
        let module = build(b)?;
        callbacks = module.configure_callbacks();
        // Compared before the models, which may differ because the data does.
        if world.size() > 1 {
            let _comparing = LogExecutionTime::begin(world.rank(), "comparing the data");
            for (i, callback) in callbacks.iter().enumerate() {
                code.insert(format!("callback {i} of the module"), callback.state_key());
            }
            let mut compared = vec![samples.agreement(&data)?, code];
            if let Some(path) = M::pretrained(model)
                && !run.checkpoint.load.broadcast_from_rank0
            {
                compared.push(weights_agreement(&path)?);
            }
            Agreement::check(&*world, &compared)?;
        }
        Ok(module)
    })?;
    fabric.peft_task_type = M::peft_task_type();
    if let Some(path) = M::pretrained(model).filter(|_| !dry_run::is_on()) {
        let options = load_options::<M>(model, &run.checkpoint.load);
        fabric.load_weights(|| open_weights::<M>(model, &path), &options)?;
        fabric.base_model = Some(path.display().to_string());
    }
    Ok(RunnerSetup {
        runner: Box::new(TypedRunner::new(module, model.clone(), data)),
        callbacks,
        model: to_table(model)?,
        data: to_table(&run.data)?,
        batch_size: M::Data::batch_size(&run.data),
        shuffle,
        samples,
        report,
        items: M::Data::items(&run.data),
    })
}

/// Returns the properties of the initial weights that must be equal on all ranks.
fn weights_agreement(path: &Path) -> Result<Agreement> {
    let mut agreement = Agreement::on(
        "the weights to start from",
        "Give all hosts the same files, or set `checkpoint.load.broadcast_from_rank0` to read rank 0's alone",
    );
    agreement.extend(checkpoint::fingerprint(path)?);
    Ok(agreement)
}

/// Opens weights for a model of this configuration, under the model's names.
pub(crate) fn open_weights<M: LightningModule>(
    config: &M::Config,
    path: &Path,
) -> Result<Box<dyn TensorSource>> {
    let path = checkpoint::resolve_last(path)?;
    let source = checkpoint::open(&path)?;
    match is_foreign(&path) {
        true => M::map_weights(config, source),
        false => Ok(source),
    }
}

/// Whether weights are in another format than this crate's.
pub(crate) fn is_foreign(path: &Path) -> bool {
    ![MANIFEST, FULL_MANIFEST].iter().any(|file| path.join(file).is_file())
}

/// The options of `[checkpoint.load]` for a model of this configuration.
pub(crate) fn load_options<M: LightningModule>(
    config: &M::Config,
    load: &LoadConfig,
) -> LoadOptions {
    LoadOptions { optional: M::new_parameters(config), ..load.options() }
}

/// A module of a concrete type, with its data.
pub(crate) struct TypedRunner<M: LightningModule> {
    pub(crate) module: M,
    config: M::Config,
    pub(crate) data: Arc<M::Data>,
    training: Batches<BatchOf<M>>,
    evaluation: Batches<BatchOf<M>>,
    /// The micro-batches of a step under a pipeline.
    kept: Vec<BatchOf<M>>,
}

/// Puts a batch's documents in force until the guard is dropped.
fn documents_in_force<M: LightningModule>(batch: &BatchOf<M>) -> Result<Option<ContextGuard>> {
    let documents = M::Data::documents(batch).map(Documents::of_lengths).transpose()?;
    Ok(documents.map(|documents| documents.enter()))
}

/// The batches being made, and the current batch.
struct Batches<B: Send + 'static> {
    loader: Option<Loader<B>>,
    batch: Option<B>,
}

impl<B: Send + 'static> Batches<B> {
    const NONE: Self = Self { loader: None, batch: None };

    fn load(&mut self) -> Result<Samples> {
        self.batch = None;
        let next = self.loader.as_mut().and_then(Iterator::next);
        let (samples, batch) = next.ok_or_else(|| Error::other("there is no further batch"))??;
        self.batch = Some(batch);
        Ok(samples)
    }

    fn get(&self) -> Result<&B> {
        self.batch.as_ref().ok_or_else(|| Error::other("no batch has been loaded"))
    }

    fn take(&mut self) -> Result<B> {
        self.batch.take().ok_or_else(|| Error::other("no batch has been loaded"))
    }
}

impl<M: LightningModule> TypedRunner<M> {
    fn new(module: M, config: M::Config, data: M::Data) -> Self {
        let (training, evaluation) = (Batches::NONE, Batches::NONE);
        Self { module, config, data: Arc::new(data), training, evaluation, kept: Vec::new() }
    }

    /// Makes batches; under context parallelism, this rank's shard of each.
    fn loader(&self, loading: Loading) -> Result<Loader<BatchOf<M>>> {
        let Loading { plan, device, context, workers } = loading;
        let data = self.data.clone();
        let make = move |samples: &Samples| {
            let _kind = memory::of_kind(MemoryKind::Data);
            let batch = data.augmented_batch(samples, &device)?;
            match &context {
                Some(context) => M::Data::shard_sequence(batch, context),
                None => Ok(batch),
            }
        };
        Loader::new(plan, make, workers)
    }
}

impl<M: LightningModule> ModuleRunner for TypedRunner<M> {
    fn num_samples(&self, split: Split) -> u64 {
        self.data.len(split)
    }

    fn data(&self) -> Arc<dyn Any + Send + Sync> {
        self.data.clone()
    }

    fn train_order(&self, seed: u64, shuffle: bool) -> Result<SampleOrder> {
        self.data.train_order(seed, shuffle)
    }

    fn validation_sets(&self) -> Vec<String> {
        self.data.validation_sets()
    }

    fn configure_optimizers(&self, configured: OptimizerSetup) -> Result<Optimizers> {
        self.module.configure_optimizers(configured)
    }

    fn automatic_optimization(&self) -> bool {
        self.module.automatic_optimization()
    }

    fn predicts_in_stages(&self) -> bool {
        self.module.predicts_in_stages()
    }

    fn save_state(&mut self) -> Result<SavedState> {
        let mut state = SavedState::default();
        self.module.on_save_checkpoint(&mut state)?;
        Ok(state)
    }

    fn load_state(&mut self, state: &SavedState) -> Result<()> {
        self.module.on_load_checkpoint(state)
    }

    fn load_training(&mut self, loading: Loading) -> Result<()> {
        self.training = Batches { loader: Some(self.loader(loading)?), batch: None };
        Ok(())
    }

    fn load_evaluation(&mut self, loading: Loading) -> Result<()> {
        self.evaluation = Batches { loader: Some(self.loader(loading)?), batch: None };
        Ok(())
    }

    fn next_training_batch(&mut self) -> Result<Samples> {
        self.training.load()
    }

    fn next_evaluation_batch(&mut self) -> Result<Samples> {
        self.evaluation.load()
    }

    fn stop_loading(&mut self, training: bool) {
        *(if training { &mut self.training } else { &mut self.evaluation }) = Batches::NONE;
    }

    fn training_step(&mut self, ctx: &mut StepContext, run: &mut RunForward) -> Result<Loss> {
        let batch = self.training.take()?;
        let _documents = documents_in_force::<M>(&batch)?;
        run(&mut || self.module.training_step(&batch, ctx))
    }

    fn keep_training_batch(&mut self) -> Result<Samples> {
        let samples = self.training.load()?;
        self.kept.push(self.training.take()?);
        Ok(samples)
    }

    fn kept_training_step(
        &mut self,
        index: usize,
        ctx: &mut StepContext,
        run: &mut RunForward,
    ) -> Result<Loss> {
        let batch = self.kept.get(index).ok_or_else(|| Error::other("no such batch is kept"))?;
        let _documents = documents_in_force::<M>(batch)?;
        run(&mut || self.module.training_step(batch, ctx))
    }

    fn forget_kept_batches(&mut self) {
        self.kept.clear();
    }

    fn validation_step(&mut self, ctx: &mut StepContext) -> Result<Loss> {
        let batch = self.evaluation.get()?;
        let _documents = documents_in_force::<M>(batch)?;
        self.module.validation_step(batch, ctx)
    }

    fn test_step(&mut self, ctx: &mut StepContext) -> Result<Loss> {
        let batch = self.evaluation.get()?;
        let _documents = documents_in_force::<M>(batch)?;
        self.module.test_step(batch, ctx)
    }

    fn predict_step(&mut self, ctx: &mut StepContext) -> Result<Tensor> {
        let batch = self.evaluation.get()?;
        let _documents = documents_in_force::<M>(batch)?;
        self.module.predict_step(batch, ctx)
    }

    fn output_names(&self) -> Vec<String> {
        self.module.output_names()
    }

    fn output_values(&self) -> Option<&[serde_json::Value]> {
        self.module.output_values()
    }

    fn sample_name(&self, index: u64) -> Option<String> {
        self.data.sample_name(Split::Predict, index)
    }

    fn open_weights(&self, path: &Path) -> Result<Box<dyn TensorSource>> {
        open_weights::<M>(&self.config, path)
    }

    fn load_options(&self, config: &LoadConfig) -> LoadOptions {
        load_options::<M>(&self.config, config)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }

    fn call_hook(&mut self, hook: Hook, ctx: &mut HookContext) -> Result<()> {
        hook.call(&mut self.module, &mut ctx.with_data(&*self.data))
    }
}
