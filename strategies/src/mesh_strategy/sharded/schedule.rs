//! When units are gathered, freed and reduced: the hooks around forward and backward.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::{DType, Tensor};
use fulgurite_core::autograd::is_grad_enabled;
use fulgurite_core::module::{UnitHandle, UnitHooks};
use fulgurite_core::parameter::{GradReducer, Parameter};
use fulgurite_core::{Error, Result};

use super::super::summands::Summands;
use super::group::ParamGroup;
use crate::accumulation::AccumulationSync;

/// dtypes that a unit's input and output are cast to.
pub(in crate::mesh_strategy) struct Casts {
    pub(in crate::mesh_strategy) input: Option<DType>,
    pub(in crate::mesh_strategy) output: Option<DType>,
}

/// The units at run time. The last group is the root's.
pub(in crate::mesh_strategy) struct Schedule {
    groups: Vec<ParamGroup>,
    /// FQN → group.
    owners: HashMap<String, usize>,
    /// Unit index → group; `None` where the unit was folded into the root.
    units: Vec<Option<usize>>,
    prefetch: usize,
    casts: Casts,
    sync: Arc<AtomicBool>,
    accumulation_sync: AccumulationSync,
    summands: Summands,
    order: Mutex<Order>,
}

/// What is known of the order in which units run.
#[derive(Default)]
struct Order {
    /// Groups in the order of the last training forward.
    forward: Vec<usize>,
    /// Those of the forward that is running.
    running: Vec<usize>,
    /// Groups whose gradients are complete (or that get none) and whose backward does not begin again,
    /// and whose parameters are kept until another unit's backward begins: operations behind frozen
    /// layers may still read them.
    done: Vec<usize>,
    /// Groups whose reduction has been started, oldest first.
    reducing: Vec<usize>,
    /// Calls of units with trainable parameters in the forward that is running. The others' outputs may
    /// have no backward.
    calls: usize,
    /// Those whose backward has begun, in the backward that is running.
    entered: usize,
    /// Groups whose backward has begun, once for each call.
    begun: Vec<usize>,
    /// Whether a backward of this step left calls of units behind: another backward may be theirs.
    behind: bool,
    /// Groups whose backward has begun and that were not reduced yet, in that order, which is the
    /// same on all ranks.
    entered_groups: Vec<usize>,
    /// Complete groups whose reduction waits for the end of the backward.
    held: Vec<usize>,
}

impl Order {
    /// Whether the backward that is running is that of the forwards since the last one, so that
    /// the uses of parameters are counted exactly. The same on all ranks, which run the same units.
    fn is_plain(&self) -> bool {
        !self.behind && self.entered <= self.calls
    }

    /// Whether the backward of this group may still begin, for the first time or again. The same on all
    /// ranks, unlike whether its gradients are complete, so it decides what is gathered and freed: else
    /// one rank would gather a unit while others gather the next.
    fn awaits(&self, group: usize) -> bool {
        let times = |groups: &[usize]| groups.iter().filter(|&&g| g == group).count();
        !self.is_plain() || times(&self.begun) < times(&self.running)
    }

    /// Has a group freed when the next unit's backward begins, if its own does not begin again.
    fn free_later(&mut self, group: usize) {
        if !self.awaits(group) {
            self.done.push(group);
        }
    }
}

impl Schedule {
    pub(in crate::mesh_strategy) fn new(
        groups: Vec<ParamGroup>,
        units: Vec<Option<usize>>,
        prefetch: usize,
        casts: Casts,
        (sync, accumulation_sync): (Arc<AtomicBool>, AccumulationSync),
        summands: Summands,
    ) -> Self {
        let mut owners = HashMap::new();
        for (i, group) in groups.iter().enumerate() {
            for member in &group.members {
                owners.insert(member.parameter.fqn().to_owned(), i);
            }
        }
        let order = Mutex::default();
        Self { groups, owners, units, prefetch, casts, sync, accumulation_sync, summands, order }
    }

    /// Whether this backward's gradients are reduced over the ranks that share parameters.
    fn reduces(&self) -> bool {
        self.sync.load(Ordering::Relaxed) || self.accumulation_sync != AccumulationSync::None
    }

