//! The hooks around forward and backward, which perform the schedule's actions.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::{DType, Tensor};
use fulgurite_engine::autograd::is_grad_enabled;
use fulgurite_engine::collective::{ProcessGroup, Work};
use fulgurite_engine::execution::transfer::HostCopy;
use fulgurite_engine::module::{UnitHandle, UnitHooks};
use fulgurite_engine::parameter::{GradReducer, Parameter, ParameterSlot};
use fulgurite_error::{Error, Result};

use super::super::gradients::{PartialGrads, gradient_after_reduction};
use super::group::{GradShards, Member, ParamGroup, Reduction, Replication};
use super::log::Log;
use crate::schedule::fsdp::{Action, Event, Prefetch, ReduceScope, Schedule};

/// Casts of a unit's inputs and outputs.
pub(in crate::mesh_strategy) struct Casts {
    pub(in crate::mesh_strategy) inputs: bool,
    pub(in crate::mesh_strategy) output: Option<DType>,
}

/// The groups to gather while `group` computes, as listed by a parallelize function.
pub(in crate::mesh_strategy) struct PrefetchLists {
    pub(in crate::mesh_strategy) group: usize,
    pub(in crate::mesh_strategy) forward: Vec<usize>,
    pub(in crate::mesh_strategy) backward: Vec<usize>,
}

/// Performs the schedule's actions on the groups. The last group is the root's.
pub(in crate::mesh_strategy) struct ShardedRuntime {
    /// This process's rank, for the log.
    rank: usize,
    groups: Vec<ParamGroup>,
    /// FQN → group.
    owners: HashMap<String, usize>,
    /// Unit index → group; `None` for a unit folded into the root.
    units: Vec<Option<usize>>,
    casts: Casts,
    partial_grads: PartialGrads,
    /// Locked for one look-up or event at a time, never while an action is performed.
    state: Mutex<State>,
}

struct State {
    schedule: Schedule,
    /// The ranks over which the current or last backward reduces.
    reduce: ReduceScope,
    /// One entry per group.
    buffers: Vec<Buffers>,
}

/// A group's pending collectives and its gradients.
#[derive(Default)]
struct Buffers {
    gather: Option<Work>,
    /// Parts of the parameters kept after forward.
    parts: Vec<Tensor>,
    /// Unsharded gradients by FQN, from a backward's first gradient until the reduction.
    grads: HashMap<String, Tensor>,
    reduction: Option<Reduction>,
    /// Reduce-scattered gradients, before and after they are all-reduced over the replicas.
    shards: Option<GradShards>,
    replication: Option<Replication>,
    /// Copies under way of gradients to shards in host memory.
    copies: Vec<(ParameterSlot, HostCopy)>,
}

impl ShardedRuntime {
    pub(in crate::mesh_strategy) fn new(
        rank: usize,
        groups: Vec<ParamGroup>,
        units: Vec<Option<usize>>,
        prefetch: Prefetch,
        lists: Vec<PrefetchLists>,
        casts: Casts,
        partial_grads: PartialGrads,
    ) -> Self {
        let mut owners = HashMap::new();
        for (i, group) in groups.iter().enumerate() {
            for member in &group.members {
                owners.insert(member.slot.fqn().to_owned(), i);
            }
        }
        let described: Vec<_> = groups.iter().map(ParamGroup::describe).collect();
        let mut schedule = Schedule::new(&described, prefetch);
        for PrefetchLists { group, forward, backward } in lists {
            schedule.set_forward_prefetch(group, forward);
            schedule.set_backward_prefetch(group, backward);
        }
        let state = Mutex::new(State {
            schedule,
            reduce: ReduceScope::default(),
            buffers: groups.iter().map(|_| Buffers::default()).collect(),
        });
        Self { rank, groups, owners, units, casts, partial_grads, state }
    }

    /// The groups that gather parts for
    /// [`Reshard::Ranks`](fulgurite_engine::module::Reshard::Ranks).
    pub(in crate::mesh_strategy) fn part_groups(&self) -> Vec<Arc<dyn ProcessGroup>> {
        self.groups.iter().filter_map(|group| group.part_group().cloned()).collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while scheduling")
    }

