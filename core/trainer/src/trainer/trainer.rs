//! [`Trainer`].

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use toml::Table;

use super::checkpoints::lookup::CheckpointLookup;
use super::checkpoints::place::Saving;
use super::elastic::{Kept, Recovered, agree};
use super::end::{
    end_hooks, profile_on_exception, summarize, tear_down_saving, write_flight_after,
};
use super::evaluation::evaluate::{EvaluationStage, evaluate_once, predict_once};
use super::fit::fit_run::fit;
use super::fit::training_loop::FitEnd;
use super::module::callback::{Callbacks, SharedCallback, read_callback};
use super::module::context::{Requests, Stage};
use super::module::hooks::Hook;
use super::module::runner::{self, RunnerFactory, RunnerSetup};
use super::preflight::checks::check_async_save;
use super::progress::Progress;
use super::record::display::default_progress;
use super::record::event::SharedSink;
use super::record::event_log::EventLog;
use super::record::flight::Flight;
use super::record::logger::LoggerSink;
use super::record::meter::{Meter, micros_since_epoch, seconds_since_epoch};
use super::record::recorder::{Recorder, Reports};
use super::record::run_dir::{RunDir, RunDirGuard};
use super::record::usage::Usage;
use super::saving::resume::{load_trained, resume};
use super::saving::save::save_on_exception;
use super::session::{Session, SessionSetup};
use super::{
    Callback, CallbackConfig, Evaluation, EventSink, LightningModule, LoggerConfig, Predictions,
    RunConfigOf, RunStatus, Trained,
};
use crate::fabric::{Connection, Fabric, StrategyInfo};
use crate::profiler::LogExecutionTime;
use crate::run::{Devices, RunConfig};
use crate::trainer::run_plan::{Planned, RunPlan};
use crate::{Error, Result};
use fulgurite_config::registry::kind;
use fulgurite_config::to_table;
use fulgurite_engine::collective::flight::FlightRecorder;
use fulgurite_engine::collective::{Agreement, ProcessGroup, Solo, TrafficMeter, broadcast_object};
use fulgurite_engine::data::DataModule as _;
use fulgurite_engine::execution::dry_run;
use fulgurite_engine::memory;
use fulgurite_engine::mesh::DeviceMesh;
use fulgurite_engine::module::{ModuleBuilder, ModuleTree};
use fulgurite_engine::strategy::ParallelizeFn;
use fulgurite_error::output;
use fulgurite_launch::{Interruption, LaunchedRank, Starting};

/// Runs a [`LightningModule`] on its data, by a [`RunConfig`] (Lightning's `Trainer`). Built on
/// [`Fabric`].
///
/// Every rank creates a trainer and calls the same methods. A trainer can be used again: its
/// callbacks and sinks take part in all of its runs.
pub struct Trainer {
    /// Of the present generation, in an elastic job.
    world: Mutex<Arc<dyn ProcessGroup>>,
    /// This process's part in a later generation.
    launched: Mutex<Option<LaunchedRank>>,
    program_start: f64,
    callbacks: Vec<SharedCallback>,
    sinks: Vec<SharedSink>,
    parallelize: Option<Arc<dyn ParallelizeFn>>,
    print: fn(&str),
    plan: Option<Planned>,
    interrupted: fn() -> Option<Interruption>,
    /// Whether this trainer has no process group, so that the configuration may only ask for one
    /// rank.
    alone: bool,
}

/// The outcome of a training.
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
    /// The best of the checkpoints that the table `[checkpoint]` keeps, by `checkpoint.monitor`.
    ///
    /// In the form of its location: a path, for a directory.
    pub best_checkpoint: Option<PathBuf>,
    /// The newest of these checkpoints.
    pub last_checkpoint: Option<PathBuf>,
    /// The run's directory: `version_N` under `trainer.default_root_dir`. A trial
    /// (`trainer.fast_dev_run`) removes it at its end, unless it contains anything else.
    pub run_dir: PathBuf,
}

impl Default for Trainer {
    /// Creates a trainer for a configuration of one rank.
    fn default() -> Self {
        Self { alone: true, ..Self::new(Arc::new(Solo::new("world", 0))) }
    }
}

impl Trainer {
    /// Creates a trainer over the ranks of `world`.
    pub fn new(world: Arc<dyn ProcessGroup>) -> Self {
        Self {
            world: Mutex::new(world),
            launched: Mutex::default(),
            program_start: seconds_since_epoch(),
            callbacks: Vec::new(),
            sinks: Vec::new(),
            parallelize: None,
            plan: None,
            print: |text| {
                // An error means that stderr has no reader any more.
                let _ = output::stderr().write_all(format!("{text}\n").as_bytes());
            },
            interrupted: || None,
            alone: false,
        }
    }

