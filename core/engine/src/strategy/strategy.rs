//! The strategy trait.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;

use super::{ParallelizeFn, RankMemory, StepTotals};
use crate::collective::ProcessGroup;
use crate::mesh::DeviceMesh;
use crate::module::{ModuleInit, ModuleTree};
use crate::optim::{SquaredNorm, StateTensor};
use crate::parameter::ParameterSlot;
use crate::{Error, Result};

/// What the names of a strategy's own [state tensors](Strategy::state_tensors) begin with.
pub const STRATEGY_STATE: &str = "strategy_";

/// What a strategy can do. The trainer asks here instead of comparing types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Capabilities {
    /// Runs on more than one rank.
    pub distributed: bool,
    /// Parameters are sharded: a rank holds less than the model.
    pub sharded: bool,
    /// Backwards may leave their gradients on their rank
    /// ([`keep_gradients`](Strategy::keep_gradients)); otherwise each ends with
    /// [`reduce_gradients`](Strategy::reduce_gradients).
    pub no_sync: bool,
    /// The host may read a step's loss and norm after the update, which the device skips by itself
    /// if one of them is not finite. Then [`grad_scale`](Strategy::grad_scale) gets totals with a
    /// `loss_sum` of NaN, and [`finish_step`](Strategy::finish_step) changes neither values nor
    /// state: it does not know whether there was an update.
    pub deferred_reads: bool,
}

/// The run that a strategy is built for.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct BuildContext {
    /// Number of ranks; 0 if it is not known.
    pub world_size: usize,
    /// Number of hosts, each with as many ranks.
    pub num_nodes: usize,
}

impl Default for BuildContext {
    /// A run of which nothing is known.
    fn default() -> Self {
        Self::new(0)
    }
}

impl BuildContext {
    /// The context of a run of `world_size` ranks on one host.
    pub fn new(world_size: usize) -> Self {
        Self { world_size, num_nodes: 1 }
    }

    /// On this number of hosts.
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

    /// How long ranks wait for each other in a collective, in seconds, if the strategy's
    /// configuration says so instead of `trainer.timeout_secs`.
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
    /// The slots of the model's parameters ([`ModuleTree::slots`]), in the order of
    /// [`ModuleTree::parameters`]; in [`Strategy::squared_norm`] perhaps some of them.
    pub slots: &'a [ParameterSlot],
}

/// How a model is distributed over ranks, and what its steps communicate.
///
/// The runtime that owns a strategy does what all strategies do alike: it runs candle's backward, counts
/// losses, audits gradients, keeps the mesh and the model, and saves and loads.
///
/// # Lifecycle
/// [`device_mesh`](Strategy::device_mesh) → the model is built in
/// [`module_init_context`](Strategy::module_init_context) → [`setup_module`](Strategy::setup_module)
/// → [`prepare_forward`](Strategy::prepare_forward) → optimizers are built on the parameters' local
/// shards → for each step: forwards, and for each backward
/// [`begin_backward`](Strategy::begin_backward), then [`reduce_gradients`](Strategy::reduce_gradients) if
/// it synchronises and [`keep_gradients`](Strategy::keep_gradients) if not; the optimizer;
/// [`finish_step`](Strategy::finish_step).
///
/// # Contract
/// - Every rank calls every method, in the same order; those that say so are collective.
/// - Gradients are of the **sum** of the loss over ranks and micro-batches. The mean is taken once,
///   when the optimizer multiplies by [`grad_scale`](Strategy::grad_scale); so means are exact over
///   ranks and micro-batches with unequal counts.
/// - A step may have several backwards. Those that do not synchronise leave their gradients on their
///   rank; the next that does reduces them too.
/// - A model may have several optimizers ([`Parameter::optimizer`]), which step by themselves. A backward has
///   gradients of the parameters that [take one][`Parameter::takes_grad`] when it begins; the others keep
///   what they have. After a step [`Parameter::local_grad`] is none for the parameters of that optimizer, and
///   [`finish_step`](Strategy::finish_step) is called.
/// - After a backward with synchronisation, [`Parameter::local_grad`] of every trainable parameter
///   is parallel to [`Parameter::local`]'s values and holds the gradient of all backwards of the step,
///   reduced over `dp_cp`.
/// - Between [`prepare_forward`](Strategy::prepare_forward) and the next optimizer step the
///   parameters outside of units have values; those of a unit have them inside the unit's hooks.
///
/// Implementors write the methods without a default, and override others as needed.
///
/// [`Parameter::local_grad`]: crate::parameter::Parameter::local_grad
/// [`Parameter::optimizer`]: crate::parameter::Parameter::optimizer
/// [`Parameter::takes_grad`]: crate::parameter::Parameter::takes_grad
/// [`Parameter::local`]: crate::parameter::Parameter::local
pub trait Strategy: Send {
    /// The name it is chosen by.
    fn name(&self) -> &str;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// Makes the device mesh over the ranks of `world`. Collective.
    ///
    /// # Errors
    /// If the configured sizes do not fit the world size.
    fn device_mesh(&self, world: Arc<dyn ProcessGroup>) -> Result<DeviceMesh>;

