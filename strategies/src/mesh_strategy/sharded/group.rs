//! One unit's parameters: gathering, freeing, reducing.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::{DType, Tensor};
use fulgurite_core::autograd::storage;
use fulgurite_core::collective::{AllGather, ProcessGroup, ReduceOp, ReduceScatter, Work};
use fulgurite_core::parameter::Parameter;
use fulgurite_core::{Error, Result};

use super::super::late_gradient::late_gradient;

/// One parameter of a unit, and how it is cut.
pub(in crate::mesh_strategy) struct Member {
    pub(in crate::mesh_strategy) parameter: Parameter,
    /// Elements of each rank's shard, in rank order.
    pub(in crate::mesh_strategy) counts: Vec<usize>,
}

impl Member {
    fn reduce_dtype(&self, policy: Option<DType>) -> DType {
        policy.unwrap_or(match self.parameter.dtype() {
            DType::F64 => DType::F64,
            _ => DType::F32,
        })
    }
}

/// The parameters that are gathered and reduced together (FSDP2's `FSDPParamGroup`).
pub(in crate::mesh_strategy) struct ParamGroup {
    pub(super) path: String,
    pub(super) members: Vec<Member>,
    pub(super) reshard_after_forward: bool,
    /// The ranks that the parameters are sharded over.
    process_group: Arc<dyn ProcessGroup>,
    /// The ranks that hold the same shards.
    replicas: Arc<dyn ProcessGroup>,
    reduce_dtype: Option<DType>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    sharded: ShardedState,
    /// Unsharded gradients by FQN, from the first one of a backward until they are reduced.
    grads: HashMap<String, Tensor>,
    /// Trainable members whose gradient is complete in this backward.
    ready: usize,
    /// Whether the gradients of this backward have been handed to a reduction.
    reduced: bool,
    reduction: Option<Reduction>,
    /// What was reduce-scattered in earlier micro-batches and has not met the replicas' yet.
    waiting: Vec<Tensor>,
    replication: Option<Replication>,
}

#[derive(Default)]
enum ShardedState {
    #[default]
    Sharded,
    Gathering(Work),
    Unsharded,
}

/// A reduce-scatter under way, with the tensors it reads and writes.
struct Reduction {
    work: Work,
    shards: Shards,
    /// The unsharded gradients, kept until they have been read.
    inputs: HashMap<String, Tensor>,
}

/// Reduced gradients of this rank's shards.
struct Shards {
    /// One buffer a dtype.
    buffers: Vec<Tensor>,
    /// Parallel to the trainable members: each one's view of a buffer.
    outputs: Vec<Tensor>,
}

/// All-reduces over the replicas under way.
struct Replication {
    works: Vec<Work>,
    shards: Shards,
}

impl ParamGroup {
    pub(in crate::mesh_strategy) fn new(
        path: String,
        members: Vec<Member>,
        reshard_after_forward: bool,
        [process_group, replicas]: [Arc<dyn ProcessGroup>; 2],
        reduce_dtype: Option<DType>,
    ) -> Self {
        let state = Mutex::default();
        Self { path, members, reshard_after_forward, process_group, replicas, reduce_dtype, state }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while gathering")
    }

