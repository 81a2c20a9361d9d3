//! Gathers, frees and reduces one group's parameters, as scheduled.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Device, Tensor};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::collective::{
    AllGather, End, Label, ProcessGroup, ReduceOp, ReduceScatter, Work,
};
use fulgurite_engine::execution::ContextGuard;
use fulgurite_engine::execution::transfer::{self, HostCopy};
use fulgurite_engine::memory::{self, MemoryKind};
use fulgurite_engine::module::Reshard;
use fulgurite_engine::parameter::{Parameter, ParameterSlot, accumulation_dtype};
use fulgurite_engine::strategy::GradientPart;
use fulgurite_error::{Error, Result};

use super::super::reduction::{GradientReduction, scale};
use crate::schedule::fsdp::Group;

/// A parameter of a group, and its cut.
pub(in crate::mesh_strategy) struct Member {
    pub(in crate::mesh_strategy) slot: ParameterSlot,
    /// The ranks that it is sharded over.
    ranks: Arc<dyn ProcessGroup>,
    /// Elements of each rank's shard, in rank order.
    pub(in crate::mesh_strategy) counts: Vec<usize>,
    /// dtype for accumulating and reducing its gradient.
    reduce_dtype: DType,
    /// Whether the current or last backward has a gradient for it.
    in_backward: AtomicBool,
}

impl Member {
    /// `reduce_dtype` is the gradients' dtype, if it differs from the optimizer's.
    pub(in crate::mesh_strategy) fn new(
        slot: ParameterSlot,
        ranks: Arc<dyn ProcessGroup>,
        counts: Vec<usize>,
        reduce_dtype: Option<DType>,
    ) -> Self {
        let in_backward = AtomicBool::new(slot.requires_grad());
        let reduce_dtype = reduce_dtype.unwrap_or_else(|| local_grad_dtype(&slot));
        Self { slot, ranks, counts, reduce_dtype, in_backward }
    }
}

/// The parameters that are gathered and reduced together (FSDP2's `FSDPParamGroup`).
pub(in crate::mesh_strategy) struct ParamGroup {
    pub(super) path: String,
    pub(super) members: Vec<Member>,
    reshard_after_forward: Reshard,
    /// The ranks that keep parts between forward and backward ([`Reshard::Ranks`]).
    part_group: Option<Arc<dyn ProcessGroup>>,
    /// The ranks that hold the same shards.
    replicas: Arc<dyn ProcessGroup>,
    reduction: GradientReduction,
    /// Whether the shards stay in host memory, on any device.
    on_host: bool,
}

/// A reduce-scatter under way, with the tensors it reads and writes.
pub(super) struct Reduction {
    work: Work,
    shards: GradShards,
    /// The unsharded gradients, kept until they have been read.
    inputs: HashMap<String, Tensor>,
}

/// Reduced gradients of this rank's shards.
pub(super) struct GradShards {
    /// One buffer for each dtype.
    buffers: Vec<Tensor>,
    /// Each trainable member's view of a buffer, in member order.
    outputs: Vec<Tensor>,
    /// All-reduces of the first buffers over the replicas, queued behind the reduce-scatter.
    replicating: Vec<Work>,
}

/// All-reduces over the replicas under way.
pub(super) struct Replication {
    works: Vec<Work>,
    shards: GradShards,
}

impl ParamGroup {
    pub(in crate::mesh_strategy) fn new(
        path: String,
        members: Vec<Member>,
        reshard_after_forward: Reshard,
        part_group: Option<Arc<dyn ProcessGroup>>,
        replicas: Arc<dyn ProcessGroup>,
        reduction: GradientReduction,
    ) -> Self {
        Self {
            path,
            members,
            reshard_after_forward,
            part_group,
            replicas,
            reduction,
            on_host: false,
        }
    }

    /// Sets whether the shards stay in host memory or on the compute device.
    pub(in crate::mesh_strategy) fn with_shards_on_host(self, on_host: bool) -> Self {
        Self { on_host, ..self }
    }

    /// Describes the group to the schedule.
    pub(super) fn describe(&self) -> Group {
        Group {
            parameters: self.members.len(),
            trainable: self.trainable().count(),
            reshard_after_forward: self.reshard_after_forward,
        }
    }

