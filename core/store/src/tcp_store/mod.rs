//! The store of a multi-process job: a server in one process, a client in each.
//!
//! Beside the connections for its requests every client has a *health connection*. It carries
//! heartbeats and the job's first failure. If it ends before the client has announced that it
//! leaves, the rank was killed. Between hosts a connection may break without an end, so there a
//! minute without a heartbeat means the same. Within a host missing heartbeats are ignored: the
//! kernel closes the connections of a dead process, and a process that a debugger has stopped is
//! not dead.
//!
//! A client must prove to know the [`JobKey`], and the server proves it too (`handshake`). The
//! resources that strangers can take are bounded (`connections`), and so are the store's values.

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

/// The identity of a client: its job and rank.
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
/// A peer on another host counts as dead after this many missed heartbeats. They are counted rather
/// than timed, so that a machine that was suspended does not find all its peers dead.
const SILENT_HEARTBEATS: u32 = 30;
/// Time limit of a handshake: short, since strangers can make the server wait.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit of the answer to a request that does not wait.
const REPLY_TIMEOUT: Duration = Duration::from_secs(20);
/// The failure message of a rank whose connection ended before the rank announced that it leaves.
const DIED: &str = "the process ended without a word (killed?)";

#[cfg(test)]
mod tests;
