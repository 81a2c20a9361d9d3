//! The strategy trait.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use serde::Serialize;

use super::{Loss, NoSyncGuard, ParallelizeFn, StepTotals, StrategyState, UnusedParameters};
use crate::collective::{ProcessGroup, ReduceOp, broadcast_object, wait_for};
use crate::mesh::{DATA_PARALLEL, DeviceMesh};
use crate::module::{ModuleInit, ModuleTree};
use crate::optim::local_squared_norm;
use crate::parallel::check_loss;
use crate::{Error, Result};

/// What a strategy can do. The trainer asks here instead of comparing types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Capabilities {
    /// Runs on more than one rank.
    pub distributed: bool,
    /// Parameters are sharded: a rank holds less than the model.
    pub sharded: bool,
    /// [`no_backward_sync`](Strategy::no_backward_sync) saves communication.
    pub no_sync: bool,
}

/// Which part of the data a rank sees (Lightning's `distributed_sampler_kwargs`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SamplerShare {
    /// Number of ranks that see different data.
    pub num_replicas: usize,
    /// This rank's place among them.
    pub rank: usize,
}

/// What a strategy is built in.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct BuildContext {
    /// Number of ranks.
    pub world_size: usize,
}

impl BuildContext {
    /// That of `world_size` ranks.
    pub fn new(world_size: usize) -> Self {
        Self { world_size }
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
    crate::registry::kind::STRATEGY,
    "trainer.strategy"
);

/// How a model is spread over ranks, and what that means for a step.
///
/// # Lifecycle
/// [`setup_environment`](Strategy::setup_environment) → the model is built in
/// [`module_init_context`](Strategy::module_init_context) → [`setup_module`](Strategy::setup_module)
/// → optimizers are built on the parameters' local shards →
/// [`prepare_forward`](Strategy::prepare_forward) → for each step: forwards and
/// [`backward`](Strategy::backward)s, [`step_totals`](Strategy::step_totals),
/// [`audit_gradients`](Strategy::audit_gradients), [`gradient_norm`](Strategy::gradient_norm), the
/// optimizer, [`finish_step`](Strategy::finish_step) → [`teardown`](Strategy::teardown).
///
/// # Contract
/// - Every rank calls every method, in the same order; those that say so are collective.
/// - Gradients are of the **sum** of the loss over ranks and micro-batches. The mean is taken once,
///   when the optimizer multiplies by [`grad_scale`](Strategy::grad_scale); so means are exact over
///   ranks and micro-batches with unequal counts.
/// - After a backward with synchronisation, [`Parameter::local_grad`] of every trainable parameter
///   is parallel to [`Parameter::local`]'s values and holds the gradient reduced over `dp_cp`.
/// - Between [`prepare_forward`](Strategy::prepare_forward) and the next optimizer step the
///   parameters outside of units have values; those of a unit have them inside the unit's hooks.
///
/// Implementors write the methods without a body, and override others where they do something
/// else.
///
/// [`Parameter::local_grad`]: crate::parameter::Parameter::local_grad
/// [`Parameter::local`]: crate::parameter::Parameter::local
pub trait Strategy: Send {
    /// The name it is chosen by.
    fn name(&self) -> &str;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// The shared state.
    fn state(&self) -> &StrategyState;

    /// The shared state.
    fn state_mut(&mut self) -> &mut StrategyState;

    /// Makes the device mesh over the ranks of `world` and hands it to the state. Collective.
    ///
    /// # Errors
    /// If the configured sizes do not fit the world size.
    fn setup_environment(&mut self, world: Arc<dyn ProcessGroup>) -> Result<()>;

    /// Cuts the model's parameters, gives this rank's shards their initial values (a function of
    /// `seed`, the FQN and the element's index), sets reducers and hooks, and hands the tree to the
    /// state. Collective.
    ///
    /// # Errors
    /// If the ranks' models differ, or the strategy cannot spread this model.
    fn setup_module(&mut self, tree: ModuleTree, seed: u64) -> Result<()>;

    /// Before a backward's first gradient arrives. Not collective.
    fn begin_backward(&mut self) -> Result<()> {
        Ok(())
    }

    /// Ends a backward: completes the reductions that were started, if gradients are synchronised,
    /// and sets the parameters' local gradients. Collective if [`StrategyState::sync`] is on.
    fn finish_backward(&mut self) -> Result<()>;

    /// The mesh.
    ///
    /// # Errors
    /// Before [`setup_environment`](Strategy::setup_environment).
    fn device_mesh(&self) -> Result<&DeviceMesh> {
        self.state().mesh()
    }

    /// Lets a function decide how the model is spread, instead of the configuration. Called before
    /// [`setup_module`](Strategy::setup_module).
    ///
    /// # Errors
    /// If the strategy has nothing to decide.
    fn set_parallelize(&mut self, parallelize: Box<dyn ParallelizeFn>) -> Result<()> {
        drop(parallelize);
        let name = self.name();
        Err(Error::other(format!("strategy `{name}` takes no parallelize function")))
    }

    /// The circumstances the model is built in; a strategy may change dtypes.
    fn module_init_context(&self, init: ModuleInit) -> ModuleInit {
        init
    }

    /// Gives parameters outside of units the values that the next forward needs. Called after
    /// setup, after loading and after each optimizer step. Collective.
    fn prepare_forward(&mut self) -> Result<()> {
        super::materialize::refresh_compute(self.state().tree()?)
    }

