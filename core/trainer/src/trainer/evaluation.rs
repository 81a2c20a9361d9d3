//! Validation, test and prediction: each sample once, without a graph.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use candle_core::Tensor;

use super::hooks::Hook;
use super::log_table::{LogTable, Stage as LogStage};
use super::progress::EvaluationProgress;
use super::runner::Loading;
use super::session::Session;
use super::{Event, Predictions, Stage, StepContext};
use crate::{Error, Result};
use fulgurite_engine::autograd::no_grad;
use fulgurite_engine::data::{EvalSampler, Samples, Split};
use fulgurite_engine::execution::read;
use fulgurite_engine::parallel::explain_mismatch;
use fulgurite_launch::Interruption;

/// What a validation or a test came to, equal on all ranks.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Evaluation {
    /// The mean loss over the data, with several validation sets over all of them.
    pub loss: f64,
    /// What the steps logged, by name, and with several validation sets the loss of each (`val_loss/books`).
    pub metrics: BTreeMap<String, f64>,
    /// Number of batches, of all ranks.
    pub batches: u64,
}

/// What is evaluated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EvaluationStage {
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

/// How an evaluation ended.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Evaluated {
    /// There is no data for it.
    NoData,
    /// It was completed.
    Done(Evaluation),
    /// It was interrupted.
    Interrupted(Interruption),
}

/// How a prediction ended.
pub(super) enum Predicted {
    Done(Predictions),
    Interrupted(Interruption),
}

