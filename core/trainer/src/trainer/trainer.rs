//! [`Trainer`].

use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;

use candle_core::DType;
use toml::Table;

use super::callback::{Callbacks, SharedCallback, read_callback};
use super::context::{Requests, Stage};
use super::evaluation::EvaluationStage;
use super::event::SharedSink;
use super::event_log::EventLog;
use super::hooks::Hook;
use super::log_table::LogTable;
use super::meter::{Meter, seconds_since_epoch};
use super::model_summary::ModelSummary;
use super::optimizers;
use super::preflight::check_async_save;
use super::progress::{RanksSummary, RunStart, default_progress};
use super::run_dir::{Job, RunDirGuard};
use super::runner::{self, RunnerFactory, RunnerSetup};
use super::saving::Saving;
use super::schedule_warning::warn_of_schedules;
use super::session::{Cursor, Session, SessionParts, training};
use super::training_loop::FitEnd;
use super::{
    Callback, CallbackConfig, Evaluation, Event, EventSink, LightningModule, LoggerConfig,
    LoggerSink, Predictions, RunConfigOf, RunDir, RunStatus, Trained,
};
use crate::fabric::Fabric;
use crate::profiler::LogExecutionTime;
use crate::run::{CountOrFraction, Devices, Precision, RunConfig};
use crate::{Error, Result, counted};
use fulgurite_config::registry::kind;
use fulgurite_config::to_table;
use fulgurite_engine::collective::{Agreement, ProcessGroup, Solo, broadcast_object};
use fulgurite_engine::data::DataModule as _;
use fulgurite_engine::mesh::DeviceMesh;
use fulgurite_engine::module::{ModuleBuilder, ModuleTree};
use fulgurite_engine::optim::WeightAverage;
use fulgurite_engine::parameter::Parameter;
use fulgurite_engine::strategy::ParallelizeFn;
use fulgurite_error::output;
use fulgurite_launch::{Interruption, Starting, attempt};

/// Runs a [`LightningModule`] on its data, by a [`RunConfig`] (Lightning's `Trainer`). Built on
/// [`Fabric`].
///
/// Every rank makes a trainer and calls the same methods. It can be used again: its callbacks and sinks
/// go through all of its runs.
pub struct Trainer {
    world: Arc<dyn ProcessGroup>,
    program_start: f64,
    callbacks: Vec<SharedCallback>,
    sinks: Vec<SharedSink>,
    parallelize: Option<Arc<dyn ParallelizeFn>>,
    print: fn(&str),
    interrupted: fn() -> Option<Interruption>,
    /// Whether this trainer has no process group, so that the configuration may ask for one rank
    /// only.
    alone: bool,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct FitOutcome {
    /// Number of optimizer steps, including those before a resume.
    pub steps: u64,
    /// The loss of the first step of this run; NaN without a step.
    pub first_loss: f64,
    /// The loss of the last step.
    pub last_loss: f64,
    /// The latest metrics by name.
    pub metrics: std::collections::BTreeMap<String, f64>,
    /// The best of the checkpoints that the table `[checkpoint]` keeps, by `checkpoint.monitor`, in words of
    /// its place: a path, for a directory.
    pub best_checkpoint: Option<PathBuf>,
    /// The newest of them.
    pub last_checkpoint: Option<PathBuf>,
    /// The run's directory: `version_N` under `trainer.default_root_dir`. A trial
    /// (`trainer.fast_dev_run`) removes it at its end, unless there is anything else in it.
    pub run_dir: PathBuf,
}

impl Default for Trainer {
    /// A trainer for a configuration of one rank.
    fn default() -> Self {
        Self { alone: true, ..Self::new(Arc::new(Solo::new("world", 0))) }
    }
}

impl Trainer {
    /// A trainer over the ranks of `world`.
    pub fn new(world: Arc<dyn ProcessGroup>) -> Self {
        Self {
            world,
            program_start: seconds_since_epoch(),
            callbacks: Vec::new(),
            sinks: Vec::new(),
            parallelize: None,
            print: |text| {
                // An error means that nobody reads any more.
                let _ = output::stderr().write_all(format!("{text}\n").as_bytes());
            },
            interrupted: || None,
            alone: false,
        }
    }

