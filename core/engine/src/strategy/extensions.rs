//! Optional features of a strategy.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Pipeline, RankMemory, StrategyContext};
use crate::Result;
use fulgurite_collective::mesh::DeviceMesh;
use fulgurite_module::module::ModuleTree;
use fulgurite_optim::StateTensor;

/// Name prefix of a strategy's own [state tensors](StrategyExtensions::state_tensors).
pub const STRATEGY_STATE: &str = "strategy_";

/// Optional features of a strategy: memory plans, pipelines, repeated steps, replicas that train
/// separately, and state of its own in checkpoints.
///
/// A strategy that needs one of them returns itself from
/// [`Strategy::extensions`](super::Strategy::extensions), and overrides the methods it needs. Every
/// rank calls every method, in the same order, except [`plan_module`](Self::plan_module).
///
/// ```
/// use fulgurite_core::Result;
/// use fulgurite_core::strategy::{StrategyContext, StrategyExtensions};
///
/// struct Averaging;
///
/// impl StrategyExtensions for Averaging {
///     fn prepare_save(&mut self, context: StrategyContext<'_>) -> Result<()> {
///         // Averages the values of all replicas …
///         # let _ = context;
///         Ok(())
///     }
/// }
/// assert!(!Averaging.replicas_differ());
/// ```
pub trait StrategyExtensions {
    /// Plans rank 0's memory in the process that starts the ranks, before it starts them. Cuts
    /// `tree` as [`setup_module`](super::Strategy::setup_module) would, on a mesh over a
    /// [`Planned`](fulgurite_collective::collective::Planned) world, and allocates nothing. Leaves
    /// the optimizer's state and the moving average 0. `None`, the default, if the strategy cannot
    /// tell; the model's size is then not compared with the machine's memory. Not collective.
    ///
    /// # Errors
    /// If the strategy cannot distribute this model.
    fn plan_module(
        &mut self,
        tree: &mut ModuleTree,
        mesh: &DeviceMesh,
    ) -> Result<Option<RankMemory>> {
        let _ = (tree, mesh);
        Ok(None)
    }

    /// The pipeline, if ranks compute different stages of the model that was set up. Backwards of
    /// whole models are then impossible. `None`, the default, otherwise. Not collective.
    fn pipeline(&self) -> Option<Arc<dyn Pipeline>> {
        None
    }

    /// Checks that a step may have this many micro-batches on each rank. Called in the process that
    /// starts the ranks, before it starts them. Not collective.
    ///
    /// # Errors
    /// If not; the message says which numbers would do.
    fn check_micro_batches(&self, micro_batches: usize) -> Result<()> {
        let _ = micro_batches;
        Ok(())
    }

    /// Called when a step failed on some rank between
    /// [`prepare_forward`](super::Strategy::prepare_forward) and the optimizer's update, before it
    /// is tried again. Drops the step's gradients and pending collectives, and makes the parameters
    /// ready for a forward. Every collective that the step started is complete: on a device, for
    /// all work queued from now on, though it may still run. The caller resets the slots.
    /// Collective.
    ///
    /// Returns whether the step may begin again. False, the default, if the strategy cannot do
    /// this; the run then ends with an error.
    ///
    /// # Errors
    /// If a peer fails.
    fn abandon_step(&mut self, context: StrategyContext<'_>) -> Result<bool> {
        let _ = context;
        Ok(false)
    }

    /// Whether replicas train separately and have stepped since they were last made equal; the same
    /// on all ranks. If true, buffers are equal only within each replica, and training ends with
    /// [`prepare_save`](Self::prepare_save). Not collective.
    fn replicas_differ(&self) -> bool {
        false
    }

    /// Whether replicas ever train separately, which is constant and the same on all ranks. An
    /// optimizer that computes with whole tensors then communicates within its replica only. Not
    /// collective.
    fn replicas_train_apart(&self) -> bool {
        false
    }

    /// Called before the parameters are saved: makes replicas equal, if they may differ.
    /// Collective.
    ///
    /// # Errors
    /// If a peer fails.
    fn prepare_save(&mut self, context: StrategyContext<'_>) -> Result<()> {
        let _ = context;
        Ok(())
    }

    /// Called before the optimizers' `states` are saved, after
    /// [`prepare_save`](Self::prepare_save). Makes the states of replicas equal in place, if they
    /// may differ. Collective.
    ///
    /// # Errors
    /// If a peer fails.
    fn prepare_save_states(&mut self, states: &[StateTensor]) -> Result<()> {
        let _ = states;
        Ok(())
    }

    /// The strategy's own state tensors, which checkpoints save beside the optimizers'. They are
    /// cut like the parameters and loaded in place, and their names begin with [`STRATEGY_STATE`].
    /// A run under another strategy ignores them. Tensors missing from a checkpoint keep their
    /// values. Not collective.
    ///
    /// # Errors
    /// If a parameter has no local values.
    fn state_tensors(&self) -> Result<Vec<StateTensor>> {
        Ok(Vec::new())
    }

    /// The strategy's own scalar state, for checkpoints. Equal on all ranks. Not collective.
    fn scalars(&self) -> BTreeMap<String, f64> {
        BTreeMap::new()
    }

    /// Restores the values that [`scalars`](Self::scalars) returned when the checkpoint was saved,
    /// perhaps by another strategy. Called after
    /// [`finish_load`](super::Strategy::finish_load), when the optimizers' states and
    /// [`state_tensors`](Self::state_tensors) have been loaded too. Not collective.
    ///
    /// # Errors
    /// If a value is out of range.
    fn load_scalars(&mut self, scalars: &BTreeMap<String, f64>) -> Result<()> {
        let _ = scalars;
        Ok(())
    }
}
