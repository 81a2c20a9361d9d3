//! The memory that the ranks of a group share.

mod free_list;
mod heap;
mod layout;
mod region;
mod waker;

pub use heap::SharedMemory;
pub(crate) use heap::{SharedMemoryHandle, at, empty_tensor, offset_of, share};
#[cfg(target_os = "linux")]
pub(crate) use heap::{keep_from_dumps, nonce_of};
pub(crate) use layout::{BUFFERS, LINE, OpRecord, P2P_CHUNKS, RankRecord, RegionLayout};
pub(crate) use region::Region;
pub(crate) use waker::{Waker, notify};

/// A random number, to distinguish memory of this program from other memory.
pub(crate) fn nonce() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    // std's hash maps have random keys; an empty hash under one is a random number.
    RandomState::new().build_hasher().finish()
}
