//! A training from its configuration to its summary: optimizers, resume, and the loop.

use std::time::Instant;

use candle_core::DType;
use toml::Table;

use crate::fabric::FabricOptimizer;
use crate::profiler::LogExecutionTime;
use crate::run::{CountOrFraction, Precision, RunConfig};
use crate::trainer::checkpoints::lookup::{CheckpointLookup, ResumeSource};
use crate::trainer::elastic::{Copies, MemoryState, Recovered, RunSoFar, number, remove_states};
use crate::trainer::end::summarize;
use crate::trainer::evaluation::evaluate::validation_sets;
use crate::trainer::fit::plan::StepPlanner;
use crate::trainer::fit::replica_check::check_key;
use crate::trainer::fit::schedule_warning::warn_of_schedules;
use crate::trainer::fit::training_loop::FitEnd;
use crate::trainer::module::hooks::Hook;
use crate::trainer::module::optimizers;
use crate::trainer::record::display::{RanksSummary, RunStart};
use crate::trainer::record::model_summary::ModelSummary;
use crate::trainer::record::run_dir::{Job, RunDir};
use crate::trainer::saving::resume::{load, resume, warn_of_other_length};
use crate::trainer::saving::save::prepare_saving;
use crate::trainer::session::{Session, SessionSetup};
use crate::trainer::{Event, FitOutcome};
use crate::{Error, Result, counted};
use fulgurite_engine::collective::Agreement;
use fulgurite_engine::execution::dry_run;
use fulgurite_engine::optim::{Interval, SchedulerConfig, WeightAverage};
use fulgurite_engine::parameter::Parameter;
use fulgurite_launch::{Starting, attempt, is_first_on_host};

/// Trains, from a checkpoint or from the start. Collective.
pub(crate) fn fit(
    session: &mut Session,
    run: &RunConfig<Table, Table>,
    starting: Starting,
    lost: Option<(&Recovered, Option<Instant>)>,
) -> Result<(FitOutcome, FitEnd)> {
    let recovered = lost.map(|(recovered, _)| recovered);
    session.recorder.report_data(&session.setup.fabric)?;
    let schedulers = set_up_optimizers(session, run)?;
    session.hook(Hook::Setup)?;
    session.hook(Hook::FitStart)?;
    go_on_from_checkpoint(session, run, recovered)?;
    let max_steps = StepPlanner::of(session).max_steps()?;
    warn_of_settings(session, max_steps)?;
    set_schedules(session, schedulers, max_steps)?;
    warn_of_other_length(session)?;
    if let Some((recovered, lost_at)) = lost {
        report_generation(session, recovered, lost_at)?;
    }
    session.has_state = true;
    let elastic = session.setup.config.elastic.enabled;
    if elastic && fulgurite_launch::generation() == 0 && is_first_on_host() {
        // Of an earlier attempt, whose processes were killed.
        remove_states();
        RunSoFar::forget();
    }
    if elastic && session.setup.rank() == 0 {
        RunSoFar::of(session).note()?;
    }
    if !session.recorder.goes_on() {
        begin_reports(session, max_steps)?;
    }
    // The rank that was to report it was lost before, or met a loss in this step.
    let last = recovered.and_then(|recovered| recovered.last_step.as_ref());
    let step = session.progress.step();
    if let Some(last) = last.filter(|last| number(last) == step)
        && !session.recorder.has_told(step)
    {
        session.emit(last)?;
    }
    prepare_saving(session)?;
    session.copies = Copies::new(session)?;
    // Until the first copy the older ones are all there is.
    if elastic && session.copies.is_none() && is_first_on_host() {
        remove_states();
    }
    check_key(session)?;
    // From here on ranks agree on when to end.
    drop(starting);

    let end = session.fit()?;
    check_steps(session, end)?;
    // An interrupted run ends without further delay.
    if end == FitEnd::Finished {
        session.hook(Hook::FitEnd)?;
    }
    summarize(session)?;
    session.recorder.keep_run_dir();
    let [best_checkpoint, last_checkpoint] = session.saving.best_and_last();
    let meter = session.recorder.meter();
    let outcome = FitOutcome {
        best_checkpoint,
        last_checkpoint,
        steps: session.progress.step(),
        first_loss: meter.first_loss(),
        last_loss: meter.last_loss(),
        metrics: session.recorder.metrics().clone(),
        run_dir: session.setup.run_dir.clone(),
    };
    Ok((outcome, end))
}

