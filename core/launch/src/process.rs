//! The state of this process in its job.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize};
use std::sync::{Mutex, OnceLock, RwLock};

use rayon::ThreadPool;

use super::attempt::Known;
use super::rank::Membership;
use super::signals::Arrived;

/// The state of this process in its job. Static, because a process takes part in at most one job:
/// every launch of a program gets the same one, and signal handlers, the panic hook and the exit
/// code belong to the process.
pub(super) static PROCESS: Process = Process {
    launching: Mutex::new(()),
    attempt: OnceLock::new(),
    alone: AtomicBool::new(false),
    membership: RwLock::new(None),
    starting: AtomicUsize::new(0),
    arrived: OnceLock::new(),
    agreed: AtomicI32::new(0),
    panicked: AtomicBool::new(false),
    compute_pools: Mutex::new(Vec::new()),
};

pub(super) struct Process {
    /// Held during a launch: one at a time.
    pub(super) launching: Mutex<()>,
    /// The attempt, as the environment names it.
    pub(super) attempt: OnceLock<Known>,
    /// Whether this process was launched as a job of one rank.
    pub(super) alone: AtomicBool,
    /// The process's part in the present generation of a job of several ranks, once launched.
    /// Memberships live as long as the process.
    pub(super) membership: RwLock<Option<&'static Membership>>,
    /// Number of live [`Starting`](super::Starting)s.
    pub(super) starting: AtomicUsize,
    /// Received signals, once they are handled. In a rank they stay set; the supervisor takes them.
    pub(super) arrived: OnceLock<Arrived>,
    /// The signal on which the ranks agreed; 0 if they have not.
    pub(super) agreed: AtomicI32,
    /// Whether a thread of a rank has panicked, which ends the process.
    pub(super) panicked: AtomicBool,
    /// Pools of the threads that launched. A pool must live as long as its threads.
    pub(super) compute_pools: Mutex<Vec<ThreadPool>>,
}