    /// Whether they are reduced over replicas too.
    fn replicates(&self) -> bool {
        self.sync.load(Ordering::Relaxed) || self.accumulation_sync == AccumulationSync::All
    }

    fn order(&self) -> MutexGuard<'_, Order> {
        self.order.lock().expect("no panic while scheduling")
    }

    fn root(&self) -> usize {
        self.groups.len() - 1
    }

    fn group_of(&self, parameter: &Parameter) -> Result<usize> {
        let owner = self.owners.get(parameter.fqn()).copied();
        owner.ok_or_else(|| Error::parameter(parameter.fqn(), "is in no FSDP unit"))
    }

    fn unit_group(&self, unit: &UnitHandle) -> Option<usize> {
        self.units.get(unit.index()).copied().flatten()
    }

    /// Gathers the root unit. Collective.
    pub(in crate::mesh_strategy) fn prepare_forward(&self) -> Result<()> {
        self.groups[self.root()].unshard()
    }

    /// Frees every unit. Local.
    pub(in crate::mesh_strategy) fn reshard_all(&self) -> Result<()> {
        self.groups.iter().try_for_each(ParamGroup::reshard)
    }

    /// Ends a step: gradients that were never reduced are dropped. Local.
    pub(in crate::mesh_strategy) fn finish_step(&self) {
        self.order().behind = false;
        self.groups.iter().for_each(ParamGroup::drop_grads);
    }

    /// All of a group's gradients are complete.
    fn post_backward(&self, group: usize) -> Result<()> {
        if self.reduces() {
            if self.order().entered_groups.contains(&group) {
                self.reduce_in_order()?;
            } else {
                // The root, whose gradients come from anywhere in the graph, and units whose
                // backward was not seen to begin in a way that is alike on all ranks.
                self.order().held.push(group);
            }
        }
        if group != self.root() {
            self.order().free_later(group);
        }
        Ok(())
    }

    /// Reduces complete units in the order in which their backwards began. When a unit is complete
    /// depends on what this rank's forward used; ranks must reduce in one order.
    fn reduce_in_order(&self) -> Result<()> {
        loop {
            let next = {
                let order = self.order();
                order.entered_groups.first().copied().filter(|_| order.is_plain())
            };
            match next {
                Some(group) if self.groups[group].is_complete() => {
                    self.order().entered_groups.remove(0);
                    self.reduce(group)?;
                }
                _ => return Ok(()),
            }
        }
    }

    fn reduce(&self, group: usize) -> Result<()> {
        self.finish_reductions()?;
        self.groups[group].reduce_async()?;
        self.order().reducing.push(group);
        Ok(())
    }

    /// One reduction at a time holds unsharded gradients besides the one being filled.
    fn finish_reductions(&self) -> Result<()> {
        let replicate = self.replicates();
        let reducing = std::mem::take(&mut self.order().reducing);
        reducing.into_iter().try_for_each(|g| self.groups[g].finish_reduction(replicate))
    }

    /// Adds what this backward reduced to the shards' gradients. Collective over the tensor-parallel
    /// ranks.
    fn deliver(&self) -> Result<()> {
        let mut fresh = Vec::new();
        for group in &self.groups {
            fresh.extend(group.finish_replication()?);
        }
        let find = |p: &Parameter| fresh.iter().find(|(q, _)| q == p).map(|(_, grad)| grad.clone());
        self.summands.sum(find)?;
        for (parameter, grad) in fresh {
            let sum = match parameter.local_grad() {
                Some(earlier) => (earlier + grad)?,
                None => grad,
            };
            parameter.set_local_grad(Some(sum));
        }
        Ok(())
    }

    /// Ends a backward: finishes what is under way, and frees the units. The root stays gathered
    /// for a further micro-batch. Collective with synchronisation.
    pub(in crate::mesh_strategy) fn finish_backward(&self) -> Result<()> {
        let (entered, mut held) = {
            let mut order = self.order();
            (std::mem::take(&mut order.entered_groups), std::mem::take(&mut order.held))
        };
        held.sort_unstable();
        if self.reduces() {
            entered.into_iter().chain(held).try_for_each(|group| self.reduce(group))?;
        }
        self.finish_reductions()?;
        self.deliver()?;
        self.order().done.clear();
        let root = self.root();
        for (i, group) in self.groups.iter().enumerate() {
            group.end_backward();
            if i != root {
                group.reshard()?;
            }
        }
        let order = &mut *self.order();
        order.behind |= order.entered != order.calls;
        (order.entered, order.calls) = (0, 0);
        order.begun.clear();
        if !order.running.is_empty() {
            order.forward = std::mem::take(&mut order.running);
        }
        Ok(())
    }

    /// The groups that follow (forward) or precede (backward) the latest occurrence of `group` in
    /// the order of forward, nearest first.
    fn neighbours(&self, group: usize, ahead: bool) -> Vec<usize> {
        let order = self.order();
        let known = if ahead { &order.forward } else { &order.running };
        // In forward, the place of this call; in backward, the last one that used the group.
        let place = if ahead {
            Some(order.running.len().saturating_sub(1)).filter(|&i| known.get(i) == Some(&group))
        } else {
            known.iter().rposition(|&g| g == group)
        };
        match place {
            None => Vec::new(),
            Some(i) if ahead => known.iter().skip(i + 1).take(self.prefetch).copied().collect(),
            Some(i) => known[..i].iter().rev().take(self.prefetch).copied().collect(),
        }
    }
}

