//! How the ranks of a group map shared memory and learn of failures.

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Tensor};
use fulgurite_error::Result;

use super::blame::Board;
use crate::memory::{Region, RegionLayout, SharedMemoryHandle};

/// What differs between ranks that are threads and ranks that are processes.
pub(crate) trait Rendezvous: Send + Sync {
    /// What ranks are connected by, for people.
    fn name(&self) -> &'static str;

    /// The region of the group `key`, the same for all its ranks. Its `leader`, a global rank, makes it;
    /// none if that is this rank.
    fn region(
        &self,
        key: &str,
        leader: Option<usize>,
        layout: RegionLayout,
        timeout: Duration,
    ) -> Result<MappedRegion>;

    /// Where ranks write whom they wait for: the region of the first group, which has all of them, given in the
    /// first call.
    fn board(&self, first: &Arc<Region>, global_ranks: &[usize]) -> Arc<Board>;

    /// Lets ranks that share no memory with this one know whom it waits for, by its global rank.
    fn waits_for(&self, awaited: Option<usize>) {
        let _ = awaited;
    }

    /// Whether ranks get the region at different times, so that they need a barrier by which the
    /// leader knows that all have it.
    fn must_meet(&self) -> bool;

    /// Starts to watch the process of a global rank, for [`is_gone`](Rendezvous::is_gone).
    fn watch(&self, global_rank: usize, pid: u32);

    /// Whether the process of a global rank is known to have ended.
    fn is_gone(&self, global_rank: usize) -> bool;

    /// A flat CPU tensor of arbitrary values that all ranks can map, if there is memory for it.
    fn empty(&self, elements: usize, dtype: DType) -> Result<Option<Tensor>>;

    /// The offset of `bytes` in this rank's shared memory, for [`reach`](Rendezvous::reach) of
    /// another rank; `None` if other ranks cannot map them.
    fn offset_of(&self, bytes: &[u8]) -> Option<u64>;

    /// How other ranks map this rank's shared memory; `None` if they need not.
    fn share(&self) -> Option<SharedMemoryHandle>;

    /// The address of `len` bytes at `offset` in the shared memory of `owner`.
    fn reach(&self, owner: MemoryOwner, offset: u64, len: usize) -> Result<*mut u8>;

    /// The job's first failure, if one is known: the global rank and its message.
    fn failure(&self) -> Option<(usize, String)>;

    /// Whether this rank is to give up what it waits for, as
    /// [`Store::give_up`](fulgurite_launch::Store::give_up) says.
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
