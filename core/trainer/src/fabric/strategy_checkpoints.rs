//! Checkpoints of what a strategy spreads.

use std::path::PathBuf;

use crate::Result;
use crate::checkpoint::{
    self, CheckpointIO, DistributedCheckpoint, FullOptions, LoadOptions, RestoreReport, SaveMeta,
    SaveRequest,
};
use crate::mesh::DeviceMesh;
use crate::module::ModuleTree;
use crate::optim::StateTensor;
use crate::strategy::Strategy;

/// Saves and loads the model of any [`Strategy`].
pub trait StrategyCheckpoints: Strategy {
    /// What this rank contributes to a distributed checkpoint `name` of the model and these
    /// optimizer states: the parts it owns, sharing their memory. Of `meta`, mesh and specs are
    /// filled in. Every save goes through it, also one in the background.
    ///
    /// # Errors
    /// If a state is of a parameter that the model does not have.
    fn save_request(
        &self,
        name: &str,
        optimizer: &[StateTensor],
        meta: SaveMeta,
    ) -> Result<SaveRequest> {
        let (mesh, tree) = (self.state().mesh()?, self.state().tree()?);
        let coordinate = |dim: &str| mesh.coordinate(dim);
        let model = checkpoint::model_tensors(tree, coordinate)?;
        let optimizer = checkpoint::optimizer_tensors(tree, optimizer, coordinate)?;
        let (names, sizes) = (mesh.layout().names(), mesh.layout().sizes());
        let meta = SaveMeta {
            mesh: names.iter().cloned().zip(sizes.iter().copied()).collect(),
            specs: checkpoint::specs(tree),
            ..meta
        };
        let name = name.to_owned();
        Ok(SaveRequest { name, model, optimizer, meta, point_last: false, remove: Vec::new() })
    }

    /// Saves the model and these optimizer states as the distributed checkpoint `name` of `io`, each
    /// rank what it owns. Of `meta`, mesh and specs are filled in. Collective.
    ///
    /// # Errors
    /// As [`checkpoint::save`].
    fn save_checkpoint(
        &self,
        io: &dyn CheckpointIO,
        name: &str,
        optimizer: &[StateTensor],
        meta: SaveMeta,
    ) -> Result<PathBuf> {
        let request = self.save_request(name, optimizer, meta)?;
        request.run(io, &**self.state().mesh()?.world())
    }

    /// Saves the model, and these optimizer states, as the full checkpoint `name` of `io`: whole
    /// tensors in files that others read, gathered on rank 0 one by one. Of `meta`, mesh and specs
    /// are filled in. Collective.
    ///
    /// # Errors
    /// As [`checkpoint::save_full`].
    fn save_full_checkpoint(
        &self,
        io: &dyn CheckpointIO,
        name: &str,
        optimizer: &[StateTensor],
        options: &FullOptions,
        meta: SaveMeta,
    ) -> Result<PathBuf> {
        let (mesh, tree) = (self.state().mesh()?, self.state().tree()?);
        let coordinate = |dim: &str| mesh.coordinate(dim);
        let meta = describe_mesh(mesh, tree, meta);
        let world = &**mesh.world();
        checkpoint::save_full(io, world, name, tree, coordinate, optimizer, options, &meta)
    }

    /// Fills the model, and these optimizer states if there are any, from a distributed checkpoint
    /// of any mesh, and makes the model ready for a forward. Collective.
    ///
    /// # Errors
    /// As [`checkpoint::load_into`]; nothing is changed if the checkpoint is of another model.
    fn load_checkpoint(
        &mut self,
        source: &DistributedCheckpoint,
        optimizer: Option<&[StateTensor]>,
    ) -> Result<()> {
        self.load_checkpoint_with(source, optimizer, &LoadOptions::default()).map(drop)
    }

    /// [`load_checkpoint`](Self::load_checkpoint) with options: a part of it, under other names, or
    /// into a model that has changed since. The report tells what differed. Collective.
    ///
    /// # Errors
    /// As [`checkpoint::restore`].
    fn load_checkpoint_with(
        &mut self,
        source: &DistributedCheckpoint,
        optimizer: Option<&[StateTensor]>,
        options: &LoadOptions,
    ) -> Result<RestoreReport> {
        let report = checkpoint::restore(source, self.state().tree()?, optimizer, options)?;
        self.finish_load()?;
        Ok(report)
    }
}

impl<S: Strategy + ?Sized> StrategyCheckpoints for S {}

/// The same with the mesh, and how it cuts each parameter.
fn describe_mesh(mesh: &DeviceMesh, tree: &ModuleTree, meta: SaveMeta) -> SaveMeta {
    let (names, sizes) = (mesh.layout().names(), mesh.layout().sizes());
    SaveMeta {
        mesh: names.iter().cloned().zip(sizes.iter().copied()).collect(),
        specs: checkpoint::specs(tree),
        ..meta
    }
}
