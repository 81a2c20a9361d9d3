//! Checks of a run before any rank is started.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::DType;
use toml::Table;

use crate::fabric::{Connection, check_frozen};
use crate::run::{CkptPath, Devices, MicroBatchSize, RunConfig};
use crate::trainer::checkpoints::place::refuse_used;
use crate::trainer::checkpoints::restart::{restarted_job, runs_of_job};
use crate::trainer::module::runner::{load_options, open_weights};
use crate::trainer::preflight::memory_check::check_memory;
use crate::trainer::{
    CallbackConfig, LightningModule, LoggerConfig, OptimizerSetup, Optimizers, RunConfigOf, Trainer,
};
use crate::{Error, Result};
use fulgurite_checkpoint::{
    self as checkpoint, CheckpointIOConfig, DistributedCheckpoint, LoadOptions, TensorSource,
};
use fulgurite_config::PluginValue;
use fulgurite_config::registry::kind;
use fulgurite_engine::collective::{Planned, ProcessGroup, Solo};
use fulgurite_engine::data::{
    DataContext, DataModule, LastBatch, SampleOrder, Split, TrainSampler,
};
use fulgurite_engine::mesh::DATA_PARALLEL;
use fulgurite_engine::module::{ModuleBuilder, ModuleTree, pattern_matches};
use fulgurite_engine::optim::{OptimizerConfig, SchedulerConfig};
use fulgurite_engine::parameter::Buffer;
use fulgurite_engine::parameter::Parameter;
use fulgurite_engine::strategy::{BuildContext, ParallelizeFn, RankMemory, StrategyConfig};

/// The purpose of a run's ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunPurpose {
    /// [`Trainer::fit`].
    Fit,
    /// [`Trainer::validate`], [`Trainer::test`] or [`Trainer::predict`].
    Evaluate,
}

/// The model of a run, described but not set up.
struct Described {
    optimizers: Box<dyn Fn(OptimizerSetup) -> Result<Optimizers>>,
    automatic_optimization: bool,
    train_samples: u64,
    /// Whether there is validation data.
    has_validation_data: bool,
    /// [`DataModule::memory`].
    data_memory: u64,
    batch_size: usize,
    shuffle: bool,
    /// [`LightningModule::pretrained`].
    pretrained: Option<PathBuf>,
    /// Opens weights under the model's names.
    open_weights: Box<OpenWeights>,
    load_options: LoadOptions,
}

type Describe<'a> = dyn Fn(&DataContext, &ModuleBuilder) -> Result<Described> + 'a;

impl Trainer {
    /// Starts the ranks of a run and connects them, as
    /// [`TrainerConfig::connect`](crate::run::TrainerConfig::connect).
    ///
    /// Before any rank is started, it describes the model once, opens the data
    /// ([`DataModule::preview`]), and checks everything that does not need ranks. These are the
    /// strategy's sharding, the options of optimizer and schedule, patterns, directories, and
    /// whether the model fits into this host's memory. Returns only in ranks. Collective.
    ///
    /// Use [`connect_parallelized`](Self::connect_parallelized) for a trainer with a
    /// [`parallelize`](Trainer::parallelize) function.
    ///
    /// # Errors
    /// As [`TrainerConfig::connect`](crate::run::TrainerConfig::connect), and if the configuration
    /// is wrong.
    pub fn connect<M: LightningModule>(
        run: &RunConfigOf<M>,
        purpose: RunPurpose,
    ) -> Result<Connection> {
        Self::connect_parallelized::<M>(run, purpose, &|| None)
    }

    /// Like [`connect`](Self::connect), for a model that a function distributes, instead of the
    /// strategy's configuration.
    ///
    /// # Errors
    /// As [`connect`](Self::connect), and the function's errors.
    pub fn connect_parallelized<M: LightningModule>(
        run: &RunConfigOf<M>,
        purpose: RunPurpose,
        parallelize: &MakeParallelize<'_>,
    ) -> Result<Connection> {
        let untyped = prepare::<M>(run)?;
        let describe =
            |context: &DataContext, builder: &ModuleBuilder| describe::<M>(run, context, builder);
        let checked = |ranks| check(&untyped, purpose, ranks, &describe, parallelize());
        let mut config = run.trainer.clone();
        // Only a training goes on after the loss of a rank.
        config.elastic.enabled &= purpose == RunPurpose::Fit;
        config.connect_checked(&checked)
    }