    /// Adds a callback. All ranks must add the same callbacks.
    #[must_use]
    pub fn with_callback(mut self, callback: Box<dyn Callback>) -> Self {
        self.callbacks.push(SharedCallback::new(callback));
        self
    }

    /// Reads the first callback of type `C` that was [added](Self::with_callback); `None` if there
    /// is none.
    ///
    /// Callbacks of the configuration belong to a run:
    /// [`Trained::read_callback`](super::Trained::read_callback).
    pub fn read_callback<C: Callback, T>(&self, read: impl FnMut(&C) -> T) -> Option<T> {
        read_callback(&self.callbacks, read)
    }

    /// Adds a receiver of events. Only rank 0's receivers are used.
    #[must_use]
    pub fn with_sink(mut self, sink: Box<dyn EventSink>) -> Self {
        self.sinks.push(SharedSink::new(sink));
        self
    }

    /// Sets the plan that the run's summary compares with what was counted. Only rank 0's is used.
    #[must_use]
    pub fn with_plan(mut self, plan: Option<RunPlan>) -> Self {
        self.plan = plan.as_ref().map(Planned::of);
        self
    }

    /// Sets the program's start in seconds since 1970, from which `startup_s` counts.
    #[must_use]
    pub fn with_program_start(mut self, secs: f64) -> Self {
        self.program_start = secs;
        self
    }

    /// Sets the function that prints hooks' texts on rank 0; by default to stderr.
    #[must_use]
    pub fn with_print(mut self, print: fn(&str)) -> Self {
        self.print = print;
        self
    }

    /// Sets a function that returns why the run is interrupted:
    /// [`launch::interruption`](fulgurite_launch::interruption()).
    ///
    /// Called after each step, and after each batch of a validation. If any rank is interrupted,
    /// all ranks finish the step, save (after Ctrl-C only with `checkpoint.save_last`), and stop.
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
    /// The error of this rank; [`Error::PeerFailed`] if another rank failed; [`Error::Interrupted`]
    /// after an interrupted run has ended in order.
    pub fn fit<M: LightningModule>(&self, run: &RunConfigOf<M>) -> Result<Trained<M>> {
        let make = &mut |fabric: &mut Fabric, code| runner::set_up::<M>(run, fabric, code);
        let factory = RunnerFactory { data_keys: M::Data::host_keys(), can_repeat: true, make };
        let (outcome, session) = self.run_fit(tables::<M>(run)?, factory)?;
        Ok(Trained::new(outcome, session))
    }

