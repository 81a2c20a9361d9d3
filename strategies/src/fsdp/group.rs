//! One unit's parameters: gathering, freeing, reducing.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::{DType, Tensor};
use fulgurite_core::autograd::storage;
use fulgurite_core::collective::{AllGather, ProcessGroup, ReduceOp, ReduceScatter, Work};
use fulgurite_core::parameter::Parameter;
use fulgurite_core::{Error, Result};

/// One parameter of a unit, and how it is cut.
pub(super) struct Member {
    pub(super) parameter: Parameter,
    /// Elements of each rank's shard, in rank order.
    pub(super) counts: Vec<usize>,
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
pub(super) struct ParamGroup {
    pub(super) path: String,
    pub(super) members: Vec<Member>,
    pub(super) reshard_after_forward: bool,
    process_group: Arc<dyn ProcessGroup>,
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
    reduction: Option<Reduction>,
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
    /// Parallel to the trainable members: where this rank's part lands.
    outputs: Vec<Tensor>,
    /// Keeps the unsharded gradients until they have been read.
    _inputs: HashMap<String, Tensor>,
}

impl ParamGroup {
    pub(super) fn new(
        path: String,
        members: Vec<Member>,
        reshard_after_forward: bool,
        process_group: Arc<dyn ProcessGroup>,
        reduce_dtype: Option<DType>,
    ) -> Self {
        let state = Mutex::default();
        Self { path, members, reshard_after_forward, process_group, reduce_dtype, state }
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

    /// The memory that a member's gradient is accumulated in.
    pub(super) fn grad_buffer(&self, parameter: &Parameter) -> Result<Tensor> {
        let state = &mut *self.state();
        if let Some(grad) = state.grads.get(parameter.fqn()) {
            return Ok(grad.clone());
        }
        let Some(member) = self.members.iter().find(|m| m.parameter == *parameter) else {
            return Err(Error::parameter(parameter.fqn(), "is in no FSDP unit"));
        };
        let dtype = member.reduce_dtype(self.reduce_dtype);
        let grad = Tensor::zeros(parameter.compute_elem_count(), dtype, parameter.device())?;
        state.grads.insert(parameter.fqn().to_owned(), grad.clone());
        Ok(grad)
    }

    /// Notes that one more gradient is complete; whether all are now.
    pub(super) fn note_ready(&self, parameter: &Parameter) -> Result<bool> {
        if !parameter.has_accumulated() {
            // No gradient on this rank; others may have one. A fresh buffer is zero, and one that
            // is not fresh holds a gradient.
            self.grad_buffer(parameter)?;
        }
        let state = &mut *self.state();
        state.ready += 1;
        Ok(state.ready == self.trainable().count())
    }

    /// Starts reducing the gradients of this backward (and of earlier ones that did not
    /// synchronise). Collective.
    pub(super) fn reduce_async(&self) -> Result<()> {
        let state = &mut *self.state();
        let inputs = std::mem::take(&mut state.grads);
        let mut outputs = Vec::new();
        let mut parts = Vec::new();
        for member in self.trainable() {
            let Some(input) = inputs.get(member.parameter.fqn()) else {
                return Err(Error::parameter(member.parameter.fqn(), "has no gradient to reduce"));
            };
            let mine = member.counts[self.process_group.rank()];
            let output = Tensor::zeros(mine, input.dtype(), input.device())?;
            outputs.push(output.clone());
            parts.push(ReduceScatter {
                input: input.clone(),
                output,
                counts: member.counts.clone(),
            });
            // The next gradient goes into a new buffer.
            member.parameter.clear_accumulated();
        }
        let work = self.process_group.reduce_scatter(parts, ReduceOp::Sum)?;
        state.reduction = Some(Reduction { work, outputs, _inputs: inputs });
        Ok(())
    }

    /// Waits for the reduction that is under way, if one is, and adds its result to the shards'
    /// gradients.
    pub(super) fn finish_reduction(&self) -> Result<()> {
        let Some(reduction) = self.state().reduction.take() else { return Ok(()) };
        reduction.work.wait()?;
        for (member, output) in self.trainable().zip(reduction.outputs) {
            let parameter = &member.parameter;
            let grad = output.to_dtype(match parameter.dtype() {
                DType::F64 => DType::F64,
                _ => DType::F32,
            })?;
            let sum = match parameter.local_grad() {
                Some(earlier) => (earlier + grad)?,
                None => grad,
            };
            parameter.set_local_grad(Some(sum));
        }
        Ok(())
    }

    /// Drops unsharded gradients.
    pub(super) fn drop_grads(&self) {
        self.state().grads.clear();
    }

    /// Ends a backward: the next one counts again.
    pub(super) fn end_backward(&self) {
        self.state().ready = 0;
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