impl EvaluationStage {
    pub(super) fn split(self) -> Split {
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

impl Session {
    /// Evaluates, if there is data for it. It can be interrupted between two batches; a resumed training
    /// starts its validation again. Collective.
    pub(super) fn evaluate(&mut self, stage: EvaluationStage) -> Result<Evaluated> {
        let sets = self.evaluation_sets(stage)?;
        if sets.is_empty() {
            return Ok(Evaluated::NoData);
        }
        let step = self.cursor.step;
        let hooks = stage.hooks();
        self.hook(hooks.start)?;
        self.hook(hooks.epoch_start)?;
        let mut tables = Vec::new();
        let mut evaluation = Evaluation { loss: 0.0, metrics: BTreeMap::new(), batches: 0 };
        let (mut sum, mut count) = (0.0, 0.0);
        for set in &sets {
            let mut table = match self.evaluate_set(stage, &hooks, set)? {
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
            for (name, value) in self.reduce(&mut table, LogStage::Evaluation)? {
                evaluation.metrics.insert(format!("{name}{}", set.suffix), value);
            }
            evaluation.batches += set.batches;
            tables.push(table);
        }
        evaluation.loss = sum / count;
        evaluation.batches *= self.parts.fabric.sampler_share()?.num_replicas as u64;
        self.record(&evaluation.metrics);
        self.record(&[(stage.loss_name().to_owned(), evaluation.loss)].into());
        if self.stage != Stage::SanityCheck {
            self.emit(&stage.event(step, evaluation.clone()))?;
            tables.iter_mut().try_for_each(|table| self.log_media(table))?;
        }
        self.hook(hooks.epoch_end)?;
        self.hook(hooks.end)?;
        Ok(Evaluated::Done(evaluation))
    }

    /// Goes through one set of an evaluation. Collective.
    fn evaluate_set(
        &mut self,
        stage: EvaluationStage,
        hooks: &EvaluationHooks,
        set: &EvaluationSet,
    ) -> Result<ControlFlow<Interruption, SetTotals>> {
        let ranks = (self.rank(), self.world_size());
        let mut ctx = StepContext::evaluation((self.cursor.step, self.epoch), ranks);
        if let Split::ValidationSet(index) = set.split {
            ctx.validation_set = Some(index);
        }
        // On its device: read once.
        let (mut sum, mut counts) = (None::<Tensor>, Vec::new());
        let sized = (set.sampler, set.batches);
        let interrupted =
            self.each_batch(set.split, hooks, sized, &mut |session, batch, padding| {
                ctx.begin_batch(batch.index, batch.samples.indices().len(), padding);
                let loss = match stage {
                    EvaluationStage::Validation => session.runner.validation_step(&mut ctx)?,
                    EvaluationStage::Test => session.runner.test_step(&mut ctx)?,
                };
                if !padding {
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
        let what = format!("in {} of step {}", stage.loss_name(), self.cursor.step);
        let totals = self.parts.fabric.runtime.totals_of_losses(sum, &counts);
        let totals = totals.map_err(|error| error.during(what))?;
        let (sum, count) = (totals.loss_sum, totals.count);
        if count == 0.0 && self.rank() == 0 {
            tracing::warn!(
                "{}{} after step {} is NaN: nothing counts, every target is ignored (`ignore_index`)",
                stage.loss_name(),
                set.suffix,
                self.cursor.step
            );
        }
        Ok(ControlFlow::Continue(SetTotals { sum, count, table: ctx.table }))
    }

    /// Whether there is anything to validate on.
    pub(super) fn has_validation_data(&self) -> Result<bool> {
        Ok(!self.evaluation_sets(EvaluationStage::Validation)?.is_empty())
    }

    /// The sets of an evaluation that have batches.
    fn evaluation_sets(&self, stage: EvaluationStage) -> Result<Vec<EvaluationSet>> {
        let names = match stage {
            EvaluationStage::Validation => self.runner.validation_sets(),
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
            let (sampler, batches) = self.batches(split)?;
            if batches > 0 {
                sets.push(EvaluationSet { split, suffix, sampler, batches });
            }
        }
        Ok(sets)
    }

    /// Predicts for this rank's samples. Collective.
    pub(super) fn predict(&mut self) -> Result<Predicted> {
        let sized = self.batches(Split::Predict)?;
        let hooks = PREDICT_HOOKS;
        self.hook(hooks.start)?;
        self.hook(hooks.epoch_start)?;
        let ranks = (self.rank(), self.world_size());
        let mut ctx = StepContext::evaluation((self.cursor.step, self.epoch), ranks);
        let mut predictions = Predictions::default();
        let interrupted =
            self.each_batch(Split::Predict, &hooks, sized, &mut |session, batch, padding| {
                ctx.begin_batch(batch.index, batch.samples.indices().len(), padding);
                let output = session.runner.predict_step(&mut ctx)?.detach();
                if !padding {
                    predictions.batches.push((batch.samples.indices().to_vec(), output));
                }
                Ok(())
            })?;
        if let Some(why) = interrupted {
            return Ok(Predicted::Interrupted(why));
        }
        self.log_table(&mut ctx.table, LogStage::Epoch)?;
        self.hook(hooks.epoch_end)?;
        self.hook(hooks.end)?;
        Ok(Predicted::Done(predictions))
    }

    /// How the samples of a split are shared, and how many batches of each rank are used.
    fn batches(&self, split: Split) -> Result<(EvalSampler, u64)> {
        let share = self.parts.fabric.sampler_share()?;
        let len = self.runner.num_samples(split);
        let sampler = EvalSampler::new(len, self.batch_size, share.num_replicas, share.rank)?;
        let all = sampler.num_batches();
        let config = &self.parts.config;
        let limit = match split {
            Split::Test => config.limit_test_batches,
            Split::Predict => config.limit_predict_batches,
            _ => config.limit_val_batches,
        };
        let mut batches = limit.of(all).min(all);
        if self.stage == Stage::SanityCheck {
            batches = batches.min(config.num_sanity_val_steps);
        }
        Ok((sampler, batches))
    }

    /// Calls `step` for each batch of this rank, and with whether the batch is padding: a rank without samples
    /// computes too, since forwards gather parameters. Ends early if the run is interrupted. Collective.
    fn each_batch(
        &mut self,
        split: Split,
        hooks: &EvaluationHooks,
        (sampler, batches): (EvalSampler, u64),
        step: &mut dyn FnMut(&mut Self, &EvaluationBatch, bool) -> Result<()>,
    ) -> Result<Option<Interruption>> {
        let device = self.device();
        let workers = self.parts.config.workers(&device);
        self.runner.load_evaluation(Loading {
            plan: Box::new(sampler.batches(split, self.parts.fabric.seed(), batches)),
            device,
            context: self.parts.fabric.context_parallel(),
            workers,
        })?;
        let _no_grad = no_grad();
        let _scope = self.parts.fabric.forward_scope(false, self.cursor.step, 0);
        let what = match (self.stage, split) {
            (Stage::SanityCheck, _) => "sanity check".to_owned(),
            (_, Split::ValidationSet(set)) => {
                self.runner.validation_sets().get(set).cloned().unwrap_or_default()
            }
            (_, split) => split.to_string(),
        };
        self.show_evaluation(&what, 0, batches);
        for index in 0..batches {
            if index > 0
                && let Some(why) = self.vote_on_stop(false)?.interruption
            {
                self.runner.stop_loading(false);
                return Ok(Some(why));
            }
            self.batch_hook(hooks.batch_start, index)?;
            let padding = sampler.indices(index).is_empty();
            let samples = self.runner.next_evaluation_batch()?;
            step(self, &EvaluationBatch { index, samples }, padding).map_err(|error| {
                let step = match split {
                    Split::Train => "training_step",
                    Split::Validation | Split::ValidationSet(_) => "validation_step",
                    Split::Test => "test_step",
                    Split::Predict => "predict_step",
                };
                explain_mismatch(error).during(format_args!("in {step} of batch {index}"))
            })?;
            self.show_evaluation(&what, index + 1, batches);
            self.batch_hook(hooks.batch_end, index)?;
        }
        self.runner.stop_loading(false);
        Ok(None)
    }
}

impl Session {
    fn show_evaluation(&self, what: &str, done: u64, batches: u64) {
        let progress = EvaluationProgress { what, done, batches };
        self.parts.sinks.iter().for_each(|sink| sink.lock().evaluating(progress));
    }
}

/// A set of samples that is evaluated.
struct EvaluationSet {
    split: Split,
    /// What comes behind the names of its metrics.
    suffix: String,
    sampler: EvalSampler,
    /// Number of batches of each rank.
    batches: u64,
}

/// What one set came to.
struct SetTotals {
    /// The loss, over all ranks.
    sum: f64,
    count: f64,
    /// What this rank's steps logged.
    table: LogTable,
}

/// A batch of an evaluation.
struct EvaluationBatch {
    index: u64,
    samples: Samples,
}