    /// The members with gradients in the current backward.
    fn trainable(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|member| member.in_backward.load(Ordering::Relaxed))
    }

    /// Records which members the starting backward has gradients for. Returns their number if the
    /// choice has changed since the last backward.
    pub(super) fn choose_gradients(&self) -> Option<usize> {
        let choose = |changed, member: &Member| {
            let now = member.slot.takes_grad();
            changed | (member.in_backward.swap(now, Ordering::Relaxed) != now)
        };
        self.members.iter().fold(false, choose).then(|| self.trainable().count())
    }

    /// Removes from `grads` the gradients of members that the current backward covers.
    pub(super) fn take_gradients(
        &self,
        grads: &mut HashMap<String, Tensor>,
    ) -> HashMap<String, Tensor> {
        self.trainable().filter_map(|member| grads.remove_entry(member.slot.fqn())).collect()
    }

    /// Labels this group's collectives for the transports' messages.
    fn label(&self) -> ContextGuard {
        match self.path.as_str() {
            "" => Label::enter("the root unit"),
            path => Label::enter(format!("unit `{path}`")),
        }
    }

    /// Starts gathering the parameters. Collective.
    pub(super) fn gather(&self) -> Result<Work> {
        let _kind = memory::of_kind(MemoryKind::Gathered);
        let part = |member: &Member| {
            let output = member.slot.compute()?;
            storage::allocate_unset(output)?;
            let mut shard = member.slot.local()?.values;
            if self.on_host {
                shard = transfer::to_device(&shard, output.device(), "parameters")?;
            }
            Ok(AllGather { input: shard, output: output.detach(), counts: member.counts.clone() })
        };
        let mut works = Vec::new();
        for (ranks, members) in by_ranks(self.members.iter()) {
            let parts = members.into_iter().map(|(_, member)| part(member));
            let mut parts = parts.collect::<Result<Vec<_>>>()?;
            if ranks.size() == 1 && !parts.iter().any(|part| part.output.device().is_cpu()) {
                cast_in_place(&mut parts)?;
            }
            storage::cast_all(parts.iter_mut().map(|part| (&mut part.input, part.output.dtype())))?;
            let _label = self.label();
            works.push(ranks.all_gather_into(parts)?);
        }
        Ok(Work::all(works))
    }

    /// The ranks that keep parts between forward and backward.
    pub(super) fn part_group(&self) -> Option<&Arc<dyn ProcessGroup>> {
        self.part_group.as_ref()
    }

    /// Copies this rank's parts of the gathered parameters and frees the rest. Local.
    pub(super) fn keep_parts(&self) -> Result<Vec<Tensor>> {
        let _kind = memory::of_kind(MemoryKind::Gathered);
        let group = self.required_part_group()?;
        let part = |member: &Member| -> Result<Tensor> {
            let whole = member.slot.compute()?.detach().flatten_all()?;
            let counts = even_parts(whole.elem_count(), group.size());
            let start = counts[..group.rank()].iter().sum();
            Ok(whole.narrow(0, start, counts[group.rank()])?.force_contiguous()?)
        };
        let parts = self.members.iter().map(part).collect::<Result<_>>()?;
        self.free()?;
        Ok(parts)
    }

    /// Starts gathering the parameters from the `parts` returned by
    /// [`keep_parts`](Self::keep_parts). Collective over the ranks with these parts.
    pub(super) fn gather_parts(&self, parts: &[Tensor]) -> Result<Work> {
        let _kind = memory::of_kind(MemoryKind::Gathered);
        let group = self.required_part_group()?;
        let gather = |(member, part): (&Member, &Tensor)| {
            let output = member.slot.compute()?;
            storage::allocate_unset(output)?;
            let counts = even_parts(output.elem_count(), group.size());
            Ok(AllGather { input: part.clone(), output: output.detach(), counts })
        };
        let parts = self.members.iter().zip(parts).map(gather).collect::<Result<_>>()?;
        let _label = self.label();
        group.all_gather_into(parts)
    }

    fn required_part_group(&self) -> Result<&Arc<dyn ProcessGroup>> {
        let none = || Error::module(&self.path, "keeps no parts after forward");
        self.part_group.as_ref().ok_or_else(none)
    }

    /// Whether other ranks hold the same shards.
    pub(super) fn has_replicas(&self) -> bool {
        self.replicas.size() > 1
    }

    /// Bytes of the gathered parameters.
    pub(super) fn gathered_bytes(&self) -> usize {
        let bytes = |member: &Member| {
            member.slot.compute_elem_count() * member.slot.compute_dtype().size_in_bytes()
        };
        self.members.iter().map(bytes).sum()
    }

    /// Bytes of the unsharded gradients that are reduced.
    pub(super) fn gradient_bytes(&self) -> usize {
        let bytes = |member: &Member| {
            member.slot.compute_elem_count() * member.reduce_dtype.size_in_bytes()
        };
        self.trainable().map(bytes).sum()
    }

    /// Frees the gathered parameters; this rank's shard stays. Local.
    pub(super) fn free(&self) -> Result<()> {
        self.members.iter().try_for_each(|member| storage::release(member.slot.compute()?))
    }

    /// Memory for a member's unsharded gradient.
    pub(super) fn empty_grad(&self, parameter: &Parameter) -> Result<Tensor> {
        let _kind = memory::of_kind(MemoryKind::Gradients);
        let member = self.members.iter().find(|member| member.slot.fqn() == parameter.fqn());
        let member = member.ok_or_else(|| {
            Error::parameter(parameter.fqn(), format_args!("is not in the unit `{}`", self.path))
        })?;
        let elements = parameter.compute_elem_count();
        member.ranks.empty(elements, member.reduce_dtype, parameter.device())
    }

    /// Declares the gradients of trainable parameters without pending uses ready.
    pub(super) fn complete_unused(&self) -> Result<()> {
        self.members.iter().try_for_each(|member| member.slot.finish_unused())
    }

    /// Starts reducing the unsharded gradients `inputs`, by FQN, over the ranks that share the
    /// parameters. With `replicate`, also queues the all-reduce over the replicas, if no wait is
    /// needed first. Collective.
    pub(super) fn reduce(
        &self,
        inputs: HashMap<String, Tensor>,
        replicate: bool,
    ) -> Result<Reduction> {
        let mut shards = self.empty_shards()?;
        let mut works = Vec::new();
        for (ranks, members) in by_ranks(self.trainable()) {
            let mut parts = Vec::new();
            for (index, member) in members {
                let Some(input) = inputs.get(member.slot.fqn()) else {
                    return Err(Error::parameter(member.slot.fqn(), "has no gradient to reduce"));
                };
                scale(input, 1.0 / self.reduction.predivide_factor())?;
                parts.push(ReduceScatter {
                    input: input.clone(),
                    output: shards.outputs[index].clone(),
                    counts: member.counts.clone(),
                });
                // The next gradient goes into a new buffer.
                member.slot.clear_accumulated();
            }
            let _label = self.label();
            works.push(ranks.reduce_scatter(parts, ReduceOp::Sum)?);
        }
        let work = Work::all(works);
        if let Some(end) = work.end().filter(|_| replicate) {
            shards.replicating = self.replicate_after(end, &shards)?;
        }
        Ok(Reduction { work, shards, inputs })
    }

    /// Memory for the reduced gradients of this rank's shards.
    fn empty_shards(&self) -> Result<GradShards> {
        let mut sizes: Vec<(DType, usize)> = Vec::new();
        let mut places = Vec::new();
        for member in self.trainable() {
            let dtype = member.reduce_dtype;
            let buffer = sizes.iter().position(|(d, _)| *d == dtype).unwrap_or_else(|| {
                sizes.push((dtype, 0));
                sizes.len() - 1
            });
            let elements = member.counts[member.ranks.rank()];
            places.push((buffer, sizes[buffer].1, elements));
            sizes[buffer].1 += elements;
        }
        let device = self.trainable().next().map(|m| m.slot.device().clone());
        let device = device.unwrap_or(Device::Cpu);
        let _kind = memory::of_kind(MemoryKind::Gradients);
        let buffers = sizes
            .into_iter()
            .map(|(dtype, n)| self.replicas.empty(n, dtype, &device))
            .collect::<Result<Vec<_>>>()?;
        let outputs = places
            .into_iter()
            .map(|(buffer, start, n)| buffers[buffer].narrow(0, start, n))
            .collect::<candle_core::Result<_>>()?;
        Ok(GradShards { buffers, outputs, replicating: Vec::new() })
    }

    /// The buffers of `shards` that are all-reduced over the replicas.
    fn replicated<'a>(&self, shards: &'a GradShards) -> impl Iterator<Item = &'a Tensor> {
        let has_replicas = self.has_replicas();
        shards.buffers.iter().filter(move |buffer| has_replicas && buffer.elem_count() > 0)
    }

    /// Queues all-reduces of `shards` over the replicas behind the reduce-scatter, for the first
    /// buffers that need no wait. Collective over the replicas.
    fn replicate_after(&self, end: &Arc<dyn End>, shards: &GradShards) -> Result<Vec<Work>> {
        let works = self
            .replicated(shards)
            .map(|buffer| self.reduction.all_reduce_after(end, buffer, &self.replicas));
        works.map_while(Result::transpose).collect()
    }

    /// Starts the remaining all-reduces of `shards` over the replicas. Collective over the
    /// replicas.
    pub(super) fn replicate(&self, mut shards: GradShards) -> Result<Replication> {
        let _label = self.label();
        let mut works = std::mem::take(&mut shards.replicating);
        for buffer in self.replicated(&shards).skip(works.len()) {
            let parts = || self.parts(buffer.dtype());
            works.push(self.reduction.all_reduce(buffer, parts, &self.replicas)?);
        }
        Ok(Replication { works, shards })
    }

    /// The parts of the gradients in the buffer of this dtype.
    fn parts(&self, dtype: DType) -> Result<Vec<GradientPart>> {
        let in_buffer = |member: &&Member| member.reduce_dtype == dtype;
        let part = |member: &Member| {
            let parameter = member.slot.parameter().clone();
            let shape = parameter.local()?.region.sizes;
            Ok(GradientPart { parameter, shape })
        };
        self.trainable().filter(in_buffer).map(part).collect()
    }

    /// The trainable parameters with their gradients, in the optimizer's dtype.
    pub(super) fn local_grads(&self, shards: GradShards) -> Result<Vec<(ParameterSlot, Tensor)>> {
        let mut grads: Vec<_> =
            self.trainable().map(|member| member.slot.clone()).zip(shards.outputs).collect();
        storage::cast_all(grads.iter_mut().map(|(slot, grad)| (grad, local_grad_dtype(slot))))?;
        // Scaled after the cast: the reduction dtype may lack the range.
        let factor = self.reduction.predivide_factor();
        grads.iter().try_for_each(|(_, grad)| scale(grad, factor))?;
        Ok(grads)
    }
}

