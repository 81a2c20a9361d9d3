//! [`Fabric`].

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use super::FabricOptimizer;
use super::SyncBuffers;
use super::attempts::Attempts;
use super::launcher::check_frozen;
use crate::profiler::{LogExecutionTime, Phase, Profile, watch_units};
use crate::runtime::{NoSyncGuard, SamplerShare, StrategyRuntime, UnusedParameters};
use crate::{Error, Result};
use fulgurite_engine::accelerator::Accelerator;
use fulgurite_engine::collective::{ProcessGroup, Solo};
use fulgurite_engine::data::Workers;
use fulgurite_engine::execution::ContextGuard;
use fulgurite_engine::mesh::DeviceMesh;
use fulgurite_engine::module::{
    ForwardScope, ModuleBuilder, ModuleInit, ModuleTree, any_pattern_matches, pattern_matches,
};
use fulgurite_engine::optim::{LossScale, OptimizerConfig};
use fulgurite_engine::parallel::ContextParallel;
use fulgurite_engine::parameter::{Parameter, PausedGradients};
use fulgurite_engine::strategy::{Capabilities, StepTotals, Strategy};
use fulgurite_launch::LaunchedRank;
use fulgurite_nn::Loss;

/// Training in a loop of one's own, under a strategy (Lightning's `Fabric`).
///
/// ```
/// # use candle_core::{Device, Tensor};
/// # use fulgurite_core::Result;
/// # use fulgurite_core::fabric::Fabric;
/// # use fulgurite_core::module::Module;
/// # use fulgurite_core::nn::{Linear, Loss};
/// # use fulgurite_core::optim::AdamW;
/// # fn train(strategy: Box<dyn fulgurite_core::strategy::Strategy>) -> Result<()> {
/// let mut fabric = Fabric::single(strategy, 42)?;
/// let (model, mut optimizer) =
///     fabric.setup(|b| Linear::new(&b.pp("model"), 4, 1), &AdamW::default())?;
/// for micro_batch in 0..8 {
///     let accumulating = micro_batch % 4 != 3;
///     let x = Tensor::ones((2, 4), candle_core::DType::F32, &Device::Cpu)?;
///     let loss = Loss::new(model.forward(&x)?.sqr()?.sum_all()?, 2.0);
///     let _no_sync = fabric.no_backward_sync(accumulating); // restores what was before
///     fabric.backward(&loss)?;
///     if !accumulating {
///         let norm = fabric.clip_gradients_norm(&mut optimizer, 1.0)?;
///         optimizer.step()?;
///     }
/// }
/// # Ok(())
/// # }
/// ```
pub struct Fabric {
    pub(crate) runtime: Arc<StrategyRuntime>,
    world: Arc<dyn ProcessGroup>,
    pub(super) init: ModuleInit,
    seed: u64,
    /// What opened the device, if a configuration did.
    pub(super) accelerator: Option<Arc<dyn Accelerator>>,
    /// Present if steps can be left and begun again.
    pub(super) attempts: Option<Attempts>,
    /// The adapter that the model's own start from, or that was loaded last.
    pub(super) adapter_from: Mutex<Option<PathBuf>>,
    /// The model's own parameters that were filled from that adapter.
    pub(super) beside_adapter: Mutex<BTreeSet<String>>,
    /// Where the base of the adapters is from.
    pub(crate) base_model: Option<String>,
    /// How batches are made.
    pub(super) workers: Workers,
    /// [`SaveMeta::saved_at`](fulgurite_checkpoint::SaveMeta::saved_at) of the last checkpoint that
    /// was saved or loaded; 0 before.
    pub(super) saved_at: AtomicU64,
    /// Held as long as this rank takes part in its job.
    pub(super) launched: Option<LaunchedRank>,
}

impl Fabric {
    /// Fabric over the ranks of `world`, under this strategy. Collective: the strategy makes its
    /// mesh.
    ///
    /// # Errors
    /// If the strategy does not fit the world size, or activations are to be moved to the host that are there.
    pub fn new(
        world: Arc<dyn ProcessGroup>,
        strategy: Box<dyn Strategy>,
        init: ModuleInit,
        seed: u64,
    ) -> Result<Self> {
        let init = strategy.module_init_context(init);
        init.activation_checkpointing.check_device(&init.device)?;
        let runtime = Arc::new(StrategyRuntime::new(strategy, world.clone())?);
        let saved_at = AtomicU64::default();
        let workers = Workers::for_device(&init.device);
        Ok(Self {
            runtime,
            world,
            init,
            seed,
            accelerator: None,
            attempts: None,
            adapter_from: Mutex::default(),
            beside_adapter: Mutex::default(),
            base_model: None,
            workers,
            saved_at,
            launched: None,
        })
    }