    /// Runs the checks of [`connect_parallelized`](Self::connect_parallelized) without starting
    /// ranks.
    ///
    /// Returns the number of ranks that the run would have.
    ///
    /// # Errors
    /// If the configuration is wrong.
    pub fn check<M: LightningModule>(
        run: &RunConfigOf<M>,
        purpose: RunPurpose,
        parallelize: &MakeParallelize<'_>,
    ) -> Result<usize> {
        let untyped = prepare::<M>(run)?;
        let describe =
            |context: &DataContext, builder: &ModuleBuilder| describe::<M>(run, context, builder);
        let devices = match run.trainer.devices {
            Devices::Count(count) => count,
            Devices::Auto => run.trainer.ranks_if_alone()?,
        };
        let ranks = devices.saturating_mul(run.trainer.num_nodes);
        run.trainer.check_launch(ranks)?;
        check(&untyped, purpose, ranks, &describe, parallelize())?;
        Ok(ranks)
    }
}

/// Opens weights to start from.
type OpenWeights = dyn Fn(&Path) -> Result<Box<dyn TensorSource>>;

/// Returns the function that distributes a model; `None` to follow the strategy's configuration.
pub type MakeParallelize<'a> = dyn Fn() -> Option<Box<dyn ParallelizeFn>> + 'a;

/// Completes the configuration, without the module's types, and checks it.
fn prepare<M: LightningModule>(run: &RunConfigOf<M>) -> Result<RunConfig<Table, Table>> {
    let mut untyped = run.untyped();
    untyped.set_module(M::module_type())?;
    untyped.validate()?;
    untyped.check_plugins()?;
    Ok(untyped)
}

fn describe<M: LightningModule>(
    run: &RunConfigOf<M>,
    context: &DataContext,
    builder: &ModuleBuilder,
) -> Result<Described> {
    let data = M::Data::preview(&run.data, context)?;
    let mut config = run.model.clone();
    M::configure_from_data(&mut config, &data)?;
    let train_samples = data.len(Split::Train);
    let has_validation_data = data.len(Split::Validation) > 0 || !data.validation_sets().is_empty();
    let data_memory = data.memory();
    drop(data);
    let pretrained = M::pretrained(&config);
    if let Some(path) = &pretrained {
        checkpoint::open(path)?;
    }
    let load_options = load_options::<M>(&config, &run.checkpoint.load);
    let module = M::configure_model(&config, builder)?;
    Ok(Described {
        automatic_optimization: module.automatic_optimization(),
        optimizers: Box::new(move |configured| module.configure_optimizers(configured)),
        train_samples,
        has_validation_data,
        data_memory,
        batch_size: M::Data::batch_size(&run.data),
        shuffle: M::Data::shuffle(&run.data),
        pretrained,
        open_weights: Box::new(move |path| open_weights::<M>(&config, path)),
        load_options,
    })
}

