//! Saving checkpoints in a run.

use std::time::Instant;

use crate::fabric::{Fabric, OptimizerState};
use crate::trainer::checkpoints::retention::RetainedCheckpoint;
use crate::trainer::checkpoints::saved_state::SavedState;
use crate::trainer::checkpoints::trainer_state::{GoesOn, TrainerState};
use crate::trainer::module::hooks::Hook;
use crate::trainer::module::runner::ModuleRunner;
use crate::trainer::record::log_table::SavedStates;
use crate::trainer::saving::failed::{is_of_place, unwritable};
use crate::trainer::session::Session;
use crate::trainer::{Event, SaveRequest};
use crate::{Error, Result};
use fulgurite_checkpoint::{self as checkpoint, SavedCheckpoint};
use fulgurite_engine::checkpoint_io::invalid_name;
use fulgurite_engine::collective::{all_gather_object, broadcast_object};
use fulgurite_engine::execution::dry_run;

/// A checkpoint to write.
struct Write {
    name: String,
    /// The checkpoints that the table `[checkpoint]` keeps.
    kept: Vec<RetainedCheckpoint>,
    /// The names to remove after the commit.
    remove: Vec<String>,
    weights_only: bool,
    blocking: bool,
}

/// Saves a checkpoint of the present step, of the kind that the strategy supports. Collective.
///
/// Saves in the background if configured, unless `blocking`.
pub(crate) fn save(session: &mut Session, blocking: bool) -> Result<()> {
    session.read_pending_step()?;
    finish_before_next(session)?;
    let (step, rank) = (session.progress.step(), session.setup.rank());
    let name = checkpoint::step_name(step);
    let (kept, remove) = session.saving.keep(step, &name, &session.recorder, rank)?;
    write(session, Write { name, kept, remove, weights_only: false, blocking })
}

/// Saves the checkpoints that hooks have requested, unless this is a dry run. Collective.
pub(crate) fn save_as_requested(session: &mut Session) -> Result<()> {
    if dry_run::is_on() {
        session.requests.saves.clear();
    }
    if !session.requests.saves.is_empty() {
        session.read_pending_step()?;
    }
    // A request stays until it is done, for the ranks that go on if one is lost meanwhile.
    for _ in 0..session.requests.saves.len() {
        let SaveRequest { name, weights_only, remove } = session.requests.saves[0].clone();
        let step_name = checkpoint::step_name(session.progress.step());
        let name = name.unwrap_or_else(|| step_name.clone());
        if let Some(why) = invalid_name(&name) {
            return Err(Error::other(format!(
                "a hook has asked for a checkpoint with the name `{name}`, which {why}"
            )));
        }
        // This step's checkpoint may be saved already.
        if name != step_name || !session.saving.has_saved(session.progress.step()) {
            finish_before_next(session)?;
            let kept = session.saving.kept();
            write(session, Write { name, kept, remove, weights_only, blocking: false })?;
        }
        session.requests.saves.remove(0);
    }
    Ok(())
}

/// Saves after an error, if a hook has requested it and there is a whole step to save.
///
/// Errors of the save are only shown, because the run has its own error.
pub(crate) fn save_on_exception(session: &mut Session) {
    let request = session.requests.save_on_exception.take();
    let Some(request) = request.filter(|_| !dry_run::is_on()) else { return };
    if let Err(error) = session.read_pending_step() {
        tracing::warn!("no checkpoint is saved after the error: {error}");
        return;
    }
    let (step, saving) = (session.progress.step(), &session.saving);
    if step == 0 || saving.has_saved(step) || session.setup.world_size() > 1 {
        return;
    }
    if !is_between_updates(session) {
        tracing::warn!(
            "no checkpoint is saved after the error, which came amid an update of the weights or a validation \
             of their averages"
        );
        return;
    }
    let kept = saving.kept();
    let name = request.name.unwrap_or_else(|| checkpoint::step_name(step));
    let SaveRequest { weights_only, remove, .. } = request;
    let write = Write { name, kept, remove, weights_only, blocking: true };
    if let Err(error) = finish_saving(session).and_then(|()| self::write(session, write)) {
        tracing::error!("saving after the error failed: {error}");
    }
}

/// Returns whether the weights are those after the last whole step.
fn is_between_updates(session: &Session) -> bool {
    let mut optimizers = session.optimizers.iter().flat_map(|all| all.iter());
    let done = session.progress.step();
    session.runner.automatic_optimization()
        && !session.has_averages
        && optimizers.all(|(_, o)| o.steps() == done && !o.is_updating())
}

