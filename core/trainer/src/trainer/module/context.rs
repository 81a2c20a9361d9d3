//! The contexts of steps and hooks.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use crate::fabric::{Fabric, FabricOptimizer, FabricOptimizers};
use crate::runtime::StrategyRuntime;
use crate::trainer::checkpoints::place::Saving;
use crate::trainer::module::manual::Manual;
use crate::trainer::module::runner::{ModuleRunner, TypedRunner};
use crate::trainer::record::log_table::{LogOptions, LogTable, Logged, Source};
use crate::trainer::record::recorder::Metrics;
use crate::trainer::{Histogram, LightningModule};
use crate::{Error, Result};
use fulgurite_engine::collective::ProcessGroup;
use fulgurite_engine::data::DataModule;
use fulgurite_engine::mesh::DeviceMesh;

/// The context of a step: its position in the run, the ranks, the data, and the table for logging.
#[derive(Debug)]
#[non_exhaustive]
pub struct StepContext {
    /// The optimizer step that is being computed, counted from 1.
    pub step: u64,
    /// The epoch of the step's first sample, counted from 0.
    pub epoch: u64,
    /// The index of the micro-batch in the step, or of the batch in a validation.
    pub batch_index: u64,
    /// This process's global rank.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Whether the batch is padding: neither its loss nor its logged values count.
    ///
    /// If there are too few samples for all ranks, ranks without a sample compute some other
    /// sample, because forwards are collective.
    pub is_padding: bool,
    /// In a validation on several sets, the index of the batch's set in
    /// [`validation_sets`](fulgurite_engine::data::DataModule::validation_sets).
    pub validation_set: Option<usize>,
    parts: StepParts,
    pub(crate) source: Source,
    /// Whether nothing is logged: in stages of a pipeline that do not end the step.
    pub(crate) is_muted: bool,
    pub(crate) table: LogTable,
    /// The optimizers of a step with manual optimization.
    pub(crate) manual: Option<Manual>,
    /// Gradient norm and learning rate of the last optimizer step under manual optimization.
    pub(crate) last_step: Option<(f64, f64)>,
}

/// The objects that a step can access.
#[derive(Clone)]
pub(crate) struct StepParts {
    pub(crate) runtime: Arc<StrategyRuntime>,
    /// The module's data.
    pub(crate) data: Arc<dyn Any + Send + Sync>,
}

impl fmt::Debug for StepParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepParts").finish_non_exhaustive()
    }
}

impl StepContext {
    /// The context of a training step. Values are logged only if `wanted` is true.
    pub(crate) fn training((step, epoch): (u64, u64), parts: StepParts, wanted: bool) -> Self {
        let world = parts.runtime.mesh().world();
        let (rank, world_size) = (world.rank(), world.size());
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
            parts,
            source,
            is_muted: false,
            table,
            manual: None,
            last_step: None,
        }
    }

    /// The context of the batches of a validation after step `step`.
    pub(crate) fn evaluation(position: (u64, u64), parts: StepParts) -> Self {
        let mut ctx = Self::training(position, parts, true);
        ctx.source.training = false;
        ctx
    }

    /// Returns the device mesh, whose groups a step can communicate in:
    /// `ctx.device_mesh().group("data_parallel")`.
    ///
    /// All ranks of a group must start the same collectives in the same order, also if a batch
    /// [is padding](Self::is_padding).
    pub fn device_mesh(&self) -> &DeviceMesh {
        self.parts.runtime.mesh()
    }

    /// Returns the process group of all ranks.
    pub fn process_group(&self) -> &Arc<dyn ProcessGroup> {
        self.device_mesh().world()
    }

    /// Returns the module's data; `None` if its type is not `D`.
    pub fn data<D: DataModule>(&self) -> Option<&D> {
        self.parts.data.downcast_ref()
    }

    /// Moves to a batch of `samples` samples.
    pub(crate) fn begin_batch(&mut self, index: u64, samples: usize, is_padding: bool) {
        self.batch_index = index;
        self.is_padding = is_padding;
        self.source.samples = samples as f64;
        self.source.padding = is_padding;
    }

    /// Logs a number or a [`Metric`](crate::metric::Metric) of this batch. All ranks log the same
    /// names.
    ///
    /// A number counts for each sample of the batch: batches and ranks are averaged over their
    /// samples. In training the mean over a step's global batch is logged, every
    /// `trainer.log_every_n_steps`; in a validation the mean over all samples. Values that are not
    /// means of samples (an accuracy of tokens, a precision) are exact as metrics.
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

    /// Like [`log`](Self::log), with options.
    pub fn log_with(&mut self, name: &str, value: impl Into<Logged>, options: LogOptions) {
        if !self.is_muted {
            self.table.log(name, value.into(), options, self.source);
        }
    }

    /// Logs a text of this batch, such as a generated sample. Only rank 0's text is logged.
    pub fn log_text(&mut self, name: &str, text: impl Into<String>) {
        if !self.is_muted {
            self.table.log_text(name, text.into(), self.source);
        }
    }

    /// Logs a histogram of a tensor's values, over all batches of a step or a validation and all
    /// ranks.
    ///
    /// All ranks log the same names. In training only every `trainer.log_every_n_steps`.
    ///
    /// # Errors
    /// If the tensor cannot be read.
    pub fn log_histogram(&mut self, name: &str, values: &Tensor) -> Result<()> {
        if self.source.wanted && !self.is_muted {
            self.table.log_histogram(name, &Histogram::of(values)?, self.source);
        }
        Ok(())
    }

    /// Returns whether values of this step are logged, equal on all ranks.
    ///
    /// If not, the step can omit expensive values that it only logs.
    pub fn is_logged(&self) -> bool {
        self.source.wanted
    }
}