    /// Runs backward on one micro-batch's loss; gradients are added to the step's. With
    /// synchronisation on (see [`no_backward_sync`](Strategy::no_backward_sync)) they are reduced
    /// over the ranks while backward goes on, and complete when this returns. Collective.
    ///
    /// # Errors
    /// If the loss depends on no trainable parameter, or a peer fails.
    fn backward(&mut self, loss: &Loss) -> Result<()> {
        let sum = loss.sum();
        if !sum.track_op() {
            return Err(Error::other(
                "the loss does not depend on any trainable parameter: all are frozen, the model \
                 was called inside `no_grad`, or an operation without a backward cut the graph",
            ));
        }
        check_loss(sum)?;
        self.state_mut().record_loss(loss)?;
        self.begin_backward()?;
        // The taps have taken every parameter's gradient; what candle returns holds none.
        drop(sum.backward()?);
        self.state_mut().finish_parameters()?;
        self.finish_backward()
    }

    /// While the guard lives and `enabled` is true, backward does not synchronise gradients over
    /// ranks (for all micro-batches of a step but the last). Dropping it restores what was before,
    /// whatever that was.
    fn no_backward_sync(&self, enabled: bool) -> NoSyncGuard {
        self.state().no_backward_sync(enabled)
    }

    /// The step's loss and count over all ranks and micro-batches, and the sum of each of `flags`
    /// over the ranks. The first call of a step is collective and its flags count; later ones
    /// return the same.
    fn step_totals(&mut self, flags: &[f64]) -> Result<StepTotals> {
        self.state_mut().totals(flags)
    }

    /// What the optimizer multiplies this rank's gradients by: one over the global count, since they
    /// are of the sum over all ranks. A strategy whose ranks step on gradients of their own says
    /// otherwise. Collective as [`step_totals`](Strategy::step_totals).
    ///
    /// # Errors
    /// If a peer fails.
    fn grad_scale(&mut self) -> Result<f64> {
        Ok(self.step_totals(&[])?.grad_scale())
    }

    /// Looks for trainable parameters without a gradient, in the first step (and in each under
    /// [`UnusedParameters::Ignore`]). Collective.
    ///
    /// # Errors
    /// [`Error::UnusedParameters`] under [`UnusedParameters::Error`].
    fn audit_gradients(&mut self, policy: UnusedParameters) -> Result<()> {
        self.state_mut().audit(policy)
    }

    /// The Euclidean norm of the mean loss's gradient over all parameters, every element counted
    /// once whatever is replicated or sharded. Equal on all ranks; may be non-finite. Where ranks
    /// that hold the same parameters have gradients of their own, it is made of a part of each.
    /// Collective.
    fn gradient_norm(&mut self) -> Result<f64> {
        let scale = self.grad_scale()?;
        let state = self.state();
        let mesh = state.mesh()?;
        let parameters: Vec<_> = state.tree()?.trainable().cloned().collect();
        let squares = local_squared_norm(&parameters, &|dim| mesh.coordinate(dim))?;
        let squares = Tensor::new(&[squares * scale * scale], &Device::Cpu)?;
        wait_for(|| mesh.world().all_reduce(&squares, ReduceOp::Sum))?;
        Ok(squares.to_vec1::<f64>()?[0].sqrt())
    }

    /// After the optimizer has stepped: forgets the step's gradients and makes the new values ready
    /// for the next forward. Collective.
    fn finish_step(&mut self) -> Result<()> {
        self.state_mut().end_step()?;
        self.prepare_forward()
    }

    /// Whether the trainer saves distributed checkpoints, each rank what it owns; otherwise full ones,
    /// gathered on rank 0.
    fn saves_distributed_checkpoints(&self) -> bool {
        true
    }

    /// After values were loaded into the local shards: makes them ready for a forward. Collective.
    ///
    /// # Errors
    /// If ranks that hold the same parameters have loaded different values.
    fn finish_load(&mut self) -> Result<()> {
        self.prepare_forward()
    }

    /// Before the parameters are saved: makes the ranks' parts fit together, if they may differ
    /// where they should be the same. Collective.
    ///
    /// # Errors
    /// If a peer fails.
    fn prepare_save(&mut self) -> Result<()> {
        Ok(())
    }

    /// Reduces a host tensor over all ranks, in place. Collective.
    fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<()> {
        wait_for(|| self.device_mesh()?.world().all_reduce(tensor, op))
    }

    /// Rank `src`'s text, on every rank. Collective.
    fn broadcast(&self, value: &str, src: usize) -> Result<String> {
        broadcast_object(&**self.device_mesh()?.world(), &value.to_owned(), src)
    }

    /// Waits for all ranks. Collective.
    fn barrier(&self) -> Result<()> {
        wait_for(|| self.device_mesh()?.world().barrier())
    }

    /// Whether all ranks (`all`), or any, say yes. Collective.
    fn reduce_boolean_decision(&self, decision: bool, all: bool) -> Result<bool> {
        let vote = Tensor::new(&[u8::from(decision)], &Device::Cpu)?;
        let op = if all { ReduceOp::Min } else { ReduceOp::Max };
        self.all_reduce(&vote, op)?;
        Ok(vote.to_vec1::<u8>()?[0] == 1)
    }

    /// Which part of the data this rank sees: its place along `data_parallel`. Ranks that differ
    /// only in tensor or context parallel see the same samples.
    fn sampler_share(&self) -> Result<SamplerShare> {
        let group = self.device_mesh()?.group(DATA_PARALLEL)?;
        Ok(SamplerShare { num_replicas: group.size(), rank: group.rank() })
    }

    /// Ends the strategy's use of the process groups.
    fn teardown(&mut self) {}
}
