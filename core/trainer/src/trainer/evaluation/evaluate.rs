//! Validation, test and prediction: each sample once, without a graph.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use candle_core::Tensor;

use crate::trainer::module::hooks::Hook;
use crate::trainer::module::runner::Loading;
use crate::trainer::record::display::EvaluationProgress;
use crate::trainer::record::log_table::{LogTable, Stage as LogStage};
use crate::trainer::record::recorder::Recorder;
use crate::trainer::session::{Session, SessionSetup};
use crate::trainer::{Event, Predictions, Stage, StepContext};
use crate::{Error, Result};
use fulgurite_engine::autograd::no_grad;
use fulgurite_engine::data::{EvalSampler, Samples, Split};
use fulgurite_engine::execution::read;
use fulgurite_engine::parallel::explain_mismatch;
use fulgurite_launch::Interruption;

/// The result of a validation or a test, equal on all ranks.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Evaluation {
    /// The mean loss over the data of all validation sets.
    pub loss: f64,
    /// Values that the steps logged, by name. With several validation sets also the loss of each
    /// (`val_loss/books`).
    pub metrics: BTreeMap<String, f64>,
    /// Number of batches on all ranks.
    pub batches: u64,
}

/// The kind of an evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EvaluationStage {
    Validation,
    Test,
}

/// The hooks of a pass over data without training.
struct EvaluationHooks {
    start: Hook<'static>,
    epoch_start: Hook<'static>,
    batch_start: Hook<'static>,
    batch_end: Hook<'static>,
    epoch_end: Hook<'static>,
    end: Hook<'static>,
}

const PREDICT_HOOKS: EvaluationHooks = EvaluationHooks {
    start: Hook::PredictStart,
    epoch_start: Hook::PredictEpochStart,
    batch_start: Hook::PredictBatchStart,
    batch_end: Hook::PredictBatchEnd,
    epoch_end: Hook::PredictEpochEnd,
    end: Hook::PredictEnd,
};

/// The outcome of an evaluation.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Evaluated {
    /// The evaluation has no data.
    NoData,
    /// The evaluation was completed.
    Done(Evaluation),
    /// The evaluation was interrupted.
    Interrupted(Interruption),
}

/// The outcome of a prediction.
enum Predicted {
    Done(Predictions),
    Interrupted(Interruption),
}

impl EvaluationStage {
    fn split(self) -> Split {
        match self {
            Self::Validation => Split::Validation,
            Self::Test => Split::Test,
        }
    }

    fn hooks(self) -> EvaluationHooks {
        match self {
            Self::Validation => EvaluationHooks {
                start: Hook::ValidationStart,
                epoch_start: Hook::ValidationEpochStart,
                batch_start: Hook::ValidationBatchStart,
                batch_end: Hook::ValidationBatchEnd,
                epoch_end: Hook::ValidationEpochEnd,
                end: Hook::ValidationEnd,
            },
            Self::Test => EvaluationHooks {
                start: Hook::TestStart,
                epoch_start: Hook::TestEpochStart,
                batch_start: Hook::TestBatchStart,
                batch_end: Hook::TestBatchEnd,
                epoch_end: Hook::TestEpochEnd,
                end: Hook::TestEnd,
            },
        }
    }

    fn loss_name(self) -> &'static str {
        match self {
            Self::Validation => "val_loss",
            Self::Test => "test_loss",
        }
    }

    fn event(self, step: u64, evaluation: Evaluation) -> Event {
        let Evaluation { loss, metrics, batches } = evaluation;
        match self {
            Self::Validation => Event::Validation { step, val_loss: loss, batches, metrics },
            Self::Test => Event::Test { step, test_loss: loss, batches, metrics },
        }
    }
}

/// Evaluates; missing data is an error. Collective.
pub(crate) fn evaluate_once(session: &mut Session, stage: EvaluationStage) -> Result<Evaluation> {
    let stage_of_run = match stage {
        EvaluationStage::Validation => Stage::Validate,
        EvaluationStage::Test => Stage::Test,
    };
    session.progress.set_stage(stage_of_run);
    match evaluate(session, stage)? {
        Evaluated::Done(evaluation) => Ok(evaluation),
        Evaluated::Interrupted(why) => Err(interrupted(why)),
        Evaluated::NoData => Err(no_data(stage.split())),
    }
}

