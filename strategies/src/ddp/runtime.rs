//! The strategy.

use std::sync::Arc;

use fulgurite_core::Result;
use fulgurite_core::collective::{ProcessGroup, broadcast_object};
use fulgurite_core::mesh::{DATA_PARALLEL_REPLICATE, DeviceMesh};
use fulgurite_core::module::ModuleTree;
use fulgurite_core::parameter::Parameter;
use fulgurite_core::strategy::{Capabilities, Strategy, StrategyState, materialize};

use super::reducer::Reducer;

pub(super) struct DdpStrategy {
    state: StrategyState,
    reducer: Option<Arc<Reducer>>,
    first_bytes: usize,
    cap_bytes: usize,
    /// Whether buckets follow the order in which gradients really become ready.
    ordered: bool,
}

impl DdpStrategy {
    pub(super) fn new(first_bytes: usize, cap_bytes: usize) -> Self {
        let state = StrategyState::default();
        Self { state, reducer: None, first_bytes, cap_bytes, ordered: false }
    }

    /// After the first synchronised step: lays the buckets out again in the order in which
    /// gradients became ready on rank 0 (the ranks must agree). Collective.
    fn reorder(&mut self) -> Result<()> {
        let Some(reducer) = &self.reducer else { return Ok(()) };
        let tree = self.state.tree()?;
        let group = self.state.mesh()?.group(DATA_PARALLEL_REPLICATE)?;
        let order = broadcast_object(&**group, &reducer.ready_order(), 0)?;
        let parameters: Vec<Parameter> =
            order.iter().filter_map(|fqn| tree.parameter(fqn).cloned()).collect();
        if parameters.len() == tree.trainable().count() {
            reducer.lay_out(&parameters, self.first_bytes, self.cap_bytes)?;
            self.ordered = true;
        }
        Ok(())
    }
}

impl Strategy for DdpStrategy {
    fn name(&self) -> &str {
        "ddp"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { distributed: true, sharded: false, no_sync: true }
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
        let group = mesh.group(DATA_PARALLEL_REPLICATE)?.clone();
        materialize::verify_same_model(&tree, &*group)?;
        materialize::replicate_along(&tree, seed, mesh, DATA_PARALLEL_REPLICATE)?;
        materialize::verify_same_values(&tree, &*group)?;
        let reducer = Arc::new(Reducer::new(group, self.state.sync_flag()));
        // Until the real order is known: the reverse of declaration.
        let parameters: Vec<Parameter> = tree.trainable().cloned().collect();
        let reversed: Vec<Parameter> = parameters.iter().rev().cloned().collect();
        reducer.lay_out(&reversed, self.first_bytes, self.cap_bytes)?;
        parameters.iter().for_each(|p| p.set_reducer(reducer.clone()));
        self.reducer = Some(reducer);
        self.state.set_tree(tree);
        Ok(())
    }

    fn finish_load(&mut self) -> Result<()> {
        // Each rank has read its own copy.
        let group = self.state.mesh()?.group(DATA_PARALLEL_REPLICATE)?;
        materialize::verify_same_values(self.state.tree()?, &**group)?;
        self.prepare_forward()
    }

    fn begin_backward(&mut self) -> Result<()> {
        self.reducer.iter().for_each(|reducer| reducer.begin_backward());
        Ok(())
    }

    fn finish_backward(&mut self) -> Result<()> {
        self.reducer.iter().try_for_each(|reducer| reducer.finish_backward())
    }

    fn finish_step(&mut self) -> Result<()> {
        self.state.end_step()?;
        self.reducer.iter().for_each(|reducer| reducer.finish_step());
        if !self.ordered {
            self.reorder()?;
        }
        self.prepare_forward()
    }
}
