//! The strategy trait.

use std::sync::Arc;

use serde::Serialize;

use super::{ParallelizeFn, StepTotals, StrategyExtensions};
use crate::{Error, Result};
use fulgurite_collective::collective::ProcessGroup;
use fulgurite_collective::mesh::DeviceMesh;
use fulgurite_module::module::{ModuleInit, ModuleTree};
use fulgurite_module::parameter::ParameterSlot;
use fulgurite_optim::SquaredNorm;

/// Features of a strategy. The trainer checks these instead of types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Capabilities {
    /// Runs on more than one rank.
    pub distributed: bool,
    /// Parameters are sharded: a rank holds less than the model.
    pub sharded: bool,
    /// Backwards may leave their gradients on their rank
    /// ([`keep_gradients`](Strategy::keep_gradients)). Otherwise each ends with
    /// [`reduce_gradients`](Strategy::reduce_gradients).
    pub no_sync: bool,
    /// The host may read a step's loss and norm after the update, which the device skips by itself
    /// if one of them is not finite. Then [`grad_scale`](Strategy::grad_scale) gets totals with a
    /// `loss_sum` of NaN, and [`finish_step`](Strategy::finish_step) changes neither values nor
    /// state: it does not know whether there was an update.
    pub deferred_reads: bool,
    /// The trainer saves distributed checkpoints, for which each rank writes the regions it owns.
    /// Otherwise it saves full ones, gathered on rank 0.
    pub saves_distributed_checkpoints: bool,
}

/// The run that a strategy is built for.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct BuildContext {
    /// Number of ranks; 0 if unknown.
    pub world_size: usize,
    /// Number of hosts, each with the same number of ranks.
    pub num_nodes: usize,
}

impl Default for BuildContext {
    /// A run of unknown size.
    fn default() -> Self {
        Self::new(0)
    }
}

impl BuildContext {
    /// The context of a run of `world_size` ranks on one host.
    pub fn new(world_size: usize) -> Self {
        Self { world_size, num_nodes: 1 }
    }

    /// Sets the number of hosts.
    #[must_use]
    pub fn on_nodes(self, num_nodes: usize) -> Self {
        Self { num_nodes, ..self }
    }
}

/// A strategy's configuration: `trainer.strategy = "name"` or `[trainer.strategy] type = "name"`.
///
/// ```
/// # use fulgurite_core::{Result, strategy::*};
/// # use serde::{Deserialize, Serialize};
/// #[derive(Debug, Clone, Serialize, Deserialize)]
/// #[serde(deny_unknown_fields)]
/// pub struct Mine {
///     pub every: usize,
/// }
///
/// #[typetag::serde(name = "mine")]
/// impl StrategyConfig for Mine {
///     fn build(&self, _context: &BuildContext) -> Result<Box<dyn Strategy>> {
///         // …
///         # Err(fulgurite_core::Error::other(self.every))
///     }
/// }
/// fulgurite_core::register_strategy!("mine", Mine, "what it does, in a line", "{ every = 4 }");
/// ```
#[typetag::serde(tag = "type")]
pub trait StrategyConfig: std::fmt::Debug + Send + Sync {
    /// Builds the strategy. Not collective.
    ///
    /// # Errors
    /// If an option is out of range or does not fit the world size.
    fn build(&self, context: &BuildContext) -> Result<Box<dyn Strategy>>;

    /// Seconds that ranks wait for each other in a collective. `None`: `trainer.timeout_secs`.
    fn timeout_secs(&self) -> Option<u64> {
        None
    }
}

fulgurite_config::plugin_kind!(
    dyn StrategyConfig,
    fulgurite_config::registry::kind::STRATEGY,
    "trainer.strategy"
);

/// The mesh and the model that a strategy has set up, for its later calls.
#[derive(Debug, Clone, Copy)]
pub struct StrategyContext<'a> {
    /// The mesh that [`Strategy::device_mesh`] made.
    pub mesh: &'a DeviceMesh,
    /// The model that [`Strategy::setup_module`] distributed.
    pub tree: &'a ModuleTree,
    /// Slots of the model's parameters ([`ModuleTree::slots`]), in the order of
    /// [`ModuleTree::parameters`]. [`Strategy::squared_norm`] may get only some of them.
    pub slots: &'a [ParameterSlot],
}

