//! [`StrategyRuntime`].

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use candle_core::{DType, Device, Tensor};

use super::UnusedParameters;
use super::buffers::SyncBuffers;
use super::magnitudes::Magnitudes;
use super::no_sync::NoSyncGuard;
use super::step::StepState;
use crate::profiler::{Phase, Profiler};
use crate::{Error, Result};
use fulgurite_engine::autograd::{detects_anomalies, refuse_variables, refuse_wrong_gradients};
use fulgurite_engine::collective::{Collective, ProcessGroup, RANKS_DIFFER, ReduceOp};
use fulgurite_engine::execution::read;
use fulgurite_engine::mesh::{
    CONTEXT_PARALLEL, DATA_PARALLEL, DATA_PARALLEL_REPLICATE, DATA_PARALLEL_SHARD, DP_CP,
    DP_SHARD_CP, DeviceMesh,
};
use fulgurite_engine::module::{BatchRanks, ModuleTree};
use fulgurite_engine::optim::{LossScale, UpdateRanks};
use fulgurite_engine::parallel::{ContextParallel, check_loss};
use fulgurite_engine::parameter::{ParameterSlot, UnusedBecause};
use fulgurite_engine::strategy::{
    Capabilities, Loss, Strategy, StrategyContext, StrategyExtensions, materialize,
};

/// A rank's share of the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SamplerShare {
    /// Number of data-parallel replicas, each with data of its own.
    pub(crate) num_replicas: usize,
    /// This rank's replica.
    pub(crate) rank: usize,
}

/// A strategy with its mesh, its model, and the state of the step.
///
/// Mesh and model are read without a lock. Strategy calls hold the state's lock. A nested call is
/// an error, not a deadlock.
pub(crate) struct StrategyRuntime {
    mesh: DeviceMesh,
    model: OnceLock<SetUp>,
    synchronise: Arc<AtomicBool>,
    state: Mutex<RuntimeState>,
    profiler: OnceLock<Profiler>,
    sync_buffers: Mutex<SyncBuffers>,
    /// Policies for parameters without a gradient, by optimizer index. Unset means the default.
    unused: Mutex<BTreeMap<usize, UnusedParameters>>,
    /// The ranks whose batches make up the global batch, for layers that compute over all of it.
    batch_ranks: OnceLock<BatchRanks>,
    /// The ranks that update this rank's copy of the model.
    update_ranks: OnceLock<UpdateRanks>,
}

/// The model that was set up.
struct SetUp {
    tree: ModuleTree,
    slots: Vec<ParameterSlot>,
}

/// The strategy and the state of the steps, behind the lock.
pub(super) struct RuntimeState {
    pub(super) strategy: Box<dyn Strategy>,
    no_extensions: NoExtensions,
    /// By [`Parameter::optimizer`](fulgurite_engine::parameter::Parameter::optimizer).
    pub(super) steps: Vec<StepState>,
    /// Whether the optimizer with index 0 was built.
    pub(super) first_is_built: bool,
    /// Whether each slot's parameter got a gradient on this rank since its optimizer's last step.
    pub(super) delivered: Vec<bool>,
    magnitudes: Magnitudes,
    /// The loss scale, if gradients are computed in f16.
    pub(super) loss_scale: Option<LossScale>,
}

/// The defaults of [`StrategyExtensions`], for strategies without extensions.
struct NoExtensions;

impl StrategyExtensions for NoExtensions {}

impl RuntimeState {
    /// The strategy's extensions, or the defaults if it has none.
    pub(super) fn extensions(&mut self) -> &mut dyn StrategyExtensions {
        match self.strategy.extensions() {
            Some(extensions) => extensions,
            None => &mut self.no_extensions,
        }
    }
}

impl StrategyRuntime {
    /// Builds the strategy's mesh. Collective.
    pub(crate) fn new(strategy: Box<dyn Strategy>, world: Arc<dyn ProcessGroup>) -> Result<Self> {
        let mesh = strategy.device_mesh(world)?;
        Ok(Self {
            mesh,
            model: OnceLock::new(),
            synchronise: Arc::new(AtomicBool::new(true)),
            state: Mutex::new(RuntimeState {
                strategy,
                no_extensions: NoExtensions,
                steps: vec![StepState::default()],
                first_is_built: false,
                delivered: Vec::new(),
                magnitudes: Magnitudes::default(),
                loss_scale: None,
            }),
            profiler: OnceLock::new(),
            sync_buffers: Mutex::default(),
            unused: Mutex::default(),
            batch_ranks: OnceLock::new(),
            update_ranks: OnceLock::new(),
        })
    }

