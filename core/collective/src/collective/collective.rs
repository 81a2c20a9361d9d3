//! Collectives and their arguments.

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::ProcessGroup;
use super::check;
use crate::Result;

/// Reductions over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReduceOp {
    /// The sum, accumulated in rank order. bf16 and f16 accumulate in f32 and round once.
    Sum,
    /// The product, in rank order.
    Product,
    /// The minimum; NaN if any rank has NaN.
    Min,
    /// The maximum; NaN if any rank has NaN.
    Max,
}

/// One tensor of an all-gather: every rank's `input` lands in every rank's `output`, in rank order.
#[derive(Debug, Clone)]
pub struct AllGather {
    /// This rank's part: contiguous, `counts[rank]` elements. May be the view of `output` that
    /// receives this part.
    pub input: Tensor,
    /// The whole: contiguous, `counts.iter().sum()` elements, same dtype.
    pub output: Tensor,
    /// Elements of each rank's part, by group rank. Equal on all ranks; may contain zeros.
    pub counts: Vec<usize>,
}

impl AllGather {
    /// A part of equal size from each of `size` ranks.
    pub fn even(output: &Tensor, input: &Tensor, size: usize) -> Self {
        let counts = vec![input.elem_count(); size];
        Self { input: input.clone(), output: output.clone(), counts }
    }
}

/// One tensor of a reduce-scatter: the ranks' `input`s are reduced, and each rank gets its part.
#[derive(Debug, Clone)]
pub struct ReduceScatter {
    /// This rank's whole contribution: contiguous, `counts.iter().sum()` elements.
    pub input: Tensor,
    /// This rank's part of the result: contiguous, `counts[rank]` elements, same dtype. May be the
    /// view of `input` with this rank's part.
    pub output: Tensor,
    /// Elements of each rank's part, by group rank. Equal on all ranks; may contain zeros.
    pub counts: Vec<usize>,
}

impl ReduceScatter {
    /// A part of equal size for each of `size` ranks.
    pub fn even(output: &Tensor, input: &Tensor, size: usize) -> Self {
        let counts = vec![output.elem_count(); size];
        Self { input: input.clone(), output: output.clone(), counts }
    }
}

/// A collective and its arguments, to be started by [`ProcessGroup::start`].
#[derive(Debug, Clone)]
pub enum Collective {
    /// Reduces `tensor` over the ranks in place. Afterwards all ranks hold the same values.
    AllReduce {
        /// The operand and the result.
        tensor: Tensor,
        /// The reduction.
        op: ReduceOp,
    },
    /// Gathers every rank's part of each tensor, in one collective for all tensors.
    AllGatherInto(Vec<AllGather>),
    /// Reduces each tensor over the ranks and leaves each rank its part, in one collective for all
    /// tensors.
    ReduceScatter {
        /// The tensors.
        parts: Vec<ReduceScatter>,
        /// The reduction.
        op: ReduceOp,
    },
    /// Copies `tensor` of group rank `src` into `tensor` of all others.
    Broadcast {
        /// The source tensor on `src`, the destination on other ranks.
        tensor: Tensor,
        /// The sending group rank.
        src: usize,
    },
    /// Sends part `i` of `input` (`size()` equal parts) to rank `i`, and receives part `i` of
    /// `output` from rank `i`.
    AllToAll {
        /// Receives the parts.
        output: Tensor,
        /// The parts to send.
        input: Tensor,
    },
    /// Completes when every rank has started it.
    Barrier,
}

impl Collective {
    /// An [`AllReduce`](Self::AllReduce).
    pub fn all_reduce(tensor: &Tensor, op: ReduceOp) -> Self {
        Self::AllReduce { tensor: tensor.clone(), op }
    }

    /// An [`AllGatherInto`](Self::AllGatherInto).
    pub fn all_gather_into(parts: Vec<AllGather>) -> Self {
        Self::AllGatherInto(parts)
    }

    /// A [`ReduceScatter`](Self::ReduceScatter).
    pub fn reduce_scatter(parts: Vec<ReduceScatter>, op: ReduceOp) -> Self {
        Self::ReduceScatter { parts, op }
    }

    /// A [`Broadcast`](Self::Broadcast).
    pub fn broadcast(tensor: &Tensor, src: usize) -> Self {
        Self::Broadcast { tensor: tensor.clone(), src }
    }

    /// An [`AllToAll`](Self::AllToAll).
    pub fn all_to_all(output: &Tensor, input: &Tensor) -> Self {
        Self::AllToAll { output: output.clone(), input: input.clone() }
    }

    /// The name of the [`ProcessGroup`] method that starts it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::AllReduce { .. } => "all_reduce",
            Self::AllGatherInto(_) => "all_gather_into",
            Self::ReduceScatter { .. } => "reduce_scatter",
            Self::Broadcast { .. } => "broadcast",
            Self::AllToAll { .. } => "all_to_all",
            Self::Barrier => "barrier",
        }
    }

    /// Bytes of the full tensors: the operand of a reduction, or the gathered whole.
    pub fn bytes(&self) -> usize {
        let bytes = |tensor: &Tensor| tensor.elem_count() * tensor.dtype().size_in_bytes();
        match self {
            Self::AllReduce { tensor, .. } | Self::Broadcast { tensor, .. } => bytes(tensor),
            Self::AllGatherInto(parts) => parts.iter().map(|part| bytes(&part.output)).sum(),
            Self::ReduceScatter { parts, .. } => parts.iter().map(|part| bytes(&part.input)).sum(),
            Self::AllToAll { input, .. } => bytes(input),
            Self::Barrier => 0,
        }
    }

    /// Checks the arguments. Every transport does so before it starts anything.
    ///
    /// # Errors
    /// If an argument is wrong. The message is the same for all transports.
    pub fn check(&self, group: &dyn ProcessGroup) -> Result<()> {
        match self {
            Self::AllReduce { tensor, .. } => check::tensor(group, self.name(), "tensor", tensor),
            Self::AllGatherInto(parts) => check::all_gather(group, parts),
            Self::ReduceScatter { parts, .. } => check::reduce_scatter(group, parts),
            Self::Broadcast { tensor, src } => {
                check::root(group, self.name(), *src)?;
                check::tensor(group, self.name(), "tensor", tensor)
            }
            Self::AllToAll { output, input } => check::all_to_all(group, output, input),
            Self::Barrier => Ok(()),
        }
    }
}