/// Reports what a generation goes on with, once all ranks have it. Collective.
fn report_generation(
    session: &mut Session,
    recovered: &Recovered,
    lost_at: Option<Instant>,
) -> Result<()> {
    session.setup.fabric.barrier()?;
    let step = session.progress.step();
    let from = match &recovered.state {
        None if step == 0 => "the start of the run".to_owned(),
        _ => recovered.from.clone(),
    };
    let repeated_steps = recovered.steps_done.saturating_sub(step);
    session.recorder.forget_last(repeated_steps);
    session.emit(&Event::Generation {
        generation: fulgurite_launch::generation(),
        step,
        world_size: session.setup.world_size(),
        from,
        repeated_steps,
        lost_s: lost_at.map_or(0.0, |at| at.elapsed().as_secs_f64()),
    })
}

/// Tells the sinks that the run begins.
fn begin_reports(session: &mut Session, max_steps: Option<u64>) -> Result<()> {
    let SessionSetup { fabric, strategy, run_dir, .. } = &session.setup;
    let items = session.recorder.items_name();
    session.recorder.begin(|| {
        let world = fabric.world();
        let device = fabric.measurements().device_description();
        let ranks = (world.size() > 1 || device.is_some()).then(|| {
            let summary = RanksSummary::new(world.size(), strategy, world.transport());
            summary.on(device.unwrap_or_default())
        });
        let model = ModelSummary::new(fabric.module_tree()?);
        let run_dir = Some(run_dir.clone());
        Ok(RunStart { max_steps, items, model, ranks, run_dir })
    })
}

/// Builds the module's optimizers, and returns their schedules.
fn set_up_optimizers(
    session: &mut Session,
    run: &RunConfig<Table, Table>,
) -> Result<Vec<Box<dyn SchedulerConfig>>> {
    let configured = session.runner.configure_optimizers(run.optimizer_setup()?)?;
    let fabric = &session.setup.fabric;
    let automatic = session.runner.automatic_optimization();
    if !automatic && fabric.device_mesh().pipeline().is_some() {
        return Err(Error::Config(
            "`trainer.strategy.pipeline_parallel_size`: the module optimizes by itself (manual optimization), with \
             backwards of the whole model, which no rank of a pipeline has"
                .to_owned(),
        ));
    }
    configured.check(fabric.module_tree()?, automatic, &run.trainer)?;
    let (optimizers, schedulers) = configured.build(fabric, run.trainer.unused_parameters)?;
    session.optimizers = Some(optimizers);
    Ok(schedulers)
}

/// Resumes from a checkpoint if there is one, and adds the average of the weights. Collective.
fn go_on_from_checkpoint(
    session: &mut Session,
    run: &RunConfig<Table, Table>,
    recovered: Option<&Recovered>,
) -> Result<()> {
    let rank = session.setup.rank();
    session.saving.lock_for_run(rank)?;
    let found = match recovered {
        Some(Recovered { state: Some(state), .. }) => {
            Some((ResumeSource::Memory(state.name().to_owned()), true))
        }
        Some(_) => match CheckpointLookup::of(session).own_last_checkpoint()? {
            Some(own) => Some((own, true)),
            None => CheckpointLookup::of(session).checkpoint_to_resume()?,
        },
        None if dry_run::is_on() => None,
        None => CheckpointLookup::of(session).checkpoint_to_resume()?,
    };
    let (mut source, is_own) = found.unzip();
    if is_own == Some(true) {
        session.saving.resume_whole_state();
    }
    let resumes = source.clone();
    if session.saving.config().weights_only
        && let Some(source) = source.take()
    {
        resume(session, &source)?;
    }
    if let Some(decay) = run.trainer.ema_decay {
        for (_, optimizer) in session.optimizers_mut().iter_mut() {
            if optimizer.average().is_some() {
                let message = "`trainer.ema_decay`: a callback keeps another average of the weights, and there \
                               can be one; leave out one of the two";
                return Err(Error::Config(message.to_owned()));
            }
            let average = WeightAverage::exponential(optimizer.parameters(), decay)?;
            optimizer.set_average(average);
        }
    }
    for (_, optimizer) in session.optimizers_mut().iter_mut() {
        if optimizer.averages_weights() && optimizer.average().is_some() {
            let message = "`optimizer.type`: a schedule-free optimizer averages the weights itself; leave out \
                           `trainer.ema_decay` and the callback `stochastic_weight_averaging`";
            return Err(Error::Config(message.to_owned()));
        }
    }
    match &source {
        Some(source @ ResumeSource::Memory(_)) => {
            let state = recovered.and_then(|recovered| recovered.state.as_ref());
            load_from_memory(session, source, state)?;
        }
        Some(source) => resume(session, source)?,
        None => {}
    }
    session.saving.refuse_used_place(resumes.as_ref(), rank)?;
    if let (0, Some(attempt)) = (rank, attempt())
        && !dry_run::is_on()
    {
        let saved_before = CheckpointLookup::of(session).last_saved_at()?;
        let job = Job { id: attempt.restart_id.clone(), saved_before };
        RunDir::set_job(&session.setup.run_dir, &job)?;
    }
    Ok(())
}

