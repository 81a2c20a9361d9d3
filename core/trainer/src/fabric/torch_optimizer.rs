//! The state of an optimizer of PyTorch for one of ours.

use std::collections::BTreeMap;

use super::{Fabric, FabricOptimizer};
use crate::{Error, Result};
use fulgurite_checkpoint::{
    LoadOptions, LoadReport, RankZeroSource, RekeyedOptimizer, TensorSource, load_optimizer,
};
use fulgurite_engine::collective::broadcast_object;
use fulgurite_engine::optim::ParamGroup;

/// What rank 0 sends of a state besides tensors.
type Numbers = (BTreeMap<String, f64>, Vec<ParamGroup>);

impl Fabric {
    /// Restores the state of an optimizer of PyTorch, under any strategy and number of ranks: moments, the number
    /// of steps, and the options of the parameter groups, as
    /// [`load_optimizer_state_dict`](Self::load_optimizer_state_dict) sets them. The optimizer must be of the
    /// kind that the state is of.
    ///
    /// `open` is called on every rank, which reads its own part of each moment; with
    /// [`broadcast_from_rank0`](LoadOptions::broadcast_from_rank0) it is called on rank 0, which reads one tensor at
    /// a time and sends it. [`LoadOptions::names`] rename the parameters. A learning-rate schedule is
    /// [the optimizer's own](FabricOptimizer::with_scheduler) and goes on at
    /// [`RekeyedOptimizer::steps`]; an average of the weights begins when it is
    /// [set](FabricOptimizer::set_average), afterwards. Collective.
    ///
    /// ```no_run
    /// # use fulgurite_core::Result;
    /// # use fulgurite_core::checkpoint::TorchOptimizer;
    /// # use fulgurite_core::fabric::{Fabric, FabricOptimizer};
    /// # fn load(fabric: &Fabric, optimizer: &mut FabricOptimizer) -> Result<()> {
    /// fabric.load_raw("last.ckpt", true)?;
    /// let names: Vec<&str> = fabric.module_tree()?.parameters().iter().map(|p| p.fqn()).collect();
    /// fabric.load_torch_optimizer(optimizer, || TorchOptimizer::open("last.ckpt")?.rekey(&names), true)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// On every rank: those of `open`; if the state is of another kind of optimizer; if strict, and it is of other
    /// parameters or shapes; if the optimizer keeps an average. The optimizer is then as it was, unless values
    /// could not be read.
    pub fn load_torch_optimizer(
        &self,
        optimizer: &mut FabricOptimizer,
        open: impl FnOnce() -> Result<RekeyedOptimizer>,
        options: impl Into<LoadOptions>,
    ) -> Result<LoadReport> {
        let (options, tree, world) = (options.into(), self.module_tree()?, &**self.world());
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
        let failed = self.all_gather_object(&opened.as_ref().err().map(ToString::to_string))?;
        let opened = opened?;
        let failed = failed.into_iter().enumerate().find_map(|(rank, m)| Some((rank, m?)));
        if let Some((rank, message)) = failed {
            return Err(Error::PeerFailed { rank, message });
        }
        if let Some(state) = &opened {
            self.warn_of(state);
        }

        let own: Numbers = opened.as_ref().map(numbers).unwrap_or_default();
        let (scalars, mut groups): Numbers = broadcast_object(world, &own, 0)?;
        for name in groups.iter_mut().flat_map(|group| &mut group.params) {
            *name = options.names.apply(name)?;
            if let Some(parameter) = tree.parameter(name) {
                *name = parameter.fqn().to_owned();
            }
        }
        let states = optimizer.state_tensors()?;
        // Refused before tensors are changed, as are differences.
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
