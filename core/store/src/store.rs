//! The trait [`Store`].

use std::time::Duration;

use crate::{Error, Result};

/// A small key-value store that all ranks of a job share, like PyTorch's `TCPStore`.
///
/// It is for rendezvous, health and control messages.
pub trait Store: Send + Sync {
    /// Sets `key`, replacing its value.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Returns the value of `key`, waiting until some rank sets it.
    ///
    /// # Errors
    /// After `timeout`, naming the key; as soon as a rank of the job is known to have failed; or if
    /// this rank must [give up](Store::give_up).
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>>;

    /// Adds `amount` to the integer at `key` (absent: 0) and returns the new value.
    fn add(&self, key: &str, amount: i64) -> Result<i64>;

    /// Sets `key` if its present value is `expected`; `None` is a key without a value. Returns
    /// whether it was set.
    fn compare_set(&self, key: &str, expected: Option<&[u8]>, value: &[u8]) -> Result<bool>;

    /// Tells all ranks of the job that this rank failed, with a message. The first report becomes
    /// the job's failure.
    fn report_failure(&self, message: &str) -> Result<()>;

    /// Returns the job's first failure, if one is known: the rank and its message. Does not block.
    fn failure(&self) -> Option<(usize, String)>;

    /// Returns [`Error::Interrupted`] if this rank must stop waiting.
    ///
    /// A rank must stop if it was asked to end before training has begun. The other ranks have been
    /// told then. A rank that waits for others calls it repeatedly.
    fn give_up(&self) -> Option<Error> {
        None
    }
}