/// Distributes a model over ranks and runs the communication of its steps.
///
/// The runtime that owns a strategy handles the common work: it runs candle's backward, counts
/// losses, audits gradients, keeps the mesh and the model, and saves and loads.
///
/// # Lifecycle
/// 1. [`device_mesh`](Strategy::device_mesh) makes the mesh.
/// 2. The model is built in [`module_init_context`](Strategy::module_init_context).
/// 3. [`setup_module`](Strategy::setup_module) distributes it, and
///    [`prepare_forward`](Strategy::prepare_forward) readies it for a forward.
/// 4. Optimizers are built on the parameters' local shards.
/// 5. Each step runs forwards and backwards. A backward starts with
///    [`begin_backward`](Strategy::begin_backward). It ends with
///    [`reduce_gradients`](Strategy::reduce_gradients) if it synchronises, otherwise with
///    [`keep_gradients`](Strategy::keep_gradients).
/// 6. The optimizer steps, and [`finish_step`](Strategy::finish_step) ends the step.
///
/// # Contract
/// - Every rank calls every method, in the same order. Methods marked as collective communicate.
/// - Gradients are of the **sum** of the loss over ranks and micro-batches. The mean is taken once,
///   when the optimizer multiplies by [`grad_scale`](Strategy::grad_scale). So means are exact even
///   if ranks and micro-batches have unequal counts.
/// - A step may have several backwards. Backwards without synchronisation leave their gradients on
///   their rank, and the next synchronising backward reduces them too.
/// - A model may have several optimizers ([`Parameter::optimizer`]), which step separately. A
///   backward computes gradients of the parameters that [take one][`Parameter::takes_grad`] when it
///   begins; other parameters keep theirs. After a step, [`Parameter::local_grad`] is `None` for
///   the parameters of that optimizer, and [`finish_step`](Strategy::finish_step) is called.
/// - After a synchronising backward, [`Parameter::local_grad`] of every trainable parameter is
///   parallel to [`Parameter::local`]'s values. It holds the gradient of all backwards of the step,
///   reduced over `dp_cp`.
/// - Between [`prepare_forward`](Strategy::prepare_forward) and the next optimizer step, parameters
///   outside of units have values. A unit's parameters have values inside the unit's hooks.
///
/// Implementors write the methods without a default, and override others as needed. Rarely needed
/// methods are those of [`StrategyExtensions`].
///
/// [`Parameter::local_grad`]: fulgurite_module::parameter::Parameter::local_grad
/// [`Parameter::optimizer`]: fulgurite_module::parameter::Parameter::optimizer
/// [`Parameter::takes_grad`]: fulgurite_module::parameter::Parameter::takes_grad
/// [`Parameter::local`]: fulgurite_module::parameter::Parameter::local
pub trait Strategy: Send {
    /// The name in configurations.
    fn name(&self) -> &str;

    /// The strategy's features.
    fn capabilities(&self) -> Capabilities;

    /// Makes the device mesh over the ranks of `world`. Collective.
    ///
    /// # Errors
    /// If the configured sizes do not fit the world size.
    fn device_mesh(&self, world: Arc<dyn ProcessGroup>) -> Result<DeviceMesh>;

    /// Lets a function, instead of the configuration, decide how the model is distributed. Called
    /// before [`setup_module`](Strategy::setup_module).
    ///
    /// # Errors
    /// If the strategy takes no such function.
    fn set_parallelize(&mut self, parallelize: Box<dyn ParallelizeFn>) -> Result<()> {
        drop(parallelize);
        let name = self.name();
        Err(Error::other(format!("strategy `{name}` takes no parallelize function")))
    }

    /// Device, dtypes and options for building the model. A strategy may change dtypes.
    fn module_init_context(&self, init: ModuleInit) -> ModuleInit {
        init
    }

