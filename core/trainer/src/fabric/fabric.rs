//! [`Fabric`].

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use super::FabricOptimizer;
use super::SyncBuffers;
use super::attempts::Attempts;
use super::launcher::check_frozen;
use crate::profiler::watch_units;
use crate::runtime::{NoSyncGuard, SamplerShare, StrategyRuntime};
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
use fulgurite_engine::strategy::{Capabilities, Pipeline, StepTotals, Strategy};
use fulgurite_launch::LaunchedRank;
use fulgurite_nn::Loss;

/// Trains in a hand-written loop under a strategy, like Lightning's `Fabric`.
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
///     let _no_sync = fabric.no_backward_sync(accumulating); // until it is dropped
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
    /// The device's accelerator; `None` on the CPU, or if the caller gave the device.
    pub(super) accelerator: Option<Arc<dyn Accelerator>>,
    /// Present if a step that runs out of memory can be abandoned and start again.
    pub(super) attempts: Option<Attempts>,
    /// Directory of the adapter loaded last, or to load once the model is set up.
    pub(super) adapter_from: Mutex<Option<PathBuf>>,
    /// Names of the parameters outside adapters that were filled from that directory.
    pub(super) beside_adapter: Mutex<BTreeSet<String>>,
    /// Path of the adapters' base model, for saved adapters.
    pub(crate) base_model: Option<String>,
    /// PEFT's `task_type` of the model.
    pub(crate) peft_task_type: Option<&'static str>,
    /// The workers that make batches.
    pub(super) workers: Workers,
    /// [`SaveMeta::saved_at`](fulgurite_checkpoint::SaveMeta::saved_at) of the last checkpoint
    /// saved or loaded; 0 before.
    pub(super) saved_at: AtomicU64,
    /// Kept as long as this rank takes part in its job.
    pub(super) launched: Option<LaunchedRank>,
}

/// A strategy's name and capabilities; see [`Fabric::strategy`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StrategyInfo {
    /// The strategy's name.
    pub name: String,
    /// What the strategy can do.
    pub capabilities: Capabilities,
}

