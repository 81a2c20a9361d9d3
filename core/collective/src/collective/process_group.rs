//! The trait that transports implement.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::collective::{AllGather, Collective, ReduceOp, ReduceScatter};
use super::{End, Work};
use crate::{Error, Result};
use fulgurite_tensor::autograd::storage;

/// An ordered set of ranks that communicate.
///
/// # Contract
/// - Every method except the accessors and [`abort`](ProcessGroup::abort) is **collective**: all
///   ranks of the group call the same methods in the same order with matching shapes and dtypes
///   (`send` / `recv` are matched in pairs, in order).
/// - [`start`](ProcessGroup::start) starts the collective and returns. After [`Work::wait`], CPU
///   tensors hold the result. Tensors on a device hold it for all work queued from then on, so a
///   failure may surface later, at the group's next call.
/// - Collectives of one group run in the order they were started. After the wait for one of them, a
///   barrier included, the earlier ones are complete too, even if their [`Work`] was dropped.
/// - The methods named after collectives call `start`; transports do not implement them.
/// - Tensors are contiguous, views of a larger tensor included, and are written in place. A
///   transport takes tensors of any device. If it cannot reach a device's memory, it stages through
///   the host.
/// - Every rank gets the same bits of a reduction. If
///   [`exact_reductions`](ProcessGroup::exact_reductions) is true, reductions are deterministic:
///   they combine in rank order, and `reduce_scatter` gives the same bits as the matching part of
///   `all_reduce`.
/// - Every wait ends: with the result, when a peer fails, when the group is aborted, or after the
///   group's timeout. In the last three cases the error names the missing ranks.
/// - Dtypes: f32, f64, bf16, f16, u8, u32, i32 and i64.
///
/// `fulgurite_core::conformance::process_group` checks this contract for any implementation.
pub trait ProcessGroup: Send + Sync {
    /// The group's name, for messages: a mesh dimension, or `world`.
    fn name(&self) -> &str;

    /// This rank's index in the group, `0..size()`.
    fn rank(&self) -> usize;

    /// Number of ranks in the group.
    fn size(&self) -> usize;

    /// The connections between the group's ranks, for people: `shm`, or
    /// `shm within hosts, tcp between them`. May be empty.
    fn transport(&self) -> String {
        String::new()
    }

    /// Whether reductions combine in rank order, so that their bits do not depend on the transport.
    /// NCCL, for one, chooses the order of floating-point sums and products, rounds to the dtype
    /// after each operation, and may pass over NaN in minima and maxima. Integers are always exact.
    fn exact_reductions(&self) -> bool {
        true
    }

    /// The global ranks of the group's members, in group order.
    fn global_ranks(&self) -> &[usize];

    /// Connects the ranks for collectives of tensors on `device`, so that no step pays for it in
    /// time and memory. Without this call a transport connects at first use. Collective.
    ///
    /// # Errors
    /// If a peer fails, or the device runs out of memory.
    fn connect(&self, device: &Device) -> Result<()> {
        let _ = device;
        Ok(())
    }

    /// Starts a collective.
    ///
    /// With `overlap` the collective runs while the caller computes. Without, the caller waits at
    /// once, so a transport may run it on the waiting thread, in [`Work::wait`] or before the
    /// group's next collective. This saves waking another thread. The result is the same.
    fn start(&self, collective: Collective, overlap: bool) -> Result<Work>;