/// Writes a checkpoint of the present step, or begins to write it in the background. Collective.
fn write(session: &mut Session, write: Write) -> Result<()> {
    // Checkpoints have the weights of evaluations, and the optimizer's state those of training.
    let was_training = session.set_training(false)?;
    let written = try_to_write(session, write);
    if was_training {
        session.set_training(true)?;
    }
    settle(session, written?)
}

/// The module's own state. Under a pipeline the state in the last stage, where steps end.
/// Collective then.
fn module_state(runner: &mut dyn ModuleRunner, fabric: &Fabric) -> Result<SavedState> {
    let state = runner.save_state()?;
    match fabric.runtime.pipeline()? {
        None => Ok(state),
        Some(pipeline) => broadcast_object(&**pipeline.group(), &state, pipeline.last_rank()),
    }
}

/// Returns the checkpoint or the save's error; `None` for one that is written in the background.
fn try_to_write(session: &mut Session, write: Write) -> Result<Result<Option<SavedCheckpoint>>> {
    let _phase = session.setup.fabric.measurements().phase("checkpoint");
    let Write { name, kept, mut remove, weights_only, blocking } = write;
    let start = Instant::now();
    let (step, rank) = (session.progress.step(), session.setup.rank());
    let epoch_metrics = gather_epoch_states(session)?;
    session.saving.take_name(&name, &mut remove, rank)?;
    let (state, config) = describe(session, kept, epoch_metrics, false)?;
    let (fabric, saving) = (&session.setup.fabric, &mut session.saving);
    let io = saving.io().clone();
    let world = &**fabric.world();
    let distributed = fabric.strategy()?.capabilities.saves_distributed_checkpoints;
    let optimizer = session.optimizers.as_mut().filter(|_| !weights_only);
    let optimizer = optimizer.map(|optimizers| optimizers as &mut dyn OptimizerState);
    let path = if distributed {
        let mut request = fabric.checkpoints().save_request(&name, optimizer, &state, config)?;
        (request.update_last, request.remove) = (!weights_only, remove);
        if let (Some(background), false) = (saving.background(), blocking) {
            background.start(request)?;
            return Ok(Ok(None));
        }
        request.run(&*io, world)
    } else {
        let path = fabric.checkpoints().save_full(&io, &name, optimizer, &state, config);
        path.and_then(|path| {
            checkpoint::after_commit(&*io, world, &name, !weights_only, &remove)?;
            Ok(path)
        })
    };
    Ok(path.map(|path| Some(SavedCheckpoint { step, path, blocked: start.elapsed() })))
}

/// Returns the values of all ranks in the present epoch; empty if no rank has any. Collective.
fn gather_epoch_states(session: &Session) -> Result<Vec<SavedStates>> {
    match session.recorder.epoch_states(&session.setup.fabric) {
        None => Ok(Vec::new()),
        Some(states) => all_gather_object(&**session.setup.fabric.world(), &states?),
    }
}

/// Returns the trainer's state, with what this run itself goes on with if `goes_on`, and the
/// configuration. Collective under a pipeline.
fn describe(
    session: &mut Session,
    kept: Vec<RetainedCheckpoint>,
    epoch_metrics: Vec<SavedStates>,
    goes_on: bool,
) -> Result<(TrainerState, serde_json::Value)> {
    // Callbacks come before the module, as everywhere.
    let callbacks = session.callbacks.states()?;
    let module = module_state(&mut *session.runner, &session.setup.fabric)?;
    let progress = &session.progress;
    let goes_on = goes_on.then(|| GoesOn {
        tail: progress.tail(),
        stop: session.requests.stop,
        saves: session.requests.saves.clone(),
        metric_steps: session.recorder.metric_steps().clone(),
        resumed_from: session.saving.resumed_from().map(str::to_owned),
    });
    let state = TrainerState {
        cursor: progress.cursor(),
        seed: session.setup.fabric.seed(),
        epoch: (progress.step() > 0).then_some(progress.epoch()),
        validation_due: progress.validation_due(),
        goes_on,
        metrics: session.recorder.metrics().iter().map(|(k, v)| (k.clone(), Some(*v))).collect(),
        epoch_metrics,
        module,
        callbacks,
        kept,
        data: session.setup.samples.fingerprint.clone(),
        samples: session.setup.samples.definition.clone(),
        length: Some(progress.length()),
    };
    let config = serde_json::to_value(&session.setup.resolved)
        .map_err(|e| Error::other(format!("encoding the configuration: {e}")))?;
    Ok((state, config))
}