/// Loads a state in the hosts' memory: each rank reads its part, from other hosts what its own
/// lacks. Collective.
fn load_from_memory(
    session: &mut Session,
    source: &ResumeSource,
    state: Option<&MemoryState>,
) -> Result<()> {
    let state = state.ok_or_else(|| Error::other("no state is in the hosts' memory"))?;
    let reader = state.open(&**session.setup.fabric.world())?;
    match load(session, source, Some(reader.io())) {
        Ok(_) => reader.end(),
        // The loss of a rank is not an error of the file.
        Err(error) => Err(reader.take_failure().unwrap_or(error)),
    }
}

/// Sets the optimizers' schedules for a run of `max_steps` steps, and compares both over the ranks.
///
/// Collective.
///
/// # Errors
/// If ranks differ, or a schedule needs an unknown run length.
fn set_schedules(
    session: &mut Session,
    schedulers: Vec<Box<dyn SchedulerConfig>>,
    max_steps: Option<u64>,
) -> Result<()> {
    let rank = session.setup.rank();
    if rank == 0 {
        warn_of_schedules(&schedulers, max_steps)?;
    }
    let world = session.setup.fabric.world().clone();
    if world.size() > 1 {
        let _comparing = LogExecutionTime::begin(rank, "comparing the optimizers");
        let optimizers = session.optimizers_mut();
        let compared = optimizers::agreement(optimizers, &schedulers, max_steps)?;
        Agreement::check(&*world, &[compared])?;
    }
    for ((_, optimizer), scheduler) in session.optimizers_mut().iter_mut().zip(schedulers) {
        optimizer.set_scheduler(scheduler, max_steps);
    }
    let length = StepPlanner::of(session).length(max_steps)?;
    session.progress.set_length(length);
    let (_, max_epochs) = length;
    for (_, optimizer) in session.optimizers_mut().iter_mut() {
        optimizer.set_max_steps(match optimizer.schedule_interval() {
            Interval::Step => max_steps,
            Interval::Epoch => max_epochs,
        });
        // If a schedule needs an unknown run length, fail before the first step.
        optimizer.learning_rate()?;
    }
    Ok(())
}

/// Warns of settings that will not have the stated effect.
fn warn_of_settings(session: &Session, max_steps: Option<u64>) -> Result<()> {
    let config = &session.setup.config;
    // The default in a short run may be intended.
    let is_asked_for = config.val_check_interval != CountOrFraction::Fraction(1.0)
        || config.check_val_every_n_epoch > 1
        || session.saving.config().monitor.is_some()
        || session.callbacks.decide_by_metrics();
    let wanted =
        is_asked_for && config.limit_val_batches.of(1) > 0 && !validation_sets(session)?.is_empty();
    if let (true, 0, Some(max)) = (wanted, session.setup.rank(), max_steps)
        && !StepPlanner::of(session).is_ever_validated(max)?
    {
        tracing::warn!(
            "nothing is validated, as no validation is due within the {} of the run \
             (`trainer.val_check_interval`, `trainer.check_val_every_n_epoch`)",
            counted(max, "step")
        );
    }
    let is_half = |p: &Parameter| matches!(p.dtype(), DType::BF16 | DType::F16);
    let tree = session.setup.fabric.module_tree()?;
    if session.setup.rank() == 0
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

/// Checks that the steps have changed something.
///
/// # Errors
/// If no step of a finished run counted anything.
fn check_steps(session: &mut Session, end: FitEnd) -> Result<()> {
    let steps = session.progress.step();
    let is_first = session.setup.rank() == 0;
    let optimizers = session.optimizers_mut();
    let idle = optimizers.iter().all(|(_, own)| own.steps() == 0);
    if idle && steps > 0 && is_first {
        tracing::warn!(
            "no optimizer has stepped in {}: `training_step` optimizes by itself \
             (`automatic_optimization`), and is to call `StepContext::optimize`, or `optimizer_step` \
             after its backwards",
            counted(steps, "step")
        );
    }
    let skipped = |own: &FabricOptimizer| own.skipped_steps() == own.steps();
    if end == FitEnd::Finished && !idle && optimizers.iter().all(|(_, own)| skipped(own)) {
        return Err(Error::Data(format!(
            "nothing has counted in any of {}, so that no parameter was changed: every target is ignored \
             (`ignore_index`), or `Loss::new` is given a count of 0",
            counted(steps, "step")
        )));
    }
    Ok(())
}