/// Predicts; missing data is an error. Collective.
pub(crate) fn predict_once(session: &mut Session) -> Result<Predictions> {
    if session.runner.num_samples(Split::Predict) == 0 {
        return Err(no_data(Split::Predict));
    }
    session.progress.set_stage(Stage::Predict);
    match predict(session)? {
        Predicted::Done(predictions) => Ok(predictions),
        Predicted::Interrupted(why) => Err(interrupted(why)),
    }
}

fn interrupted(why: Interruption) -> Error {
    fulgurite_launch::agree_on(why);
    Error::Interrupted
}

fn no_data(split: Split) -> Error {
    let limit = match split {
        Split::Test => "limit_test_batches",
        Split::Predict => "limit_predict_batches",
        _ => "limit_val_batches",
    };
    Error::Data(format!(
        "there are no {split} samples; give the data module some (for text: \
         `data.validation_fraction` or `data.validation_path`), and leave `trainer.{limit}` above 0"
    ))
}

/// Evaluates if there is data. Collective.
///
/// The evaluation can be interrupted between two batches. A resumed training then restarts its
/// validation.
pub(crate) fn evaluate(session: &mut Session, stage: EvaluationStage) -> Result<Evaluated> {
    let sets = evaluation_sets(session, stage)?;
    if sets.is_empty() {
        return Ok(Evaluated::NoData);
    }
    let step = session.progress.step();
    let hooks = stage.hooks();
    session.hook(hooks.start)?;
    session.hook(hooks.epoch_start)?;
    let mut tables = Vec::new();
    let mut evaluation = Evaluation { loss: 0.0, metrics: BTreeMap::new(), batches: 0 };
    let (mut sum, mut count) = (0.0, 0.0);
    for set in &sets {
        let mut table = match evaluate_set(session, stage, &hooks, set)? {
            ControlFlow::Continue(SetTotals { sum: of_set, count: samples, table }) => {
                (sum, count) = (sum + of_set, count + samples);
                if !set.suffix.is_empty() {
                    let name = format!("{}{}", stage.loss_name(), set.suffix);
                    evaluation.metrics.insert(name, of_set / samples);
                }
                table
            }
            ControlFlow::Break(why) => return Ok(Evaluated::Interrupted(why)),
        };
        for (name, value) in
            Recorder::reduce_of_steps(&session.setup.fabric, &mut table, LogStage::Evaluation)?
        {
            evaluation.metrics.insert(format!("{name}{}", set.suffix), value);
        }
        table.media.add_suffix(&set.suffix);
        evaluation.batches += set.batches;
        tables.push(table);
    }
    evaluation.loss = sum / count;
    evaluation.batches *= session.setup.fabric.sampler_share()?.num_replicas as u64;
    session.recorder.record(step, &evaluation.metrics);
    session.recorder.record_one(step, stage.loss_name(), evaluation.loss);
    if session.progress.stage() != Stage::SanityCheck {
        session.emit(&stage.event(step, evaluation.clone()))?;
        let (recorder, fabric) = (&mut session.recorder, &session.setup.fabric);
        tables.iter_mut().try_for_each(|table| recorder.log_media(fabric, step, table))?;
    }
    session.hook(hooks.epoch_end)?;
    session.hook(hooks.end)?;
    Ok(Evaluated::Done(evaluation))
}