    /// Locks the state for one call. One thread drives a strategy, so the lock is held already only
    /// if this call is nested in another.
    ///
    /// # Errors
    /// If the lock is held.
    pub(super) fn lock_state(&self) -> Result<MutexGuard<'_, RuntimeState>> {
        self.state.try_lock().map_err(|_| {
            Error::other(
                "the strategy is at work: a call that needs it comes from within another one (from a \
                 hook or the backward of an operation), or from a second thread. Make it before or \
                 after, on the thread that trains",
            )
        })
    }

    /// Sets the profiler. Only the first call has an effect.
    pub(crate) fn set_profiler(&self, profiler: Profiler) {
        self.profiler.get_or_init(|| profiler);
    }

    pub(crate) fn profiler(&self) -> Option<&Profiler> {
        self.profiler.get()
    }

    /// See [`Measurements::phase`](crate::fabric::Measurements::phase).
    pub(crate) fn phase(&self, name: &'static str) -> Option<Phase> {
        Phase::begin(self.profiler(), name)
    }

    pub(crate) fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// The model's tree.
    ///
    /// # Errors
    /// Before [`setup_module`](Self::setup_module).
    pub(crate) fn tree(&self) -> Result<&ModuleTree> {
        Ok(&self.model()?.tree)
    }

    fn model(&self) -> Result<&SetUp> {
        self.model.get().ok_or_else(|| {
            Error::other("no model has been set up; call `Fabric::setup` (`setup_module`) first")
        })
    }

    /// The parameters' slots; empty before [`setup_module`](Self::setup_module).
    pub(super) fn slots(&self) -> &[ParameterSlot] {
        self.model.get().map_or(&[], |model| &model.slots)
    }

    pub(super) fn context(&self) -> Result<StrategyContext<'_>> {
        let SetUp { tree, slots } = self.model()?;
        Ok(StrategyContext { mesh: &self.mesh, tree, slots })
    }

    pub(crate) fn name(&self) -> Result<String> {
        Ok(self.lock_state()?.strategy.name().to_owned())
    }

    pub(crate) fn capabilities(&self) -> Result<Capabilities> {
        Ok(self.lock_state()?.strategy.capabilities())
    }

    /// Distributes a model with the strategy and makes it ready for a forward. Collective.
    pub(crate) fn setup_module(&self, mut tree: ModuleTree, seed: u64) -> Result<()> {
        let mut state = self.lock_state()?;
        state.strategy.setup_module(&mut tree, &self.mesh, seed)?;
        materialize::buffers(&tree, seed)?;
        materialize::verify_same_buffers(&tree, &**self.mesh.world())?;
        if tree.synchronises_batches() {
            self.set_batch_ranks()?;
        }
        self.set_update_ranks(state.extensions().replicas_train_apart())?;
        let slots = tree.slots();
        state.delivered = vec![false; slots.len()];
        let in_f16 =
            |slot: &ParameterSlot| slot.requires_grad() && slot.compute_dtype() == DType::F16;
        state.loss_scale = slots.iter().any(in_f16).then(LossScale::default);
        self.model.get_or_init(|| SetUp { tree, slots });
        state.magnitudes = Magnitudes::start(self.context()?)?;
        state.strategy.prepare_forward(self.context()?)
    }

    pub(crate) fn prepare_forward(&self) -> Result<()> {
        self.lock_state()?.strategy.prepare_forward(self.context()?)
    }

    pub(crate) fn finish_load(&self) -> Result<()> {
        let context = self.context()?;
        let mut state = self.lock_state()?;
        state.magnitudes.follow(context)?;
        state.strategy.finish_load(context)?;
        drop(state);
        materialize::verify_same_buffers(context.tree, &**self.mesh.world())
    }

    pub(crate) fn set_sync_buffers(&self, how: SyncBuffers) {
        *self.sync_buffers.lock().expect("no panic while setting") = how;
    }

    pub(super) fn sync_buffers(&self) -> SyncBuffers {
        *self.sync_buffers.lock().expect("no panic while reading")
    }

    pub(super) fn unused_policies(&self) -> MutexGuard<'_, BTreeMap<usize, UnusedParameters>> {
        self.unused.lock().expect("no panic while it is held")
    }

    /// Creates the process group of the ranks that share a global batch. Collective.
    fn set_batch_ranks(&self) -> Result<()> {
        if self.mesh.size(DP_CP)? == 1 {
            return Ok(());
        }
        // A separate group: gradients are reduced in the mesh's groups while layers compute.
        let dims = [DATA_PARALLEL_REPLICATE, DATA_PARALLEL_SHARD, CONTEXT_PARALLEL];
        let names = self.mesh.layout().names();
        let dims = dims.into_iter().filter(|dim| names.iter().any(|name| name == dim));
        let partition = self.mesh.layout().partition(&dims.collect::<Vec<_>>())?;
        if let Some(ranks) = BatchRanks::new(self.mesh.world().split(&partition, "batch_ranks")?) {
            self.batch_ranks.get_or_init(|| ranks);
        }
        Ok(())
    }

    /// Creates the group of the ranks that update one copy of the model: a replica's if replicas
    /// train apart. Collective then.
    fn set_update_ranks(&self, replicas_train_apart: bool) -> Result<()> {
        let ranks = if replicas_train_apart && self.mesh.size(DATA_PARALLEL_REPLICATE)? > 1 {
            let names = self.mesh.layout().names();
            let within = names.iter().filter(|name| *name != DATA_PARALLEL_REPLICATE);
            let within: Vec<&str> = within.map(String::as_str).collect();
            UpdateRanks::within(&self.mesh, self.mesh.submesh(&within)?.world().clone())?
        } else {
            UpdateRanks::new(&self.mesh)?
        };
        self.update_ranks.get_or_init(|| ranks);
        Ok(())
    }

    /// The ranks that update this rank's copy of the model.
    ///
    /// # Errors
    /// Before [`setup_module`](Self::setup_module).
    pub(crate) fn update_ranks(&self) -> Result<&UpdateRanks> {
        self.model()?;
        self.update_ranks.get().ok_or_else(|| Error::other("no model has been set up"))
    }

    pub(crate) fn batch_ranks(&self) -> Option<BatchRanks> {
        self.batch_ranks.get().cloned()
    }

    /// See [`Fabric::context_parallel`](crate::fabric::Fabric::context_parallel).
    pub(crate) fn context_parallel(&self) -> Option<ContextParallel> {
        ContextParallel::new(self.mesh.group(CONTEXT_PARALLEL).ok()?.clone())
    }

    /// Whether the next backward reduces gradients over ranks.
    fn synchronises(&self) -> bool {
        self.synchronise.load(Ordering::Relaxed)
    }

    pub(crate) fn no_backward_sync(&self, enabled: bool) -> NoSyncGuard {
        NoSyncGuard::set(&self.synchronise, !enabled)
    }

    /// See [`Fabric::backward`](crate::fabric::Fabric::backward).
    pub(crate) fn backward(&self, loss: &Loss) -> Result<()> {
        let _phase = self.phase("backward");
        loss.check_sequence_ranks(self.context_parallel().map_or(1, |context| context.size()))?;
        let context = self.context()?;
        let state = &mut *self.lock_state()?;
        if state.extensions().pipeline().is_some() {
            return Err(Error::other(
                "the strategy's ranks compute different stages of the model, so that no rank has a whole backward: a \
                 pipeline runs in the Trainer's steps, with automatic optimization",
            ));
        }
        let RuntimeState { strategy, steps, loss_scale, .. } = &mut *state;
        let sum = loss.sum();
        let synchronise = self.synchronises() || !strategy.capabilities().no_sync;
        self.note_loss(context, steps, loss, synchronise)?;
        let scaled = match loss_scale {
            Some(scale) => Some(self.scale_loss(loss, scale)?),
            None => None,
        };
        let sum = scaled.as_ref().unwrap_or(sum);
        strategy.begin_backward(context, synchronise)?;
        // Gradients are in the reducers, not in candle's store.
        let grads = sum.backward().map_err(|error| explain_difference(error.into()))?;
        // An optimizer without parameters is never audited, such as the first one if all others
        // have names.
        let is_first = |slot: &ParameterSlot| {
            slot.takes_grad() && steps.get(slot.optimizer()).is_some_and(|step| !step.audited)
        };
        if context.slots.iter().any(is_first) {
            refuse_variables(sum, &grads)?;
            refuse_wrong_gradients(sum)?;
        }
        drop(grads);
        self.end_backward(state, context, synchronise)
    }

    /// Checks a loss before its backward, and adds it to the steps of its optimizers.
    pub(super) fn note_loss(
        &self,
        context: StrategyContext<'_>,
        steps: &mut [StepState],
        loss: &Loss,
        synchronise: bool,
    ) -> Result<()> {
        let sum = loss.sum();
        if !sum.track_op() {
            let detached = |slot: &&ParameterSlot| {
                slot.takes_grad() && slot.unused_because() == UnusedBecause::Detached
            };
            let read = context.slots.iter().find(detached).map(|slot| {
                format!(
                    ". Forward read the values of `{}` with `Parameter::value`, which are detached: compute with \
                     `Parameter::tensor`",
                    slot.fqn()
                )
            });
            return Err(Error::other(format!(
                "the loss does not depend on any trainable parameter: all are frozen, or belong to \
                 another optimizer than the one whose turn it is; the model was called inside \
                 `no_grad`, or an operation without a backward cut the graph{}",
                read.unwrap_or_default()
            )));
        }
        check_loss(sum)?;
        let loss_sum = loss.sum_tensor()?;
        if detects_anomalies() {
            let loss_sum = read::scalar::<f64>(&loss_sum, "detect_anomaly")?;
            if !loss_sum.is_finite() {
                return Err(Error::other(format!(
                    "detect_anomaly: the loss is {loss_sum}, and every layer gave finite values: look at how \
                     the loss is computed from them"
                )));
            }
        }
        // Under a pipeline, of another rank's parameters too.
        let is_trained =
            |slot: &ParameterSlot| slot.takes_grad() || slot.requires_grad() && slot.is_elsewhere();
        for (optimizer, step) in steps.iter_mut().enumerate() {
            if context.slots.iter().any(|slot| slot.optimizer() == optimizer && is_trained(slot)) {
                step.add(loss, &loss_sum, synchronise)?;
            }
        }
        Ok(())
    }

    /// Ends a backward: whether parameters got a gradient is noted, and gradients are reduced if it
    /// synchronises. Collective.
    pub(super) fn end_backward(
        &self,
        state: &mut RuntimeState,
        context: StrategyContext<'_>,
        synchronise: bool,
    ) -> Result<()> {
        let RuntimeState { strategy, delivered, .. } = state;
        self.check_reached(context.slots)?;
        for (slot, delivered) in context.slots.iter().zip(delivered) {
            *delivered |= slot.finish_backward()?;
        }
        let reduced = match synchronise {
            true => strategy.reduce_gradients(context),
            false => strategy.keep_gradients(context),
        };
        reduced.map_err(explain_difference)
    }

    /// Checks that a backward reached at least one parameter, if other ranks share parameters with
    /// this one: they wait for it in their backward.
    fn check_reached(&self, slots: &[ParameterSlot]) -> Result<()> {
        let sharing = self.mesh.size(DP_SHARD_CP).unwrap_or(1);
        let mut taking = slots.iter().filter(|slot| slot.takes_grad()).peekable();
        if sharing == 1 || taking.peek().is_none() || taking.any(ParameterSlot::has_delivered) {
            return Ok(());
        }
        Err(Error::other(format!(
            "the backward of the loss reached no parameter, and the ranks that share parameters wait for this one in \
             theirs. {ZERO_FACTOR}"
        )))
    }

    /// Multiplies the loss by the loss scale. Collective in the first backward.
    pub(super) fn scale_loss(&self, loss: &Loss, scale: &mut LossScale) -> Result<Tensor> {
        if !scale.has_begun() {
            self.begin_scale(scale, loss.count())?;
        }
        Ok((loss.sum().to_dtype(DType::F32)? * scale.factor())?)
    }

    /// Sets the first loss scale by the count of this rank's first loss. Collective.
    pub(super) fn begin_scale(&self, scale: &mut LossScale, count: f64) -> Result<()> {
        let count = Tensor::new(&[count], &Device::Cpu)?;
        self.mesh.world().run(Collective::all_reduce(&count, ReduceOp::Max))?;
        scale.begin(read::host::<f64>(&count)?[0]);
        Ok(())
    }

    /// See [`Fabric::loss_scale`](crate::fabric::Fabric::loss_scale).
    pub(crate) fn loss_scale(&self) -> Result<Option<LossScale>> {
        Ok(self.lock_state()?.loss_scale)
    }

    /// Sets the loss scale, if gradients are computed in f16.
    pub(crate) fn set_loss_scale(&self, scale: LossScale) -> Result<()> {
        if let Some(own) = &mut self.lock_state()?.loss_scale {
            *own = scale;
        }
        Ok(())
    }

    /// Adds an optimizer for the trainable parameters that `has` selects. Returns its index.
    ///
    /// # Errors
    /// If a selected parameter has an added optimizer already, or if gradients are computed in f16.
    pub(crate) fn add_optimizer(&self, has: &dyn Fn(&str) -> bool) -> Result<usize> {
        let slots = self.context()?.slots;
        let mut state = self.lock_state()?;
        if state.loss_scale.is_some() {
            return Err(Error::Config(
                "several optimizers in f16: the loss has one scale, which changes when one of them steps, while \
                 the others have gradients of the scale before. Compute in bf16 (`trainer.precision = \
                 \"bf16-mixed\"`)"
                    .to_owned(),
            ));
        }
        let own: Vec<&ParameterSlot> =
            slots.iter().filter(|slot| slot.requires_grad() && has(slot.fqn())).collect();
        if let Some(slot) = own.iter().find(|slot| slot.optimizer() != 0) {
            return Err(Error::parameter(
                slot.fqn(),
                "has an optimizer already; a parameter is updated by one",
            ));
        }
        let index = state.steps.len();
        own.iter().for_each(|slot| slot.set_optimizer(index));
        state.steps.push(StepState::default());
        Ok(index)
    }

    /// Notes that the optimizer with index 0 was built.
    pub(crate) fn note_first_optimizer(&self) -> Result<()> {
        self.lock_state()?.first_is_built = true;
        Ok(())
    }

    /// Returns the index of the sole optimizer.
    ///
    /// # Errors
    /// If there are several optimizers.
    pub(crate) fn only_optimizer(&self) -> Result<usize> {
        if self.lock_state()?.steps.len() == 1 {
            return Ok(0);
        }
        Err(Error::other(
            "there are several optimizers, each with gradients and totals of its own: call the method of \
             `FabricOptimizer` instead of Fabric's",
        ))
    }

    /// See [`Fabric::sampler_share`](crate::fabric::Fabric::sampler_share).
    pub(crate) fn sampler_share(&self) -> Result<SamplerShare> {
        let group = self.mesh.group(DATA_PARALLEL)?;
        Ok(SamplerShare { num_replicas: group.size(), rank: group.rank() })
    }

    /// Breaks the reference cycle between the strategy, its parameters and their reducers.
    pub(crate) fn teardown(&self) {
        if let Ok(model) = self.model() {
            model.slots.iter().for_each(ParameterSlot::clear_reducer);
        }
    }
}

/// The hint for a backward that candle ends silently.
const ZERO_FACTOR: &str = "candle ends a backward at a constant factor of 0, `(loss * 0.0)?`: multiply by a zero \
    tensor, as `Loss::ignored` does, so that the backward runs and its gradients are zero";

/// Adds a likely cause to an error about ranks that call different collectives: some rank did not
/// run a backward.
pub(super) fn explain_difference(error: Error) -> Error {
    match error {
        Error::Collective { rank, group, op, message } if message.contains(RANKS_DIFFER) => {
            let message = format!(
                "{message}. If the loss has a term that some rank leaves out: {ZERO_FACTOR}"
            );
            Error::Collective { rank, group, op, message }
        }
        error => error,
    }
}
