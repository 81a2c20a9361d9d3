//! The store of a job of several processes: a server in one of them, a client in each.
//!
//! Beside the connections for its requests every client has a *health connection*. It carries
//! heartbeats and, as soon as there is one, the job's first failure. If it ends before the client
//! has announced that it leaves, the rank was killed. Between hosts a connection may break without
//! an end, so there a minute without a heartbeat means the same. Within a host it does not: the
//! kernel closes the connections of a dead process, and a process that a debugger has stopped is
//! not dead.
//!
//! Whoever connects must prove to know the [`JobKey`], and the server proves it too (`handshake`). What
//! strangers can make the server hold is bounded (`connections`), and so are the values of the store.

mod client;
mod connections;
mod handshake;
mod job_key;
mod protocol;
mod server;

pub use client::{ClientOptions, StoreHost, TcpStore};
pub use job_key::JobKey;
pub use server::{LostRankPolicy, StoreServer};

use std::time::Duration;

/// Which rank of which job a client is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientIdentity {
    /// The job's key.
    pub key: JobKey,
    /// The client's rank.
    pub rank: usize,
    /// The number of ranks the client expects.
    pub world_size: usize,
}

/// The interval of heartbeats.
const HEARTBEAT: Duration = Duration::from_secs(2);
/// A peer on another host is taken for dead after this many missed heartbeats. They are counted
/// rather than timed, so that a machine that was suspended does not find all its peers dead.
const SILENT_HEARTBEATS: u32 = 30;
/// How long a handshake may take: short, since strangers can make the server wait.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the answer to a request that does not wait may take.
const REPLY_TIMEOUT: Duration = Duration::from_secs(20);
/// The failure message of a rank whose connection ended before it announced that it leaves.
const DIED: &str = "the process ended without a word (killed?)";

#[cfg(test)]
mod tests;