    fn trainable(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|member| member.parameter.requires_grad())
    }

    /// Starts gathering, unless that was done already. Collective.
    pub(super) fn unshard_async(&self) -> Result<()> {
        let state = &mut *self.state();
        if !matches!(state.sharded, ShardedState::Sharded) || self.members.is_empty() {
            return Ok(());
        }
        let parts = self
            .members
            .iter()
            .map(|member| {
                let output = member.parameter.compute()?;
                storage::allocate(output)?;
                Ok(AllGather {
                    input: member.parameter.local()?.values.to_dtype(output.dtype())?,
                    output: output.detach(),
                    counts: member.counts.clone(),
                })
            })
            .collect::<Result<_>>()?;
        state.sharded = ShardedState::Gathering(self.process_group.all_gather_into(parts)?);
        Ok(())
    }

    /// Gathers, or waits for what [`unshard_async`](Self::unshard_async) started. Collective.
    pub(super) fn unshard(&self) -> Result<()> {
        self.unshard_async()?;
        let state = &mut *self.state();
        if let ShardedState::Gathering(work) =
            std::mem::replace(&mut state.sharded, ShardedState::Unsharded)
        {
            work.wait()?;
        }
        Ok(())
    }

    /// Frees the gathered parameters; this rank's shard stays. Local.
    pub(super) fn reshard(&self) -> Result<()> {
        let state = &mut *self.state();
        match std::mem::take(&mut state.sharded) {
            ShardedState::Sharded => return Ok(()),
            ShardedState::Gathering(work) => work.wait()?,
            ShardedState::Unsharded => {}
        }
        self.members.iter().try_for_each(|member| storage::release(member.parameter.compute()?))
    }

    /// The memory that a member's gradient is accumulated in: a gradient, or anything if there is
    /// none yet.
    pub(super) fn grad_buffer(&self, parameter: &Parameter) -> Result<Tensor> {
        let state = &mut *self.state();
        if let Some(grad) = state.grads.get(parameter.fqn()) {
            return Ok(grad.clone());
        }
        if state.reduced {
            return Err(late_gradient(parameter));
        }
        let Some(member) = self.members.iter().find(|m| m.parameter == *parameter) else {
            return Err(Error::parameter(parameter.fqn(), "is in no FSDP unit"));
        };
        let dtype = member.reduce_dtype(self.reduce_dtype);
        let elements = parameter.compute_elem_count();
        let grad = self.process_group.empty(elements, dtype, parameter.device())?;
        state.grads.insert(parameter.fqn().to_owned(), grad.clone());
        Ok(grad)
    }

    /// Notes that one more gradient is complete; whether all are now.
    pub(super) fn note_ready(&self, parameter: &Parameter) -> Result<bool> {
        let in_use = self.state().grads.contains_key(parameter.fqn());
        if !parameter.has_accumulated() && !in_use {
            // No gradient on this rank; others may have one.
            self.grad_buffer(parameter)?.zero_set()?;
        }
        let state = &mut *self.state();
        state.ready += 1;
        Ok(state.ready == self.trainable().count())
    }

    /// Starts reducing the gradients of this backward (and of earlier ones that did not
    /// synchronise) over the ranks that share the parameters. Collective.
    pub(super) fn reduce_async(&self) -> Result<()> {
        let state = &mut *self.state();
        let inputs = std::mem::take(&mut state.grads);
        state.reduced = true;
        let shards = self.empty_shards()?;
        let mut parts = Vec::new();
        for (member, output) in self.trainable().zip(&shards.outputs) {
            let Some(input) = inputs.get(member.parameter.fqn()) else {
                return Err(Error::parameter(member.parameter.fqn(), "has no gradient to reduce"));
            };
            parts.push(ReduceScatter {
                input: input.clone(),
                output: output.clone(),
                counts: member.counts.clone(),
            });
            // The next gradient goes into a new buffer.
            member.parameter.clear_accumulated();
        }
        let work = self.process_group.reduce_scatter(parts, ReduceOp::Sum)?;
        state.reduction = Some(Reduction { work, shards, inputs });
        Ok(())
    }

    /// Room for the reduced gradients of this rank's shards.
    fn empty_shards(&self) -> Result<Shards> {
        let rank = self.process_group.rank();
        let dtype = |member: &Member| member.reduce_dtype(self.reduce_dtype);
        let mut sizes: Vec<(DType, usize)> = Vec::new();
        let mut places = Vec::new();
        for member in self.trainable() {
            let dtype = dtype(member);
            let buffer = sizes.iter().position(|(d, _)| *d == dtype).unwrap_or_else(|| {
                sizes.push((dtype, 0));
                sizes.len() - 1
            });
            places.push((buffer, sizes[buffer].1, member.counts[rank]));
            sizes[buffer].1 += member.counts[rank];
        }
        let device = self.trainable().next().map(|m| m.parameter.device().clone());
        let device = device.unwrap_or(candle_core::Device::Cpu);
        let buffers = sizes
            .into_iter()
            .map(|(dtype, n)| self.replicas.empty(n, dtype, &device))
            .collect::<Result<Vec<_>>>()?;
        let outputs = places
            .into_iter()
            .map(|(buffer, start, n)| buffers[buffer].narrow(0, start, n))
            .collect::<candle_core::Result<_>>()?;
        Ok(Shards { buffers, outputs })
    }

    /// Waits for the reduction that is under way, if one is, and, where `replicate` says so, starts
    /// adding the replicas' results to its own. Collective over the replicas then.
    pub(super) fn finish_reduction(&self, replicate: bool) -> Result<()> {
        let state = &mut *self.state();
        let Some(Reduction { work, shards, inputs }) = state.reduction.take() else {
            return Ok(());
        };
        work.wait()?;
        drop(inputs);
        for (buffer, earlier) in shards.buffers.iter().zip(std::mem::take(&mut state.waiting)) {
            storage::copy_from(buffer, &(buffer + earlier)?)?;
        }
        if !replicate {
            state.waiting = shards.buffers;
            return Ok(());
        }
        let works = shards
            .buffers
            .iter()
            .filter(|buffer| self.replicas.size() > 1 && buffer.elem_count() > 0)
            .map(|buffer| self.replicas.all_reduce(buffer, ReduceOp::Sum))
            .collect::<Result<_>>()?;
        state.replication = Some(Replication { works, shards });
        Ok(())
    }

    /// Waits for the replicas, if they are being waited for, and returns the fresh gradients of this
    /// rank's shards.
    pub(super) fn finish_replication(&self) -> Result<Vec<(Parameter, Tensor)>> {
        let Some(Replication { works, shards }) = self.state().replication.take() else {
            return Ok(Vec::new());
        };
        works.into_iter().try_for_each(Work::wait)?;
        self.trainable()
            .zip(shards.outputs)
            .map(|(member, output)| {
                let grad = output.to_dtype(match member.parameter.dtype() {
                    DType::F64 => DType::F64,
                    _ => DType::F32,
                })?;
                Ok((member.parameter.clone(), grad))
            })
            .collect()
    }

    /// Drops gradients that were not reduced, or not over the replicas.
    pub(super) fn drop_grads(&self) {
        let state = &mut *self.state();
        state.grads.clear();
        state.waiting.clear();
    }

    /// Ends a backward: the next one counts again.
    pub(super) fn end_backward(&self) {
        let state = &mut *self.state();
        (state.ready, state.reduced) = (0, false);
    }

    /// Whether no member gets a gradient.
    pub(super) fn is_frozen(&self) -> bool {
        self.trainable().next().is_none()
    }

    /// Whether every trainable member has delivered in this backward.
    pub(super) fn is_complete(&self) -> bool {
        self.state().ready == self.trainable().count()
    }
}
