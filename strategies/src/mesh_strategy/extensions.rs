//! The optional features of the mesh strategy.

use std::collections::BTreeMap;
use std::sync::Arc;

use fulgurite_engine::mesh::DeviceMesh;
use fulgurite_engine::module::ModuleTree;
use fulgurite_engine::optim::StateTensor;
use fulgurite_engine::strategy::{
    Pipeline, RankMemory, Strategy as _, StrategyContext, StrategyExtensions,
};
use fulgurite_error::Result;

use super::experts::ExpertShards;
use super::ignored::Ignored;
use super::outer::Outer;
use super::reduction::GradientReduction;
use super::strategy::DataParallel;
use super::{MeshStrategy, PipelineSettings, plan};

impl StrategyExtensions for MeshStrategy {
    fn plan_module(
        &mut self,
        tree: &mut ModuleTree,
        mesh: &DeviceMesh,
    ) -> Result<Option<RankMemory>> {
        GradientReduction::new(&self.settings.gradients, mesh)?;
        self.parallelize(tree, mesh)?;
        ExpertShards::new(self.settings.expert_parallel_size, tree, mesh)?;
        self.assign(tree, mesh)?;
        plan::rank_memory(self, tree, mesh).map(Some)
    }

    fn pipeline(&self) -> Option<Arc<dyn Pipeline>> {
        self.pipeline.clone().map(|pipeline| pipeline as Arc<dyn Pipeline>)
    }

    fn check_micro_batches(&self, micro_batches: usize) -> Result<()> {
        let Some(PipelineSettings { ranks, source, .. }) = &self.settings.pipeline else {
            return Ok(());
        };
        source.schedule(*ranks, micro_batches).map(drop)
    }

    fn abandon_step(&mut self, context: StrategyContext<'_>) -> Result<bool> {
        if self.pipeline.is_some() {
            // Other stages' messages may be under way.
            return Ok(false);
        }
        match self.data_parallel()? {
            DataParallel::Replicated { reducer, .. } => reducer.abandon_step()?,
            DataParallel::Sharded(runtime) => runtime.abandon_step()?,
        }
        self.ignored.as_ref().map_or(Ok(()), Ignored::abandon_step)?;
        self.prepare_forward(context)?;
        Ok(true)
    }

    fn replicas_differ(&self) -> bool {
        self.outer.as_ref().is_some_and(Outer::replicas_differ)
    }

    fn replicas_train_apart(&self) -> bool {
        self.outer.is_some()
    }

    fn prepare_save(&mut self, context: StrategyContext<'_>) -> Result<()> {
        let verify = |ignored: &Ignored| ignored.verify_same_values(context.mesh);
        self.ignored.as_ref().map_or(Ok(()), verify)?;
        if !self.replicas_differ() {
            return Ok(());
        }
        self.outer.as_mut().map_or(Ok(()), Outer::synchronise)?;
        self.prepare_forward(context)
    }

    fn prepare_save_states(&mut self, states: &[StateTensor]) -> Result<()> {
        self.outer.as_mut().map_or(Ok(()), |outer| outer.prepare_save_states(states))
    }

    fn state_tensors(&self) -> Result<Vec<StateTensor>> {
        self.outer.as_ref().map_or(Ok(Vec::new()), Outer::state_tensors)
    }

    fn scalars(&self) -> BTreeMap<String, f64> {
        self.outer.as_ref().map(Outer::scalars).unwrap_or_default()
    }

    fn load_scalars(&mut self, scalars: &BTreeMap<String, f64>) -> Result<()> {
        self.outer.as_mut().map_or(Ok(()), |outer| outer.load_scalars(scalars))
    }
}