fn check(
    run: &RunConfig<Table, Table>,
    purpose: RunPurpose,
    ranks: usize,
    describe: &Describe,
    parallelize: Option<Box<dyn ParallelizeFn>>,
) -> Result<()> {
    let config = &run.trainer;
    for value in &config.callbacks {
        callback_config(value)?.build()?;
    }
    for value in &config.loggers {
        value.build::<Box<dyn LoggerConfig>>(kind::LOGGER, "trainer.loggers")?.check()?;
    }
    let io = &run.checkpoint.io;
    io.build::<Box<dyn CheckpointIOConfig>>(kind::CHECKPOINT_IO, "checkpoint.io")?.check()?;
    check_directories(run)?;
    check_resume(run)?;
    if purpose == RunPurpose::Fit {
        check_place_is_unused(run)?;
    }
    let mut strategy = config
        .strategy
        .build::<Box<dyn StrategyConfig>>(kind::STRATEGY, "trainer.strategy")?
        .build(&BuildContext::new(ranks).on_nodes(config.num_nodes))?;
    if let Some(parallelize) = parallelize {
        strategy.set_parallelize(parallelize)?;
    }
    check_async_save(run, strategy.capabilities().saves_distributed_checkpoints)?;
    let planned = Arc::new(Planned::world(ranks));
    let world: Arc<dyn ProcessGroup> = match ranks {
        1 => Arc::new(Solo::new("world", 0)),
        _ => planned.clone(),
    };
    let mesh = match strategy.device_mesh(world) {
        Ok(mesh) => Some(mesh),
        // A strategy that communicates to make its mesh is checked by its ranks.
        Err(Error::Collective { .. }) => None,
        Err(error) => return Err(error),
    };
    let data_parallel_size = match &mesh {
        Some(mesh) => mesh.size(DATA_PARALLEL).unwrap_or(1),
        None => 1,
    };
    let context = DataContext {
        seed: run.seed,
        world_size: ranks,
        data_parallel_size,
        ..DataContext::default()
    };
    let builder = ModuleBuilder::new(strategy.module_init_context(config.module_init()?));
    let model = describe(&context, &builder)?;
    let mut tree = builder.finish()?;
    check_frozen(&config.freeze, &tree)?;
    check_weights(run, &model, &tree)?;
    if purpose == RunPurpose::Fit && config.adapters.is_some() {
        check_new_are_trained(&model, &tree)?;
    }
    let mut memory = match (&mesh, strategy.extensions()) {
        (Some(mesh), Some(extensions)) => extensions.plan_module(&mut tree, mesh)?,
        _ => None,
    };
    if let Some(memory) = &mut memory {
        memory.buffers = tree.buffers().iter().map(Buffer::bytes).fold(0, u64::saturating_add);
    }
    if purpose == RunPurpose::Fit {
        let order = SampleOrder::new(run.seed, model.shuffle, model.train_samples)?;
        let micro_batches = config.micro_batches(model.batch_size, data_parallel_size)? as usize;
        let in_batch = config.micro_batches_in_batch(model.batch_size)?;
        if config.micro_batch_size == Some(MicroBatchSize::Auto)
            && mesh.as_ref().is_some_and(|mesh| mesh.pipeline().is_some())
        {
            return Err(Error::Config(
                "`trainer.micro_batch_size` = \"auto\": a step of a pipeline cannot begin again; set a number"
                    .to_owned(),
            ));
        }
        let stages = mesh.as_ref().and_then(|mesh| mesh.pipeline()).map_or(1, |group| group.size());
        if micro_batches * in_batch < stages {
            tracing::warn!(
                "the micro-batches of a step ({}) are fewer than the ranks of the pipeline ({stages}), most of which \
                 wait at any time: raise `trainer.accumulate_grad_batches` to several times the ranks, or set \
                 `trainer.micro_batch_size`",
                micro_batches * in_batch
            );
        }
        if let Some(extensions) = strategy.extensions() {
            extensions.check_micro_batches(micro_batches * in_batch)?;
            let samples = model.batch_size / in_batch;
            let (ranks, count) = (data_parallel_size, micro_batches * in_batch);
            let sampler = TrainSampler::new(order.clone(), samples, ranks, 0, count)?
                .with_last_batch(config.last_batch)?;
            let rest = order.epoch_len() % sampler.global_batch_size();
            if config.last_batch == LastBatch::Partial && rest > 0 {
                let last = sampler.step_at(order.epoch_len() - rest).micro_batches;
                extensions.check_micro_batches(last).map_err(|error| {
                    Error::Config(format!(
                        "{error}. An epoch's last step has {last} (`trainer.last_batch` = \"partial\")"
                    ))
                })?;
            }
        }
        TrainSampler::new(order, model.batch_size, data_parallel_size, 0, micro_batches)?
            .with_last_batch(config.last_batch)?;
        check_optimizers(run, &model, &tree, memory.as_mut())?;
        check_monitors(run, &model)?;
    } else if let Some(memory) = &mut memory {
        *memory = RankMemory {
            parameters: memory.parameters,
            gathered_unit: memory.gathered_unit,
            ..RankMemory::default()
        };
    }
    check_memory(run, &tree, memory.unwrap_or_default(), model.data_memory, &planned)
}

fn callback_config(value: &PluginValue) -> Result<Box<dyn CallbackConfig>> {
    value.build(kind::CALLBACK, "trainer.callbacks")
}

/// Checks that monitored metrics can be logged: metrics of validations only if there are
/// validations.
fn check_monitors(run: &RunConfig<Table, Table>, model: &Described) -> Result<()> {
    let limit = run.trainer.effective().limit_val_batches;
    if model.has_validation_data && limit.of(1) > 0 {
        return Ok(());
    }
    let mut monitors = vec![("checkpoint.monitor", run.checkpoint.monitor.clone())];
    for value in &run.trainer.callbacks {
        let monitor = callback_config(value)?.monitor().map(str::to_owned);
        monitors.push(("trainer.callbacks", monitor));
    }
    for (key, monitor) in monitors {
        if let Some(monitor) = monitor.filter(|monitor| monitor.starts_with("val")) {
            return Err(Error::Config(format!(
                "`{key}`: `{monitor}` is never logged, as nothing is validated; give validation data \
                 (for text: `data.validation_fraction` or `data.validation_path`), leave \
                 `trainer.limit_val_batches` above 0, or monitor something else, such as `train_loss`"
            )));
        }
    }
    Ok(())
}

