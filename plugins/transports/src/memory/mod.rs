//! The memory that the ranks of a group share.

mod bell;
mod free_list;
mod heap;
mod layout;
mod region;

pub(crate) use bell::{Bell, ring};
pub use heap::SharedMemory;
pub(crate) use heap::{Share, at, empty_tensor, place, share};
#[cfg(target_os = "linux")]
pub(crate) use heap::{keep_from_dumps, nonce_of};
pub(crate) use layout::{BUFFERS, LINE, Layout, MAILS, OpRecord, RankRecord};
pub(crate) use region::Region;

/// A random number.
pub(crate) fn nonce() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    // std's hash maps have random keys; an empty hash under one is a random number.
    RandomState::new().build_hasher().finish()
}
