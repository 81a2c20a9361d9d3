//! The content of a store (values, members, failures), and waiting for its changes.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::Patience;

/// A failure of the job: the rank and its message.
pub(super) type Failure = (usize, String);

/// The reason why a wait ended without a value.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum WaitError {
    /// The timeout passed.
    Timeout,
    /// A rank failed.
    Failed(Failure),
    /// The store was closed.
    Closed,
}

/// The state of one rank.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Member {
    /// The rank connected.
    pub(super) joined: bool,
    /// The rank has sent a message since, so it knows of its admission.
    pub(super) confirmed: bool,
    /// The rank announced that it leaves, so the end of its connection is not a failure.
    pub(super) left: bool,
    /// When the rank's connection ended.
    pub(super) lost: Option<Instant>,
    /// The rank confirmed the notice of the job's failure.
    pub(super) notified: bool,
}

/// The state behind a lock, shared by a server's threads; the core of a
/// [`LocalStore`](crate::LocalStore).
pub(super) struct Table {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
pub(super) struct State {
    values: HashMap<String, Vec<u8>>,
    /// Bytes of keys and values.
    bytes: usize,
    /// In the order of their reports; the first is the job's failure.
    pub(super) failures: Vec<Failure>,
    pub(super) members: Vec<Member>,
    /// The hosting process announced that it leaves, as in [`Member::left`].
    pub(super) host_left: bool,
    pub(super) closed: bool,
    /// The reason why the hosting process cannot serve the job any more.
    pub(super) broken: Option<String>,
    /// Failures of ranks that other ranks have noticed, but that the ranks have not reported
    /// themselves.
    pub(super) noticed: Vec<Failure>,
}

/// Maximum size of all keys and values of a store, with [`ENTRY_BYTES`] for each entry.
///
/// It is far above the needs of a job's ranks.
pub(super) const MAX_BYTES: usize = 256 << 20;
/// Approximate overhead of an entry.
const ENTRY_BYTES: usize = 64;
/// Longest message of a failure; the rest is cut.
const MAX_MESSAGE_BYTES: usize = 64 << 10;

impl State {
    /// Sets a value; fails with a message if the store is full.
    fn set(&mut self, key: &str, value: Vec<u8>) -> Result<(), String> {
        let cost = |value: &Vec<u8>| key.len() + value.len() + ENTRY_BYTES;
        let old = self.values.get(key).map_or(0, cost);
        let bytes = self.bytes - old + cost(&value);
        if bytes > MAX_BYTES {
            return Err(format!(
                "the store has no room for {} bytes at its key `{key}`: all values together may have {MAX_BYTES} \
                 bytes. It is for small messages; tensors go over process groups",
                value.len()
            ));
        }
        self.bytes = bytes;
        self.values.insert(key.to_owned(), value);
        Ok(())
    }

    /// Returns the reason to stop waiting, if there is one.
    pub(super) fn wait_error(&self) -> Option<WaitError> {
        match self.failures.first() {
            Some(failure) => Some(WaitError::Failed(failure.clone())),
            None => self.closed.then_some(WaitError::Closed),
        }
    }
}

impl Table {
    pub(super) fn new(world_size: usize) -> Self {
        let state = State {
            values: HashMap::new(),
            bytes: 0,
            failures: Vec::new(),
            members: vec![Member::default(); world_size],
            host_left: false,
            closed: false,
            broken: None,
            noticed: Vec::new(),
        };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Locks the state for reading. A poisoned lock is ignored: every change is a single assignment
    /// or push, so a panic cannot leave a partial change.
    pub(super) fn read(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state and wakes all waiting threads.
    pub(super) fn change<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        let result = change(&mut self.read());
        self.changed.notify_all();
        result
    }

    /// Waits until `ready` returns a value. Returns `None` after `timeout`.
    pub(super) fn wait<R>(
        &self,
        timeout: Duration,
        mut ready: impl FnMut(&State) -> Option<R>,
    ) -> Option<R> {
        let mut patience = Patience::new(timeout);
        let mut state = self.read();
        loop {
            if let Some(result) = ready(&state) {
                return Some(result);
            }
            let slice = patience.slice()?;
            state =
                self.changed.wait_timeout(state, slice).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Sets a value; fails with a message if the store is full.
    pub(super) fn set(&self, key: &str, value: Vec<u8>) -> Result<(), String> {
        self.change(|state| state.set(key, value))
    }

    pub(super) fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, WaitError> {
        // A value that is set is returned even after a failure.
        self.wait(timeout, |state| match state.values.get(key) {
            Some(value) => Some(Ok(value.clone())),
            None => state.wait_error().map(Err),
        })
        .unwrap_or(Err(WaitError::Timeout))
    }

    /// Adds to a value; fails with a message if the value is not an integer, or the store is full.
    pub(super) fn add(&self, key: &str, amount: i64) -> Result<i64, String> {
        self.change(|state| {
            let old = match state.values.get(key) {
                None => 0,
                Some(bytes) => {
                    let text = String::from_utf8_lossy(bytes);
                    text.parse::<i64>().map_err(|_| {
                        format!(
                            "the store's key `{key}` holds `{text}`, to which nothing can be added"
                        )
                    })?
                }
            };
            let new = old.wrapping_add(amount);
            state.set(key, new.to_string().into_bytes()).map(|()| new)
        })
    }

    /// Sets a value if the present one is `expected`; fails with a message if the store is full.
    pub(super) fn compare_set(
        &self,
        key: &str,
        expected: Option<&[u8]>,
        value: Vec<u8>,
    ) -> Result<bool, String> {
        self.change(|state| {
            let is_expected = state.values.get(key).map(Vec::as_slice) == expected;
            if is_expected {
                state.set(key, value)?;
            }
            Ok(is_expected)
        })
    }

    /// Records a rank's first failure, and returns the job's first failure.
    pub(super) fn fail(&self, rank: usize, message: &str) -> Failure {
        let message = cut(message, MAX_MESSAGE_BYTES);
        self.change(|state| {
            if state.failures.iter().all(|(other, _)| *other != rank) {
                state.failures.push((rank, message.to_owned()));
            }
            state.failures.first().cloned().unwrap_or((rank, message.to_owned()))
        })
    }

    pub(super) fn failure(&self) -> Option<Failure> {
        self.read().failures.first().cloned()
    }
}

/// Returns the first `max` bytes of a text, without a partial character.
pub(super) fn cut(text: &str, max: usize) -> &str {
    let longest = text.len().min(max);
    let end = (0..=longest).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    &text[..end]
}

/// Returns the time after `timeout`, limited to ten years, which an [`Instant`] can express.
pub(super) fn deadline(timeout: Duration) -> Instant {
    const MAX: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
    Instant::now() + timeout.min(MAX)
}