/// Evaluates one set. Collective.
fn evaluate_set(
    session: &mut Session,
    stage: EvaluationStage,
    hooks: &EvaluationHooks,
    set: &EvaluationSet,
) -> Result<ControlFlow<Interruption, SetTotals>> {
    let position = (session.progress.step(), session.progress.epoch());
    let mut ctx = StepContext::evaluation(position, session.step_parts());
    if let Split::ValidationSet(index) = set.split {
        ctx.validation_set = Some(index);
    }
    // The sum stays on its device and is read once.
    let (mut sum, mut counts) = (None::<Tensor>, Vec::new());
    let sized = (set.sampler, set.batches);
    let pipeline = session.setup.fabric.runtime.pipeline()?;
    let interrupted =
        each_batch(session, set.split, hooks, sized, &mut |session, batch, padding| {
            ctx.begin_batch(batch.index, batch.samples.indices().len(), padding);
            let mut step = |is_last: bool| {
                ctx.is_muted = !is_last;
                match stage {
                    EvaluationStage::Validation => session.runner.validation_step(&mut ctx),
                    EvaluationStage::Test => session.runner.test_step(&mut ctx),
                }
            };
            let loss = match &pipeline {
                None => Some(step(true)?),
                Some(pipeline) => pipeline.forward(&mut step)?,
            };
            if let Some(loss) = loss.filter(|_| !padding) {
                let loss_sum = loss.sum_tensor()?;
                sum = Some(match sum.take() {
                    Some(before) => (before + loss_sum)?,
                    None => loss_sum,
                });
                counts.push(loss.count());
            }
            Ok(())
        })?;
    if let Some(why) = interrupted {
        return Ok(ControlFlow::Break(why));
    }
    let sum = sum.map_or(Ok(0.0), |sum| read::scalar(&sum, "loss"))?;
    let what = format!("in {} of step {}", stage.loss_name(), session.progress.step());
    let totals = session.setup.fabric.runtime.totals_of_losses(sum, &counts);
    let totals = totals.map_err(|error| error.during(what))?;
    let (sum, count) = (totals.loss_sum, totals.count);
    if count == 0.0 && session.setup.rank() == 0 {
        tracing::warn!(
            "{}{} after step {} is NaN: nothing counts, every target is ignored (`ignore_index`)",
            stage.loss_name(),
            set.suffix,
            session.progress.step()
        );
    }
    Ok(ControlFlow::Continue(SetTotals { sum, count, table: ctx.table }))
}

/// Returns the sets of a validation that have batches.
pub(crate) fn validation_sets(session: &Session) -> Result<Vec<EvaluationSet>> {
    evaluation_sets(session, EvaluationStage::Validation)
}

/// Returns the sets of an evaluation that have batches.
fn evaluation_sets(session: &Session, stage: EvaluationStage) -> Result<Vec<EvaluationSet>> {
    let names = match stage {
        EvaluationStage::Validation => session.runner.validation_sets(),
        EvaluationStage::Test => Vec::new(),
    };
    for (i, name) in names.iter().enumerate() {
        if name.is_empty() || names[..i].contains(name) {
            return Err(Error::Data(format!(
                "the validation sets are named {names:?}; each needs a name of its own, which is \
                 behind the names of its metrics"
            )));
        }
    }
    let mut splits: Vec<(Split, String)> = names
        .into_iter()
        .enumerate()
        .map(|(i, name)| (Split::ValidationSet(i), format!("/{name}")))
        .collect();
    if splits.is_empty() {
        splits.push((stage.split(), String::new()));
    }
    let mut sets = Vec::new();
    for (split, suffix) in splits {
        let (sampler, batches) = batches(session, split)?;
        if batches > 0 {
            sets.push(EvaluationSet { split, suffix, sampler, batches });
        }
    }
    Ok(sets)
}

/// Predicts for this rank's samples. Collective.
fn predict(session: &mut Session) -> Result<Predicted> {
    let sized = batches(session, Split::Predict)?;
    let hooks = PREDICT_HOOKS;
    session.hook(hooks.start)?;
    session.hook(hooks.epoch_start)?;
    let position = (session.progress.step(), session.progress.epoch());
    let mut ctx = StepContext::evaluation(position, session.step_parts());
    let output_names = session.runner.output_names();
    let mut predictions = Predictions { output_names, ..Predictions::default() };
    let predicts_in_stages = session.runner.predicts_in_stages();
    let pipeline = session.setup.fabric.runtime.pipeline()?;
    let interrupted =
        each_batch(session, Split::Predict, &hooks, sized, &mut |session, batch, padding| {
            ctx.begin_batch(batch.index, batch.samples.indices().len(), padding);
            let mut step = |is_last: bool| {
                ctx.is_muted = !is_last;
                session.runner.predict_step(&mut ctx)
            };
            let output = match &pipeline {
                None => Some(step(true)?),
                Some(pipeline) if predicts_in_stages => {
                    let is_last = pipeline.group().rank() == pipeline.last_rank();
                    Some(step(is_last)?).filter(|_| is_last)
                }
                Some(pipeline) => pipeline.forward(&mut step)?,
            };
            if let Some(output) = output.filter(|_| !padding) {
                let output = output.detach();
                let samples = batch.samples.indices();
                let named = |&i: &u64| Some((i, session.runner.sample_name(i)?));
                predictions.sample_names.extend(samples.iter().filter_map(named));
                let values = session.runner.output_values().unwrap_or_default();
                predictions.values.extend(samples.iter().copied().zip(values.iter().cloned()));
                predictions.batches.push((samples.to_vec(), output));
            }
            Ok(())
        })?;
    if let Some(why) = interrupted {
        return Ok(Predicted::Interrupted(why));
    }
    let step = session.progress.step();
    session.recorder.log_steps(&session.setup.fabric, step, &mut ctx.table)?;
    session.hook(hooks.epoch_end)?;
    session.hook(hooks.end)?;
    Ok(Predicted::Done(predictions))
}

