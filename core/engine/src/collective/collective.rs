//! A collective and its arguments.

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::ProcessGroup;
use super::check;
use crate::Result;

/// How the ranks' elements are reduced to one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReduceOp {
    /// The sum, accumulated in rank order. bf16 and f16 accumulate in f32 and round once.
    Sum,
    /// The product, in rank order.
    Product,
    /// The smallest; NaN if any rank has NaN.
    Min,
    /// The largest; NaN if any rank has NaN.
    Max,
}

/// One tensor of an all-gather: every rank's `input` lands in every rank's `output`, in rank order.
#[derive(Debug, Clone)]
pub struct AllGather {
    /// This rank's part, contiguous, `counts[rank]` elements. It may be the view of `output` where
    /// this rank's part goes.
    pub input: Tensor,
    /// Where the whole goes: contiguous, `counts.iter().sum()` elements, same dtype.
    pub output: Tensor,
    /// Elements a rank contributes, by group rank. Equal on all ranks; may contain zeros.
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
    /// Where this rank's part of the result goes: contiguous, `counts[rank]` elements, same dtype.
    /// It may be the view of `input` that is this rank's part.
    pub output: Tensor,
    /// Elements a rank receives, by group rank. Equal on all ranks; may contain zeros.
    pub counts: Vec<usize>,
}

impl ReduceScatter {
    /// A part of equal size for each of `size` ranks.
    pub fn even(output: &Tensor, input: &Tensor, size: usize) -> Self {
        let counts = vec![output.elem_count(); size];
        Self { input: input.clone(), output: output.clone(), counts }
    }
}

/// A collective and its arguments: what [`ProcessGroup::start`] starts.
#[derive(Debug, Clone)]
pub enum Collective {
    /// Reduces `tensor` over the ranks, in place: afterwards all ranks hold the same values.
    AllReduce {
        /// What is reduced, and where the result goes.
        tensor: Tensor,
        /// The reduction.
        op: ReduceOp,
    },
    /// Gathers every rank's part of each tensor; one collective for all of them.
    AllGatherInto(Vec<AllGather>),
    /// Reduces each tensor over the ranks and leaves each rank its part; one collective for all of them.
    ReduceScatter {
        /// The tensors.
        parts: Vec<ReduceScatter>,
        /// How they are reduced.
        op: ReduceOp,
    },
    /// Copies `tensor` of group rank `src` into `tensor` of all others.
    Broadcast {
        /// On `src` the tensor that is sent, on the others where it goes.
        tensor: Tensor,
        /// The group rank that sends.
        src: usize,
    },
    /// Sends part `i` of `input` (`size()` equal parts) to rank `i`, and receives part `i` of `output`
    /// from rank `i`.
    AllToAll {
        /// Where the received parts go.
        output: Tensor,
        /// The parts that are sent.
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

    /// Bytes of the whole tensors: what is reduced, or the gathered whole.
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

    /// Checks the arguments; every transport does so before it starts anything.
    ///
    /// # Errors
    /// If an argument is wrong; the message is the same for all transports.
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