    /// Lets a function decide how the model is distributed, instead of the configuration. Called before
    /// [`setup_module`](Strategy::setup_module).
    ///
    /// # Errors
    /// If the strategy takes no such function.
    fn set_parallelize(&mut self, parallelize: Box<dyn ParallelizeFn>) -> Result<()> {
        drop(parallelize);
        let name = self.name();
        Err(Error::other(format!("strategy `{name}` takes no parallelize function")))
    }

    /// Device, dtypes and options that the model is built with; a strategy may change dtypes.
    fn module_init_context(&self, init: ModuleInit) -> ModuleInit {
        init
    }

    /// Cuts the model's parameters, gives this rank's shards their initial values (a function of
    /// `seed`, the FQN and the element's index), and sets reducers ([`ModuleTree::slots`]) and hooks
    /// ([`ModuleTree::units`]). Collective.
    ///
    /// # Errors
    /// If the ranks' models differ, or the strategy cannot distribute this model.
    fn setup_module(&mut self, tree: &mut ModuleTree, mesh: &DeviceMesh, seed: u64) -> Result<()>;

    /// Works out what rank 0 will hold of the model, in the process that starts the ranks, before it
    /// does: cuts `tree` as [`setup_module`](Strategy::setup_module) would, on a mesh over a
    /// [`Planned`](crate::collective::Planned) world, and allocates nothing. Of the result, the
    /// optimizer's state and the moving average are left 0. `None`, the default, if the strategy cannot
    /// tell; the model's size is then not compared with the machine's memory. Not collective.
    ///
    /// # Errors
    /// If the strategy cannot distribute this model.
    fn plan_module(&self, tree: &mut ModuleTree, mesh: &DeviceMesh) -> Result<Option<RankMemory>> {
        let _ = (tree, mesh);
        Ok(None)
    }

    /// Gives parameters outside of units the values that the next forward needs. Called after
    /// setup, after loading and after each optimizer step. Collective.
    ///
    /// # Errors
    /// If a peer fails.
    fn prepare_forward(&mut self, context: StrategyContext<'_>) -> Result<()> {
        super::materialize::refresh_compute(context.slots)
    }

    /// Called before a backward's first gradient arrives. `synchronise` says whether its gradients will
    /// be reduced: whether [`reduce_gradients`](Strategy::reduce_gradients) ends it, or
    /// [`keep_gradients`](Strategy::keep_gradients). Not collective.
    ///
    /// # Errors
    /// If the strategy cannot take gradients.
    fn begin_backward(&mut self, context: StrategyContext<'_>, synchronise: bool) -> Result<()> {
        let _ = (context, synchronise);
        Ok(())
    }

