//! Waits for other ranks, and all ways in which a wait can end.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fulgurite_engine::collective::TIMED_OUT;
use fulgurite_error::Error;
use fulgurite_launch::Patience;

use super::blame::{self, Board, LongWait};
use super::group::Identity;
use super::plan::KINDS;
use super::queue::Queue;
use super::rendezvous::{MemoryOwner, Rendezvous};
use crate::memory::{Region, SharedMemoryHandle, Waker, notify};

/// Interval at which a waiting rank asks the store for failures and checks the processes of missing
/// ranks.
const POLL: Duration = Duration::from_millis(100);

/// Duration of a wait after which it is announced to ranks of other hosts.
const LONG: Duration = Duration::from_millis(500);

/// Time that a rank still waits after another's process has ended, for the error that the other may
/// have reported.
const GRACE: Duration = Duration::from_secs(1);

/// The failure of a collective, and so of its group. Unlike [`Error`], it is `Clone`.
#[derive(Debug, Clone)]
pub(crate) enum Failure {
    /// A rank of the job failed: its global rank and its message.
    Peer { rank: usize, message: String },
    /// Any other failure, by its message.
    Group(String),
    /// This rank was asked to end during the job's start.
    Interrupted,
}

impl Failure {
    /// Converts it to an error of the operation `op` of a group, on the global rank `rank`.
    pub(crate) fn error(self, rank: usize, group: &str, op: &'static str) -> Error {
        match self {
            Self::Peer { rank, message } => Error::PeerFailed { rank, message },
            Self::Interrupted => Error::Interrupted,
            Self::Group(message) => {
                Error::Collective { rank, group: group.to_owned(), op, message }
            }
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::PeerFailed { rank, message } => Self::Peer { rank, message },
            Error::Interrupted => Self::Interrupted,
            other => Self::Group(other.to_string()),
        }
    }
}

impl From<candle_core::Error> for Failure {
    fn from(error: candle_core::Error) -> Self {
        Error::from(error).into()
    }
}

/// State shared by a group's handle and its communication thread.
pub(crate) struct Shared {
    pub(crate) identity: Identity,
    pub(crate) timeout: Duration,
    pub(crate) chunk_bytes: usize,
    pub(crate) region: Arc<Region>,
    /// Records which rank each rank waits for.
    pub(crate) board: Arc<Board>,
    pub(crate) rendezvous: Arc<dyn Rendezvous>,
    pub(crate) queue: Arc<Queue>,
    /// The failure of the group, if it has failed.
    pub(crate) failure: Mutex<Option<Failure>>,
    /// Whether a waiting rank spins before it sleeps; by default, if each rank has a core.
    pub(crate) spins: bool,
    /// Whether this rank can map the memory of the others' [`empty`](Rendezvous::empty) tensors.
    /// Set after the first barrier.
    pub(crate) reaches_all: AtomicBool,
}

impl Shared {
    /// Maps the shared memory of all ranks, after the first barrier.
    pub(crate) fn reach_all(&self) {
        let reaches = (0..self.identity.size()).all(|rank| match self.reach(rank, 0, 0) {
            Ok(_) => true,
            Err(error) => {
                tracing::debug!(
                    "collectives of `{}` copy through slots: {error}",
                    self.identity.name
                );
                false
            }
        });
        self.reaches_all.store(reaches, Ordering::Relaxed);
    }

    /// Returns the address of `len` bytes at an offset in the shared memory of a rank of the group.
    pub(crate) fn reach(
        &self,
        rank: usize,
        offset: u64,
        len: usize,
    ) -> fulgurite_error::Result<*mut u8> {
        let record = self.region.record(rank);
        let share = SharedMemoryHandle {
            fd: record.memory.fd.load(Ordering::Relaxed),
            len: record.memory.len.load(Ordering::Relaxed) as usize,
            nonce: record.memory.nonce.load(Ordering::Relaxed),
        };
        let pid = record.pid.load(Ordering::Relaxed);
        let owner = MemoryOwner { global_rank: self.identity.global_ranks[rank], pid, share };
        self.rendezvous.reach(owner, offset, len)
    }

    /// Makes a waiting thread of this rank check its condition again.
    pub(crate) fn notify_self(&self) {
        notify(self.region.record(self.identity.rank));
    }

    /// Returns the failure of the group, if it has failed.
    pub(crate) fn broken(&self) -> Option<Failure> {
        let failure = self.failure.lock().expect("no panic while failing").clone();
        failure.or_else(|| self.aborted())
    }

    /// Sets the failure of the group, unless it has failed before, and aborts the group on the
    /// other ranks.
    pub(crate) fn fail(&self, failure: &Failure) {
        match failure {
            Failure::Group(message) => self.region.abort(self.identity.rank, None, message),
            Failure::Interrupted => self.region.abort(self.identity.rank, None, "interrupted"),
            Failure::Peer { rank, message } => {
                self.region.abort(self.identity.rank, Some(*rank), message);
            }
        }
        let mut first = self.failure.lock().expect("no panic while failing");
        first.get_or_insert_with(|| failure.clone());
    }