/// Returns this rank's part of a distributed checkpoint of the present state. Collective.
pub(crate) fn whole_state(session: &mut Session, name: &str) -> Result<checkpoint::SaveRequest> {
    let epoch = gather_epoch_states(session)?;
    let (state, config) = describe(session, session.saving.kept(), epoch, true)?;
    let optimizer = session.optimizers.as_mut().map(|o| o as &mut dyn OptimizerState);
    session.setup.fabric.checkpoints().save_request(name, optimizer, &state, config)
}

/// Like [`whole_state`], of what this rank's replica has, with the values of the epoch that the
/// caller has gathered. Not collective: other ranks may be lost.
///
/// # Errors
/// If the weights are not those after a whole step, or replicas have trained separately.
pub(crate) fn held_state(
    session: &mut Session,
    name: &str,
    epoch: Vec<SavedStates>,
) -> Result<checkpoint::SaveRequest> {
    if !is_between_updates(session) || session.setup.fabric.device_mesh().pipeline().is_some() {
        return Err(Error::other("the weights are not those after a whole step"));
    }
    let (state, config) = describe(session, session.saving.kept(), epoch, true)?;
    let optimizer = session.optimizers.as_mut().map(|o| o as &mut dyn OptimizerState);
    session.setup.fabric.checkpoints().held_request(name, optimizer, &state, config)
}

/// Allocates memory for background saves, if the run will use them. Collective.
pub(crate) fn prepare_saving(session: &mut Session) -> Result<()> {
    let Session { setup, saving, optimizers, .. } = session;
    let is_periodic = saving.is_periodic();
    if let Some(background) = saving.background().filter(|_| is_periodic) {
        let optimizers =
            optimizers.as_mut().map(|optimizers| optimizers as &mut dyn OptimizerState);
        let request = setup.fabric.checkpoints().save_request(
            "",
            optimizers,
            &(),
            serde_json::Value::Null,
        )?;
        background.reserve(&request)?;
    }
    Ok(())
}

/// Waits for the save that is written in the background, before another one begins. Collective.
fn finish_before_next(session: &mut Session) -> Result<()> {
    let start = Instant::now();
    finish_saving(session)?;
    session.saving.note_wait(start.elapsed());
    Ok(())
}

/// Waits for the save that is written in the background, if any. Collective.
pub(crate) fn finish_saving(session: &mut Session) -> Result<()> {
    let _phase = session.setup.fabric.measurements().phase("checkpoint");
    match session.saving.background() {
        Some(background) => {
            let saved = background.wait();
            settle(session, saved)
        }
        None => Ok(()),
    }
}

/// Waits for the save that is written in the background, at the end of the run. Collective.
///
/// # Errors
/// Also if the last save has failed and the run went on.
pub(crate) fn end_saving(session: &mut Session) -> Result<()> {
    finish_saving(session)?;
    session.saving.take_failure().map_or(Ok(()), Err)
}

/// Reports a committed checkpoint to sinks and callbacks. After an error of the location the run
/// goes on, unless too many saves have failed. Collective after an error.
fn settle(session: &mut Session, saved: Result<Option<SavedCheckpoint>>) -> Result<()> {
    match saved {
        Ok(None) => Ok(()),
        Ok(Some(SavedCheckpoint { step, path, blocked })) => {
            let blocked_s = (blocked + session.saving.complete(step)).as_secs_f64();
            session.emit(&Event::Checkpoint { step, path: path.clone(), blocked_s })?;
            session.hook(Hook::AfterSaveCheckpoint(&path))
        }
        Err(error) => {
            let step = session.progress.step();
            let error = unwritable(error, step);
            let Some(before) = session.saving.take_before() else { return Err(error) };
            let world = &**session.setup.fabric.world();
            if !is_of_place(world, &error)? {
                return Err(error);
            }
            // An error may come after the commit.
            let there = match world.rank() {
                0 => session.saving.io().list("").unwrap_or_default(),
                _ => Vec::new(),
            };
            let is_committed = there.iter().any(|entry| entry.name == before.name);
            let is_committed = broadcast_object(world, &is_committed, 0)?;
            let message = error.to_string();
            let count = session.saving.go_on_after(before, error, is_committed);
            if session.setup.rank() == 0 {
                let allowed = session.saving.config().max_failed_saves;
                tracing::warn!(
                    "a save failed: {message}. The run goes on; failed saves in a row: {count} of {allowed} allowed"
                );
            }
            session.emit(&Event::SaveFailed { step, error: message })
        }
    }
}
