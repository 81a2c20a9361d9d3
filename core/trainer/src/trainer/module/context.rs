//! The contexts of steps and hooks.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::Tensor;

use crate::fabric::{Fabric, FabricOptimizer, FabricOptimizers};
use crate::trainer::checkpoints::place::Saving;
use crate::trainer::module::manual::Manual;
use crate::trainer::module::runner::{ModuleRunner, TypedRunner};
use crate::trainer::record::log_table::{LogOptions, LogTable, Logged, Source};
use crate::trainer::record::recorder::Metrics;
use crate::trainer::{Histogram, LightningModule};
use crate::{Error, Result};

/// The context of a step: its position in the run, and what it logs.
#[derive(Debug)]
#[non_exhaustive]
pub struct StepContext {
    /// The optimizer step that is being computed, counted from 1.
    pub step: u64,
    /// The epoch of its first sample, counted from 0.
    pub epoch: u64,
    /// The micro-batch within the step, or the batch within a validation, counted from 0.
    pub batch_index: u64,
    /// This process's global rank.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Whether the batch counts for nothing. Where samples are not enough for all ranks, those that have none
    /// compute with some sample all the same, since forwards are collective; neither the loss nor what is
    /// logged counts.
    pub is_padding: bool,
    /// In a validation on several sets, the index of the batch's set in
    /// [`validation_sets`](fulgurite_engine::data::DataModule::validation_sets).
    pub validation_set: Option<usize>,
    pub(crate) source: Source,
    pub(crate) table: LogTable,
    /// What a step that optimizes by itself works with.
    pub(crate) manual: Option<Manual>,
    /// Gradient norm and learning rate of the last optimizer step in such a step.
    pub(crate) last_step: Option<(f64, f64)>,
}

impl StepContext {
    /// The context of training step `step`, of whose values are logged if `wanted`.
    pub(crate) fn training(
        (step, epoch): (u64, u64),
        (rank, world_size): (usize, usize),
        wanted: bool,
    ) -> Self {
        let source = Source { samples: 0.0, training: true, wanted, padding: false };
        let table = LogTable::default();
        Self {
            step,
            epoch,
            batch_index: 0,
            rank,
            world_size,
            is_padding: false,
            validation_set: None,
            source,
            table,
            manual: None,
            last_step: None,
        }
    }

    /// The context of batches of a validation after step `step`.
    pub(crate) fn evaluation(
        (step, epoch): (u64, u64),
        (rank, world_size): (usize, usize),
    ) -> Self {
        let mut ctx = Self::training((step, epoch), (rank, world_size), true);
        ctx.source.training = false;
        ctx
    }

    /// Goes to a batch of so many samples.
    pub(crate) fn begin_batch(&mut self, index: u64, samples: usize, is_padding: bool) {
        self.batch_index = index;
        self.is_padding = is_padding;
        self.source.samples = samples as f64;
        self.source.padding = is_padding;
    }

    /// Logs a number or a [`Metric`](crate::metric::Metric) of this batch. All ranks log the same names.
    ///
    /// A number stands for each sample of the batch: several batches and all ranks become the mean over their
    /// samples. In training the value of a step over its whole global batch is logged, every
    /// `trainer.log_every_n_steps`; in a validation the value over all of its samples. What is not a mean of
    /// samples (an accuracy of tokens, a precision) is exact as a metric.
    ///
    /// ```
    /// use fulgurite_core::metric::Accuracy;
    /// use fulgurite_core::trainer::StepContext;
    /// # use candle_core::Tensor;
    /// # use fulgurite_core::Result;
    /// # fn step(ctx: &mut StepContext, logits: Tensor, targets: Tensor) -> Result<()> {
    ///
    /// ctx.log("temperature", 0.5);
    /// ctx.log("val_accuracy", Accuracy::of(&logits, &targets)?);
    /// # Ok(())
    /// # }
    /// ```
    pub fn log(&mut self, name: &str, value: impl Into<Logged>) {
        self.log_with(name, value, LogOptions::default());
    }

