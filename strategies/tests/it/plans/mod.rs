//! Tensor-parallel plans: effects of the built-in plans on parameters, and messages about mistakes.

mod configuration;
mod mistakes;
mod models;
mod specs;

use fulgurite_core::Result;
use fulgurite_core::config::{self, PluginValue};
use fulgurite_core::mesh::DeviceMesh;
use fulgurite_core::registry::kind;
use fulgurite_core::strategy::{ParallelizeConfig, ParallelizeFn};
use fulgurite_strategies as _;
use serde::Deserialize;

/// The function named by a configuration's `parallelize`, in TOML.
fn function(parallelize: &str) -> Result<Box<dyn ParallelizeFn>> {
    #[derive(Deserialize)]
    struct Config {
        parallelize: PluginValue,
    }
    let table =
        config::ConfigLayers::new().text("a.toml", &format!("parallelize = {parallelize}"))?;
    let Config { parallelize } = table.parse()?;
    let config: Box<dyn ParallelizeConfig> = parallelize.build(kind::PARALLELIZE, "parallelize")?;
    config.build()
}

/// A mesh on which all ranks share layers.
fn mesh(world: std::sync::Arc<dyn fulgurite_core::collective::ProcessGroup>) -> Result<DeviceMesh> {
    let tensor = world.size();
    DeviceMesh::new(DeviceMesh::layout_for(tensor, None, None, None, Some(tensor))?, world)
}