    /// Starts an overlapping collective that runs after the end of another one, of this group or
    /// any other, and takes its results without a wait in between. If the other collective fails,
    /// so do this one and its group. Counts as a call of [`start`](Self::start) in the order of the
    /// group's calls.
    ///
    /// `None`: the transport cannot do this and has started nothing. The caller then waits for the
    /// other collective and starts this one. A group answers the same on all its ranks.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    fn start_after(&self, end: &Arc<dyn End>, collective: Collective) -> Result<Option<Work>> {
        let _ = (end, collective);
        Ok(None)
    }

    /// Runs a collective and waits for it. For small collectives without overlap.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use fulgurite_core::collective::{Collective, ProcessGroup as _, ReduceOp, Solo};
    ///
    /// let (group, sum) = (Solo::new("world", 0), Tensor::new(&[1f32], &Device::Cpu)?);
    /// group.run(Collective::all_reduce(&sum, ReduceOp::Sum))?;
    /// # Ok::<(), fulgurite_core::Error>(())
    /// ```
    fn run(&self, collective: Collective) -> Result<()> {
        self.start(collective, false)?.wait()
    }

    /// Starts a [`Collective::AllReduce`] that overlaps with what the caller does.
    fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Work> {
        self.start(Collective::all_reduce(tensor, op), true)
    }

    /// Starts a [`Collective::AllGatherInto`] that overlaps with what the caller does.
    fn all_gather_into(&self, parts: Vec<AllGather>) -> Result<Work> {
        self.start(Collective::all_gather_into(parts), true)
    }

    /// Starts a [`Collective::ReduceScatter`] that overlaps with what the caller does.
    fn reduce_scatter(&self, parts: Vec<ReduceScatter>, op: ReduceOp) -> Result<Work> {
        self.start(Collective::reduce_scatter(parts, op), true)
    }

    /// Starts a [`Collective::Broadcast`] that overlaps with what the caller does.
    fn broadcast(&self, tensor: &Tensor, src: usize) -> Result<Work> {
        self.start(Collective::broadcast(tensor, src), true)
    }

    /// Starts a [`Collective::AllToAll`] of equally long parts that overlaps with what the caller
    /// does.
    fn all_to_all(&self, output: &Tensor, input: &Tensor) -> Result<Work> {
        self.start(Collective::all_to_all(output, input), true)
    }

    /// Starts a [`Collective::Barrier`] that overlaps with what the caller does.
    fn barrier(&self) -> Result<Work> {
        self.start(Collective::Barrier, true)
    }

    /// Sends `tensor` to group rank `dst`, which calls [`recv`](ProcessGroup::recv).
    fn send(&self, tensor: &Tensor, dst: usize) -> Result<Work>;

    /// Receives into `tensor` from group rank `src`.
    fn recv(&self, tensor: &Tensor, src: usize) -> Result<Work>;

    /// Begins the messages that were started with [`send`](Self::send) and [`recv`](Self::recv). A
    /// transport may otherwise begin them together, when one of them is waited for. Called by ranks
    /// that wait for something else first. Not collective.
    ///
    /// # Errors
    /// If the group has failed.
    fn begin_messages(&self) -> Result<()> {
        Ok(())
    }

    /// Whether messages with tensors like this one, of the host, have an order of their own: they
    /// may be received before messages with tensors of a device that were sent earlier. By default
    /// all messages to a rank arrive in the order of sending. The same on all ranks.
    fn travels_apart(&self, _tensor: &Tensor) -> bool {
        false
    }

    /// Splits the group into smaller groups. `partition` lists disjoint sets of this group's ranks,
    /// equal on every rank, with every rank in exactly one set. Returns the group of this rank's
    /// set, in the set's order. Collective over the whole group.
    fn split(&self, partition: &[Vec<usize>], name: &str) -> Result<Arc<dyn ProcessGroup>>;

    /// A flat uninitialised tensor, as `torch.empty`, in memory that this transport's collectives
    /// reach with the fewest copies, as PyTorch's symmetric memory and `ncclMemAlloc`. For tensors
    /// communicated in every step, such as buckets and shards. Not collective. Collectives take
    /// tensors in other memory too.
    ///
    /// # Errors
    /// If the device runs out of memory.
    fn empty(&self, elements: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        storage::unset(elements, dtype, device)
    }

    /// Makes every pending and future call on this group fail with `reason`, on all its ranks. Not
    /// collective; callable from any thread.
    fn abort(&self, reason: &str);

    /// The error with which the group's next call would fail, as far as this rank knows: a failure
    /// here, an abort by another rank, or a failed rank of the job. Not collective; callable from
    /// any thread. Does not wait, so failures known to other ranks may show only in a later call.
    /// `None`: the group works, or its transport cannot tell.
    fn failure(&self) -> Option<Error> {
        None
    }
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