    /// As [`log`](Self::log), with options.
    pub fn log_with(&mut self, name: &str, value: impl Into<Logged>, options: LogOptions) {
        self.table.log(name, value.into(), options, self.source);
    }

    /// Logs a text of this batch, such as a generated sample; that of rank 0 is logged.
    pub fn log_text(&mut self, name: &str, text: impl Into<String>) {
        self.table.log_text(name, text.into(), self.source);
    }

    /// Logs how the values of a tensor are distributed: over all batches of a step or a validation, and all
    /// ranks, which all log the same names. In training every `trainer.log_every_n_steps`.
    ///
    /// # Errors
    /// If the tensor cannot be read.
    pub fn log_histogram(&mut self, name: &str, values: &Tensor) -> Result<()> {
        if self.source.wanted {
            self.table.log_histogram(name, &Histogram::of(values)?, self.source);
        }
        Ok(())
    }

    /// Whether what this step logs is wanted. What is dear to compute and logged by the step alone need
    /// not be computed otherwise; the answer is the same on all ranks.
    pub fn is_logged(&self) -> bool {
        self.source.wanted
    }
}

/// What the trainer is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stage {
    /// Training, and the validations in it.
    Fit,
    /// The short validation before training.
    SanityCheck,
    /// A validation by itself.
    Validate,
    /// A test.
    Test,
    /// A prediction.
    Predict,
}

/// The context of a hook. `D` is the type of the data module that the hook has access to.
pub struct HookContext<'a, D: ?Sized = ()> {
    /// Optimizer steps done.
    pub step: u64,
    /// The epoch of the step that is being or was last computed, counted from 0.
    pub epoch: u64,
    /// In hooks of batches the micro-batch within the step, or the batch within a validation,
    /// counted from 0.
    pub batch_index: u64,
    /// What the trainer is at.
    pub stage: Stage,
    /// Micro-batches in a step.
    pub accumulate_grad_batches: u64,
    /// The number of the run's last step, if that is known: from `on_train_start` on.
    pub max_steps: Option<u64>,
    /// How many epochs the run has, the last one perhaps in part, if that is known: from `on_train_start` on.
    pub max_epochs: Option<u64>,
    /// What the losses of the last step counted, of all ranks: tokens, or other items.
    pub items: f64,
    /// This process's global rank.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// The run's seed.
    pub seed: u64,
    /// Whether the run is a trial of everything (`trainer.fast_dev_run`), in which nothing is kept.
    pub fast_dev_run: bool,
    /// The latest metrics, a map by name: `train_loss`, `grad_norm`, `lr`, `val_loss` and what steps logged. Whoever looks
    /// at it in each step waits for the device in each step (`trainer.late_reads`).
    pub metrics: &'a Metrics<'a>,
    pub(crate) data: &'a D,
    pub(crate) parts: HookParts<'a>,
}

/// What a hook has access to.
pub(crate) struct HookParts<'a> {
    pub(crate) fabric: &'a Fabric,
    pub(crate) optimizers: Option<&'a mut FabricOptimizers>,
    /// Not in the module's own hooks.
    pub(crate) runner: Option<&'a mut dyn ModuleRunner>,
    pub(crate) requests: &'a mut Requests,
    pub(crate) saving: &'a Saving,
    /// The step after which a metric was logged last.
    pub(crate) metric_steps: &'a BTreeMap<String, u64>,
    /// Whether what is logged is wanted.
    pub(crate) wanted: bool,
    pub(crate) table: &'a mut LogTable,
}

/// What hooks ask of the trainer.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    /// To stop after the present step.
    pub(crate) stop: bool,
    /// To save after it.
    pub(crate) saves: Vec<SaveRequest>,
    /// To save where an error ends the run.
    pub(crate) save_on_exception: Option<SaveRequest>,
    pub(crate) printed: Vec<String>,
}