    /// Like [`fit`](Self::fit), with a module and data that the program creates in code.
    /// Collective.
    ///
    /// `build` describes the model as [`configure_model`](LightningModule::configure_model) does.
    /// The table `[data]` of `run` sets the batch size and whether samples are shuffled.
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
        let factory = RunnerFactory { data_keys: M::Data::host_keys(), can_repeat: false, make };
        let (outcome, session) = self.run_fit(tables::<M>(run)?, factory)?;
        Ok(Trained::new(outcome, session))
    }

    fn run_fit(
        &self,
        run: UntypedRun,
        mut factory: RunnerFactory,
    ) -> Result<(FitOutcome, Session)> {
        if run.trainer.elastic.enabled && !factory.can_repeat {
            return Err(Error::Config(
                "`trainer.elastic`: this program makes the data in code, and so cannot set the run up again after \
                 the loss of a rank; use `Trainer::fit`, whose data is made from `[data]`"
                    .to_owned(),
            ));
        }
        let mut kept = Kept::default();
        loop {
            if let Some(done) = self.fit_in_generation(&run, &mut factory, &mut kept)? {
                return Ok(done);
            }
        }
    }

    /// Trains until the end, or until a rank is lost. The result is `None` if this process has
    /// joined the next generation then. Collective.
    fn fit_in_generation(
        &self,
        run: &UntypedRun,
        factory: &mut RunnerFactory,
        kept: &mut Kept,
    ) -> Result<Option<(FitOutcome, Session)>> {
        let starting = Starting::new();
        let world = self.world();
        let rank = world.rank();
        let begun = match fulgurite_launch::generation() {
            0 => Ok(None),
            _ => agree(&world, kept),
        };
        let begun = begun.and_then(|recovered| {
            let session = self.set_up(Stage::Fit, run, factory, recovered.as_ref(), kept)?;
            Ok((recovered, session))
        });
        let (recovered, mut session) = match begun {
            Ok(begun) => begun,
            Err(error) => {
                kept.note_loss();
                drop(starting);
                return if self.join_next_generation(run, &error)? { Ok(None) } else { Err(error) };
            }
        };
        let lost = recovered.as_ref().map(|recovered| (recovered, kept.lost_at()));
        let mut result = fit(&mut session, run, starting, lost);
        if session.has_state {
            kept.end_loss();
        }
        if let Err(error) = &result {
            kept.note_loss();
            match self.join_next_generation(run, error) {
                Ok(true) => {
                    tracing::info!("goes on after: {error}");
                    kept.keep(session);
                    return Ok(None);
                }
                Ok(false) => {}
                Err(second) => {
                    tracing::info!("cannot go on after: {error}");
                    result = Err(second);
                }
            }
        }
        write_flight_after(&mut session, &result);
        let result = result.map_err(|error| session.read_pending_step_after(error));
        let result = result.map_err(|error| session.setup.fabric.explain(error));
        if result.is_err() {
            save_on_exception(&mut session);
            profile_on_exception(&mut session);
        }
        let result = tear_down_saving(&mut session, result).and_then(|(outcome, end)| match end {
            FitEnd::Finished => Ok(outcome),
            FitEnd::Interrupted(why) => {
                tracing::info!(rank, "interrupted");
                fulgurite_launch::agree_on(why);
                Err(Error::Interrupted)
            }
        });
        if let Some(copies) = session.copies.take() {
            copies.end();
        }
        let status = RunStatus::of(&result);
        end_hooks(&mut session, status, result.as_ref().err());
        let finished = session.recorder.finish(status);
        let outcome = result?;
        finished?;
        Ok(Some((outcome, session)))
    }

    /// Joins the next generation after an error, if there is one, and connects to its ranks.
    fn join_next_generation(&self, run: &UntypedRun, error: &Error) -> Result<bool> {
        let Some(Connection { launched, world }) = run.trainer.reconnect(error)? else {
            return Ok(false);
        };
        *lock(&self.world) = world;
        *lock(&self.launched) = Some(launched);
        Ok(true)
    }

    /// The ranks of the present generation.
    fn world(&self) -> Arc<dyn ProcessGroup> {
        lock(&self.world).clone()
    }

    /// Validates the weights of a checkpoint once. Collective.
    ///
    /// The checkpoint is the one that `trainer.ckpt_path` names. With `trainer.ema_decay` its
    /// averages are used, as in [`fit`](Self::fit).
    ///
    /// Without `trainer.ckpt_path`, it is the best checkpoint in `checkpoint.dir` if
    /// `checkpoint.monitor` is set, otherwise the last, and a warning names it. Without
    /// `checkpoint.dir` the newest run's checkpoint is used. Weights of the module
    /// ([`pretrained`](LightningModule::pretrained)) or of `trainer.adapters.from` stay. If no
    /// checkpoint is found, the model keeps its initial weights, and a warning says so.
    ///
    /// # Errors
    /// As [`fit`](Self::fit), and if there is no validation data; [`Error::Interrupted`] if it was
    /// interrupted between two batches.
    pub fn validate<M: LightningModule>(&self, run: &RunConfigOf<M>) -> Result<Evaluation> {
        self.once::<M, _>(Stage::Validate, run, |session| {
            evaluate_once(session, EvaluationStage::Validation)
        })
    }

    /// Tests once, as [`validate`](Self::validate), on the data of
    /// [`Split::Test`](fulgurite_engine::data::Split::Test).
    ///
    /// # Errors
    /// As [`validate`](Self::validate).
    pub fn test<M: LightningModule>(&self, run: &RunConfigOf<M>) -> Result<Evaluation> {
        self.once::<M, _>(Stage::Test, run, |session| evaluate_once(session, EvaluationStage::Test))
    }

    /// Predicts once, with weights as in [`validate`](Self::validate), for this rank's samples of
    /// [`Split::Predict`](fulgurite_engine::data::Split::Predict). Collective.
    ///
    /// # Errors
    /// As [`validate`](Self::validate) and [`predict_step`](LightningModule::predict_step).
    pub fn predict<M: LightningModule>(&self, run: &RunConfigOf<M>) -> Result<Predictions> {
        self.once::<M, _>(Stage::Predict, run, predict_once)
    }

    /// Sets up, loads weights, and runs an evaluation or prediction once.
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
            tables::<M>(run)?,
            RunnerFactory { data_keys: M::Data::host_keys(), can_repeat: false, make },
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
        let mut factory = factory;
        let mut session = self.set_up(stage, &run, &mut factory, None, &mut Kept::default())?;
        let result = act_once(&mut session, &run, starting, act);
        write_flight_after(&mut session, &result);
        let result = result.map_err(|e| session.setup.fabric.explain(e));
        if result.is_err() {
            profile_on_exception(&mut session);
        }
        let result = tear_down_saving(&mut session, result);
        let status = RunStatus::of(&result);
        end_hooks(&mut session, status, result.as_ref().err());
        let finished = session.recorder.finish(status);
        result?;
        finished
    }

    /// Sets everything up: data, strategy, model, loggers. Collective.
    ///
    /// In a later generation of an elastic training, `recovered` is what it goes on with, and what
    /// this process has kept goes on.
    fn set_up(
        &self,
        stage: Stage,
        run: &UntypedRun,
        factory: &mut RunnerFactory,
        recovered: Option<&Recovered>,
        kept: &mut Kept,
    ) -> Result<Session> {
        run.validate()?;
        let own_world = self.world();
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
        // Compared before anything that depends on the configuration is communicated.
        if own_world.size() > 1 {
            let _comparing =
                LogExecutionTime::begin(own_world.rank(), "comparing the configurations");
            Agreement::check(&*own_world, &[as_given.agreement(factory.data_keys)?])?;
        }
        let parallelize = self.parallelize.clone().map(|f| {
            let shared = move |tree: &mut ModuleTree, mesh: &DeviceMesh| f.parallelize(tree, mesh);
            Box::new(shared) as Box<dyn ParallelizeFn>
        });
        let traffic = TrafficMeter::default();
        // Kernels keep memory of the dry run for their next call.
        let held_before = self.plan.as_ref().map_or_else(memory::held, |plan| plan.held_before);
        let usage = Usage::new(traffic.clone(), held_before);
        let records = own_world.size() > 1 && config.flight_recorder > 0 && !dry_run::is_on();
        let recorder = records.then(|| FlightRecorder::new(config.flight_recorder));
        let world = match &recorder {
            Some(recorder) => recorder.watch(own_world.clone()),
            None => own_world.clone(),
        };
        let background = world.clone();
        let world = match own_world.size() {
            1 => world,
            _ => traffic.watch(world),
        };
        let mut fabric = Fabric::over(world, config, run.seed, parallelize)?;
        if config.slow_rank_factor.is_some() && !fabric.device().is_cpu() {
            return Err(Error::Config(
                "`trainer.slow_rank_factor`: on this device the host does not wait in collectives, so its times say \
                 nothing of ranks; leave the key out"
                    .to_owned(),
            ));
        }
        let StrategyInfo { name: strategy_name, capabilities } = fabric.strategy()?;
        check_async_save(run, capabilities.saves_distributed_checkpoints)?;
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
        let world = &own_world;
        let is_first = world.rank() == 0;
        let reports = kept.take_reports().filter(|reports| is_first && !reports.sinks.is_empty());
        let told = reports.as_ref().and_then(|reports| reports.told);
        let (opened, meter) = match (recovered, reports) {
            (Some(recovered), Some(Reports { sinks, meter, guard, .. })) => {
                (OpenRun { dir: recovered.run.run_dir.clone(), sinks, guard }, meter)
            }
            (recovered, _) => {
                let again = recovered.map(|recovered| &*recovered.run.run_dir);
                let opened = open_run(&**world, stage, run, &resolved, self.sinks.clone(), again)?;
                (opened, Meter::new(self.program_start))
            }
        };
        let OpenRun { dir: run_dir, mut sinks, guard } = opened;
        let saving = Saving::new(&run.checkpoint, RunDir::checkpoints_in(&run_dir), &**world)?;
        let flight = recorder
            .map(|recorder| {
                Flight::new(recorder, own_world.rank(), &run_dir, config.slow_rank_factor)
            })
            .transpose()?;
        let callbacks = Callbacks::new(callbacks, set_up.callbacks, world.rank() == 0);
        if world.rank() != 0 {
            sinks.clear();
        }
        let mut config = config.clone();
        let ranks = fabric.sampler_share()?.num_replicas;
        let ranks = match recovered {
            Some(recovered) => recovered.run.step_ranks,
            // A rank may be lost before the training begins. The other dimensions of the mesh are
            // as large as before.
            None if fulgurite_launch::generation() > 0 => {
                let first = fulgurite_launch::first_world_size().unwrap_or(own_world.size());
                ranks * first / own_world.size()
            }
            None => ranks,
        };
        config.accumulate_grad_batches = config.micro_batches(batch_size, ranks)?;
        let accumulate = config.accumulate_grad_batches;
        let micro_batches_in_batch = config.micro_batches_in_batch(batch_size)?;
        let recorder =
            Recorder::new(&config, sinks, (meter, usage), (items, report), guard).going_on(told);
        Ok(Session {
            saving,
            setup: SessionSetup {
                fabric,
                background,
                config,
                run_dir,
                begun_at: recovered
                    .map_or_else(micros_since_epoch, |recovered| recovered.run.begun_at),
                resolved,
                strategy: strategy_name,
                batch_size,
                step_ranks: ranks,
                shuffle,
                samples,
                plan: self.plan,
                print: self.print,
                interrupted: self.interrupted,
            },
            copies: None,
            flight,
            runner,
            optimizers: None,
            progress: Progress::new(stage, accumulate, micro_batches_in_batch),
            has_state: false,
            has_averages: false,
            buffers_before: Vec::new(),
            callbacks,
            requests: Requests::default(),
            recorder,
        })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A run whose `[model]` and `[data]` tables only the [runner](runner::set_up) can parse.
type UntypedRun = RunConfig<Table, Table>;

/// The run with tables instead of the module's types, and with the module's name.
fn tables<M: LightningModule>(run: &RunConfigOf<M>) -> Result<UntypedRun> {
    let mut tables = run.tables()?;
    tables.set_module(M::module_type())?;
    Ok(tables)
}

/// Returns the agreement between ranks on the callbacks of a program and its configuration.
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

/// The action of a one-time session.
type Act<'a> = dyn FnOnce(&mut Session) -> Result<()> + 'a;

/// Loads the weights, and runs an action once. Collective.
fn act_once(
    session: &mut Session,
    run: &UntypedRun,
    starting: Starting,
    act: Box<Act>,
) -> Result<()> {
    session.recorder.report_data(&session.setup.fabric)?;
    session.hook(Hook::Setup)?;
    match CheckpointLookup::of(session).checkpoint_to_resume()? {
        Some((source, _)) => resume(session, &source)?,
        None if run.trainer.ckpt_path.is_some() => {
            return Err(Error::Config(
                "`trainer.ckpt_path`: there is no checkpoint yet; name the directory of one, \
                 or leave the key out to take the weights that training would start from"
                    .to_owned(),
            ));
        }
        None => load_trained(session)?,
    }
    drop(starting);
    act(session)?;
    summarize(session)
}

/// A run's directory, and the receivers of its events.
struct OpenRun {
    dir: PathBuf,
    sinks: Vec<SharedSink>,
    /// Set on rank 0.
    guard: Option<RunDirGuard>,
}

/// Creates the run's directory and its loggers on rank 0. All ranks get the directory's path.
/// Collective. A dry run has neither. `again` is the directory of a run that goes on, on a rank 0
/// that has not reported yet.
fn open_run(
    world: &dyn ProcessGroup,
    stage: Stage,
    run: &UntypedRun,
    resolved: &Table,
    mut sinks: Vec<SharedSink>,
    again: Option<&Path>,
) -> Result<OpenRun> {
    if dry_run::is_on() {
        return Ok(OpenRun { dir: PathBuf::new(), sinks: Vec::new(), guard: None });
    }
    let (mut path, mut guard) = (PathBuf::new(), None);
    if world.rank() == 0 {
        path = match again {
            Some(dir) => {
                std::fs::create_dir_all(dir)
                    .map_err(Error::io("creating the run's directory", dir))?;
                dir.to_owned()
            }
            None => {
                let dir = RunDir::create(&run.trainer.default_root_dir, stage, resolved)?;
                dir.path().to_owned()
            }
        };
        // Guards the directory even if a logger cannot be built.
        let mut unbuilt = RunDirGuard::new(&path)?;
        if again.is_some() {
            unbuilt.keep();
        }
        let loggers = run
            .trainer
            .loggers
            .iter()
            .map(|value| {
                value.build::<Box<dyn LoggerConfig>>(kind::LOGGER, "trainer.loggers")?.build(&path)
            })
            .collect::<Result<Vec<_>>>()?;
        if run.trainer.enable_progress_bar
            && let Some(progress) = default_progress(run.trainer.log_every_n_steps)
        {
            sinks.push(SharedSink::new(progress));
        }
        let loggers = LoggerSink::new(loggers, run.trainer.log_every_n_steps, resolved)?;
        let log = EventLog::create(&path)?;
        sinks.insert(0, SharedSink::new(Box::new(log)));
        sinks.insert(0, SharedSink::new(Box::new(loggers)));
        guard = Some(unbuilt.with_present_files()?);
    }
    let dir = match again {
        Some(dir) => dir.to_owned(),
        None => broadcast_object(world, &path, 0)?,
    };
    Ok(OpenRun { dir, sinks, guard })
}
