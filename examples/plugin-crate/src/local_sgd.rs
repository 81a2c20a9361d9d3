//! [`LocalSgd`], a strategy.

use std::sync::Arc;

use fulgurite_core::autograd::storage;
use fulgurite_core::collective::{ProcessGroup, ReduceOp};
use fulgurite_core::mesh::{DATA_PARALLEL_REPLICATE, DeviceMesh};
use fulgurite_core::module::ModuleTree;
use fulgurite_core::optim::SquaredNorm;
use fulgurite_core::parameter::LocalGrads;
use fulgurite_core::strategy::{
    BuildContext, Capabilities, StepTotals, Strategy, StrategyConfig, StrategyContext,
    StrategyExtensions, materialize,
};
use fulgurite_core::{Error, Result};
use serde::{Deserialize, Serialize};

/// Averages parameters every few steps instead of gradients every step.
///
/// Between two averages each rank trains only on its own data. The optimizer's state is never
/// averaged. A save averages the parameters; the checkpoint has a part of each rank's optimizer
/// state.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LocalSgd {
    /// Optimizer steps from one average to the next.
    pub sync_every: usize,
}

#[typetag::serde(name = "local_sgd")]
impl StrategyConfig for LocalSgd {
    fn build(&self, _context: &BuildContext) -> Result<Box<dyn Strategy>> {
        if self.sync_every == 0 {
            return Err(Error::Config(
                "`trainer.strategy.sync_every` = 0: expected at least 1".to_owned(),
            ));
        }
        Ok(Box::new(LocalSgdStrategy {
            sync_every: self.sync_every,
            steps: 0,
            grads: Arc::default(),
        }))
    }
}

// For `plugins list` and error messages.
fulgurite_core::register_strategy!(
    "local_sgd",
    LocalSgd,
    "every rank trains alone; parameters are averaged every few steps",
    "{ type = \"local_sgd\", sync_every = 16 }"
);

struct LocalSgdStrategy {
    sync_every: usize,
    steps: usize,
    grads: Arc<LocalGrads>,
}

impl LocalSgdStrategy {
    /// Replaces the parameters of all ranks by their mean. Collective.
    fn average(&self, context: StrategyContext<'_>) -> Result<()> {
        let group = context.mesh.group(DATA_PARALLEL_REPLICATE)?;
        for parameter in context.tree.trainable() {
            let values = parameter.local()?.values;
            group.all_reduce(&values, ReduceOp::Sum)?.wait()?;
            // In place, since layers and optimizer share this memory.
            storage::copy_from(&values, &(&values / group.size() as f64)?)?;
        }
        Ok(())
    }
}

impl Strategy for LocalSgdStrategy {
    fn name(&self) -> &str {
        "local_sgd"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            distributed: true,
            sharded: false,
            no_sync: false,
            deferred_reads: false,
            saves_distributed_checkpoints: true,
        }
    }

    fn device_mesh(&self, world: Arc<dyn ProcessGroup>) -> Result<DeviceMesh> {
        let layout = DeviceMesh::layout_for(world.size(), None, Some(1), Some(1), Some(1))?;
        DeviceMesh::new(layout, world)
    }

    fn setup_module(&mut self, tree: &mut ModuleTree, mesh: &DeviceMesh, seed: u64) -> Result<()> {
        materialize::verify_same_model(tree, &**mesh.world())?;
        let slots = tree.slots();
        materialize::replicate_along(&slots, seed, mesh, DATA_PARALLEL_REPLICATE)?;
        slots.iter().for_each(|slot| slot.set_reducer(self.grads.clone()));
        Ok(())
    }

    /// Each rank keeps its own gradients.
    fn reduce_gradients(&mut self, context: StrategyContext<'_>) -> Result<()> {
        self.grads.deliver(context.slots)
    }

    /// Gradients are of the sum over this rank's items, so the mean is over these items.
    fn grad_scale(&self, _totals: &StepTotals, local_count: f64) -> Result<f64> {
        Ok(1.0 / local_count.max(1.0))
    }

    /// The root mean square of the ranks' norms, so that all ranks clip alike.
    fn squared_norm(&self, context: StrategyContext<'_>) -> Result<SquaredNorm> {
        let parameters: Vec<_> = context.tree.trainable().cloned().collect();
        let ranks = context.mesh.world().size();
        // The default counts each parameter once; here the replicas have different gradients.
        (0..ranks)
            .map(|replica| SquaredNorm::of(&parameters, &|_| replica))
            .try_fold(SquaredNorm::default(), |sum, square| sum.plus(square?))?
            .divided_by(ranks as f64)
    }

    fn finish_step(&mut self, context: StrategyContext<'_>) -> Result<()> {
        self.steps += 1;
        if self.steps.is_multiple_of(self.sync_every) {
            self.average(context)?;
        }
        self.prepare_forward(context)
    }

    fn extensions(&mut self) -> Option<&mut dyn StrategyExtensions> {
        Some(self)
    }
}

impl StrategyExtensions for LocalSgdStrategy {
    fn prepare_save(&mut self, context: StrategyContext<'_>) -> Result<()> {
        self.average(context)?;
        self.prepare_forward(context)
    }
}
