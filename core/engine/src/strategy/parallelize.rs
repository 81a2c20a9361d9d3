//! User-defined parallelism: functions that cut a model for a mesh.

use crate::Result;
use fulgurite_collective::mesh::DeviceMesh;
use fulgurite_module::module::ModuleTree;

/// Decides how a model is distributed over a mesh, before any values exist. Every rank calls it
/// once with the same result; it communicates nothing. Closures implement it.
pub trait ParallelizeFn: Send + Sync {
    /// Records decisions in the tree: cuts of layers
    /// ([`parallelize_module`](ModuleTree::parallelize_module)) and units to gather separately
    /// ([`fully_shard`](ModuleTree::fully_shard), [`shard_model`](ModuleTree::shard_model)).
    ///
    /// # Errors
    /// If the model and the mesh do not allow it. The message names the module.
    fn parallelize(&self, model: &mut ModuleTree, mesh: &DeviceMesh) -> Result<()>;
}

impl<F> ParallelizeFn for F
where
    F: Fn(&mut ModuleTree, &DeviceMesh) -> Result<()> + Send + Sync,
{
    fn parallelize(&self, model: &mut ModuleTree, mesh: &DeviceMesh) -> Result<()> {
        self(model, mesh)
    }
}

/// A parallelize function's configuration: `trainer.strategy.parallelize.type = "…"`.
#[typetag::serde(tag = "type")]
pub trait ParallelizeConfig: std::fmt::Debug + Send + Sync {
    /// Builds the function.
    ///
    /// # Errors
    /// If an option is out of range.
    fn build(&self) -> Result<Box<dyn ParallelizeFn>>;
}

fulgurite_config::plugin_kind!(
    dyn ParallelizeConfig,
    fulgurite_config::registry::kind::PARALLELIZE,
    "trainer.strategy.parallelize"
);