impl UnitHooks for Schedule {
    fn pre_forward(&self, unit: &UnitHandle) -> Result<()> {
        let Some(group) = self.unit_group(unit) else { return Ok(()) };
        self.groups[group].unshard()?;
        if is_grad_enabled() {
            {
                let mut order = self.order();
                order.running.push(group);
                order.calls += usize::from(!self.groups[group].is_frozen());
            }
            for next in self.neighbours(group, true) {
                self.groups[next].unshard_async()?;
            }
        }
        Ok(())
    }

    fn post_forward(&self, unit: &UnitHandle) -> Result<()> {
        match self.unit_group(unit) {
            Some(group) if self.groups[group].reshard_after_forward => self.groups[group].reshard(),
            _ => Ok(()),
        }
    }

    fn pre_backward(&self, unit: &UnitHandle) -> Result<()> {
        let Some(group) = self.unit_group(unit) else { return Ok(()) };
        let done = {
            let mut order = self.order();
            order.entered += usize::from(!self.groups[group].is_frozen());
            order.begun.push(group);
            std::mem::take(&mut order.done)
        };
        for other in done {
            if other != group {
                self.groups[other].reshard()?;
            }
        }
        self.groups[group].unshard()?;
        if self.groups[group].is_frozen() {
            // No gradient will say that its backward is done.
            self.order().free_later(group);
        }
        for previous in self.neighbours(group, false) {
            if self.order().awaits(previous) {
                self.groups[previous].unshard_async()?;
            }
        }
        // What this rank's forward left out must not hold the unit's reduction back: ranks reduce
        // in one order, and others may have used it.
        let plain = self.order().is_plain();
        if plain {
            if !self.groups[group].is_frozen() && !self.groups[group].is_complete() {
                let mut order = self.order();
                if !order.entered_groups.contains(&group) {
                    order.entered_groups.push(group);
                }
            }
            self.groups[group].members.iter().try_for_each(|m| m.parameter.finish_unused())?;
        }
        Ok(())
    }

    fn input_dtype(&self) -> Option<DType> {
        self.casts.input
    }

    fn output_dtype(&self) -> Option<DType> {
        self.casts.output
    }
}

impl GradReducer for Schedule {
    fn buffer(&self, parameter: &Parameter) -> Result<Tensor> {
        self.groups[self.group_of(parameter)?].grad_buffer(parameter)
    }

    fn ready(&self, parameter: &Parameter) -> Result<()> {
        let group = self.group_of(parameter)?;
        if self.groups[group].note_ready(parameter)? {
            self.post_backward(group)?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for Schedule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let paths: Vec<&str> = self.groups.iter().map(|group| group.path.as_str()).collect();
        f.debug_struct("Schedule").field("groups", &paths).finish_non_exhaustive()
    }
}