/// The trainer's task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stage {
    /// Training, and the validations in it.
    Fit,
    /// The short validation before training.
    SanityCheck,
    /// A separate validation.
    Validate,
    /// A test.
    Test,
    /// A prediction.
    Predict,
}

/// The context of a hook. `D` is the type of the data module that the hook can access.
pub struct HookContext<'a, D: ?Sized = ()> {
    /// Number of finished optimizer steps.
    pub step: u64,
    /// The epoch of the current or last step, counted from 0.
    pub epoch: u64,
    /// In hooks of batches, the index of the micro-batch in the step, or of the batch in a
    /// validation.
    pub batch_index: u64,
    /// The trainer's task.
    pub stage: Stage,
    /// Number of batches per rank in a step. `trainer.micro_batch_size` may split each into several
    /// micro-batches.
    pub accumulate_grad_batches: u64,
    /// The number of the run's last step, if known. Set from `on_train_start` on.
    pub max_steps: Option<u64>,
    /// Number of epochs in the run, if known. The last may be partial. Set from `on_train_start`
    /// on.
    pub max_epochs: Option<u64>,
    /// The count of the last step's losses over all ranks: tokens, or other items.
    pub items: f64,
    /// This process's global rank.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// The run's seed.
    pub seed: u64,
    /// Whether the run is a trial (`trainer.fast_dev_run`), which keeps nothing.
    pub fast_dev_run: bool,
    /// The latest metrics by name: `train_loss`, `grad_norm`, `lr`, `val_loss` and values that
    /// steps logged.
    ///
    /// Reading the map in each step waits for the device in each step (`trainer.late_reads`).
    pub metrics: &'a Metrics<'a>,
    pub(crate) data: &'a D,
    pub(crate) parts: HookParts<'a>,
}

/// The objects that a hook can access.
pub(crate) struct HookParts<'a> {
    pub(crate) fabric: &'a Fabric,
    pub(crate) optimizers: Option<&'a mut FabricOptimizers>,
    /// `None` in the module's own hooks.
    pub(crate) runner: Option<&'a mut dyn ModuleRunner>,
    pub(crate) requests: &'a mut Requests,
    pub(crate) saving: &'a Saving,
    /// The step in which each metric was logged last.
    pub(crate) metric_steps: &'a BTreeMap<String, u64>,
    /// Whether logged values are kept.
    pub(crate) wanted: bool,
    pub(crate) table: &'a mut LogTable,
}

/// Requests of hooks to the trainer.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    /// Stop after the present step.
    pub(crate) stop: bool,
    /// Save these checkpoints after the present step.
    pub(crate) saves: Vec<SaveRequest>,
    /// Save this checkpoint if an error ends the run.
    pub(crate) save_on_exception: Option<SaveRequest>,
    pub(crate) printed: Vec<String>,
}

/// A checkpoint that a hook [requests](HookContext::save_checkpoint).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SaveRequest {
    /// The checkpoint's name in the run's checkpoint location, without `/`; by default named after
    /// its step.
    pub name: Option<String>,
    /// Whether only the weights are saved.
    pub weights_only: bool,
    /// The names of checkpoints to remove after the commit.
    /// [The one that the run resumed from](HookContext::resumed_from) is never removed.
    pub remove: Vec<String>,
}

impl<'a, D: ?Sized> HookContext<'a, D> {
    /// Returns the run's data module, in hooks of a module.
    ///
    /// `()` in callbacks, which work with any data module.
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