    /// Cuts the model's parameters, and sets reducers ([`ModuleTree::slots`]) and hooks
    /// ([`ModuleTree::units`]). Gives this rank's shards their initial values, a function of
    /// `seed`, the FQN and the element's index. Collective.
    ///
    /// # Errors
    /// If the ranks' models differ, or the strategy cannot distribute this model.
    fn setup_module(&mut self, tree: &mut ModuleTree, mesh: &DeviceMesh, seed: u64) -> Result<()>;

    /// Gives parameters outside of units the values that the next forward needs. Called after
    /// setup, after loading and after each optimizer step. Collective.
    ///
    /// # Errors
    /// If a peer fails.
    fn prepare_forward(&mut self, context: StrategyContext<'_>) -> Result<()> {
        super::materialize::refresh_compute(context.slots)
    }

    /// Called before a backward's first gradient arrives. The backward ends with
    /// [`reduce_gradients`](Strategy::reduce_gradients) if `synchronise`, else with
    /// [`keep_gradients`](Strategy::keep_gradients). Not collective.
    ///
    /// # Errors
    /// If the strategy cannot take gradients.
    fn begin_backward(&mut self, context: StrategyContext<'_>, synchronise: bool) -> Result<()> {
        let _ = (context, synchronise);
        Ok(())
    }

    /// Ends a synchronising backward: reduces this rank's unreduced gradients over the ranks, and
    /// adds them to the parameters' local gradients. Includes gradients of the step's earlier
    /// backwards that ended with [`keep_gradients`](Strategy::keep_gradients). Collective.
    ///
    /// # Errors
    /// If a peer fails.
    fn reduce_gradients(&mut self, context: StrategyContext<'_>) -> Result<()>;

    /// Ends a backward that does not synchronise (all micro-batches of a step except the last). Its
    /// gradients stay in the reducer's memory on this rank. Collective only for strategies that
    /// communicate here.
    ///
    /// # Errors
    /// If a peer fails.
    fn keep_gradients(&mut self, context: StrategyContext<'_>) -> Result<()> {
        let _ = context;
        Ok(())
    }

    /// The factor by which the optimizer multiplies this rank's gradients. By default one over the
    /// global count, since gradients are of the sum over all ranks. A strategy whose ranks step on
    /// their own gradients overrides it. `local_count` is the number of items of this rank's losses
    /// in the step. Collective.
    ///
    /// # Errors
    /// If a peer fails.
    fn grad_scale(&self, totals: &StepTotals, local_count: f64) -> Result<f64> {
        let _ = local_count;
        Ok(totals.grad_scale())
    }

    /// This rank's part of the squared Euclidean norm of the gradient, over the parameters of
    /// `context.slots` (one optimizer's, if the model has several). The parts of all ranks sum to
    /// the square, with every element counted once, replicated or sharded. If replicas have their
    /// own gradients, each contributes the part that it owns. Not collective, and does not wait for
    /// a device.
    ///
    /// # Errors
    /// If a shard does not fit its spec.
    fn squared_norm(&self, context: StrategyContext<'_>) -> Result<SquaredNorm> {
        let StrategyContext { mesh, slots, .. } = context;
        let trainable = slots.iter().filter(|slot| slot.requires_grad());
        let parameters: Vec<_> = trainable.map(|slot| slot.parameter().clone()).collect();
        SquaredNorm::of(&parameters, &|dim| mesh.coordinate(dim))
    }

    /// Called after the optimizer's step, when its gradients are cleared: makes the new values
    /// ready for the next forward. Collective.
    ///
    /// # Errors
    /// If a peer fails.
    fn finish_step(&mut self, context: StrategyContext<'_>) -> Result<()> {
        self.prepare_forward(context)
    }

    /// Called after values were loaded into the local shards: makes them ready for a forward.
    /// Collective.
    ///
    /// # Errors
    /// If ranks that hold the same parameters have loaded different values.
    fn finish_load(&mut self, context: StrategyContext<'_>) -> Result<()> {
        self.prepare_forward(context)
    }

    /// The strategy's optional features. `None`, the default, if it has none. The answer is the
    /// same in every call. Not collective.
    fn extensions(&mut self) -> Option<&mut dyn StrategyExtensions> {
        None
    }
}
