//! The content of a store (values, members, failures), and waiting for a change of it.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::Patience;

/// A failure of the job: the rank and its message.
pub(super) type Failure = (usize, String);

/// Why a wait ended without a value.
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
    /// It connected.
    pub(super) joined: bool,
    /// It has said something since, so it knows that it was let in.
    pub(super) confirmed: bool,
    /// It announced that it leaves, so the end of its connection is no failure.
    pub(super) left: bool,
    /// Its connection ended.
    pub(super) lost: bool,
    /// It confirmed the notice of the job's failure.
    pub(super) notified: bool,
}

/// The state behind a lock, shared by the threads of a server; a [`LocalStore`](crate::LocalStore)
/// is little more.
pub(super) struct Table {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
pub(super) struct State {
    values: HashMap<String, Vec<u8>>,
    /// Bytes of keys and values.
    bytes: usize,
    /// In the order in which they became known; the first is the job's failure.
    pub(super) failures: Vec<Failure>,
    pub(super) members: Vec<Member>,
    /// The hosting process announced that it leaves, as [`Member::left`].
    pub(super) host_left: bool,
    pub(super) closed: bool,
    /// Why the hosting process cannot serve the job any more.
    pub(super) broken: Option<String>,
    /// Failures of ranks that other ranks have noticed, and whose own words are still to come.
    pub(super) noticed: Vec<Failure>,
}

/// How many bytes all keys and values of a store may have, with [`ENTRY_BYTES`] for each: far more than what ranks tell each
/// other.
pub(super) const MAX_BYTES: usize = 256 << 20;
/// What an entry takes besides its key and value, about.
const ENTRY_BYTES: usize = 64;
/// Longest message of a failure; the rest is cut.
const MAX_MESSAGE_BYTES: usize = 64 << 10;

impl State {
    /// Sets a value; fails with a message if there is no room for it.
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

    /// Why waiting is pointless from now on; `None` if it is not.
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

    /// Locks the state for reading. A poisoned lock is taken all the same: every change is one
    /// assignment or push, so a panic leaves no half of one.
    pub(super) fn read(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state and wakes all waiting threads.
    pub(super) fn change<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        let result = change(&mut self.read());
        self.changed.notify_all();
        result
    }

    /// Waits until `ready` returns a value; `None` after `timeout`.
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

    /// Fails with a message if there is no room for the value.
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

    /// Fails with a message if the present value is no integer, or there is no room.
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

    /// Records a failure, unless the rank has one already, and returns the job's first.
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

/// The first `max` bytes of a text, or one fewer character.
pub(super) fn cut(text: &str, max: usize) -> &str {
    let longest = text.len().min(max);
    let end = (0..=longest).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    &text[..end]
}

/// `timeout` from now, at most ten years, which an [`Instant`] can express.
pub(super) fn deadline(timeout: Duration) -> Instant {
    const MAX: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
    Instant::now() + timeout.min(MAX)
}
