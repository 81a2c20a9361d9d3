//! Collectives and their arguments.

use std::ops::Range;

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

/// An exchange: every rank sends a part of its `input` to every rank, itself included, and receives
/// one from each into its `output`. Parts are in rank order in both.
#[derive(Debug, Clone)]
pub struct AllToAll {
    /// The parts to send: contiguous.
    pub input: Tensor,
    /// Receives the parts: contiguous, same dtype. With `counts`, shares no memory with `input`.
    pub output: Tensor,
    /// `counts[i][j]`: the number of elements that group rank `i` sends to group rank `j`. Equal on
    /// all ranks; may contain zeros. `None`: all parts are equally long.
    pub counts: Option<Vec<Vec<usize>>>,
}

impl AllToAll {
    /// An exchange of equally long parts.
    pub fn even(output: &Tensor, input: &Tensor) -> Self {
        Self { input: input.clone(), output: output.clone(), counts: None }
    }

    /// An exchange of parts of these lengths (see [`counts`](Self::counts)).
    pub fn uneven(output: &Tensor, input: &Tensor, counts: Vec<Vec<usize>>) -> Self {
        Self { counts: Some(counts), ..Self::even(output, input) }
    }

    /// The elements of the input that rank `rank` of `size` sends to each rank, in rank order.
    pub fn sent(&self, rank: usize, size: usize) -> Vec<Range<usize>> {
        self.parts(size, |counts, peer| counts[rank][peer])
    }

    /// The elements of the output that rank `rank` of `size` receives from each rank, in rank
    /// order.
    pub fn received(&self, rank: usize, size: usize) -> Vec<Range<usize>> {
        self.parts(size, |counts, peer| counts[peer][rank])
    }

    /// The number of elements of the longest part that any of `size` ranks sends.
    pub fn longest(&self, size: usize) -> usize {
        match &self.counts {
            None => self.input.elem_count() / size,
            Some(counts) => counts.iter().flatten().copied().max().unwrap_or(0),
        }
    }

    fn parts(
        &self,
        size: usize,
        count: impl Fn(&[Vec<usize>], usize) -> usize,
    ) -> Vec<Range<usize>> {
        let even = self.input.elem_count() / size;
        let mut start = 0;
        let part = |peer| {
            let count = self.counts.as_ref().map_or(even, |counts| count(counts, peer));
            start += count;
            start - count..start
        };
        (0..size).map(part).collect()
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
    /// Sends a part of a tensor to each rank, and receives one from each.
    AllToAll(AllToAll),
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

    /// An [`AllToAll`](Self::AllToAll) of equally long parts.
    pub fn all_to_all(output: &Tensor, input: &Tensor) -> Self {
        Self::AllToAll(AllToAll::even(output, input))
    }

    /// The name of the [`ProcessGroup`] method that starts it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::AllReduce { .. } => "all_reduce",
            Self::AllGatherInto(_) => "all_gather_into",
            Self::ReduceScatter { .. } => "reduce_scatter",
            Self::Broadcast { .. } => "broadcast",
            Self::AllToAll(_) => "all_to_all",
            Self::Barrier => "barrier",
        }
    }

    /// Bytes of the full tensors: the operand of a reduction, the gathered whole, or what
    /// this rank sends in an exchange.
    pub fn bytes(&self) -> usize {
        let bytes = |tensor: &Tensor| tensor.elem_count() * tensor.dtype().size_in_bytes();
        match self {
            Self::AllReduce { tensor, .. } | Self::Broadcast { tensor, .. } => bytes(tensor),
            Self::AllGatherInto(parts) => parts.iter().map(|part| bytes(&part.output)).sum(),
            Self::ReduceScatter { parts, .. } => parts.iter().map(|part| bytes(&part.input)).sum(),
            Self::AllToAll(exchange) => bytes(&exchange.input),
            Self::Barrier => 0,
        }
    }

    /// Whether no rank has anything to give another. The same on all ranks.
    pub fn is_empty(&self) -> bool {
        match self {
            Self::AllToAll(AllToAll { counts: Some(counts), .. }) => {
                counts.iter().flatten().all(|count| *count == 0)
            }
            _ => self.bytes() == 0,
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
            Self::AllToAll(exchange) => check::all_to_all(group, exchange),
            Self::Barrier => Ok(()),
        }
    }
}
