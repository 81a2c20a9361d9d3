//! How a transport is configured, and what it needs to connect the ranks.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use fulgurite_store::Store;

use super::ProcessGroup;
use crate::Result;

/// What a transport needs to build its world group.
#[derive(Clone)]
pub struct GroupContext {
    /// This process's global rank.
    pub rank: usize,
    /// Number of processes of the job.
    pub world_size: usize,
    /// This process's rank among those of its host.
    pub local_rank: usize,
    /// Number of the job's processes on this host.
    pub local_world_size: usize,
    /// This host's number among the job's hosts.
    pub node_rank: usize,
    /// The address at which the ranks of other hosts reach this one; `None` if it is not known, or there are
    /// no others.
    pub address: Option<IpAddr>,
    /// The job's store.
    pub store: Arc<dyn Store>,
    /// How long a collective may wait for its peers.
    pub timeout: Duration,
}

/// Memory that the ranks of a host share for one process group, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GroupMemory {
    /// What all of them together come to use.
    pub used: u64,
    /// What each of them maps: it counts against the limit on a process's address space.
    pub mapped: u64,
}

/// A transport's configuration: `trainer.process_group.type = "shm"`.
///
/// Registered with `#[typetag::serde(name = "…")]` and
/// [`register_process_group!`](fulgurite_config::register_process_group).
#[typetag::serde(tag = "type")]
pub trait ProcessGroupConfig: std::fmt::Debug + Send + Sync {
    /// Checks the options, before any process is started.
    ///
    /// # Errors
    /// If one is out of range. By default none: [`build`](Self::build) finds it.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// The memory that the ranks of one host share for a group, `ranks` of them in it: what is compared,
    /// group by group, with the host's memory before any rank is started. By default none.
    fn memory(&self, ranks: usize) -> GroupMemory {
        let _ = ranks;
        GroupMemory::default()
    }

    /// Builds the group of all ranks. Collective: every rank of the job calls it once.
    ///
    /// # Errors
    /// If the transport cannot connect these ranks (shared memory across hosts, no such library),
    /// saying which transport can.
    fn build(&self, context: &GroupContext) -> Result<Arc<dyn ProcessGroup>>;
}

fulgurite_config::plugin_kind!(
    dyn ProcessGroupConfig,
    fulgurite_config::registry::kind::PROCESS_GROUP,
    "trainer.process_group"
);
