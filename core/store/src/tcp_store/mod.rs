//! The store of a job of several processes: a server in one of them, a client in each.
//!
//! Every client holds a *health connection* beside those for its requests. It carries nothing but
//! signs of life, and the job's first failure as soon as there is one; its end without a word is
//! how a rank that was killed is noticed. Between hosts, where a connection may die without ending,
//! silence for a minute means the same. On one host it does not: there the kernel closes
//! the connections of a dead process, and a process that a debugger has stopped is not dead.

mod client;
mod protocol;
mod server;

pub use client::TcpStore;
pub use server::{LostRank, StoreServer};

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Which rank of which job a client is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// What tells this job from others.
    pub job_id: String,
    /// The client's rank.
    pub rank: usize,
    /// The number of ranks the client expects.
    pub world_size: usize,
}

/// How often a sign of life is sent.
const HEARTBEAT: Duration = Duration::from_secs(2);
/// After so many heartbeats without a sign of life, a peer on another host is taken for dead. Counted
/// and not timed, so that a machine that was suspended does not find all its peers dead.
const SILENT_HEARTBEATS: u32 = 30;
/// How long a greeting or an immediate answer may take.
const ANSWER: Duration = Duration::from_secs(20);
/// The failure of a rank whose connection ended without a goodbye.
const WITHOUT_A_WORD: &str = "the process ended without a word (killed?)";

#[cfg(test)]
mod tests;
