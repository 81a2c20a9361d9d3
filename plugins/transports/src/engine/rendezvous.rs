//! The interface by which the ranks of a group map shared memory and learn of failures.

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Tensor};
use fulgurite_core::Result;

use super::blame::Board;
use crate::memory::{Region, RegionLayout, SharedMemoryHandle};

/// The differences between ranks that are threads and ranks that are processes.
pub(crate) trait Rendezvous: Send + Sync {
    /// The transport's name, for people.
    fn name(&self) -> &'static str;

    /// Returns the region of the group `key`, the same for all its ranks. Its `leader`, a global
    /// rank, makes the region; `None` if this rank is the leader.
    fn region(
        &self,
        key: &str,
        leader: Option<usize>,
        layout: RegionLayout,
        timeout: Duration,
    ) -> Result<MappedRegion>;

    /// Returns the board on which ranks record their waits. It lies in the region of the first
    /// group, which has all ranks and is passed to the first call.
    fn board(&self, first: &Arc<Region>, global_ranks: &[usize]) -> Arc<Board>;

    /// Tells ranks without shared memory which global rank this rank waits for.
    fn waits_for(&self, awaited: Option<usize>) {
        let _ = awaited;
    }

    /// Whether ranks get the region at different times. If so, a barrier tells the leader that all
    /// have it.
    fn must_meet(&self) -> bool;

    /// Starts to watch the process of a global rank, for [`is_gone`](Rendezvous::is_gone).
    fn watch(&self, global_rank: usize, pid: u32);

    /// Whether the process of a global rank is known to have ended.
    fn is_gone(&self, global_rank: usize) -> bool;

    /// Makes a flat CPU tensor of arbitrary values that all ranks can map, if memory is left.
    fn empty(&self, elements: usize, dtype: DType) -> Result<Option<Tensor>>;

    /// Returns the offset of `bytes` in this rank's shared memory, for [`reach`](Rendezvous::reach)
    /// on another rank. Returns `None` if other ranks cannot map them.
    fn offset_of(&self, bytes: &[u8]) -> Option<u64>;

    /// Returns the handle by which other ranks map this rank's shared memory, or `None` if they
    /// need not.
    fn share(&self) -> Option<SharedMemoryHandle>;

    /// Returns the address of `len` bytes at `offset` in the shared memory of `owner`.
    fn reach(&self, owner: MemoryOwner, offset: u64, len: usize) -> Result<*mut u8>;

    /// Returns the job's first failure, if known: the global rank and its message.
    fn failure(&self) -> Option<(usize, String)>;

    /// Whether this rank must give up its waits, by
    /// [`Store::give_up`](fulgurite_core::launch::Store::give_up).
    fn gives_up(&self) -> bool;
}

/// A mapped region, and the file that must stay open until all ranks have mapped it.
pub(crate) struct MappedRegion {
    pub(crate) region: Arc<Region>,
    pub(crate) file: Option<File>,
}

/// A rank, and how to map its shared memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MemoryOwner {
    pub(crate) global_rank: usize,
    pub(crate) pid: u32,
    pub(crate) share: SharedMemoryHandle,
}