/// A set of ranks, and the members that are sharded over it, with their places in a list.
type OfRanks<'a> = (&'a Arc<dyn ProcessGroup>, Vec<(usize, &'a Member)>);

/// The members that are sharded over each set of ranks, with their places in the list. Experts may
/// be sharded over other ranks than the rest of their unit.
fn by_ranks<'a>(members: impl Iterator<Item = &'a Member>) -> Vec<OfRanks<'a>> {
    let mut sets: Vec<OfRanks<'_>> = Vec::new();
    for (index, member) in members.enumerate() {
        match sets.iter_mut().find(|(ranks, _)| Arc::ptr_eq(ranks, &member.ranks)) {
            Some((_, of_ranks)) => of_ranks.push((index, member)),
            None => sets.push((&member.ranks, vec![(index, member)])),
        }
    }
    sets
}

/// For a gather of one rank: casts inputs of other dtypes into the outputs and uses the outputs as
/// inputs, so that the gather copies nothing.
fn cast_in_place(parts: &mut [AllGather]) -> Result<()> {
    let cast: Vec<_> =
        parts.iter_mut().filter(|part| part.input.dtype() != part.output.dtype()).collect();
    let pairs: Vec<_> = cast.iter().map(|part| (&part.output, &part.input)).collect();
    storage::copy_all(&pairs)?;
    for part in cast {
        part.input = part.output.flatten_all()?;
    }
    Ok(())
}