    /// Fabric on one rank.
    ///
    /// # Errors
    /// If the strategy needs more ranks.
    pub fn single(strategy: Box<dyn Strategy>, seed: u64) -> Result<Self> {
        Self::new(Arc::new(Solo::new("world", 0)), strategy, ModuleInit::default(), seed)
    }

    /// The name of the strategy.
    ///
    /// # Errors
    /// Within another call of the strategy, such as in one of its hooks.
    pub fn strategy_name(&self) -> Result<String> {
        self.runtime.name()
    }

    /// The strategy's capabilities.
    ///
    /// # Errors
    /// Within another call of the strategy, such as in one of its hooks.
    pub fn capabilities(&self) -> Result<Capabilities> {
        self.runtime.capabilities()
    }

    /// This rank's share of the data, by its coordinate in `data_parallel`. Tensor- and
    /// context-parallel ranks have the same samples.
    ///
    /// # Errors
    /// If the mesh has no such dimension.
    pub fn sampler_share(&self) -> Result<SamplerShare> {
        self.runtime.sampler_share()
    }

    /// The group of all ranks.
    pub fn world(&self) -> &Arc<dyn ProcessGroup> {
        &self.world
    }

    /// This process's global rank.
    pub fn global_rank(&self) -> usize {
        self.world.rank()
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.world.size()
    }

    /// Whether this is rank 0.
    pub fn is_global_zero(&self) -> bool {
        self.global_rank() == 0
    }

    /// When the program was started, in seconds since 1970; `None` if this Fabric was not launched.
    pub fn program_start(&self) -> Option<f64> {
        self.launched.as_ref().map(|launched| launched.program_start)
    }

    /// The run's seed.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The factor of the loss in backwards that are computed in f16, which optimizers divide gradients by; `None` in
    /// other dtypes. Gradients that hooks see are multiplied by it.
    ///
    /// # Errors
    /// Within another call of the strategy.
    pub fn loss_scale(&self) -> Result<Option<LossScale>> {
        self.runtime.loss_scale()
    }

    /// Sets it, or how it changes, between two steps; on all ranks alike. Does nothing in other dtypes than f16.
    ///
    /// # Errors
    /// Within another call of the strategy.
    pub fn set_loss_scale(&self, scale: LossScale) -> Result<()> {
        self.runtime.set_loss_scale(scale)
    }

    /// Sets how the buffers of data-parallel ranks are made equal after each step; by default as rank 0
    /// has them. Every rank calls it alike; not collective.
    pub fn set_sync_buffers(&self, how: SyncBuffers) {
        self.runtime.set_sync_buffers(how);
    }

    /// The device mesh.
    pub fn device_mesh(&self) -> &DeviceMesh {
        self.runtime.mesh()
    }

    /// The tree of the model that was set up.
    ///
    /// # Errors
    /// Before [`setup_module`](Self::setup_module).
    pub fn module_tree(&self) -> Result<&ModuleTree> {
        self.runtime.tree()
    }

    /// Builds a model and an optimizer for it. Collective.
    ///
    /// # Errors
    /// As [`setup_module`](Self::setup_module) and [`setup_optimizer`](Self::setup_optimizer).
    pub fn setup<M>(
        &mut self,
        build: impl FnOnce(&ModuleBuilder) -> Result<M>,
        optimizer: &dyn OptimizerConfig,
    ) -> Result<(M, FabricOptimizer)> {
        let model = self.setup_module(build)?;
        Ok((model, self.setup_optimizer(optimizer)?))
    }

