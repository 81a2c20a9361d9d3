//! Restoring an optimizer from PyTorch's state.

use std::collections::BTreeMap;

use super::{Checkpoints, FabricOptimizer};
use crate::{Error, Result};
use fulgurite_checkpoint::{
    LoadOptions, LoadReport, RankZeroSource, RekeyedOptimizer, TensorSource, load_optimizer,
};
use fulgurite_engine::collective::broadcast_object;
use fulgurite_engine::optim::ParamGroup;

/// Scalars and parameter groups, which rank 0 sends.
type Numbers = (BTreeMap<String, f64>, Vec<ParamGroup>);

impl Checkpoints<'_> {
    /// Restores a PyTorch optimizer's state, under any strategy and number of ranks. Collective.
    ///
    /// The state has moments, the number of steps, and the options of the parameter groups, which
    /// are set as in
    /// [`FullState::load_optimizer_state_dict`](super::FullState::load_optimizer_state_dict). Both
    /// optimizers must be of the same kind.
    ///
    /// Every rank calls `open` and reads its own part of each moment. With
    /// [`broadcast_from_rank0`](LoadOptions::broadcast_from_rank0) only rank 0 calls `open`, reads
    /// one tensor at a time, and sends it. [`LoadOptions::names`] renames the parameters.
    ///
    /// The optimizer keeps [its own](FabricOptimizer::with_scheduler) learning-rate schedule, which
    /// continues at [`RekeyedOptimizer::steps`]. [Set](FabricOptimizer::set_average) an average of
    /// the weights after loading.
    ///
    /// ```no_run
    /// # use fulgurite_core::Result;
    /// # use fulgurite_core::checkpoint::TorchOptimizer;
    /// # use fulgurite_core::fabric::{Fabric, FabricOptimizer};
    /// # fn load(fabric: &Fabric, optimizer: &mut FabricOptimizer) -> Result<()> {
    /// fabric.load_raw("last.ckpt", true)?;
    /// let names: Vec<&str> = fabric.module_tree()?.parameters().iter().map(|p| p.fqn()).collect();
    /// fabric.checkpoints().load_torch_optimizer(
    ///     optimizer,
    ///     || TorchOptimizer::open("last.ckpt")?.rekey(&names),
    ///     true,
    /// )?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// On every rank: the errors of `open`; if the state belongs to another kind of optimizer; if
    /// the optimizer keeps an average; if strict and parameters or shapes differ. The optimizer is
    /// unchanged then, unless values could not be read.
    pub fn load_torch_optimizer(
        &self,
        optimizer: &mut FabricOptimizer,
        open: impl FnOnce() -> Result<RekeyedOptimizer>,
        options: impl Into<LoadOptions>,
    ) -> Result<LoadReport> {
        let (options, tree, world) = (options.into(), self.0.module_tree()?, &**self.0.world());
        if optimizer.average().is_some() {
            return Err(Error::other(
                "the optimizer keeps an average of the weights, which torch's state has not; load the state \
                 first and then begin the average with `FabricOptimizer::set_average`",
            ));
        }
        let opened = match options.broadcast_from_rank0 && world.rank() > 0 {
            true => Ok(None),
            false => open().map(Some),
        };
        let failed = self.0.all_gather_object(&opened.as_ref().err().map(ToString::to_string))?;
        let opened = opened?;
        let failed = failed.into_iter().enumerate().find_map(|(rank, m)| Some((rank, m?)));
        if let Some((rank, message)) = failed {
            return Err(Error::PeerFailed { rank, message });
        }
        if let Some(state) = &opened {
            self.0.warn_of(state);
        }

        let own: Numbers = opened.as_ref().map(numbers).unwrap_or_default();
        let (scalars, mut groups): Numbers = broadcast_object(world, &own, 0)?;
        for group in &mut groups {
            let mut renamed = Vec::with_capacity(group.params.len());
            for name in &group.params {
                renamed.extend(options.names.apply_all(name)?);
            }
            for name in &mut renamed {
                if let Some(parameter) = tree.parameter(name) {
                    *name = parameter.fqn().to_owned();
                }
            }
            group.params = renamed;
        }
        let states = optimizer.state_tensors()?;
        // Fails for another kind of optimizer before tensors are changed, as differences do below.
        let before = optimizer.param_groups();
        optimizer.load_param_groups(&groups)?;
        let loaded = match (options.broadcast_from_rank0, opened) {
            (false, Some(state)) => load_optimizer(&state, tree, &states, options),
            (_, state) => RankZeroSource::new(world, || {
                let state = state.ok_or_else(|| Error::other("rank 0 has opened no state"))?;
                Ok(Box::new(state) as Box<dyn TensorSource>)
            })
            .and_then(|source| source.load_optimizer(tree, &states, options)),
        };
        if loaded.is_err() {
            optimizer.load_param_groups(&before)?;
        }
        let report = loaded?;
        optimizer.load_scalars(&scalars)?;
        Ok(report)
    }
}

fn numbers(state: &RekeyedOptimizer) -> Numbers {
    let scalars = [("step", state.optimizer_step()), ("fabric.steps", state.steps())];
    let scalars = scalars.map(|(name, value)| (name.to_owned(), value as f64));
    (BTreeMap::from(scalars), state.param_groups().to_vec())
}
