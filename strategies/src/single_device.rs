//! One process with the whole model.

use std::sync::Arc;

use fulgurite_core::collective::ProcessGroup;
use fulgurite_core::mesh::DeviceMesh;
use fulgurite_core::module::ModuleTree;
use fulgurite_core::parameter::LocalGrads;
use fulgurite_core::strategy::{
    BuildContext, Capabilities, Strategy, StrategyConfig, StrategyState, materialize,
};
use fulgurite_core::{Error, Result};
use serde::{Deserialize, Serialize};

/// `strategy = "single_device"`: one process, no communication.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SingleDevice {}

#[typetag::serde(name = "single_device")]
impl StrategyConfig for SingleDevice {
    fn build(&self, _context: &BuildContext) -> Result<Box<dyn Strategy>> {
        Ok(Box::new(SingleDeviceStrategy::default()))
    }
}

fulgurite_core::register_strategy!(
    "single_device",
    SingleDevice,
    "one process with the whole model",
    "\"single_device\""
);

#[derive(Default)]
struct SingleDeviceStrategy {
    state: StrategyState,
    grads: Arc<LocalGrads>,
}

impl Strategy for SingleDeviceStrategy {
    fn name(&self) -> &str {
        "single_device"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { distributed: false, sharded: false, no_sync: false }
    }

    fn state(&self) -> &StrategyState {
        &self.state
    }

    fn state_mut(&mut self) -> &mut StrategyState {
        &mut self.state
    }

    fn setup_environment(&mut self, world: Arc<dyn ProcessGroup>) -> Result<()> {
        if world.size() != 1 {
            return Err(Error::Mesh(format!(
                "strategy `single_device` runs on one rank, the world size is {}; set \
                 `trainer.devices = 1`, or choose `ddp` or `fsdp`",
                world.size()
            )));
        }
        let layout = DeviceMesh::layout_for(1, None, None, None, None)?;
        self.state.set_mesh(DeviceMesh::new(layout, world)?);
        Ok(())
    }

    fn setup_module(&mut self, tree: ModuleTree, seed: u64) -> Result<()> {
        materialize::replicate(&tree, seed)?;
        for parameter in tree.trainable() {
            parameter.set_reducer(self.grads.clone());
        }
        self.state.set_tree(tree);
        Ok(())
    }

    fn finish_backward(&mut self) -> Result<()> {
        self.grads.deliver(self.state.tree()?)
    }
}