    /// Adds a callback. All ranks must add the same ones.
    #[must_use]
    pub fn with_callback(mut self, callback: Box<dyn Callback>) -> Self {
        self.callbacks.push(SharedCallback::new(callback));
        self
    }

    /// Reads the first callback of this type that was [added](Self::with_callback); `None` if there is
    /// none. Those of the configuration are a run's own:
    /// [`Trained::read_callback`](super::Trained::read_callback).
    pub fn read_callback<C: Callback, T>(&self, read: impl FnMut(&C) -> T) -> Option<T> {
        read_callback(&self.callbacks, read)
    }

    /// Adds a receiver of events; those of rank 0 are used.
    #[must_use]
    pub fn with_sink(mut self, sink: Box<dyn EventSink>) -> Self {
        self.sinks.push(SharedSink::new(sink));
        self
    }

    /// Sets when the program was started, in seconds since 1970, from which `startup_s` counts.
    #[must_use]
    pub fn with_program_start(mut self, secs: f64) -> Self {
        self.program_start = secs;
        self
    }

    /// Sets how texts that hooks print are shown (on rank 0); by default on stderr.
    #[must_use]
    pub fn with_print(mut self, print: fn(&str)) -> Self {
        self.print = print;
        self
    }

    /// Sets a function that is called after each step, and each batch of a validation, and returns
    /// why the run is interrupted: [`launch::interruption`](fulgurite_launch::interruption()). If
    /// it is on one rank, all finish the step, save (after Ctrl-C only with
    /// `checkpoint.save_last`), and stop.
    #[must_use]
    pub fn with_interrupt(mut self, interrupted: fn() -> Option<Interruption>) -> Self {
        self.interrupted = interrupted;
        self
    }

    /// Sets the function that distributes the model over the mesh, in place of the strategy's
    /// configuration.
    #[must_use]
    pub fn parallelize(mut self, f: impl ParallelizeFn + 'static) -> Self {
        self.parallelize = Some(Arc::new(f));
        self
    }

    /// Trains, from the checkpoint that `trainer.ckpt_path` names or from the start. Collective.
    ///
    /// # Errors
    /// The error of this rank; [`Error::PeerFailed`] if another one failed; [`Error::Interrupted`]
    /// after an interrupted run has ended in order.
    pub fn fit<M: LightningModule>(&self, run: &RunConfigOf<M>) -> Result<Trained<M>> {
        let make = &mut |fabric: &mut Fabric, code| runner::set_up::<M>(run, fabric, code);
        let factory = RunnerFactory { data_keys: M::Data::host_keys(), make };
        let (outcome, session) = self.run_fit(run.tables()?, factory)?;
        Ok(Trained::new(outcome, session))
    }

    /// As [`fit`](Self::fit), with a module and data that the program makes itself, from whatever it has:
    /// `build` describes the model as [`configure_model`](LightningModule::configure_model) does. The table
    /// `[data]` of `run` says how large batches are and whether they are shuffled. Collective.
    ///
    /// ```no_run
    /// # use fulgurite_core::Result;
    /// # use fulgurite_core::trainer::{LightningModule, RunConfigOf, Trainer};
    /// # use fulgurite_core::module::ModuleBuilder;
    /// # fn example<M: LightningModule>(run: RunConfigOf<M>, data: M::Data, layers: usize,
    /// #     new: fn(&ModuleBuilder, usize) -> Result<M>) -> Result<()> {
    /// let trained = Trainer::default().fit_with(&run, |b| new(b, layers), data)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`fit`](Self::fit).
    pub fn fit_with<M: LightningModule>(
        &self,
        run: &RunConfigOf<M>,
        mut build: impl FnMut(&ModuleBuilder) -> Result<M>,
        data: M::Data,
    ) -> Result<Trained<M>> {
        let mut data = Some(data);
        let make = &mut |fabric: &mut Fabric, code| {
            let data = data.take().expect("set up once");
            runner::set_up_with::<M>(run, &run.model, (fabric, code), &mut build, data)
        };
        let factory = RunnerFactory { data_keys: M::Data::host_keys(), make };
        let (outcome, session) = self.run_fit(run.tables()?, factory)?;
        Ok(Trained::new(outcome, session))
    }