impl Fabric {
    /// Creates a Fabric over the ranks of `world`, under a strategy.
    ///
    /// Collective, because the strategy creates its mesh.
    ///
    /// # Errors
    /// If the strategy does not fit the world size, or if activation offload to the host is
    /// requested but the device is the CPU.
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
            peft_task_type: Some("CAUSAL_LM"),
            workers,
            saved_at,
            launched: None,
        })
    }

    /// Creates a Fabric on one rank.
    ///
    /// # Errors
    /// If the strategy needs more ranks.
    pub fn single(strategy: Box<dyn Strategy>, seed: u64) -> Result<Self> {
        Self::new(Arc::new(Solo::new("world", 0)), strategy, ModuleInit::default(), seed)
    }

    /// Returns the strategy's name and capabilities.
    ///
    /// # Errors
    /// Within another call of the strategy, such as in one of its hooks.
    pub fn strategy(&self) -> Result<StrategyInfo> {
        Ok(StrategyInfo { name: self.runtime.name()?, capabilities: self.runtime.capabilities()? })
    }

    /// Returns this rank's share of the data, by its coordinate in `data_parallel`.
    ///
    /// Tensor- and context-parallel ranks have the same samples.
    ///
    /// # Errors
    /// If the mesh lacks this dimension.
    pub(crate) fn sampler_share(&self) -> Result<SamplerShare> {
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

    /// The run's seed.
    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns the strategy's pipeline, if ranks compute different stages of the model. `None`
    /// before a model is set up.
    ///
    /// # Errors
    /// Within another call of the strategy.
    pub fn pipeline(&self) -> Result<Option<Arc<dyn Pipeline>>> {
        self.runtime.pipeline()
    }

    /// Returns the loss scale of backwards in f16; `None` in other dtypes.
    ///
    /// The loss is multiplied by its factor, and optimizers divide the gradients by the factor.
    /// Hooks see the undivided gradients.
    ///
    /// # Errors
    /// Within another call of the strategy.
    pub fn loss_scale(&self) -> Result<Option<LossScale>> {
        self.runtime.loss_scale()
    }

    /// Sets the loss scale: its factor, and how the factor changes.
    ///
    /// Call it between two steps, with the same scale on all ranks. It does nothing in dtypes other
    /// than f16.
    ///
    /// # Errors
    /// Within another call of the strategy.
    pub fn set_loss_scale(&self, scale: LossScale) -> Result<()> {
        self.runtime.set_loss_scale(scale)
    }

    /// Sets how the buffers of data-parallel ranks are synchronised after each step.
    ///
    /// By default all ranks get the buffers of the first data-parallel rank. Every rank must make
    /// the same call; not collective.
    pub fn set_sync_buffers(&self, how: SyncBuffers) {
        self.runtime.set_sync_buffers(how);
    }

    /// The device mesh.
    pub fn device_mesh(&self) -> &DeviceMesh {
        self.runtime.mesh()
    }

    /// Returns the model's tree.
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

    /// Builds a model, distributes it over the ranks, and initialises this rank's part. Collective.
    ///
    /// The closure builds the model, and the strategy distributes it. Build several models that
    /// train together (a generator and its discriminator, a teacher and its student) in one call,
    /// each under its own prefix.
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
        let describing = self.measurements().log_execution_time("describing the model");
        let builder = ModuleBuilder::new(self.init.clone());
        let model = build(&builder)?;
        let tree = builder.finish()?;
        check_frozen(&self.init.frozen, &tree)?;
        drop(describing);
        let distributing =
            self.measurements().log_execution_time("distributing and initialising the model");
        self.runtime.setup_module(tree, self.seed)?;
        drop(distributing);
        watch_units(self.runtime.profiler(), self.module_tree()?.units())?;
        if let Some(dir) = self.adapter_from() {
            self.checkpoints().load_adapter(dir)?;
        }
        Ok(model)
    }

    /// Builds an optimizer for the model's trainable parameters. Not collective.
    ///
    /// Parameters with an optimizer from [`setup_optimizer_for`](Self::setup_optimizer_for) are
    /// left out.
    ///
    /// # Errors
    /// If no model was set up, if no trainable parameter is left, or if the configuration does not
    /// fit.
    pub fn setup_optimizer(&self, config: &dyn OptimizerConfig) -> Result<FabricOptimizer> {
        self.build_optimizer(config, 0)
    }

    /// Builds one of several optimizers, for the trainable parameters that match a pattern.
    ///
    /// Patterns match names as in [`pattern_matches`]. Each optimizer has its own gradients, losses
    /// and totals since its last step. Call this before the first backward, in the same order on
    /// all ranks. Not collective.
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
    /// If no model was set up, if a pattern matches no trainable parameter, if a matching parameter
    /// has another optimizer, or if the configuration does not fit.
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

    /// Builds the optimizer for the trainable parameters with optimizer `index`.
    fn build_optimizer(
        &self,
        config: &dyn OptimizerConfig,
        index: usize,
    ) -> Result<FabricOptimizer> {
        let tree = self.module_tree()?;
        if tree.trainable().next().is_none() {
            return Err(Error::other("every parameter is frozen; there is nothing to train"));
        }
        // Includes frozen parameters, because patterns of the configuration may name them.
        let own = |p: &&Parameter| !p.requires_grad() || p.optimizer() == index;
        let own: Vec<Parameter> = tree.parameters().iter().filter(own).cloned().collect();
        if !own.iter().any(Parameter::requires_grad) {
            return Err(Error::other("there is no parameter left that has no optimizer yet"));
        }
        let mut optimizer = config.build(&own)?;
        if index == 0 {
            self.runtime.note_first_optimizer()?;
        }
        optimizer.set_ranks(self.runtime.update_ranks()?)?;
        optimizer.set_seed(self.seed);
        Ok(FabricOptimizer::new(optimizer, self.runtime.clone(), index))
    }

    /// Computes gradients for one optimizer's parameters only, until the guard is dropped.
    ///
    /// Forwards and backwards treat the other parameters as constants, as after Lightning's
    /// `toggle_optimizer`. The guard must live from before the forward until after the backward, on
    /// all ranks. Not collective.
    ///
    /// # Errors
    /// If no model was set up.
    pub fn toggle_optimizer(&self, optimizer: &FabricOptimizer) -> Result<PausedGradients> {
        optimizer.toggle()
    }

    /// Enters the [scope](ForwardScope) of this thread's forwards, until the guard is dropped.
    ///
    /// Dropout, context parallelism and a parallel loss depend on the scope. `first_sample` is the
    /// index of this rank's first sample in the step's global batch. Batches of
    /// [`setup_data`](Self::setup_data) bring their own scopes.
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
            batch_invariant: false,
            batch_ranks: self.runtime.batch_ranks(),
        }
    }

    /// Returns the ranks that share sequences with this rank; `None` if sequences are whole.
    ///
    /// Batches are cut with
    /// [`DataModule::shard_sequence`](fulgurite_engine::data::DataModule::shard_sequence).
    pub fn context_parallel(&self) -> Option<ContextParallel> {
        self.runtime.context_parallel()
    }

    /// Runs the backward of a micro-batch's loss, which adds to the step's gradients. Collective.
    ///
    /// Unless under [`no_backward_sync`](Self::no_backward_sync), gradients are reduced over the
    /// ranks during backward, and complete when this returns.
    ///
    /// Each rank needs at least one sample: candle leaves operations on empty tensors out of the
    /// graph, and their units would send nothing. A rank without samples computes the loss of any
    /// sample and passes [`Loss::ignored`].
    ///
    /// # Errors
    /// If the loss depends on no trainable parameter, or if a peer fails. Also if context-parallel
    /// ranks share sequences, but the loss was not computed in a [scope](ForwardScope) with context
    /// parallelism.
    pub fn backward(&self, loss: &Loss) -> Result<()> {
        self.runtime.backward(loss)
    }

    /// Turns off gradient reduction over ranks while the guard lives; turns it on if not `enabled`.
    ///
    /// Turn it off for all micro-batches of a step except the last. Dropping the guard restores the
    /// previous state.
    pub fn no_backward_sync(&self, enabled: bool) -> NoSyncGuard {
        self.runtime.no_backward_sync(enabled)
    }

    /// Returns the step's loss and count over all ranks and micro-batches.
    ///
    /// Also sums each of `flags` over the ranks. The first call of a step is collective; later
    /// calls return the same totals and ignore `flags`.
    ///
    /// # Errors
    /// If a peer fails, or there are [several optimizers](FabricOptimizer::step_totals). On every
    /// rank, if the count of a loss is negative or not finite on any rank.
    pub fn step_totals(&self, flags: &[f64]) -> Result<StepTotals> {
        self.runtime.step_totals(self.runtime.only_optimizer()?, flags)
    }

    /// Clips the next optimizer step's gradients to a total norm of `max_norm`. Collective.
    ///
    /// Returns the norm before clipping.
    ///
    /// # Errors
    /// As [`FabricOptimizer::gradient_norm`], and if `max_norm` is not positive.
    pub fn clip_gradients_norm(
        &self,
        optimizer: &mut FabricOptimizer,
        max_norm: f64,
    ) -> Result<f64> {
        optimizer.clip_gradients_norm(max_norm)
    }

    /// Clamps each element of the next optimizer step's gradients to ±`clip_value`. Collective.
    ///
    /// Returns the norm before clipping.
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
}

impl Drop for Fabric {
    fn drop(&mut self) {
        self.runtime.teardown();
    }
}
