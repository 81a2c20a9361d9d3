//! The store of a single-process job.

use std::time::Duration;

use super::table::{Table, WaitError};
use crate::Store;
use crate::{Error, Result};

/// An in-memory [`Store`] without sockets or threads.
///
/// It is for a job of one rank, and for tests whose ranks are threads.
///
/// ```
/// use std::time::Duration;
/// use fulgurite_store::{LocalStore, Store};
///
/// let store = LocalStore::new();
/// store.set("greeting", b"hello")?;
/// assert_eq!(store.get("greeting", Duration::ZERO)?, b"hello");
/// assert_eq!(store.add("ready", 1)?, 1);
/// # Ok::<(), fulgurite_store::Error>(())
/// ```
pub struct LocalStore {
    table: Table,
    rank: usize,
}

impl LocalStore {
    /// Creates an empty store. Failures reported to it belong to rank 0.
    pub fn new() -> Self {
        Self { table: Table::new(1), rank: 0 }
    }
}

impl Default for LocalStore {
    fn default() -> Self {
        Self::new()
    }
}

impl Store for LocalStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.table.set(key, value.to_owned()).map_err(Error::Launch)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.table.get(key, timeout).map_err(|wait_error| wait_error.into_error(key, timeout))
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.table.add(key, amount).map_err(Error::Launch)
    }

    fn compare_set(&self, key: &str, expected: Option<&[u8]>, value: &[u8]) -> Result<bool> {
        self.table.compare_set(key, expected, value.to_owned()).map_err(Error::Launch)
    }

    fn report_failure(&self, message: &str) -> Result<()> {
        self.table.fail(self.rank, message);
        Ok(())
    }

    fn failure(&self) -> Option<(usize, String)> {
        self.table.failure()
    }
}

impl WaitError {
    /// Returns the error of a `get` of `key`.
    pub(super) fn into_error(self, key: &str, timeout: Duration) -> Error {
        match self {
            Self::Timeout => Error::Launch(format!(
                "no rank set the store's key `{key}` within {timeout:?}; the ranks may have gone \
                 different ways, or one is stuck"
            )),
            Self::Failed((rank, message)) => Error::PeerFailed { rank, message },
            Self::Closed => {
                Error::Launch(format!("the store was closed while waiting for its key `{key}`"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    #[test]
    fn waits_time_out_and_fail_by_name() {
        let store = LocalStore::new();
        assert_says!(
            store.get("nobody", Duration::from_millis(1)).unwrap_err(),
            "launch: no rank set the store's key `nobody` within 1ms …"
        );
        store.set("word", b"abc").unwrap();
        assert_says!(store.add("word", 1).unwrap_err(), "launch: … key `word` holds `abc` … added");
        assert_eq!(store.failure(), None);
        store.report_failure("first").unwrap();
        store.report_failure("second").unwrap();
        assert_eq!(store.failure(), Some((0, "first".to_owned())));
        let error = store.get("nobody", Duration::from_secs(60)).unwrap_err();
        assert_says!(error, "rank 0 failed: first");
        assert_eq!(store.get("word", Duration::ZERO).unwrap(), b"abc", "what is there is given");
    }

    #[test]
    fn values_are_set_by_comparison() {
        let store = LocalStore::new();
        assert!(!store.compare_set("seat", Some(b"a"), b"b").unwrap());
        assert!(store.compare_set("seat", None, b"a").unwrap());
        assert!(!store.compare_set("seat", None, b"b").unwrap(), "it has a value");
        assert!(store.compare_set("seat", Some(b"a"), b"b").unwrap());
        assert_eq!(store.get("seat", Duration::ZERO).unwrap(), b"b");
    }

    #[test]
    fn waiting_thread_is_woken() {
        let store = LocalStore::new();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| store.get("late", Duration::from_secs(60)));
            store.set("late", b"1").unwrap();
            assert_eq!(waiter.join().unwrap().unwrap(), b"1");
        });
        assert_eq!(store.add("late", 41).unwrap(), 42);
    }
}