/// Returns the sampler of a split, and the number of batches that each rank uses.
fn batches(session: &Session, split: Split) -> Result<(EvalSampler, u64)> {
    let share = session.setup.fabric.sampler_share()?;
    let len = session.runner.num_samples(split);
    let SessionSetup { config, batch_size, step_ranks, .. } = &session.setup;
    // A limit counts the batches of these ranks, also after the loss of one.
    let all = EvalSampler::new(len, *batch_size, *step_ranks, 0)?.num_batches();
    let limit = match split {
        Split::Test => config.limit_test_batches,
        Split::Predict => config.limit_predict_batches,
        _ => config.limit_val_batches,
    };
    let mut batches = limit.of(all).min(all);
    if session.progress.stage() == Stage::SanityCheck {
        batches = batches.min(config.num_sanity_val_steps);
    }
    let samples = batches.saturating_mul((batch_size * step_ranks) as u64).min(len);
    let sampler = EvalSampler::new(samples, *batch_size, share.num_replicas, share.rank)?;
    Ok((sampler, sampler.num_batches()))
}

/// Calls `step` for each batch of this rank, with a flag for padding. Collective.
///
/// A rank without samples computes padding batches, because forwards gather parameters. Ends early
/// if the run is interrupted.
fn each_batch(
    session: &mut Session,
    split: Split,
    hooks: &EvaluationHooks,
    (sampler, batches): (EvalSampler, u64),
    step: &mut dyn FnMut(&mut Session, &EvaluationBatch, bool) -> Result<()>,
) -> Result<Option<Interruption>> {
    let device = session.setup.device();
    let workers = session.setup.config.workers(&device);
    session.runner.load_evaluation(Loading {
        plan: Box::new(sampler.batches(split, session.setup.fabric.seed(), batches)),
        device,
        context: session.setup.fabric.context_parallel(),
        workers,
    })?;
    let _no_grad = no_grad();
    let _scope = session.setup.fabric.forward_scope(false, session.progress.step(), 0);
    let what = match (session.progress.stage(), split) {
        (Stage::SanityCheck, _) => "sanity check".to_owned(),
        (_, Split::ValidationSet(set)) => {
            session.runner.validation_sets().get(set).cloned().unwrap_or_default()
        }
        (_, split) => split.to_string(),
    };
    session.recorder.show_evaluation(EvaluationProgress { what: &what, done: 0, batches });
    for index in 0..batches {
        if index > 0
            && let Some(why) = session.vote_on_stop(false)?.interruption
        {
            session.runner.stop_loading(false);
            return Ok(Some(why));
        }
        session.batch_hook(hooks.batch_start, index)?;
        let padding = sampler.indices(index).is_empty();
        let samples = session.runner.next_evaluation_batch()?;
        step(session, &EvaluationBatch { index, samples }, padding).map_err(|error| {
            let step = match split {
                Split::Train => "training_step",
                Split::Validation | Split::ValidationSet(_) => "validation_step",
                Split::Test => "test_step",
                Split::Predict => "predict_step",
            };
            explain_mismatch(error).during(format_args!("in {step} of batch {index}"))
        })?;
        session.recorder.show_evaluation(EvaluationProgress {
            what: &what,
            done: index + 1,
            batches,
        });
        session.batch_hook(hooks.batch_end, index)?;
    }
    session.runner.stop_loading(false);
    Ok(None)
}

/// A set of samples to evaluate.
pub(crate) struct EvaluationSet {
    split: Split,
    /// The suffix of the set's metric names.
    suffix: String,
    sampler: EvalSampler,
    /// Number of batches on each rank.
    batches: u64,
}

/// The result of one set.
struct SetTotals {
    /// The sum of the loss over all ranks.
    sum: f64,
    count: f64,
    /// Values logged by this rank's steps.
    table: LogTable,
}

/// A batch of an evaluation.
struct EvaluationBatch {
    index: u64,
    samples: Samples,
}
