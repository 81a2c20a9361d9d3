//! Saving and loading checkpoints under a strategy.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::StrategyRuntime;
use crate::{Error, Result};
use fulgurite_checkpoint::{
    self as checkpoint, CheckpointIO, DistributedCheckpoint, FullOptions, LoadOptions,
    RestoreReport, SaveMeta, SaveRequest, ShardTensor,
};
use fulgurite_engine::mesh::DP_CP;
use fulgurite_engine::optim::StateTensor;

impl StrategyRuntime {
    /// Makes replicas equal before a save, buffers included. Collective.
    pub(crate) fn prepare_save(&self) -> Result<()> {
        let state = &mut *self.lock_state()?;
        let extensions = state.extensions();
        let differ = extensions.replicas_differ();
        extensions.prepare_save(self.context()?)?;
        if differ { self.synchronise_buffers(DP_CP) } else { Ok(()) }
    }

    /// Makes replicas equal if they have trained separately. Collective.
    pub(crate) fn unite_replicas(&self) -> Result<()> {
        let differ = self.lock_state()?.extensions().replicas_differ();
        if differ { self.prepare_save() } else { Ok(()) }
    }

    /// Makes the optimizers' states equal on all replicas before a save. Called after
    /// [`prepare_save`](Self::prepare_save). Collective.
    pub(crate) fn prepare_save_states(&self, states: &[StateTensor]) -> Result<()> {
        self.lock_state()?.extensions().prepare_save_states(states)
    }

    /// Returns the strategy's own state tensors.
    pub(crate) fn strategy_states(&self) -> Result<Vec<StateTensor>> {
        self.lock_state()?.extensions().state_tensors()
    }

    /// Returns the scalars of the strategy's own state.
    pub(crate) fn strategy_scalars(&self) -> Result<BTreeMap<String, f64>> {
        Ok(self.lock_state()?.extensions().scalars())
    }

    /// Restores what [`strategy_scalars`](Self::strategy_scalars) returned.
    pub(crate) fn load_strategy_scalars(&self, scalars: &BTreeMap<String, f64>) -> Result<()> {
        self.lock_state()?.extensions().load_scalars(scalars)
    }

    /// Returns this rank's part of the distributed checkpoint `name`: the regions of the model and
    /// of these optimizer states that the rank owns. The request shares their memory. Sets mesh and
    /// specs in `meta`. Every distributed save uses it, in the background too.
    ///
    /// # Errors
    /// If a state belongs to a parameter that the model lacks.
    pub(crate) fn save_request(
        &self,
        name: &str,
        optimizer: &[StateTensor],
        meta: SaveMeta,
    ) -> Result<SaveRequest> {
        let (mesh, tree) = (self.mesh(), self.tree()?);
        let coordinate = |dim: &str| mesh.coordinate(dim);
        let model = checkpoint::model_tensors(tree, coordinate)?;
        let optimizer = checkpoint::optimizer_tensors(tree, optimizer, coordinate)?;
        self.request(name, (model, optimizer), meta)
    }

    /// Like [`save_request`](Self::save_request), of the regions that the rank owns in its replica.
    /// Not collective.
    ///
    /// # Errors
    /// Also if replicas divide the optimizer's state.
    pub(crate) fn held_request(
        &self,
        name: &str,
        optimizer: &[StateTensor],
        meta: SaveMeta,
    ) -> Result<SaveRequest> {
        let (mesh, tree) = (self.mesh(), self.tree()?);
        let coordinate = |dim: &str| mesh.coordinate(dim);
        let parts = checkpoint::replica_tensors(tree, optimizer, coordinate)?;
        self.request(name, parts, meta)
    }

    fn request(
        &self,
        name: &str,
        (model, optimizer): (Vec<ShardTensor>, Vec<ShardTensor>),
        meta: SaveMeta,
    ) -> Result<SaveRequest> {
        let (name, meta) = (name.to_owned(), self.describe(meta)?);
        Ok(SaveRequest { name, model, optimizer, meta, update_last: false, remove: Vec::new() })
    }

    /// Checks that replicas are equal after each step. Not collective.
    ///
    /// # Errors
    /// If they train separately.
    pub(crate) fn check_replicas_equal(&self) -> Result<()> {
        match self.lock_state()?.extensions().replicas_differ() {
            true => Err(Error::other("replicas have trained separately")),
            false => Ok(()),
        }
    }

    /// Saves the model and these optimizer states to `io` as the full checkpoint `name`. Whole
    /// tensors are gathered on rank 0 one by one. Sets mesh and specs in `meta`. Collective.
    ///
    /// # Errors
    /// As [`checkpoint::save_full`].
    pub(crate) fn save_full_checkpoint(
        &self,
        io: &dyn CheckpointIO,
        name: &str,
        optimizer: &[StateTensor],
        options: &FullOptions,
        meta: SaveMeta,
    ) -> Result<PathBuf> {
        let (mesh, tree) = (self.mesh(), self.tree()?);
        let coordinate = |dim: &str| mesh.coordinate(dim);
        let meta = self.describe(meta)?;
        let world = &**mesh.world();
        checkpoint::save_full(io, world, name, tree, coordinate, optimizer, options, &meta)
    }

    /// Loads a distributed checkpoint of any mesh into the model and, if given, these optimizer
    /// states. Then makes the model ready for a forward. Returns the differences. Collective.
    ///
    /// # Errors
    /// As [`checkpoint::restore`].
    pub(crate) fn load_checkpoint(
        &self,
        source: &DistributedCheckpoint,
        optimizer: Option<&[StateTensor]>,
        options: &LoadOptions,
    ) -> Result<RestoreReport> {
        let report = checkpoint::restore(source, self.tree()?, optimizer, options)?;
        self.finish_load()?;
        Ok(report)
    }

    /// Sets mesh and specs in `meta`.
    fn describe(&self, meta: SaveMeta) -> Result<SaveMeta> {
        let (names, sizes) = (self.mesh().layout().names(), self.mesh().layout().sizes());
        Ok(SaveMeta {
            mesh: names.iter().cloned().zip(sizes.iter().copied()).collect(),
            specs: checkpoint::shard_specs(self.tree()?),
            ..meta
        })
    }
}