    /// Ends a backward that synchronises: reduces this rank's gradients that were not reduced yet
    /// (those of earlier backwards of the step that ended with
    /// [`keep_gradients`](Strategy::keep_gradients) too) over the ranks, and adds them to the parameters'
    /// local gradients. Collective.
    ///
    /// # Errors
    /// If a peer fails.
    fn reduce_gradients(&mut self, context: StrategyContext<'_>) -> Result<()>;

    /// Ends a backward that does not synchronise (all micro-batches of a step but the last): its
    /// gradients stay in the reducer's memory on this rank. Collective only for strategies that
    /// communicate here.
    ///
    /// # Errors
    /// If a peer fails.
    fn keep_gradients(&mut self, context: StrategyContext<'_>) -> Result<()> {
        let _ = context;
        Ok(())
    }

    /// The factor by which the optimizer multiplies this rank's gradients: by default one over the
    /// global count, since they are of the sum over all ranks. A strategy whose ranks step on gradients
    /// of their own overrides it; `local_count` is the number of items of this rank's losses in the
    /// step. Collective.
    ///
    /// # Errors
    /// If a peer fails.
    fn grad_scale(&self, totals: &StepTotals, local_count: f64) -> Result<f64> {
        let _ = local_count;
        Ok(totals.grad_scale())
    }

    /// This rank's part of the square of the gradient's Euclidean norm, over the parameters of `context.slots` (those
    /// of one optimizer, where a model has several): the sum of all ranks' parts is the square, in which every element
    /// counts once whatever is replicated or sharded. Where replicas have gradients of their own, each contributes the
    /// part that it owns. Not collective, and nothing waits for a device.
    ///
    /// # Errors
    /// If a shard is not what its spec says.
    fn squared_norm(&self, context: StrategyContext<'_>) -> Result<SquaredNorm> {
        let StrategyContext { mesh, slots, .. } = context;
        let trainable = slots.iter().filter(|slot| slot.requires_grad());
        let parameters: Vec<_> = trainable.map(|slot| slot.parameter().clone()).collect();
        SquaredNorm::of(&parameters, &|dim| mesh.coordinate(dim))
    }

    /// Called after the optimizer's step, when its gradients are cleared: makes the new values ready for
    /// the next forward. Collective.
    ///
    /// # Errors
    /// If a peer fails.
    fn finish_step(&mut self, context: StrategyContext<'_>) -> Result<()> {
        self.prepare_forward(context)
    }

    /// Called when a step failed on some rank anywhere between [`prepare_forward`](Strategy::prepare_forward) and the
    /// optimizer's update, and is begun again: drops the step's gradients and pending collectives, and makes the
    /// parameters ready for a forward. Every collective that the step started is complete: on a device, before all work
    /// that is queued from now on, though it may still run there. The caller resets the slots. Collective.
    ///
    /// # Errors
    /// If the strategy cannot, as by default.
    fn abandon_step(&mut self, context: StrategyContext<'_>) -> Result<()> {
        let _ = context;
        Err(Error::other(format!(
            "strategy `{}` cannot begin a step again that has failed, which `trainer.micro_batch_size` = \"auto\" \
             does",
            self.name()
        )))
    }

    /// Called after values were loaded into the local shards: makes them ready for a forward.
    /// Collective.
    ///
    /// # Errors
    /// If ranks that hold the same parameters have loaded different values.
    fn finish_load(&mut self, context: StrategyContext<'_>) -> Result<()> {
        self.prepare_forward(context)
    }

    /// Whether replicas train on their own and have taken steps since they were last made the same; equal on all
    /// ranks. Buffers are then equal within each replica only, and a training ends with
    /// [`prepare_save`](Strategy::prepare_save). Not collective.
    fn replicas_differ(&self) -> bool {
        false
    }

    /// Called before the parameters are saved: makes replicas the same, if they may differ. Collective.
    ///
    /// # Errors
    /// If a peer fails.
    fn prepare_save(&mut self, context: StrategyContext<'_>) -> Result<()> {
        let _ = context;
        Ok(())
    }

    /// Called before the optimizers' `states` are saved, after [`prepare_save`](Strategy::prepare_save): makes
    /// those of replicas the same in place, if they may differ. Collective.
    ///
    /// # Errors
    /// If a peer fails.
    fn prepare_save_states(&mut self, states: &[StateTensor]) -> Result<()> {
        let _ = states;
        Ok(())
    }

    /// State tensors of its own, which a checkpoint has beside those of the optimizers: cut as the parameters
    /// are, in place, with names that begin with [`STRATEGY_STATE`]. A run under another strategy leaves them out, and
    /// where a checkpoint has none they stay as they are. Not collective.
    ///
    /// # Errors
    /// If a parameter has no local values.
    fn state_tensors(&self) -> Result<Vec<StateTensor>> {
        Ok(Vec::new())
    }

    /// The numbers of its own state that are no tensors, for checkpoints; equal on all ranks. Not collective.
    fn scalars(&self) -> BTreeMap<String, f64> {
        BTreeMap::new()
    }

    /// Restores what [`scalars`](Strategy::scalars) returned when the checkpoint was saved, perhaps by another
    /// strategy. Called after [`finish_load`](Strategy::finish_load), when the optimizers' states and
    /// [`state_tensors`](Strategy::state_tensors) were loaded too. Not collective.
    ///
    /// # Errors
    /// If a number is out of range.
    fn load_scalars(&mut self, scalars: &BTreeMap<String, f64>) -> Result<()> {
        let _ = scalars;
        Ok(())
    }

    /// Whether the trainer saves distributed checkpoints, in which each rank writes what it owns;
    /// otherwise full ones, gathered on rank 0.
    fn saves_distributed_checkpoints(&self) -> bool {
        true
    }
}