    fn group_of(&self, parameter: &Parameter) -> Result<usize> {
        let owner = self.owners.get(parameter.fqn()).copied();
        owner.ok_or_else(|| Error::parameter(parameter.fqn(), "is in no FSDP unit"))
    }

    /// Passes an event to the schedule and performs its actions.
    pub(in crate::mesh_strategy) fn on(&self, event: Event) -> Result<()> {
        self.log().event(event);
        let actions = self.state().schedule.on(event);
        actions.into_iter().try_for_each(|action| {
            let began = self.log().before(action);
            self.perform(action)?;
            self.log().after(action, began);
            Ok(())
        })
    }

    /// Begins a backward for the parameters that currently take a gradient.
    pub(in crate::mesh_strategy) fn begin_backward(&self, reduce: ReduceScope) -> Result<()> {
        for (group, params) in self.groups.iter().enumerate() {
            let Some(trainable) = params.choose_gradients() else { continue };
            if self.state().buffers[group].shards.is_some() {
                return Err(Error::other(format!(
                    "the gradients of `{}` from a backward under `no_backward_sync` wait for the \
                     replicas, and this backward has gradients for other parameters of it: finish the \
                     accumulation of one optimizer before that of another, or set \
                     `accumulation_sync = \"all\"`",
                    params.path
                )));
            }
            self.on(Event::Expect { group, trainable })?;
        }
        self.state().reduce = reduce;
        self.on(Event::BeginBackward { reduce })
    }

    /// Discards a failed step and everything gathered or under way. Its collectives are complete,
    /// or complete before any later work of the device.
    pub(in crate::mesh_strategy) fn abandon_step(&self) -> Result<()> {
        self.state().buffers.iter_mut().for_each(|buffers| *buffers = Buffers::default());
        self.on(Event::Abandon)
    }

    /// Like [`on`](Self::on) for an event of the unit's group, if it has one.
    fn on_unit(&self, unit: &UnitHandle, event: impl FnOnce(usize) -> Event) -> Result<()> {
        match self.units.get(unit.index()).copied().flatten() {
            Some(group) => self.on(event(group)),
            None => Ok(()),
        }
    }

