//! Resuming from a checkpoint.

use std::path::PathBuf;
use std::sync::Arc;

use crate::fabric::OptimizerState;
use crate::trainer::Event;
use crate::trainer::checkpoints::lookup::{CheckpointLookup, ResumeSource};
use crate::trainer::checkpoints::trainer_state::TrainerState;
use crate::trainer::module::context::Stage as RunStage;
use crate::trainer::module::runner::is_foreign;
use crate::trainer::record::log_table::SavedStates;
use crate::trainer::session::Session;
use crate::{Error, Result};
use fulgurite_checkpoint::{
    self as checkpoint, CheckpointIO, DistributedCheckpoint, LoadOptions, TensorSource,
};
use fulgurite_engine::collective::broadcast_object;
use fulgurite_engine::optim::{Interval, WeightAverage};

/// Removes the unfinished saves and the lock of a killed run from its location.
///
/// No other run saves there any more: the successor uses another location.
fn clear_place(io: &dyn CheckpointIO) -> Result<()> {
    if !io.is_abandoned("")? {
        return Ok(());
    }
    let lock = io.lock("")?;
    let removed = checkpoint::remove_unfinished(io);
    drop(lock);
    removed.map(drop)
}

/// Resumes from a checkpoint. Collective.
///
/// With `checkpoint.weights_only` loads only the weights. A session without an optimizer, for an
/// evaluation, loads the moving average of the weights if `trainer.ema_decay` is set.
pub(crate) fn resume(session: &mut Session, from: &ResumeSource) -> Result<()> {
    let (step, path) = load(session, from, None)?;
    session.emit(&Event::Resume { step, path })
}

/// Resumes as [`resume`], and returns the step and the checkpoint's path. A state in memory is in
/// `memory`. Collective.
pub(crate) fn load(
    session: &mut Session,
    from: &ResumeSource,
    memory: Option<Arc<dyn CheckpointIO>>,
) -> Result<(u64, PathBuf)> {
    let training = session.optimizers.is_some();
    let (saving, rank) = (&session.saving, session.setup.rank());
    let io = match from {
        ResumeSource::Local(_) => None,
        ResumeSource::Memory(_) => memory,
        ResumeSource::Named { dir, .. } if *dir == saving.root() => Some(saving.io().clone()),
        ResumeSource::Named { dir, .. } => Some(saving.config().open(dir)?),
    };
    // An evaluation must not remove unfinished saves: a training run may be saving there.
    let saves_there =
        training && matches!(from, ResumeSource::Named { dir, .. } if *dir == saving.root());
    if let (Some(io), 0, true) = (&io, rank, saves_there)
        && let Err(error) = checkpoint::remove_unfinished(&**io)
    {
        tracing::warn!("what an earlier run left unfinished stays: {error}");
    }
    let is_named = matches!(from, ResumeSource::Named { .. });
    if let (Some(io), 0, true) = (&io, rank, training && is_named && !saves_there)
        && let Err(error) = clear_place(&**io)
    {
        tracing::warn!("what an earlier run left unfinished stays: {error}");
    }
    let open = || match (from, &io) {
        (ResumeSource::Named { name, .. } | ResumeSource::Memory(name), Some(io)) => {
            DistributedCheckpoint::open_with(io, name)
        }
        _ => DistributedCheckpoint::open(from.path()),
    };
    // Weights from any source can be evaluated.
    let foreign = matches!(from, ResumeSource::Local(path) if is_foreign(path));
    if saving.config().weights_only || (foreign && !training) {
        let path = match (from, &io) {
            (ResumeSource::Named { name, .. }, Some(io)) => io.location(name),
            (_, _) => from.path(),
        };
        let open = || -> Result<Box<dyn TensorSource>> {
            match from {
                ResumeSource::Named { .. } | ResumeSource::Memory(_) => Ok(Box::new(open()?)),
                ResumeSource::Local(path) => session.runner.open_weights(path),
            }
        };
        let options = session.runner.load_options(&saving.config().load);
        session.setup.fabric.load_weights(open, &options)?;
        return Ok((0, path));
    }
    let source = open()?;
    let optimizer =
        session.optimizers.as_mut().map(|optimizers| optimizers as &mut dyn OptimizerState);
    let advice = match training {
        true => {
            "Going on needs the configuration that it was saved with. To begin a training with those of \
             its weights that fit this model, set `checkpoint.weights_only = true` and \
             `checkpoint.load.strict = false`"
        }
        false => {
            "Use the configuration that it was saved with, or set `checkpoint.weights_only = true` and the \
             keys of `checkpoint.load` to load a part of it, or under other names"
        }
    };
    let options = LoadOptions { advice: Some(advice), ..LoadOptions::default() };
    let (state, _): (serde_json::Value, _) =
        session.setup.fabric.checkpoints().load(&source, optimizer, &options)?;
    let state: TrainerState = match serde_json::from_value(state) {
        Ok(state) => state,
        // Saved by a program with its own loop, or after the training.
        Err(_) if !training => {
            return Ok((0, source.location().to_owned()));
        }
        Err(error) => {
            let message = format!("its training state cannot be read: {error}");
            return Err(Error::checkpoint(source.location(), message));
        }
    };
    if training {
        check_data(session, &source, &state)?;
    }
    if rank == 0 {
        warn_of_other_model(session, &source.manifest().config);
    }
    if state.seed != session.setup.fabric.seed() && rank == 0 {
        tracing::warn!(
            "the checkpoint was written with seed {}, this run has {}: the order of samples \
             and dropout will differ from an uninterrupted run",
            state.seed,
            session.setup.fabric.seed()
        );
    }
    session.progress.resume(state.cursor);
    if let (false, Some(decay)) = (training, session.setup.config.ema_decay) {
        load_ema_weights(session, &source, decay)?;
    }
    if training {
        session.progress.resume_training(state.epoch, state.validation_due, state.length);
        let number = |value: Option<f64>| value.unwrap_or(f64::NAN);
        let metrics = state.metrics.into_iter().map(|(k, v)| (k, number(v))).collect();
        session.recorder.set_metrics(metrics);
        if !state.epoch_metrics.is_empty() {
            let world_size = session.setup.world_size();
            let states = match session.setup.fabric.runtime.pipeline()? {
                None => SavedStates::of_rank(state.epoch_metrics, rank, world_size),
                // The steps of the last stage log.
                Some(pipeline) => {
                    let is_last = pipeline.group().rank() == pipeline.last_rank();
                    let receives =
                        is_last && session.setup.fabric.device_mesh().stage_ranks().rank() == 0;
                    SavedStates::merged(state.epoch_metrics, receives)
                }
            };
            session.recorder.load_epoch(states);
        }
        if !state.module.is_empty() {
            session.runner.load_state(&state.module)?;
        }
        session.callbacks.load_states(state.callbacks)?;
        if let (ResumeSource::Named { name, .. }, true) = (from, saves_there) {
            // A validation that is still due may change the saved state.
            let saved = (!state.validation_due).then_some(state.cursor.step);
            session.saving.resume(name, state.kept, saved, rank);
        } else if let (ResumeSource::Memory(_), Some(goes_on)) = (from, state.goes_on) {
            session.saving.go_on(state.kept, goes_on.resumed_from)?;
            session.progress.go_on(goes_on.tail);
            session.recorder.set_metric_steps(goes_on.metric_steps);
            session.requests.stop = goes_on.stop;
            session.requests.saves = goes_on.saves;
        }
    }
    Ok((session.progress.step(), source.location().to_owned()))
}

