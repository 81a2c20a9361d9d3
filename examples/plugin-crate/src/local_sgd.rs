//! The strategy.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use fulgurite_core::autograd::storage;
use fulgurite_core::collective::{ProcessGroup, ReduceOp};
use fulgurite_core::mesh::{DATA_PARALLEL_REPLICATE, DeviceMesh};
use fulgurite_core::module::ModuleTree;
use fulgurite_core::optim::local_squared_norm;
use fulgurite_core::parameter::LocalGrads;
use fulgurite_core::strategy::{
    BuildContext, Capabilities, Strategy, StrategyConfig, StrategyState, materialize,
};
use fulgurite_core::{Error, Result};
use serde::{Deserialize, Serialize};

/// Average parameters every few steps instead of gradients every step.
///
/// Between two averages each rank trains on its own data alone; momentum and the like are never
/// averaged. A checkpoint holds the average of the parameters, with which training goes on, and a
/// part of each rank's momentum.
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
            state: StrategyState::default(),
            grads: Arc::default(),
        }))
    }
}

// So that `plugins list` and errors know it.
fulgurite_core::register_strategy!(
    "local_sgd",
    LocalSgd,
    "every rank trains alone; parameters are averaged every few steps",
    "{ type = \"local_sgd\", sync_every = 16 }"
);

struct LocalSgdStrategy {
    sync_every: usize,
    steps: usize,
    state: StrategyState,
    grads: Arc<LocalGrads>,
}

impl LocalSgdStrategy {
    /// Gives all ranks the mean of their parameters. Collective.
    fn average(&self) -> Result<()> {
        let group = self.state.mesh()?.group(DATA_PARALLEL_REPLICATE)?;
        for parameter in self.state.tree()?.trainable() {
            let values = parameter.local()?.values;
            group.all_reduce(&values, ReduceOp::Sum)?.wait()?;
            // In place: layers and optimizer hold this very memory.
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
        Capabilities { distributed: true, sharded: false, no_sync: false }
    }

    fn state(&self) -> &StrategyState {
        &self.state
    }

    fn state_mut(&mut self) -> &mut StrategyState {
        &mut self.state
    }

    fn setup_environment(&mut self, world: Arc<dyn ProcessGroup>) -> Result<()> {
        let layout = DeviceMesh::layout_for(world.size(), None, Some(1), Some(1), Some(1))?;
        self.state.set_mesh(DeviceMesh::new(layout, world)?);
        Ok(())
    }

    fn setup_module(&mut self, tree: ModuleTree, seed: u64) -> Result<()> {
        let mesh = self.state.mesh()?;
        materialize::verify_same_model(&tree, &**mesh.world())?;
        materialize::replicate_along(&tree, seed, mesh, DATA_PARALLEL_REPLICATE)?;
        for parameter in tree.trainable() {
            parameter.set_reducer(self.grads.clone());
        }
        self.state.set_tree(tree);
        Ok(())
    }

    fn finish_backward(&mut self) -> Result<()> {
        self.grads.deliver(self.state.tree()?.trainable())
    }

    /// Gradients are of the sum over this rank's own items, so the mean is over those.
    fn grad_scale(&mut self) -> Result<f64> {
        Ok(1.0 / self.state.local_count().max(1.0))
    }

    /// The root mean square of the ranks' norms, so that all ranks clip alike.
    fn gradient_norm(&mut self) -> Result<f64> {
        let scale = self.grad_scale()?;
        let parameters: Vec<_> = self.state.tree()?.trainable().cloned().collect();
        let world = self.state.mesh()?.world();
        // The default counts only the part that this replica owns; here every replica's is another.
        let squares = (0..world.size())
            .map(|replica| local_squared_norm(&parameters, &|_| replica))
            .sum::<Result<f64>>()?;
        let squares = Tensor::new(&[squares * scale * scale], &Device::Cpu)?;
        world.all_reduce(&squares, ReduceOp::Sum)?.wait()?;
        Ok((squares.to_vec1::<f64>()?[0] / world.size() as f64).sqrt())
    }

    fn prepare_save(&mut self) -> Result<()> {
        self.average()?;
        self.prepare_forward()
    }

    fn finish_step(&mut self) -> Result<()> {
        self.state.end_step()?;
        self.steps += 1;
        if self.steps.is_multiple_of(self.sync_every) {
            self.average()?;
        }
        self.prepare_forward()
    }
}