/// Checks optimizer and schedule, and adds their memory.
fn check_optimizers(
    run: &RunConfig<Table, Table>,
    model: &Described,
    tree: &ModuleTree,
    memory: Option<&mut RankMemory>,
) -> Result<()> {
    if tree.trainable().next().is_none() {
        return Err(Error::Config(
            "`trainer.freeze`: every parameter is frozen; there is nothing to train".to_owned(),
        ));
    }
    let optimizers = (model.optimizers)(run.optimizer_setup()?)?;
    optimizers.check(tree, model.automatic_optimization, &run.trainer)?;
    let limits = run.trainer.effective().limits();
    let steps = limits.max_steps.or(limits.max_epochs);
    let (mut state_bytes, mut elements) = (0, 0);
    for (parameters, setup) in optimizers.with_parameters(tree) {
        setup.optimizer.check(&parameters)?;
        setup.scheduler.factor(0, steps)?;
        for parameter in parameters.iter().filter(|p| p.requires_grad()) {
            elements += parameter.elem_count() as u128;
            state_bytes += setup.optimizer.parameter_state_bytes(parameter);
        }
    }
    if let Some(memory) = memory {
        let dtype = tree.trainable().next().map_or(DType::F32, Parameter::dtype);
        // Assumes that this rank updates the same fraction of every parameter.
        let own = u128::from(memory.updated_elements) * state_bytes / elements.max(1);
        memory.optimizer_state = u64::try_from(own).unwrap_or(u64::MAX);
        let elements = memory.updated_elements;
        if run.trainer.ema_decay.is_some() {
            let average = fulgurite_engine::parameter::accumulation_dtype(dtype);
            memory.average = elements.saturating_mul(average.size_in_bytes() as u64);
        }
    }
    Ok(())
}

impl<M, D> RunConfig<M, D> {
    /// Returns the configured optimizer and schedule.
    pub(crate) fn optimizer_setup(&self) -> Result<OptimizerSetup> {
        Ok(OptimizerSetup {
            optimizer: self
                .optimizer
                .build::<Box<dyn OptimizerConfig>>(kind::OPTIMIZER, "optimizer")?,
            scheduler: self
                .scheduler
                .build::<Box<dyn SchedulerConfig>>(kind::SCHEDULER, "scheduler")?,
        })
    }
}

/// Checks that a strategy that gathers checkpoints on one rank does not save them in the
/// background.
pub(crate) fn check_async_save(
    run: &RunConfig<Table, Table>,
    saves_distributed: bool,
) -> Result<()> {
    if run.checkpoint.async_save && !saves_distributed {
        return Err(Error::Config(
            "`checkpoint.async_save`: full checkpoints are gathered on rank 0 while training \
             waits, not in the background; leave it out, or save distributed checkpoints (without \
             `trainer.strategy.save_distributed_checkpoint = false`) and make full ones of them \
             with `fulgurite checkpoint consolidate`"
                .to_owned(),
        ));
    }
    Ok(())
}

/// Checks that configured directories are directories, or can be created.
fn check_directories(run: &RunConfig<Table, Table>) -> Result<()> {
    let wrong = |key: &str, message: String| Err(Error::Config(format!("`{key}`: {message}")));
    let directories = [
        ("trainer.default_root_dir", Some(run.trainer.default_root_dir.as_path())),
        ("checkpoint.dir", run.checkpoint.dir.as_deref()),
    ];
    for (key, path) in directories {
        let Some(path) = path else { continue };
        if path.as_os_str().is_empty() {
            return wrong(key, "is empty; name a directory".to_owned());
        }
        let there = path.ancestors().find(|path| path.symlink_metadata().is_ok());
        if let Some(there) = there.filter(|path| !path.is_dir()) {
            return wrong(key, format!("{} is not a directory", there.display()));
        }
    }
    Ok(())
}

