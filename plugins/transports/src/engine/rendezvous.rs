//! How the ranks of a group map their common memory and hear of failures.

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Tensor};
use fulgurite_core::Result;

use crate::memory::{Region, RegionLayout, Share};

/// What differs between threads and processes.
pub(crate) trait Rendezvous: Send + Sync {
    /// The region of the group `key`, made by its `leader` (group rank 0), the same for all.
    fn region(
        &self,
        key: &str,
        leader: bool,
        layout: RegionLayout,
        timeout: Duration,
    ) -> Result<Joined>;

    /// Whether the ranks can have the region at different times and must meet once, so that the
    /// leader knows when all are in.
    fn must_meet(&self) -> bool;

    /// Remembers the process of a global rank, for [`is_gone`](Rendezvous::is_gone).
    fn watch(&self, global_rank: usize, pid: u32);

    /// Whether the process of a global rank is known to have ended.
    fn is_gone(&self, global_rank: usize) -> bool;

    /// A flat CPU tensor of arbitrary content that all ranks reach, if there is memory for it.
    fn empty(&self, elements: usize, dtype: DType) -> Result<Option<Tensor>>;

    /// The offset of `bytes` in this rank's memory, for another rank's
    /// [`reach`](Rendezvous::reach); none if other ranks cannot reach them.
    fn offset_of(&self, bytes: &[u8]) -> Option<u64>;

    /// How other ranks map this rank's memory, where they must.
    fn share(&self) -> Option<Share>;

    /// The address of `len` bytes at an `offset` in the memory of `owner`.
    fn reach(&self, owner: Owner, offset: u64, len: usize) -> Result<*mut u8>;

    /// The job's first failure, if one is known: the global rank and its message.
    fn failure(&self) -> Option<(usize, String)>;
}

/// A region, and the file that must stay open until all ranks have mapped it.
pub(crate) struct Joined {
    pub(crate) region: Arc<Region>,
    pub(crate) file: Option<File>,
}

/// A rank, and how to map its memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Owner {
    pub(crate) global_rank: usize,
    pub(crate) pid: u32,
    pub(crate) share: Share,
}