    /// Returns the strategy in use: parameters and gradients
    /// ([`module_tree`](Fabric::module_tree)), collectives, forward scopes.
    pub fn fabric(&self) -> &'a Fabric {
        self.parts.fabric
    }

    /// Returns the optimizer, or the first of several; `None` outside of training.
    pub fn optimizer(&self) -> Option<&FabricOptimizer> {
        self.optimizers()?.first()
    }

    /// Like [`optimizer`](Self::optimizer), but mutable. Changes must be equal on all ranks.
    pub fn optimizer_mut(&mut self) -> Option<&mut FabricOptimizer> {
        self.optimizers_mut()?.first_mut()
    }

    /// Returns the optimizers by name. A single optimizer is called `""`. `None` outside of
    /// training.
    pub fn optimizers(&self) -> Option<&FabricOptimizers> {
        self.parts.optimizers.as_deref()
    }

    /// Like [`optimizers`](Self::optimizers), but mutable. Changes must be equal on all ranks.
    pub fn optimizers_mut(&mut self) -> Option<&mut FabricOptimizers> {
        self.parts.optimizers.as_deref_mut()
    }

    /// Returns the module, in callbacks; `None` if its type is not `M`.
    ///
    /// A forward with the module is collective, and needs a [scope](Fabric::forward_scope).
    pub fn module<M: LightningModule>(&self) -> Option<&M> {
        let runner = self.parts.runner.as_deref()?.as_any();
        runner.downcast_ref::<TypedRunner<M>>().map(|runner| &runner.module)
    }

    /// Like [`module`](Self::module), but mutable.
    pub fn module_mut<M: LightningModule>(&mut self) -> Option<&mut M> {
        let runner = self.parts.runner.as_deref_mut()?.as_any_mut();
        runner.downcast_mut::<TypedRunner<M>>().map(|runner| &mut runner.module)
    }

    /// Returns the data of the module, in callbacks; `None` if the module's type is not `M`.
    pub fn data_of<M: LightningModule>(&self) -> Option<&M::Data> {
        let runner = self.parts.runner.as_deref()?.as_any();
        runner.downcast_ref::<TypedRunner<M>>().map(|runner| &*runner.data)
    }

    /// Logs a number, averaged over the ranks, or a [`Metric`](crate::metric::Metric).
    ///
    /// All ranks log the same names. In the hooks of a training step only every
    /// `trainer.log_every_n_steps` ([`is_logged`](Self::is_logged)).
    pub fn log(&mut self, name: &str, value: impl Into<Logged>) {
        self.log_with(name, value, LogOptions::default());
    }

    /// Like [`log`](Self::log), with options. In hooks, values for the epoch are logged at once.
    pub fn log_with(&mut self, name: &str, value: impl Into<Logged>, options: LogOptions) {
        let options = options.on_step(true).on_epoch(false);
        let source = self.source();
        self.parts.table.log(name, value.into(), options, source);
    }

    /// Logs a text, such as a generated sample. Only rank 0's text is logged.
    pub fn log_text(&mut self, name: &str, text: impl Into<String>) {
        let source = self.source();
        self.parts.table.log_text(name, text.into(), source);
    }

    /// Logs a histogram of a tensor's values, such as a gradient's, over all ranks.
    ///
    /// All ranks log the same names. In the hooks of a training step only every
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

    /// Returns the step in which this run logged a metric last; `None` if never.
    ///
    /// A value of [`metrics`](Self::metrics) belongs to the present state if this is
    /// [`step`](Self::step). Validations count too.
    pub fn metric_step(&self, name: &str) -> Option<u64> {
        self.metrics.pending_step(name).or_else(|| self.parts.metric_steps.get(name).copied())
    }

    fn source(&self) -> Source {
        Source { samples: 1.0, training: true, wanted: self.parts.wanted, padding: false }
    }

    /// Returns whether values of this hook are logged.
    pub fn is_logged(&self) -> bool {
        self.parts.wanted
    }

    /// Returns whether this is rank 0.
    pub fn is_global_zero(&self) -> bool {
        self.rank == 0
    }

    /// Asks the trainer to stop after this step, on all ranks.
    ///
    /// The trainer continues at least to `trainer.min_steps` and `trainer.min_epochs`.
    pub fn stop(&mut self) {
        self.parts.requests.stop = true;
    }

    /// Requests a checkpoint after this step (and its validation). All ranks must request the same
    /// checkpoints.
    /// If the save fails, the run ends.
    pub fn save_checkpoint(&mut self, request: SaveRequest) {
        self.parts.requests.saves.push(request);
    }

    /// Returns the taken names in the run's checkpoint location: of existing checkpoints and of
    /// this run's requests.
    ///
    /// Reads the location on the calling rank. Not collective: call it on rank 0 and share the
    /// result.
    ///
    /// # Errors
    /// If the location cannot be read.
    pub fn checkpoint_names(&self) -> Result<BTreeSet<String>> {
        let mut names = self.parts.saving.names()?;
        names.extend(self.parts.requests.saves.iter().filter_map(|request| request.name.clone()));
        Ok(names)
    }

    /// Returns the name of the checkpoint that this run resumed from, if it lies in the run's
    /// checkpoint location.
    ///
    /// It is never removed.
    pub fn resumed_from(&self) -> Option<&str> {
        self.parts.saving.resumed_from()
    }

    /// Returns whether the training goes on after the loss of a rank (`trainer.elastic`), from a
    /// state in memory. Checkpoints and states of callbacks are then those of this run.
    pub fn goes_on(&self) -> bool {
        self.parts.saving.goes_on()
    }

    /// Requests a checkpoint of the last whole step in case an error ends this run. Replaces an
    /// earlier request.
    ///
    /// Only for runs on one rank: after an error, the others of several ranks may have failed, and
    /// a checkpoint needs all of them. Nothing is saved if the error occurs during an update of the
    /// weights, or during manual optimization.
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

    /// Prints a text on the terminal, on rank 0 only.
    pub fn print(&mut self, text: impl Into<String>) {
        if self.rank == 0 {
            self.parts.requests.printed.push(text.into());
        }
    }
}