/// Warns if the checkpoint was saved with another configuration of the model or its adapters.
///
/// The weights may fit and still compute something else.
fn warn_of_other_model(session: &Session, saved: &serde_json::Value) {
    let Ok(now) = serde_json::to_value(&session.setup.resolved) else { return };
    let differing: Vec<String> = ["/module", "/model", "/trainer/adapters"]
        .into_iter()
        .filter_map(|at| Some((at, saved.pointer(at)?, now.pointer(at)?)))
        .flat_map(|(at, saved, now)| differing_keys(&at[1..].replace('/', "."), saved, now))
        .collect();
    if !differing.is_empty() {
        tracing::warn!(
            "the checkpoint was saved with another configuration of the model, and its weights may not mean the \
             same in this one: {}",
            differing.join("; ")
        );
    }
}

/// Checks that the checkpoint was trained on the samples of this run.
fn check_data(
    session: &Session,
    source: &DistributedCheckpoint,
    trained: &TrainerState,
) -> Result<()> {
    let mut differing = Vec::new();
    if let (Some(before), Some(now)) = (&trained.data, &session.setup.samples.fingerprint)
        && before != now
    {
        differing.push(format!("the data was {before} and is {now}"));
    }
    differing.extend(session.setup.samples.differences(&trained.samples));
    if differing.is_empty() {
        return Ok(());
    }
    let what = format!("it was trained on other samples: {}", differing.join("; "));
    if session.saving.config().allow_other_data {
        if session.setup.rank() == 0 {
            tracing::warn!("{}: {what}", source.location().display());
        }
        return Ok(());
    }
    let message = format!(
        "{what}. The position in the data would be one in other samples. Give the run the data and the keys \
         of `[data]` of that checkpoint, or set `checkpoint.allow_other_data = true` to go on with these"
    );
    Err(Error::checkpoint(source.location(), message))
}