    fn run_fit(&self, run: UntypedRun, factory: RunnerFactory) -> Result<(FitOutcome, Session)> {
        let rank = self.world.rank();
        let starting = Starting::new();
        let mut session = self.set_up(Stage::Fit, &run, factory)?;
        let result = session.run_fit(&run, starting);
        let result = result.map_err(|error| session.catch_up_after(error));
        let result = result.map_err(|error| session.parts.fabric.explain(error));
        if result.is_err() {
            session.save_on_exception();
            session.profile_on_exception();
        }
        let result = session.tear_down_saving(result).and_then(|(outcome, end)| match end {
            FitEnd::Finished => Ok(outcome),
            FitEnd::Interrupted(why) => {
                tracing::info!(rank, "interrupted");
                fulgurite_launch::agree_on(why);
                Err(Error::Interrupted)
            }
        });
        let status = RunStatus::of(&result);
        session.end_hooks(status, result.as_ref().err());
        let finished = session.finish_sinks(status);
        let outcome = result?;
        finished?;
        // They have had their end.
        session.parts.sinks.clear();
        Ok((outcome, session))
    }

    /// Validates once: the checkpoint that `trainer.ckpt_path` names (with `trainer.ema_decay` the
    /// averages in it, as [`fit`](Self::fit) does). Without that key the best checkpoint in
    /// `checkpoint.dir` if `checkpoint.monitor` is set, otherwise the last, and a warning says
    /// which; without `checkpoint.dir`, that of the newest run. Weights that the module
    /// ([`pretrained`](LightningModule::pretrained)) or `trainer.adapters.from` names stay. If there
    /// is none, the weights are those that the model was set up with, and a warning says so.
    /// Collective.
    ///
    /// # Errors
    /// As [`fit`](Self::fit), and if there is no validation data; [`Error::Interrupted`] if it was
    /// interrupted between two batches.
    pub fn validate<M: LightningModule>(&self, run: &RunConfigOf<M>) -> Result<Evaluation> {
        self.once::<M, _>(Stage::Validate, run, |session| {
            session.evaluate_once(EvaluationStage::Validation)
        })
    }

    /// Tests once, as [`validate`](Self::validate), on the data of
    /// [`Split::Test`](fulgurite_engine::data::Split::Test).
    ///
    /// # Errors
    /// As [`validate`](Self::validate).
    pub fn test<M: LightningModule>(&self, run: &RunConfigOf<M>) -> Result<Evaluation> {
        self.once::<M, _>(Stage::Test, run, |session| session.evaluate_once(EvaluationStage::Test))
    }

    /// Predicts once, with weights as in [`validate`](Self::validate), for the samples of
    /// [`Split::Predict`](fulgurite_engine::data::Split::Predict); each rank for its share. Collective.
    ///
    /// # Errors
    /// As [`validate`](Self::validate), and those of
    /// [`predict_step`](LightningModule::predict_step).
    pub fn predict<M: LightningModule>(&self, run: &RunConfigOf<M>) -> Result<Predictions> {
        self.once::<M, _>(Stage::Predict, run, Session::predict_once)
    }

    /// Sets up, loads weights, and does one thing.
    fn once<M: LightningModule, T>(
        &self,
        stage: Stage,
        run: &RunConfigOf<M>,
        act: impl FnOnce(&mut Session) -> Result<T>,
    ) -> Result<T> {
        let mut outcome = None;
        let make = &mut |fabric: &mut Fabric, code| runner::set_up::<M>(run, fabric, code);
        self.run_once(
            stage,
            run.tables()?,
            RunnerFactory { data_keys: M::Data::host_keys(), make },
            Box::new(|session| {
                outcome = Some(act(session)?);
                Ok(())
            }),
        )?;
        Ok(outcome.expect("it was done"))
    }