    /// Builds a model with the closure, lets the strategy distribute it over the ranks, and
    /// initialises this rank's part. Several models that train together (a generator and its
    /// discriminator, a teacher and its pupil) are built by one call, under prefixes of their own. Collective.
    ///
    /// # Errors
    /// If a model was set up already, the ranks' models differ, or the strategy cannot distribute
    /// it.
    pub fn setup_module<M>(
        &mut self,
        build: impl FnOnce(&ModuleBuilder) -> Result<M>,
    ) -> Result<M> {
        if self.runtime.tree().is_ok() {
            return Err(Error::other(
                "a model has been set up already. Several models that train together are built by one call, \
                 as a tuple for instance, and have their own optimizers (`setup_optimizer_for`)",
            ));
        }
        let describing = self.log_execution_time("describing the model");
        let builder = ModuleBuilder::new(self.init.clone());
        let model = build(&builder)?;
        let tree = builder.finish()?;
        check_frozen(&self.init.frozen, &tree)?;
        drop(describing);
        let distributing = self.log_execution_time("distributing and initialising the model");
        self.runtime.setup_module(tree, self.seed)?;
        drop(distributing);
        watch_units(self.runtime.profiler(), self.module_tree()?.units());
        if let Some(dir) = self.adapter_from() {
            self.load_adapter(dir)?;
        }
        Ok(model)
    }

    /// Logs on this rank, when the guard is dropped, how long what a program did took, as
    /// composer's `log_execution_time`: `FULGURITE_LOG=fulgurite::time=debug` shows it, with the times of
    /// what Fabric does itself once (setting up the model, loading). What comes in every step is for
    /// [`phase`](Self::phase).
    pub fn log_execution_time(&self, what: impl Into<Cow<'static, str>>) -> LogExecutionTime {
        LogExecutionTime::begin(self.global_rank(), what)
    }

    /// Builds an optimizer for the trainable parameters of the model that was set up, but for those that
    /// have one of [`setup_optimizer_for`](Self::setup_optimizer_for). Local.
    ///
    /// # Errors
    /// If no model was set up, nothing is trainable, or the configuration does not fit.
    pub fn setup_optimizer(&self, config: &dyn OptimizerConfig) -> Result<FabricOptimizer> {
        self.build_optimizer(config, 0)
    }

    /// Builds one of several optimizers: for the trainable parameters whose names one of the patterns
    /// matches, as [`pattern_matches`] reads them. Each has gradients, losses and totals of its own, since its
    /// last step. Before the first backward, on all ranks in the same order. Local.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use fulgurite_core::Result;
    /// # use fulgurite_core::fabric::Fabric;
    /// # use fulgurite_core::module::{Module, ModuleBuilder};
    /// # use fulgurite_core::nn::{Linear, Loss};
    /// # use fulgurite_core::optim::AdamW;
    /// # fn train(strategy: Box<dyn fulgurite_core::strategy::Strategy>) -> Result<()> {
    /// let mut fabric = Fabric::single(strategy, 42)?;
    /// let (generator, critic) = fabric.setup_module(|b| {
    ///     Ok((Linear::new(&b.pp("generator"), 4, 2)?, Linear::new(&b.pp("critic"), 2, 1)?))
    /// })?;
    /// let mut of_generator = fabric.setup_optimizer_for(&AdamW::default(), &["generator"])?;
    /// let mut of_critic = fabric.setup_optimizer_for(&AdamW::default(), &["critic"])?;
    ///
    /// let noise = Tensor::ones((3, 4), DType::F32, &Device::Cpu)?;
    /// let fake = generator.forward(&noise)?;
    /// {
    ///     let _turn = fabric.toggle_optimizer(&of_critic)?;
    ///     let loss = critic.forward(&fake.detach())?.sqr()?.sum_all()?;
    ///     fabric.backward(&Loss::new(loss, 3.0))?;
    ///     of_critic.step()?;
    /// }
    /// let _turn = fabric.toggle_optimizer(&of_generator)?;
    /// let loss = critic.forward(&fake)?.sqr()?.sum_all()?; // its gradient goes through the critic
    /// fabric.backward(&Loss::new(loss, 3.0))?;
    /// of_generator.step()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// If no model was set up, a pattern matches no trainable parameter, one has another optimizer, or the
    /// configuration does not fit.
    pub fn setup_optimizer_for(
        &self,
        config: &dyn OptimizerConfig,
        patterns: &[&str],
    ) -> Result<FabricOptimizer> {
        let tree = self.module_tree()?;
        if let Some(pattern) =
            patterns.iter().find(|p| !tree.trainable().any(|q| pattern_matches(p, q.fqn())))
        {
            return Err(Error::Config(format!(
                "the optimizer for {pattern:?}: no trainable parameter has a name that this pattern matches"
            )));
        }
        let has = |fqn: &str| any_pattern_matches(patterns, fqn);
        let index = self.runtime.add_optimizer(&has)?;
        self.build_optimizer(config, index)
    }

