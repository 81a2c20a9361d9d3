//! The trait [`Store`].

use std::time::Duration;

use crate::{Error, Result};

/// A small key-value store that all ranks of a job share, like PyTorch's `TCPStore`, for
/// rendezvous, health and control messages.
pub trait Store: Send + Sync {
    /// Sets `key`, replacing what was there.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// The value of `key`, waiting until some rank sets it.
    ///
    /// # Errors
    /// After `timeout`, naming the key; as soon as a rank of the job is known to have failed; or if this
    /// rank is to [give up](Store::give_up).
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>>;

    /// Adds `amount` to the integer at `key` (absent: 0) and returns the new value.
    fn add(&self, key: &str, amount: i64) -> Result<i64>;

    /// Tells all ranks of the job that this one failed, and why. The first report is the job's
    /// failure.
    fn report_failure(&self, message: &str) -> Result<()>;

    /// The job's first failure, if one is known: the rank and its message. Does not block.
    fn failure(&self) -> Option<(usize, String)>;

    /// Whether this rank is to give up what it waits for, for it was asked to end before training has
    /// begun: the error to end with, [`Error::Interrupted`]. The other ranks have been told then. Asked
    /// now and again by whoever waits for other ranks.
    fn give_up(&self) -> Option<Error> {
        None
    }
}