    fn aborted(&self) -> Option<Failure> {
        let (rank, failed, reason) = self.region.aborted()?;
        // The failed rank's own message says more than the message of a rank that has noticed the
        // failure.
        if let Some((rank, message)) = self.rendezvous.failure() {
            return Some(Failure::Peer { rank, message });
        }
        if let Some(rank) = failed {
            return Some(Failure::Peer { rank, message: reason });
        }
        Some(Failure::Group(match self.identity.global_ranks.get(rank) {
            Some(_) if rank == self.identity.rank => reason,
            Some(rank) => format!("aborted by rank {rank}: {reason}"),
            None => format!("aborted: {reason}"),
        }))
    }

    /// Waits until `ready` returns true. Calls it `spins` times before it sleeps, unless the group
    /// does not spin. `ready` is not called again after it has returned true.
    ///
    /// `missing` lists the missing group ranks, and `what` names the waiting operation. Both are
    /// called only in a long wait.
    pub(crate) fn wait_until(
        &self,
        spins: u32,
        mut ready: impl FnMut() -> bool,
        missing: impl Fn() -> Vec<usize>,
        what: impl Fn() -> String,
    ) -> Result<(), Failure> {
        let spins = if self.spins { spins } else { 0 };
        for _ in 0..spins {
            if ready() {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let mut patience = Patience::new(self.timeout);
        let mut polled = Instant::now();
        let mut gone_since = None;
        let mut on_record = None;
        let began = polled;
        let mut told = None;
        let over = |told: Option<usize>| {
            if told.is_some() {
                self.rendezvous.waits_for(None);
            }
        };
        loop {
            let waker = Waker::new(self.region.record(self.identity.rank));
            if ready() {
                over(told);
                return Ok(());
            }
            // Another rank may have passed this point, and then failed, since the call of `ready`.
            if let Some(failure) = self.aborted() {
                return if ready() { Ok(()) } else { Err(failure) };
            }
            let now = Instant::now();
            if now - polled >= POLL {
                polled = now;
                if let Some((rank, message)) = self.rendezvous.failure() {
                    return if ready() { Ok(()) } else { Err(Failure::Peer { rank, message }) };
                }
                if self.rendezvous.gives_up() {
                    return if ready() { Ok(()) } else { Err(Failure::Interrupted) };
                }
                match missing().into_iter().find_map(|rank| Some((rank, self.gone(rank)?))) {
                    Some((rank, how)) => {
                        if now - *gone_since.get_or_insert(now) >= GRACE {
                            let rank = self.identity.global_ranks[rank];
                            let message = format!("{how} while {}", what());
                            return Err(Failure::Peer { rank, message });
                        }
                    }
                    None => gone_since = None,
                }
                self.check_closing(&what)?;
                if let Some(rank) = missing().first().map(|&rank| self.identity.global_ranks[rank])
                {
                    let begin = || LongWait::begin(&self.board, self.identity.own_rank(), rank);
                    on_record.get_or_insert_with(begin).goes_on(rank);
                    if told != Some(rank) && now - began >= LONG {
                        told = Some(rank);
                        self.rendezvous.waits_for(Some(rank));
                    }
                }
            }
            let Some(slice) = patience.slice() else {
                let missing: Vec<String> =
                    missing().into_iter().map(|r| self.last_seen(r)).collect();
                on_record.into_iter().for_each(LongWait::gives_up);
                return Err(Failure::Group(format!(
                    "{TIMED_OUT} {:?}: {}, waited for {}",
                    self.timeout,
                    what(),
                    missing.join(", "),
                )));
            };
            waker.sleep(POLL.min(slice));
        }
    }

    /// Describes how a rank has left the group, if it has.
    fn gone(&self, rank: usize) -> Option<String> {
        let record = self.region.record(rank);
        if record.left.load(Ordering::Acquire) != 0 {
            return Some(format!("it left the process group `{}`", self.identity.name));
        }
        if self.rendezvous.is_gone(self.identity.global_ranks[rank]) {
            let pid = record.pid.load(Ordering::Relaxed);
            return Some(format!("its process ({pid}) ended"));
        }
        None
    }

    /// Describes a rank, its last collective and the rank that it waits for, for messages.
    fn last_seen(&self, rank: usize) -> String {
        let global = self.identity.global_ranks[rank];
        let record = self.region.record(rank);
        let waits = blame::describe(&blame::chain(&self.board, global));
        match record.begun.load(Ordering::Acquire) {
            0 => format!("rank {global} (which has started no collective of this group){waits}"),
            begun => {
                let op = &record.ops[(begun - 1) as usize % 2];
                let kind = op.kind.load(Ordering::Relaxed) as usize;
                let name = KINDS.get(kind).unwrap_or(&"a collective");
                format!("rank {global} (last seen in {name}, its collective {begun}){waits}")
            }
        }
    }

    fn check_closing(&self, what: &impl Fn() -> String) -> Result<(), Failure> {
        match self.queue.is_over() {
            true => Err(Failure::Group(format!(
                "rank {} dropped the group while {}",
                self.identity.own_rank(),
                what(),
            ))),
            false => Ok(()),
        }
    }
}