    fn log(&self) -> Log<'_> {
        Log { rank: self.rank, groups: &self.groups }
    }

    fn perform(&self, action: Action) -> Result<()> {
        // Takes an action's operands out of the state first: never waits for a peer under the lock.
        match action {
            Action::Gather(group) => {
                let work = self.groups[group].gather()?;
                self.state().buffers[group].gather = Some(work);
            }
            Action::GatherParts(group) => {
                let parts = self.state().buffers[group].parts.clone();
                let work = self.groups[group].gather_parts(&parts)?;
                self.state().buffers[group].gather = Some(work);
            }
            Action::WaitGather(group) => {
                let work = self.state().buffers[group].gather.take();
                work.map_or(Ok(()), Work::wait)?;
                self.state().buffers[group].parts.clear();
            }
            Action::Free(group) => {
                self.state().buffers[group].parts.clear();
                self.groups[group].free()?;
            }
            Action::KeepPart(group) => {
                let parts = self.groups[group].keep_parts()?;
                self.state().buffers[group].parts = parts;
            }
            Action::CompleteUnused(group) => self.groups[group].complete_unused()?,
            Action::Reduce(group) => {
                let (grads, replicate) = {
                    let state = &mut *self.state();
                    let buffers = &mut state.buffers[group];
                    let grads = self.groups[group].take_gradients(&mut buffers.grads);
                    // Shards of earlier backwards must be added first.
                    (grads, state.reduce == ReduceScope::All && buffers.shards.is_none())
                };
                let reduction = self.groups[group].reduce(grads, replicate)?;
                self.state().buffers[group].reduction = Some(reduction);
            }
            Action::WaitReduction(group) => {
                let (reduction, earlier) = {
                    let buffers = &mut self.state().buffers[group];
                    (buffers.reduction.take(), buffers.shards.take())
                };
                let shards = reduction.map(|reduction| reduction.wait(earlier)).transpose()?;
                self.state().buffers[group].shards = shards;
            }
            Action::Replicate(group) => {
                let Some(shards) = self.state().buffers[group].shards.take() else {
                    return Ok(());
                };
                if self.copies_early(group) {
                    let copies = self.copy_beside_shards(group, shards)?;
                    self.state().buffers[group].copies = copies;
                } else {
                    let replication = self.groups[group].replicate(shards)?;
                    self.state().buffers[group].replication = Some(replication);
                }
            }
            Action::WaitReplication(group) => {
                let replication = self.state().buffers[group].replication.take();
                let shards = replication.map(Replication::wait).transpose()?;
                self.state().buffers[group].shards = shards;
            }
            Action::Deliver => self.deliver()?,
        }
        Ok(())
    }

    /// Whether a group's gradients move to the host during backward, right after their reduction:
    /// only if no other ranks add to them.
    fn copies_early(&self, group: usize) -> bool {
        let group = &self.groups[group];
        let partial = |member: &Member| self.partial_grads.has(&member.slot);
        group.is_on_host() && !group.has_replicas() && !group.members.iter().any(partial)
    }

    fn copy_beside_shards(
        &self,
        group: usize,
        shards: GradShards,
    ) -> Result<Vec<(ParameterSlot, HostCopy)>> {
        let group = &self.groups[group];
        group.begin_beside_shards(group.local_grads(shards)?)
    }

    /// Adds the reduced gradients of the backward pass to the parameters' gradients. Collective
    /// over the tensor-parallel ranks.
    fn deliver(&self) -> Result<()> {
        let (mut copies, mut fresh) = (Vec::new(), Vec::new());
        for (i, group) in self.groups.iter().enumerate() {
            let (begun, shards) = {
                let buffers = &mut self.state().buffers[i];
                (std::mem::take(&mut buffers.copies), buffers.shards.take())
            };
            copies.extend(begun);
            if let Some(shards) = shards {
                fresh.push((group, group.local_grads(shards)?));
            }
        }
        let find = |p: &Parameter| {
            let mut grads = fresh.iter().flat_map(|(_, grads)| grads);
            grads.find(|(slot, _)| slot.parameter() == p).map(|(_, grad)| grad.clone())
        };
        self.partial_grads.sum(find)?;
        for (group, grads) in fresh {
            copies.extend(group.begin_beside_shards(grads)?);
        }
        copies.into_iter().try_for_each(|(slot, copy)| slot.add_local_grad(copy.wait()?))
    }
}

impl UnitHooks for ShardedRuntime {
    fn pre_forward(&self, unit: &UnitHandle) -> Result<()> {
        let records_graph = is_grad_enabled();
        self.on_unit(unit, |group| Event::PreForward { group, records_graph })
    }

    fn post_forward(&self, unit: &UnitHandle) -> Result<()> {
        self.on_unit(unit, |group| Event::PostForward { group })
    }

    fn pre_backward(&self, unit: &UnitHandle) -> Result<()> {
        self.on_unit(unit, |group| Event::PreBackward { group })
    }

    fn casts_inputs(&self) -> bool {
        self.casts.inputs
    }

    fn output_dtype(&self) -> Option<DType> {
        self.casts.output
    }
}

impl GradReducer for ShardedRuntime {
    fn buffer(&self, slot: &ParameterSlot) -> Result<Tensor> {
        let group = self.group_of(slot)?;
        {
            let state = self.state();
            if !state.schedule.accepts_gradients(group) {
                return Err(gradient_after_reduction(slot));
            }
            if let Some(grad) = state.buffers[group].grads.get(slot.fqn()) {
                return Ok(grad.clone());
            }
        }
        let grad = self.groups[group].empty_grad(slot)?;
        let fqn = slot.fqn().to_owned();
        self.state().buffers[group].grads.insert(fqn, grad.clone());
        Ok(grad)
    }

    fn ready(&self, slot: &ParameterSlot) -> Result<()> {
        let group = self.group_of(slot)?;
        let has_buffer = self.state().buffers[group].grads.contains_key(slot.fqn());
        if !slot.has_accumulated() && !has_buffer {
            // This rank has no gradient; other ranks may have one.
            self.buffer(slot)?.zero_set()?;
        }
        self.on(Event::GradientReady { group })
    }
}

impl std::fmt::Debug for ShardedRuntime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let paths: Vec<&str> = self.groups.iter().map(|group| group.path.as_str()).collect();
        f.debug_struct("ShardedRuntime").field("groups", &paths).finish_non_exhaustive()
    }
}