    /// Builds the optimizer of the trainable parameters that have this one.
    fn build_optimizer(
        &self,
        config: &dyn OptimizerConfig,
        index: usize,
    ) -> Result<FabricOptimizer> {
        let tree = self.module_tree()?;
        if tree.trainable().next().is_none() {
            return Err(Error::other("every parameter is frozen; there is nothing to train"));
        }
        // With the frozen ones, which patterns of the configuration may name.
        let own = |p: &&Parameter| !p.requires_grad() || p.optimizer() == index;
        let own: Vec<Parameter> = tree.parameters().iter().filter(own).cloned().collect();
        if !own.iter().any(Parameter::requires_grad) {
            return Err(Error::other("there is no parameter left that has no optimizer yet"));
        }
        let mut optimizer = config.build(&own)?;
        if index == 0 {
            self.runtime.note_first_optimizer()?;
        }
        optimizer.set_seed(self.seed);
        Ok(FabricOptimizer::new(optimizer, self.runtime.clone(), index))
    }

    /// Gives an optimizer its turn: until the guard is dropped, forwards and backwards compute gradients for
    /// its parameters only, and the others take part as constants (Lightning's `toggle_optimizer`). It is to
    /// live from before the forward until after the backward, on all ranks. Local.
    ///
    /// # Errors
    /// If no model was set up.
    pub fn toggle_optimizer(&self, optimizer: &FabricOptimizer) -> Result<PausedGradients> {
        optimizer.toggle()
    }

    /// Enters the [scope](ForwardScope) of the following forwards on this thread, on which dropout,
    /// context parallelism and a parallel loss depend, until the guard is dropped. `first_sample`
    /// is the index of this rank's first sample in the step's global batch. The batches of
    /// [`setup_data`](Self::setup_data) have scopes of their own.
    pub fn forward_scope(&self, training: bool, step: u64, first_sample: u64) -> ContextGuard {
        self.scope(training, step, first_sample).enter()
    }

    pub(crate) fn scope(&self, training: bool, step: u64, first_sample: u64) -> ForwardScope {
        ForwardScope {
            training,
            seed: self.seed,
            step,
            first_sample,
            context: self.context_parallel(),
            loss_parallel: true,
            is_padding: false,
            batch_ranks: self.runtime.batch_ranks(),
        }
    }

    /// The ranks that share sequences with this one; `None` if sequences are whole. Batches are cut
    /// with [`DataModule::shard_sequence`](fulgurite_engine::data::DataModule::shard_sequence).
    pub fn context_parallel(&self) -> Option<ContextParallel> {
        self.runtime.context_parallel()
    }

    /// Runs the backward of a micro-batch's loss, which adds to the step's gradients. Unless under
    /// [`no_backward_sync`](Self::no_backward_sync), gradients are reduced over the ranks during
    /// backward, and complete when this returns. Collective.
    ///
    /// Each rank needs at least one sample: candle leaves operations on empty tensors out of the graph, so that
    /// their units would send nothing. A rank that has none computes the loss of any sample and passes
    /// [`Loss::ignored`].
    ///
    /// # Errors
    /// If the loss depends on no trainable parameter, if context-parallel ranks share sequences and
    /// the loss was not computed in a [scope](ForwardScope) that says so, or if a peer fails.
    pub fn backward(&self, loss: &Loss) -> Result<()> {
        self.runtime.backward(loss)
    }

    /// While the guard lives and `enabled` is true, backward does not reduce gradients over ranks:
    /// for all micro-batches of a step but the last. Dropping the guard restores the state before.
    pub fn no_backward_sync(&self, enabled: bool) -> NoSyncGuard {
        self.runtime.no_backward_sync(enabled)
    }

    /// Whether the next backward reduces gradients over ranks: not under
    /// [`no_backward_sync`](Self::no_backward_sync).
    pub fn synchronises_backward(&self) -> bool {
        self.runtime.synchronises()
    }

