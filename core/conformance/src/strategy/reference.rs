//! The reference: training on one rank with the whole model and all data.

use std::sync::Arc;

use super::model::{Batch, MICRO_BATCHES, Probe, Variant};
use super::suite::{SEED, optimizer};
use crate::Result;
use fulgurite_engine::collective::ProcessGroup;
use fulgurite_engine::mesh::DeviceMesh;
use fulgurite_engine::module::{ModuleInit, ModuleTree};
use fulgurite_engine::parameter::LocalGrads;
use fulgurite_engine::strategy::{Capabilities, Strategy, StrategyContext, materialize};
use fulgurite_trainer::fabric::Fabric;

/// A strategy for one rank.
#[derive(Default)]
pub(super) struct OneRank {
    grads: Arc<LocalGrads>,
}

impl Strategy for OneRank {
    fn name(&self) -> &str {
        "reference"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            distributed: false,
            sharded: false,
            no_sync: false,
            deferred_reads: false,
            saves_distributed_checkpoints: true,
        }
    }

    fn device_mesh(&self, world: Arc<dyn ProcessGroup>) -> Result<DeviceMesh> {
        DeviceMesh::new(DeviceMesh::layout_for(world.size(), None, None, None, None)?, world)
    }

    fn setup_module(&mut self, tree: &mut ModuleTree, _mesh: &DeviceMesh, seed: u64) -> Result<()> {
        let slots = tree.slots();
        materialize::replicate(&slots, seed)?;
        slots.iter().for_each(|slot| slot.set_reducer(self.grads.clone()));
        Ok(())
    }

    fn reduce_gradients(&mut self, context: StrategyContext<'_>) -> Result<()> {
        self.grads.deliver(context.slots)
    }
}

/// Returns loss and gradient norm of each step, with the batches of all replicas.
pub(super) fn train(steps: usize, replicas: usize, init: &ModuleInit) -> Result<Vec<(f64, f64)>> {
    let world = Arc::new(fulgurite_engine::collective::Solo::new("reference", 0));
    let mut fabric = Fabric::new(world, Box::new(OneRank::default()), init.clone(), SEED)?;
    let (model, mut optimizer) =
        fabric.setup(|b| Probe::new(b, Variant::default()), &optimizer())?;
    let step = |_| {
        for replica in 0..replicas {
            for micro_batch in 0..MICRO_BATCHES {
                let batch = Batch::new(replica, replicas, micro_batch, &init.device)?;
                fabric.backward(&model.loss(&batch)?)?;
            }
        }
        let loss = fabric.step_totals(&[])?.mean();
        let norm = optimizer.gradient_norm()?;
        optimizer.step()?;
        Ok((loss, norm))
    };
    (0..steps).map(step).collect()
}