    fn run_once(
        &self,
        stage: Stage,
        run: UntypedRun,
        factory: RunnerFactory,
        act: Box<Act>,
    ) -> Result<()> {
        let starting = Starting::new();
        let mut session = self.set_up(stage, &run, factory)?;
        let result =
            session.run_once(&run, starting, act).map_err(|e| session.parts.fabric.explain(e));
        if result.is_err() {
            session.profile_on_exception();
        }
        let result = session.tear_down_saving(result);
        let status = RunStatus::of(&result);
        session.end_hooks(status, result.as_ref().err());
        let finished = session.finish_sinks(status);
        result?;
        finished
    }

    /// Sets everything up: data, strategy, model, loggers. Collective.
    fn set_up(&self, stage: Stage, run: &UntypedRun, factory: RunnerFactory) -> Result<Session> {
        run.validate()?;
        let (as_given, run) = (run, &run.effective());
        let config = &run.trainer;
        let devices = match config.devices {
            Devices::Count(count) => count,
            Devices::Auto => 1,
        };
        for (key, count) in [("devices", devices), ("num_nodes", config.num_nodes)] {
            if self.alone && count > 1 {
                return Err(Error::Config(format!(
                    "`trainer.{key}` = {count}: `Trainer::default()` trains in this process alone. \
                     Start the ranks with `let connection = run.trainer.connect()?;`, and train with \
                     `Trainer::new(connection.world.clone())`"
                )));
            }
        }
        run.check_plugins()?;
        // Before anything that depends on the configuration is communicated.
        if self.world.size() > 1 {
            let _comparing =
                LogExecutionTime::begin(self.world.rank(), "comparing the configurations");
            Agreement::check(&*self.world, &[as_given.agreement(factory.data_keys)?])?;
        }
        let parallelize = self.parallelize.clone().map(|f| {
            let shared = move |tree: &mut ModuleTree, mesh: &DeviceMesh| f.parallelize(tree, mesh);
            Box::new(shared) as Box<dyn ParallelizeFn>
        });
        let mut fabric = Fabric::over(self.world.clone(), config, run.seed, parallelize)?;
        let strategy_name = fabric.strategy_name()?;
        check_async_save(run, fabric.runtime.saves_distributed_checkpoints()?)?;
        let mut callbacks = self.callbacks.clone();
        for value in &config.callbacks {
            let config: Box<dyn CallbackConfig> =
                value.build(kind::CALLBACK, "trainer.callbacks")?;
            callbacks.push(SharedCallback::new(config.build()?));
        }
        let code = agreement_of_callbacks(&callbacks);
        let set_up = (factory.make)(&mut fabric, code)?;
        let RunnerSetup {
            runner, model, data, batch_size, shuffle, samples, report, items, ..
        } = set_up;
        let resolved = to_table(&run.clone().with(model, data))?;
        let OpenRun { dir: run_dir, mut sinks, guard } =
            open_run(&*self.world, stage, run, &resolved, self.sinks.clone())?;
        let world = &self.world;
        let saving = Saving::new(&run.checkpoint, RunDir::checkpoints_in(&run_dir), &**world)?;
        let callbacks = Callbacks::new(callbacks, set_up.callbacks, world.rank() == 0);
        if world.rank() != 0 {
            sinks.clear();
        }
        let mut config = config.clone();
        let ranks = fabric.sampler_share()?.num_replicas;
        config.accumulate_grad_batches = config.micro_batches(batch_size, ranks)?;
        let accumulate = config.accumulate_grad_batches;
        let micro_batches_in_batch = config.micro_batches_in_batch(batch_size)?;
        Ok(Session {
            parts: SessionParts {
                saving,
                config,
                run_dir,
                resolved,
                callbacks,
                print: self.print,
                sinks,
                meter: Meter::new(self.program_start),
                strategy: strategy_name,
                interrupted: self.interrupted,
                fabric,
                guard,
            },
            runner,
            optimizers: None,
            stage,
            items: 0.0,
            accumulate,
            micro_batches_in_batch,
            length: (None, None),
            requests: Requests::default(),
            batch_size,
            shuffle,
            samples,
            length_before: None,
            report,
            items_name: items,
            cursor: Cursor::default(),
            epoch: 0,
            unread: None,
            metrics: std::collections::BTreeMap::new(),
            metric_steps: std::collections::BTreeMap::new(),
            epoch_table: LogTable::default(),
            hook_table: LogTable::default(),
            started_epoch: None,
            validation_due: false,
        })
    }
}

/// A run whose `[model]` and `[data]` tables only the [runner](runner::set_up) can parse.
type UntypedRun = RunConfig<Table, Table>;

/// What all ranks must have alike of the callbacks of a program and its configuration.
fn agreement_of_callbacks(callbacks: &[SharedCallback]) -> Agreement {
    let mut agreement = Agreement::on(
        "the program",
        "All ranks must run the same program, and what it adds to a run must not depend on the rank: a callback \
         that is for one rank alone asks for `HookContext::rank` in its hooks",
    );
    for (i, callback) in callbacks.iter().enumerate() {
        agreement.insert(format!("callback {i}"), callback.state_key());
    }
    agreement
}

/// What is done once with a session.
type Act<'a> = dyn FnOnce(&mut Session) -> Result<()> + 'a;

/// A run's directory, and what its events go to.
struct OpenRun {
    dir: PathBuf,
    sinks: Vec<SharedSink>,
    /// On rank 0.
    guard: Option<RunDirGuard>,
}

/// Makes the run's directory and its loggers on rank 0, and returns it on all ranks. Collective.
fn open_run(
    world: &dyn ProcessGroup,
    stage: Stage,
    run: &UntypedRun,
    resolved: &Table,
    mut sinks: Vec<SharedSink>,
) -> Result<OpenRun> {
    let (mut path, mut guard) = (PathBuf::new(), None);
    if world.rank() == 0 {
        let dir = RunDir::create(&run.trainer.default_root_dir, stage, resolved)?;
        path = dir.path().to_owned();
        // Also if a logger cannot be built.
        let unbuilt = RunDirGuard::new(&path)?;
        let loggers = run
            .trainer
            .loggers
            .iter()
            .map(|value| {
                value
                    .build::<Box<dyn LoggerConfig>>(kind::LOGGER, "trainer.loggers")?
                    .build(dir.path())
            })
            .collect::<Result<Vec<_>>>()?;
        if run.trainer.enable_progress_bar
            && let Some(progress) = default_progress(run.trainer.log_every_n_steps)
        {
            sinks.push(SharedSink::new(progress));
        }
        let loggers = LoggerSink::new(loggers, run.trainer.log_every_n_steps, resolved)?;
        let log = EventLog::create(dir.path())?;
        sinks.insert(0, SharedSink::new(Box::new(log)));
        sinks.insert(0, SharedSink::new(Box::new(loggers)));
        guard = Some(unbuilt.with_present_files()?);
    }
    Ok(OpenRun { dir: broadcast_object(world, &path, 0)?, sinks, guard })
}

impl Session {
    /// Loads the weights, and does one thing. Collective.
    fn run_once(&mut self, run: &UntypedRun, starting: Starting, act: Box<Act>) -> Result<()> {
        self.report_data()?;
        self.hook(Hook::Setup)?;
        match self.checkpoint_to_resume()? {
            Some((source, _)) => self.resume(&source)?,
            None if run.trainer.ckpt_path.is_some() => {
                return Err(Error::Config(
                    "`trainer.ckpt_path`: there is no checkpoint yet; name the directory of one, \
                     or leave the key out to take the weights that training would start from"
                        .to_owned(),
                ));
            }
            None => self.load_trained()?,
        }
        drop(starting);
        act(self)?;
        self.summary()
    }