/// Warns if a schedule depends on the run's length and the length has changed: the learning rate
/// jumps.
pub(crate) fn warn_of_other_length(session: &mut Session) -> Result<()> {
    let progress = &session.progress;
    let (Some(before), now) = (progress.length_before(), progress.length()) else { return Ok(()) };
    session.set_schedules_position();
    let rank = session.setup.rank();
    for (_, optimizer) in session.optimizers_mut().iter_mut() {
        let (before, now, what, key) = match optimizer.schedule_interval() {
            Interval::Step => (before.0, now.0, "steps", "trainer.max_steps"),
            Interval::Epoch => (before.1, now.1, "epochs", "trainer.max_epochs"),
        };
        let rate = optimizer.learning_rate()?;
        optimizer.set_max_steps(before);
        let rate_before = optimizer.learning_rate();
        optimizer.set_max_steps(now);
        let (Ok(rate_before), Some(before), Some(now)) = (rate_before, before, now) else {
            continue;
        };
        if (rate - rate_before).abs() > 1e-9 * rate.abs().max(rate_before.abs()) && rank == 0 {
            tracing::warn!(
                "the learning rate jumps: the next step has {rate:e}, and would have {rate_before:e} in the run \
                 that is resumed. The schedule depends on the run's length (`{key}`), which was {before} {what} and \
                 is {now} now. To go on with the old schedule, set its length to {before} in `[scheduler]`: \
                 `total_steps` where it has that key, or `decay_steps`"
            );
        }
    }
    Ok(())
}

/// Replaces the weights by the moving average in a checkpoint. Collective.
fn load_ema_weights(session: &Session, source: &DistributedCheckpoint, decay: f64) -> Result<()> {
    let tree = session.setup.fabric.module_tree()?;
    let mut averages = WeightAverage::exponential(tree.parameters(), decay)?;
    let states = averages.state()?;
    // Not strict, since the rest of the optimizer's state is not loaded.
    let report = checkpoint::load_optimizer(source.optimizer(), tree, &states, false)?;
    let unfit = report.mismatched.iter().map(|mismatch| &mismatch.name);
    if let Some(name) = report.missing.iter().chain(unfit).next() {
        let message = format!(
            "it has no average of the weights that would fit this model (`{name}`); leave out \
             `trainer.ema_decay` to validate the weights themselves"
        );
        return Err(Error::checkpoint(source.location(), message));
    }
    averages.swap()?;
    session.setup.fabric.runtime.prepare_forward()
}

/// Loads the weights for an evaluation without `trainer.ckpt_path`. Collective.
///
/// The best or last checkpoint of the newest run is used, and a warning names it. Weights of the
/// module or of `trainer.adapters.from` stay. If no checkpoint is found, a warning says that the
/// model keeps its initial weights.
pub(crate) fn load_trained(session: &mut Session) -> Result<()> {
    let adapters = session.setup.config.adapters.as_ref();
    if session.setup.fabric.base_model.is_some() || adapters.is_some_and(|a| a.from.is_some()) {
        if session.setup.rank() == 0
            && let Some((source, which)) = CheckpointLookup::of(session).trained_checkpoint()?
        {
            tracing::warn!(
                "the weights are those that the configuration names, not those of the {which} checkpoint \
                 of the newest run, {}; take these with `--set trainer.ckpt_path={which}`",
                source.path().display()
            );
        }
        return Ok(());
    }
    let found = match session.setup.rank() {
        0 => CheckpointLookup::of(session).trained_checkpoint()?,
        _ => None,
    };
    let found = broadcast_object(&**session.setup.fabric.world(), &found, 0)?;
    let what = match session.progress.stage() {
        RunStage::Test => "test",
        RunStage::Predict => "predict",
        _ => "validate",
    };
    let Some((source, which)) = found else {
        if session.setup.rank() == 0 {
            tracing::warn!(
                "{what}: the weights are those that the model was set up with, since no checkpoint is \
                 there to be taken (`checkpoint.dir`, or the newest run); name one with `--set \
                 trainer.ckpt_path=PATH`"
            );
        }
        return Ok(());
    };
    if session.setup.rank() == 0 {
        tracing::warn!(
            "{what}: the weights are those of the {which} checkpoint of the newest run, {}, since \
             `trainer.ckpt_path` names none",
            source.path().display()
        );
    }
    resume(session, &source).map_err(|error| match error {
        Error::Checkpoint { path, message } => {
            let message = format!(
                "{message}. It was taken since `trainer.ckpt_path` is not set and it is the {which} one; name \
                 another"
            );
            Error::Checkpoint { path, message }
        }
        error => error,
    })
}

/// Returns the keys under a path whose values differ, with both values.
fn differing_keys(at: &str, saved: &serde_json::Value, now: &serde_json::Value) -> Vec<String> {
    use serde_json::Value;
    match (saved, now) {
        (Value::Object(saved), Value::Object(now)) => {
            let both = saved.iter().filter_map(|(key, value)| Some((key, value, now.get(key)?)));
            both.flat_map(|(key, a, b)| differing_keys(&format!("{at}.{key}"), a, b)).collect()
        }
        (saved, now) if saved == now => Vec::new(),
        // The folder may have been moved.
        _ if at == "model.from_pretrained" || at == "trainer.adapters.from" => Vec::new(),
        (saved, now) => vec![format!("`{at}` was {saved} and is {now}")],
    }
}