    /// The step's loss and count over all ranks and micro-batches, and the sum of each of `flags`
    /// over the ranks. The first call of a step is collective; later calls return the same and
    /// ignore their flags.
    ///
    /// # Errors
    /// If a peer fails, or there are [several optimizers](FabricOptimizer::step_totals). On every
    /// rank, if the count of a loss is negative or not finite on any.
    pub fn step_totals(&self, flags: &[f64]) -> Result<StepTotals> {
        self.runtime.step_totals(self.runtime.only_optimizer()?, flags)
    }

    /// Checks that all trainable parameters have a gradient, in the first step. The optimizer's
    /// step calls it. Collective.
    ///
    /// # Errors
    /// [`Error::UnusedParameters`] under [`UnusedParameters::Error`]. If there are several optimizers.
    pub fn audit_gradients(&self, policy: UnusedParameters) -> Result<()> {
        self.runtime.audit_gradients(self.runtime.only_optimizer()?, policy)
    }

    /// To be called after writing values into the model's local shards, if not by
    /// [`load`](Self::load); makes the model ready for a forward. Collective.
    ///
    /// # Errors
    /// If replicas have different values, or a peer fails.
    pub fn finish_load(&self) -> Result<()> {
        self.runtime.finish_load()
    }

    /// The norm of the mean gradient over all parameters, which may be infinite or NaN. Collective.
    ///
    /// # Errors
    /// If a peer fails, or there are several optimizers.
    pub fn unchecked_gradient_norm(&self) -> Result<f64> {
        self.runtime.gradient_norm(self.runtime.only_optimizer()?)
    }

    /// The norm of the mean gradient of each group of parameters, which `group` names by their names: one
    /// all-reduce. Between backward and the optimizer's step. Collective.
    ///
    /// # Errors
    /// If a peer fails, or there are [several optimizers](FabricOptimizer::gradient_norms).
    pub fn gradient_norms(&self, group: &dyn Fn(&str) -> String) -> Result<BTreeMap<String, f64>> {
        self.runtime.gradient_norms(self.runtime.only_optimizer()?, group)
    }

    /// The norm of the mean gradient over all parameters of the optimizer. Collective.
    ///
    /// # Errors
    /// [`Error::NonFinite`] on every rank if it is not finite; nothing is changed.
    pub fn gradient_norm(&self, optimizer: &FabricOptimizer) -> Result<f64> {
        optimizer.gradient_norm()
    }

    /// Clips the next optimizer step's gradients to a total norm of `max_norm`. Returns the norm
    /// before clipping. Collective.
    ///
    /// # Errors
    /// As [`gradient_norm`](Self::gradient_norm), and if `max_norm` is not positive.
    pub fn clip_gradients_norm(
        &self,
        optimizer: &mut FabricOptimizer,
        max_norm: f64,
    ) -> Result<f64> {
        optimizer.clip_gradients_norm(max_norm)
    }

    /// Clamps each element of the next optimizer step's gradients to plus or minus `clip_value`.
    /// Returns the norm before clipping. Collective.
    ///
    /// # Errors
    /// As [`clip_gradients_norm`](Self::clip_gradients_norm).
    pub fn clip_gradients_value(
        &self,
        optimizer: &mut FabricOptimizer,
        clip_value: f64,
    ) -> Result<f64> {
        optimizer.clip_gradients_value(clip_value)
    }

    /// Begins a phase of `trainer.profiler` and of NVIDIA's tools, which ends when the guard is
    /// dropped; `None` without any. A phase within another one is a part of that.
    #[must_use = "a phase ends when its guard is dropped"]
    pub fn phase(&self, name: &'static str) -> Option<Phase> {
        self.runtime.phase(name)
    }

    /// Where the time went since this was called last, by `trainer.profiler`, and the text of a trace
    /// file if spans were traced; `None` without a profiler. The trainer calls it at the end of a run.
    /// Collective.
    ///
    /// # Errors
    /// If a peer fails.
    pub fn profile(&self) -> Result<Option<(Profile, Option<String>)>> {
        let Some(profiler) = self.runtime.profiler() else { return Ok(None) };
        profiler.finish(&*self.world).map(Some)
    }

    /// As [`profile`](Self::profile), of this rank alone, where others may have failed; `None` also if nothing was
    /// recorded.
    pub(crate) fn own_profile(&self) -> Result<Option<(Profile, Option<String>)>> {
        self.runtime.profiler().map_or(Ok(None), |profiler| profiler.finish_alone())
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        self.runtime.teardown();
    }
}
