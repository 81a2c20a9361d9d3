//! The trait that transports implement.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};

use super::Work;
use crate::{Error, Result};

/// How elements of several ranks become one.
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

/// An ordered set of ranks that communicate.
///
/// # Contract
/// - Every method but the accessors and [`abort`](ProcessGroup::abort) is **collective**: all ranks
///   of the group call the same methods in the same order with matching shapes and dtypes
///   (`send` / `recv` are matched in pairs, in order).
/// - A call starts the collective and returns; the result is there after [`Work::wait`]. Collectives
///   of one group run in the order they were started.
/// - Tensors are contiguous (views of a larger one included) and are written in place. A transport
///   takes tensors of any device; one that cannot reach a device's memory stages through the host.
/// - Reductions are deterministic: they combine in rank order, and every rank gets the same bits;
///   `reduce_scatter` gives the same bits as the matching part of `all_reduce`.
/// - Every wait ends: with the result, when a peer fails, when the group is aborted, or after the
///   group's timeout, the last three with an error that names the ranks that are missing.
/// - Dtypes: f32, f64, bf16, f16, u8, u32, i32 and i64.
///
/// `fulgurite_core::conformance::process_group` checks all of this for any implementation.
pub trait ProcessGroup: Send + Sync {
    /// The group's name, for messages: a mesh dimension, or `world`.
    fn name(&self) -> &str;

    /// This process's place in the group, `0..size()`.
    fn rank(&self) -> usize;

    /// Number of ranks in the group.
    fn size(&self) -> usize;

    /// The global ranks of the group's members, in group order.
    fn global_ranks(&self) -> &[usize];

    /// Reduces `tensor` over the ranks, in place: afterwards all ranks hold the same values.
    fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Work>;

    /// Gathers every rank's part of each tensor; one collective for all of `parts`.
    fn all_gather_into(&self, parts: Vec<AllGather>) -> Result<Work>;

    /// Reduces each tensor over the ranks and leaves each rank its part; one collective for all.
    fn reduce_scatter(&self, parts: Vec<ReduceScatter>, op: ReduceOp) -> Result<Work>;

    /// Copies `tensor` of group rank `src` into `tensor` of all others.
    fn broadcast(&self, tensor: &Tensor, src: usize) -> Result<Work>;

    /// Sends part `i` of `input` (`size()` equal parts) to rank `i`, and receives part `i` of
    /// `output` from rank `i`.
    fn all_to_all(&self, output: &Tensor, input: &Tensor) -> Result<Work>;

    /// Sends `tensor` to group rank `dst`, which calls [`recv`](ProcessGroup::recv).
    fn send(&self, tensor: &Tensor, dst: usize) -> Result<Work>;

    /// Receives into `tensor` from group rank `src`.
    fn recv(&self, tensor: &Tensor, src: usize) -> Result<Work>;

    /// Returns (after `wait`) when every rank has called it.
    fn barrier(&self) -> Result<Work>;

    /// Makes smaller groups. `partition` lists disjoint sets of this group's ranks, the same list
    /// on every rank, and every rank is in exactly one of them; the returned group is the one that
    /// this rank is in, its order that of the set. Collective over the whole group.
    fn split(&self, partition: &[Vec<usize>], name: &str) -> Result<Arc<dyn ProcessGroup>>;

    /// A flat tensor of arbitrary content (as `torch.empty`) in memory that this transport's collectives
    /// reach with the fewest copies (as PyTorch's symmetric memory and `ncclMemAlloc`): for what is
    /// communicated step after step, such as buckets and shards. Not collective. Tensors in other
    /// memory may be communicated just as well.
    ///
    /// # Errors
    /// If there is no memory for it.
    fn empty(&self, elements: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        Ok(Tensor::zeros(elements, dtype, device)?)
    }

    /// Makes every pending and future call on this group fail with `reason`, on all its ranks.
    /// Not collective; callable from any thread.
    fn abort(&self, reason: &str);
}

impl dyn ProcessGroup + '_ {
    /// An [`Error::Collective`] of this group.
    pub fn error(&self, op: &'static str, message: impl std::fmt::Display) -> Error {
        Error::Collective {
            rank: self.global_ranks()[self.rank()],
            group: self.name().to_owned(),
            op,
            message: message.to_string(),
        }
    }
}
