//! The memory that the ranks of a group share.

mod free_list;
mod heap;
mod layout;
mod region;
mod waker;

pub use heap::SharedMemory;
pub(crate) use heap::{SharedMemoryHandle, at, empty_tensor, offset_of};
#[cfg(target_os = "linux")]
pub(crate) use heap::{keep_from_dumps, nonce_of, set_ranks, share};
pub(crate) use layout::{
    BUFFERS, LINE, OpRecord, P2P_CHUNKS, RankRecord, RegionLayout, WaitRecord,
};
pub(crate) use region::Region;
#[cfg(target_os = "linux")]
pub(crate) use region::{SEALS, nonce};
pub(crate) use waker::{Waker, notify};