/// A checkpoint that a hook [asks for](HookContext::save_checkpoint).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SaveRequest {
    /// Its name in the place of the run's checkpoints, without `/`; by default that of its step.
    pub name: Option<String>,
    /// Whether only the weights are saved.
    pub weights_only: bool,
    /// The names of checkpoints that are removed when it is committed, but for
    /// [the one that the run goes on from](HookContext::resumed_from).
    pub remove: Vec<String>,
}

impl<'a, D: ?Sized> HookContext<'a, D> {
    /// The run's data module, in hooks of a module; `()` in callbacks, which work with any data
    /// module.
    pub fn data(&self) -> &'a D {
        self.data
    }

    /// The same context with another view of the data, and without the module.
    pub(crate) fn with_data<'b, E: ?Sized>(&'b mut self, data: &'b E) -> HookContext<'b, E> {
        HookContext {
            step: self.step,
            epoch: self.epoch,
            batch_index: self.batch_index,
            stage: self.stage,
            accumulate_grad_batches: self.accumulate_grad_batches,
            max_steps: self.max_steps,
            max_epochs: self.max_epochs,
            items: self.items,
            rank: self.rank,
            world_size: self.world_size,
            seed: self.seed,
            fast_dev_run: self.fast_dev_run,
            metrics: self.metrics,
            data,
            parts: HookParts {
                fabric: self.parts.fabric,
                optimizers: self.parts.optimizers.as_deref_mut(),
                runner: None,
                requests: self.parts.requests,
                saving: self.parts.saving,
                metric_steps: self.parts.metric_steps,
                wanted: self.parts.wanted,
                table: self.parts.table,
            },
        }
    }

    /// The strategy at work: the parameters with their gradients
    /// ([`module_tree`](Fabric::module_tree)), collectives, forward scopes.
    pub fn fabric(&self) -> &'a Fabric {
        self.parts.fabric
    }

    /// The optimizer, the first one where there are several; `None` outside of a training.
    pub fn optimizer(&self) -> Option<&FabricOptimizer> {
        self.optimizers()?.first()
    }

    /// As [`optimizer`](Self::optimizer), to be changed alike on all ranks.
    pub fn optimizer_mut(&mut self) -> Option<&mut FabricOptimizer> {
        self.optimizers_mut()?.first_mut()
    }

    /// The optimizers by name; the only one is called `""`. `None` outside of a training.
    pub fn optimizers(&self) -> Option<&FabricOptimizers> {
        self.parts.optimizers.as_deref()
    }

    /// As [`optimizers`](Self::optimizers), to be changed alike on all ranks.
    pub fn optimizers_mut(&mut self) -> Option<&mut FabricOptimizers> {
        self.parts.optimizers.as_deref_mut()
    }

    /// The module, in callbacks; `None` if it is no `M`. A forward with it is collective, and belongs
    /// into a [scope](Fabric::forward_scope).
    pub fn module<M: LightningModule>(&self) -> Option<&M> {
        let runner = self.parts.runner.as_deref()?.as_any();
        runner.downcast_ref::<TypedRunner<M>>().map(|runner| &runner.module)
    }

    /// The module, to be changed; see [`module`](Self::module).
    pub fn module_mut<M: LightningModule>(&mut self) -> Option<&mut M> {
        let runner = self.parts.runner.as_deref_mut()?.as_any_mut();
        runner.downcast_mut::<TypedRunner<M>>().map(|runner| &mut runner.module)
    }

    /// Logs a number, of which the mean over the ranks is taken, or a [`Metric`](crate::metric::Metric). All
    /// ranks log the same names. In the hooks of a training step only every `trainer.log_every_n_steps`
    /// ([`is_logged`](Self::is_logged)).
    pub fn log(&mut self, name: &str, value: impl Into<Logged>) {
        self.log_with(name, value, LogOptions::default());
    }

    /// As [`log`](Self::log), with options. What is logged by the epoch is logged at once here.
    pub fn log_with(&mut self, name: &str, value: impl Into<Logged>, options: LogOptions) {
        let options = options.on_step(true).on_epoch(false);
        let source = self.source();
        self.parts.table.log(name, value.into(), options, source);
    }

    /// Logs a text, such as a generated sample; that of rank 0 is logged.
    pub fn log_text(&mut self, name: &str, text: impl Into<String>) {
        let source = self.source();
        self.parts.table.log_text(name, text.into(), source);
    }

    /// Logs how the values of a tensor are distributed, such as a gradient's. Those of all ranks are one
    /// histogram, and all ranks log the same names. In the hooks of a training step only every
    /// `trainer.log_every_n_steps`; otherwise the tensor is not read.
    ///
    /// # Errors
    /// If the tensor cannot be read.
    pub fn log_histogram(&mut self, name: &str, values: &Tensor) -> Result<()> {
        if self.parts.wanted {
            let source = self.source();
            self.parts.table.log_histogram(name, &Histogram::of(values)?, source);
        }
        Ok(())
    }

    /// The step after which this run logged a metric last, be it by a validation; `None` if it has not. A value of
    /// [`metrics`](Self::metrics) is one of the present state if this is [`step`](Self::step).
    pub fn metric_step(&self, name: &str) -> Option<u64> {
        self.metrics.pending_step(name).or_else(|| self.parts.metric_steps.get(name).copied())
    }

    fn source(&self) -> Source {
        Source { samples: 1.0, training: true, wanted: self.parts.wanted, padding: false }
    }

    /// Whether what this hook logs is wanted.
    pub fn is_logged(&self) -> bool {
        self.parts.wanted
    }

    /// Whether this is rank 0.
    pub fn is_global_zero(&self) -> bool {
        self.rank == 0
    }

    /// Asks the trainer to stop after this step, on all ranks. Before `trainer.min_steps` and
    /// `trainer.min_epochs` it goes on until then.
    pub fn stop(&mut self) {
        self.parts.requests.stop = true;
    }

    /// Asks the trainer for a checkpoint after this step (and its validation). All ranks must ask for the
    /// same ones.
    pub fn save_checkpoint(&mut self, request: SaveRequest) {
        self.parts.requests.saves.push(request);
    }

    /// The names that are taken in the place of the run's checkpoints: by what lies there, and by what this run has
    /// asked for. Looks into that place, which rank 0 does for all.
    ///
    /// # Errors
    /// If the place cannot be read.
    pub fn checkpoint_names(&self) -> Result<BTreeSet<String>> {
        let mut names = self.parts.saving.names()?;
        names.extend(self.parts.requests.saves.iter().filter_map(|request| request.name.clone()));
        Ok(names)
    }

    /// The name of the checkpoint that this run goes on from, if it lies in the place of the run's own. It is never
    /// removed.
    pub fn resumed_from(&self) -> Option<&str> {
        self.parts.saving.resumed_from()
    }

    /// Asks the trainer for a checkpoint if an error ends this run, in place of an earlier one that was asked for
    /// so: of the last whole step, from which a run can go on. For runs on one rank: where there are several, the
    /// others may have failed or not, and what is saved by all of them cannot be. Nothing is saved if the error
    /// comes amid an update of the weights, or amid a module's own optimization.
    ///
    /// # Errors
    /// If there are several ranks.
    pub fn save_on_exception(&mut self, request: SaveRequest) -> Result<()> {
        if self.world_size > 1 {
            return Err(Error::Config(format!(
                "a checkpoint on an error needs a run on one rank, and this has {}: ranks save together, and \
                 those that have failed cannot. Save on the way, with `checkpoint.every_n_steps`",
                self.world_size
            )));
        }
        self.parts.requests.save_on_exception = Some(request);
        Ok(())
    }

    /// Prints a text on the terminal; only that of rank 0 is printed.
    pub fn print(&mut self, text: impl Into<String>) {
        if self.rank == 0 {
            self.parts.requests.printed.push(text.into());
        }
    }
}