/// Refuses a directory with checkpoints of another run, if this machine can see it.
///
/// A run that may resume from one of them is left to its rank 0, which looks it up.
fn check_place_is_unused(run: &RunConfig<Table, Table>) -> Result<()> {
    let run = run.effective();
    let Some(dir) = run.checkpoint.dir.as_deref().filter(|dir| dir.is_dir()) else { return Ok(()) };
    let real = |path: &Path| path.canonicalize().ok();
    let has_begun = match restarted_job(&run.trainer) {
        Some(job) => !runs_of_job(&run.trainer.default_root_dir, job)?.is_empty(),
        None => false,
    };
    let may_go_on = match &run.trainer.ckpt_path {
        _ if has_begun => true,
        None => false,
        Some(CkptPath::Path(path)) if path.exists() => {
            real(path).as_deref().and_then(Path::parent) == real(dir).as_deref()
        }
        Some(_) => true,
    };
    let is_local = run.checkpoint.io.name == "local";
    if may_go_on || !is_local || run.checkpoint.overwrite || !run.checkpoint.will_save() {
        return Ok(());
    }
    let io = run.checkpoint.open(dir)?;
    let refused = refuse_used(&*io);
    refused.and(io.teardown())
}

/// Checks that the weights that a run starts from fit the model, as `[checkpoint.load]` requires.
fn check_weights(
    run: &RunConfig<Table, Table>,
    model: &Described,
    tree: &ModuleTree,
) -> Result<()> {
    let (options, open) = (&model.load_options, &model.open_weights);
    // If only rank 0 can read the weights, they may be missing on this host.
    let elsewhere = |path: &Path| options.broadcast_from_rank0 && !path.exists();
    if let Some(path) = model.pretrained.as_deref().filter(|path| !elsewhere(path)) {
        checkpoint::check_compatible_with(&*open(path)?, tree, options)?;
    }
    match &run.trainer.ckpt_path {
        Some(CkptPath::Path(path)) if run.checkpoint.weights_only && path.exists() => {
            let checked = checkpoint::check_compatible_with(&*open(path)?, tree, options);
            checked.map_err(|error| Error::Config(format!("`trainer.ckpt_path`: {error}")))
        }
        _ => Ok(()),
    }
}

/// Checks that adapters leave no new head untrained.
fn check_new_are_trained(model: &Described, tree: &ModuleTree) -> Result<()> {
    let Some(path) = model.pretrained.as_deref().filter(|path| path.exists()) else {
        return Ok(());
    };
    let source = (model.open_weights)(path)?;
    let report = checkpoint::compare_with(&*source, tree, &model.load_options)?;
    let is_frozen = |name: &&String| tree.parameter(name).is_some_and(|p| !p.requires_grad());
    let Some(name) = report.new.iter().find(is_frozen) else { return Ok(()) };
    let patterns = &model.load_options.optional;
    let module = patterns.iter().find(|pattern| pattern_matches(pattern, name));
    let module = module.map_or(name.as_str(), |pattern| pattern.trim_start_matches('.'));
    Err(Error::Config(format!(
        "{} has no values for {name}, and beside adapters it would keep its initial ones; train it too with \
         trainer.adapters.modules_to_save = [\"{module}\"]",
        path.display()
    )))
}

/// Checks that the checkpoint that `trainer.ckpt_path` names can be opened.
fn check_resume(run: &RunConfig<Table, Table>) -> Result<()> {
    let Some(CkptPath::Path(path)) = &run.trainer.ckpt_path else { return Ok(()) };
    let wrong = |error: Error| Error::Config(format!("`trainer.ckpt_path`: {error}"));
    let path = &checkpoint::resolve_last(path).map_err(wrong)?;
    if run.checkpoint.weights_only && run.checkpoint.load.broadcast_from_rank0 && !path.exists() {
        return Ok(());
    }
    let opened = match &run.checkpoint.dir {
        Some(dir) if !path.exists() => {
            let io = run.checkpoint.open(dir)?;
            let inside = path.strip_prefix(io.location("")).unwrap_or(path).to_str();
            let opened = match inside.filter(|name| !name.contains('/')) {
                Some(name) => DistributedCheckpoint::open_with(&io, name).map(drop),
                None => DistributedCheckpoint::open(path).map(drop),
            };
            opened.and(io.teardown())
        }
        _ if run.checkpoint.weights_only => checkpoint::open(path).map(drop),
        _ => DistributedCheckpoint::open(path).map(drop),
    };
    opened.map_err(wrong)
}