    /// Calls the hooks at the very end of a run. What goes wrong in them is only shown: the run has its
    /// result.
    fn end_hooks(&mut self, status: RunStatus, error: Option<&Error>) {
        let exception = error.map(Hook::Exception);
        for hook in exception.into_iter().chain([Hook::Teardown(&status)]) {
            for deciding in [false, true] {
                if let Err(error) = self.call_hook(hook, 0, deciding) {
                    tracing::error!("a hook at the end of the run failed: {error}");
                }
            }
        }
        // Nothing that is logged here can be reduced any more.
        self.hook_table = LogTable::default();
    }

    fn run_fit(&mut self, run: &UntypedRun, starting: Starting) -> Result<(FitOutcome, FitEnd)> {
        self.report_data()?;
        let configured = self.runner.configure_optimizers(run.optimizer_setup()?)?;
        let fabric = &self.parts.fabric;
        let automatic = self.runner.automatic_optimization();
        configured.check(fabric.module_tree()?, automatic, &run.trainer)?;
        let (optimizers, schedulers) = configured.build(fabric, run.trainer.unused_parameters)?;
        self.optimizers = Some(optimizers);
        self.hook(Hook::Setup)?;
        self.hook(Hook::FitStart)?;
        let rank = self.rank();
        self.parts.saving.lock_for_run(rank)?;
        let (mut source, is_own) = self.checkpoint_to_resume()?.unzip();
        if is_own == Some(true) {
            // It is of the checkpoint that the configuration names.
            self.parts.saving.config.weights_only = false;
        }
        let resumes = source.clone();
        if self.parts.saving.config.weights_only
            && let Some(source) = source.take()
        {
            self.resume(&source)?;
        }
        if let Some(decay) = run.trainer.ema_decay {
            for (_, optimizer) in training(&mut self.optimizers).iter_mut() {
                if optimizer.average().is_some() {
                    let message = "`trainer.ema_decay`: a callback keeps another average of the weights, and there \
                                   can be one; leave out one of the two";
                    return Err(Error::Config(message.to_owned()));
                }
                let average = WeightAverage::exponential(optimizer.parameters(), decay)?;
                optimizer.set_average(average);
            }
        }
        if let Some(source) = &source {
            self.resume(source)?;
        }
        self.parts.saving.refuse_used_place(resumes.as_ref(), rank)?;
        if let (0, Some(attempt)) = (rank, attempt()) {
            let job = Job { id: attempt.restart_id.clone(), saved_before: self.last_saved_at()? };
            RunDir::set_job(&self.parts.run_dir, &job)?;
        }
        let max_steps = self.max_steps()?;
        self.warn_of_settings(max_steps)?;
        if rank == 0 {
            warn_of_schedules(&schedulers, max_steps)?;
        }
        let world = self.parts.fabric.world().clone();
        if world.size() > 1 {
            let _comparing = LogExecutionTime::begin(rank, "comparing the optimizers");
            let optimizers = training(&mut self.optimizers);
            let compared = optimizers::agreement(optimizers, &schedulers, max_steps)?;
            Agreement::check(&*world, &[compared])?;
        }
        for ((_, optimizer), scheduler) in training(&mut self.optimizers).iter_mut().zip(schedulers)
        {
            optimizer.set_scheduler(scheduler, max_steps);
        }
        self.set_length(max_steps)?;
        for (_, optimizer) in training(&mut self.optimizers).iter() {
            // Fails before the first step for a schedule that needs the run's length.
            optimizer.learning_rate()?;
        }
        self.warn_of_other_length()?;
        if !self.parts.sinks.is_empty() {
            let model = ModelSummary::new(self.parts.fabric.module_tree()?);
            let world = self.parts.fabric.world();
            let device = self.parts.fabric.device_description();
            let several = (world.size() > 1 || device.is_some()).then(|| {
                let strategy = self.parts.strategy.clone();
                let summary = RanksSummary::new(world.size(), strategy, world.transport());
                summary.on(device.unwrap_or_default())
            });
            let run_dir = Some(self.parts.run_dir.clone());
            let start =
                RunStart { max_steps, items: self.items_name, model, ranks: several, run_dir };
            self.parts.sinks.iter().for_each(|sink| {
                let mut sink = sink.lock();
                sink.begin(&start);
                sink.start(max_steps);
            });
        }
        self.prepare_saving()?;
        // From here on ranks agree on when to end.
        drop(starting);
        let end = self.fit()?;
        self.finish_fit(end)?;
        self.keep_run_dir();
        let [best_checkpoint, last_checkpoint] = self.parts.saving.best_and_last();
        let outcome = FitOutcome {
            best_checkpoint,
            last_checkpoint,
            steps: self.cursor.step,
            first_loss: self.parts.meter.first_loss(),
            last_loss: self.parts.meter.last_loss(),
            metrics: self.metrics.clone(),
            run_dir: self.parts.run_dir.clone(),
        };
        Ok((outcome, end))
    }

