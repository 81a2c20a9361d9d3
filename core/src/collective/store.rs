//! Rendezvous: the store over which ranks find each other, and how a transport is configured.

use std::sync::Arc;
use std::time::Duration;

use super::ProcessGroup;
use crate::Result;

/// A small key-value store that all ranks of a job share (as PyTorch's `TCPStore`): rendezvous,
/// health and control messages go over it; no data does.
pub trait Store: Send + Sync {
    /// Sets `key`, replacing what was there.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// The value of `key`, waiting until some rank sets it.
    ///
    /// # Errors
    /// After `timeout`, naming the key; or as soon as a rank of the job is known to have failed.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>>;

    /// Adds `amount` to the integer at `key` (absent: 0) and returns the new value.
    fn add(&self, key: &str, amount: i64) -> Result<i64>;

    /// Tells all ranks of the job that this one failed, and why. The first report is the job's.
    fn report_failure(&self, message: &str) -> Result<()>;

    /// The job's first failure, if one is known: the rank and its message. Does not block.
    fn failure(&self) -> Option<(usize, String)>;
}

/// What a transport needs to build its world group.
#[derive(Clone)]
pub struct GroupContext {
    /// This process's global rank.
    pub rank: usize,
    /// Number of processes of the job.
    pub world_size: usize,
    /// This process's place on its host.
    pub local_rank: usize,
    /// Number of the job's processes on this host.
    pub local_world_size: usize,
    /// The job's store.
    pub store: Arc<dyn Store>,
    /// How long a collective may wait for its peers.
    pub timeout: Duration,
}

/// A transport's configuration: `trainer.process_group.type = "shm"`.
///
/// Registered with `#[typetag::serde(name = "…")]` and
/// [`register_process_group!`](crate::register_process_group).
#[typetag::serde(tag = "type")]
pub trait ProcessGroupConfig: std::fmt::Debug + Send + Sync {
    /// Builds the group of all ranks. Collective: every rank of the job calls it once.
    ///
    /// # Errors
    /// If the transport cannot connect these ranks (shared memory across hosts, no such library),
    /// saying which transport can.
    fn build(&self, context: &GroupContext) -> Result<Arc<dyn ProcessGroup>>;
}

crate::plugin_kind!(
    dyn ProcessGroupConfig,
    crate::registry::kind::PROCESS_GROUP,
    "trainer.process_group"
);