impl ParamGroup {
    /// Whether gradients move to host memory, next to the shards.
    pub(super) fn is_on_host(&self) -> bool {
        self.on_host
    }

    /// Starts to copy gradients from [`local_grads`](Self::local_grads) to the memory of their
    /// shards.
    pub(super) fn begin_beside_shards(
        &self,
        grads: Vec<(ParameterSlot, Tensor)>,
    ) -> Result<Vec<(ParameterSlot, HostCopy)>> {
        let _kind = memory::of_kind(MemoryKind::Gradients);
        let begin = |(slot, grad): (ParameterSlot, Tensor)| {
            let copy = match self.on_host {
                true => transfer::begin_to_host(&grad, "gradients")?,
                false => HostCopy::done(grad),
            };
            Ok((slot, copy))
        };
        grads.into_iter().map(begin).collect()
    }
}

impl Reduction {
    /// Waits for the reduction and adds the shards of `earlier`.
    pub(super) fn wait(self, earlier: Option<GradShards>) -> Result<GradShards> {
        self.work.wait()?;
        drop(self.inputs);
        for (buffer, earlier) in
            self.shards.buffers.iter().zip(earlier.into_iter().flat_map(|shards| shards.buffers))
        {
            storage::copy_from(buffer, &(buffer + earlier)?)?;
        }
        Ok(self.shards)
    }
}

impl Replication {
    /// Waits for the replicas.
    pub(super) fn wait(self) -> Result<GradShards> {
        self.works.into_iter().try_for_each(Work::wait)?;
        Ok(self.shards)
    }
}

/// Elements of each rank's part, as even as possible.
fn even_parts(elements: usize, ranks: usize) -> Vec<usize> {
    (0..ranks).map(|rank| elements / ranks + usize::from(rank < elements % ranks)).collect()
}

/// dtype of a gradient for the optimizer.
fn local_grad_dtype(parameter: &Parameter) -> DType {
    accumulation_dtype(parameter.dtype())
}