    /// Tears the checkpoints' place down after the run, and returns the run's error if it has one.
    fn tear_down_saving<T>(&mut self, result: Result<T>) -> Result<T> {
        match (result, self.parts.saving.teardown()) {
            (Ok(outcome), teardown_after) => teardown_after.map(|()| outcome),
            (Err(error), teardown_after) => {
                if let Err(second) = teardown_after {
                    tracing::error!("completing what checkpoints are still under way: {second}");
                }
                Err(error)
            }
        }
    }

    /// Warns of settings that say something else than what will happen.
    fn warn_of_settings(&self, max_steps: Option<u64>) -> Result<()> {
        let config = &self.parts.config;
        // A short run with the default may be meant so.
        let is_asked_for = config.val_check_interval != CountOrFraction::Fraction(1.0)
            || config.check_val_every_n_epoch > 1
            || self.parts.saving.config.monitor.is_some()
            || self.parts.callbacks.decide_by_metrics();
        let wanted =
            is_asked_for && config.limit_val_batches.of(1) > 0 && self.has_validation_data()?;
        if let (true, 0, Some(max)) = (wanted, self.rank(), max_steps)
            && !self.is_ever_validated(max)?
        {
            tracing::warn!(
                "nothing is validated, as no validation is due within the {} of the run \
                 (`trainer.val_check_interval`, `trainer.check_val_every_n_epoch`)",
                counted(max, "step")
            );
        }
        let is_half = |p: &Parameter| matches!(p.dtype(), DType::BF16 | DType::F16);
        let tree = self.parts.fabric.module_tree()?;
        if self.rank() == 0
            && matches!(config.precision, Precision::Bf16True | Precision::F16True)
            && tree.trainable().any(|p| is_half(p) && !p.is_adapter())
        {
            tracing::warn!(
                "`trainer.precision`: weights are kept in half precision, in which an update of less than half of a \
                 weight's last place is lost (in bf16 of less than 1/512 of it, as of norms at small learning \
                 rates); \"bf16-mixed\" keeps them in f32"
            );
        }
        Ok(())
    }

    /// Tells the sinks what was read of the data, and warns of what was left out by mistake.
    fn report_data(&mut self) -> Result<()> {
        let Some(report) = self.report.take() else { return Ok(()) };
        if let (0, Some(faults)) = (self.rank(), report.faults()) {
            tracing::warn!("some of the data cannot be used and was left out: {faults}");
        }
        self.emit(&Event::Data(report))
    }

    /// Finishes all sinks, and returns the first error.
    fn finish_sinks(&mut self, status: RunStatus) -> Result<()> {
        let results: Vec<Result<()>> =
            self.parts.sinks.iter().map(|sink| sink.lock().finish(status)).collect();
        // A program may end now.
        match status {
            RunStatus::Failed => output::flush_briefly(),
            RunStatus::Success | RunStatus::Interrupted => output::flush(),
        }
        results.into_iter().collect()
    }
}
