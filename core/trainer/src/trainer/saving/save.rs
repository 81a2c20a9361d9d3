//! Saving checkpoints in a run.

use std::io::ErrorKind;
use std::time::Instant;

use crate::fabric::{Fabric, OptimizerState};
use crate::trainer::checkpoints::retention::RetainedCheckpoint;
use crate::trainer::checkpoints::saved_state::SavedState;
use crate::trainer::checkpoints::trainer_state::{GoesOn, TrainerState};
use crate::trainer::module::hooks::Hook;
use crate::trainer::module::runner::ModuleRunner;
use crate::trainer::record::log_table::SavedStates;
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
    if let Err(error) = write(session, Write { name, kept, remove, weights_only, blocking: true }) {
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

/// Writes a checkpoint of the present step. Collective.
fn write(session: &mut Session, write: Write) -> Result<()> {
    // Checkpoints have the weights of evaluations, and the optimizer's state those of training.
    let was_training = session.set_training(false)?;
    let written = try_to_write(session, write);
    if was_training {
        session.set_training(true)?;
    }
    written.map_err(|error| unwritable(error, session.progress.step()))
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

fn try_to_write(session: &mut Session, write: Write) -> Result<()> {
    let _phase = session.setup.fabric.measurements().phase("checkpoint");
    let Write { name, kept, mut remove, weights_only, blocking } = write;
    let start = Instant::now();
    if blocking {
        finish_saving(session)?;
    }
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
            let earlier = background.start(request)?;
            return report_saved(session, earlier);
        }
        request.run(&*io, world)?
    } else {
        let path = fabric.checkpoints().save_full(&io, &name, optimizer, &state, config)?;
        checkpoint::after_commit(&*io, world, &name, !weights_only, &remove)?;
        path
    };
    report_saved(session, Some(SavedCheckpoint { step, path, blocked: start.elapsed() }))
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

/// Waits for the running save. Collective.
pub(crate) fn finish_saving(session: &mut Session) -> Result<()> {
    let _phase = session.setup.fabric.measurements().phase("checkpoint");
    let step = session.progress.step();
    let saved = match session.saving.background() {
        Some(background) => background.wait().map_err(|error| unwritable(error, step))?,
        None => None,
    };
    report_saved(session, saved)
}

/// Reports a committed checkpoint to sinks and callbacks.
fn report_saved(session: &mut Session, saved: Option<SavedCheckpoint>) -> Result<()> {
    let Some(SavedCheckpoint { step, path, blocked }) = saved else { return Ok(()) };
    let blocked_s = blocked.as_secs_f64();
    session.emit(&Event::Checkpoint { step, path: path.clone(), blocked_s })?;
    session.hook(Hook::AfterSaveCheckpoint(&path))
}

/// Explains an error after which the location of checkpoints can no longer be written.
fn unwritable(error: Error, step: u64) -> Error {
    match error {
        Error::Io { action, path, source }
            if matches!(
                source.kind(),
                ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem
            ) =>
        {
            let message = format!(
                "{action} it after step {step}: {source}. Nothing can be written there any more, and the checkpoints \
                 that were saved before are whole: make the place writable, or set another `checkpoint.dir`, and go \
                 on from the last one with `trainer.ckpt_path`"
            );
            Error::checkpoint(path, message)
        }
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn location_that_becomes_read_only_is_explained() {
        let error = |kind: ErrorKind| Error::io("replacing", "kept/last")(kind.into());
        insta::assert_snapshot!(unwritable(error(ErrorKind::ReadOnlyFilesystem), 5), @"checkpoint kept/last: replacing it after step 5: read-only filesystem or storage medium. Nothing can be written there any more, and the checkpoints that were saved before are whole: make the place writable, or set another `checkpoint.dir`, and go on from the last one with `trainer.ckpt_path`");
        insta::assert_snapshot!(unwritable(error(ErrorKind::StorageFull), 5), @"replacing kept/last: no storage space");
    }
}
