//! How a transport is configured, and what it needs to connect the ranks.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use fulgurite_store::Store;

use super::ProcessGroup;
use crate::{Error, Result};

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

    /// Whether a process group for the ranks' devices may be built over this one, if they have devices: one that
    /// chooses a way for them, as `"auto"` does, says so. By default no.
    fn leaves_devices_open(&self) -> bool {
        false
    }

    /// The kind of devices, as `trainer.accelerator` names it, between which it carries tensors, in programs that are
    /// built for them. By default none.
    fn device_kind(&self) -> Option<&'static str> {
        None
    }

    /// Whether this process can use it: for what is looked for at run time, such as libraries. By default it can.
    ///
    /// # Errors
    /// If not, with the reason.
    fn available(&self) -> Result<()> {
        Ok(())
    }

    /// Builds it over a group of the host that all ranks have, of one with a [`device_kind`](Self::device_kind), by the
    /// options of its name alone. Collective.
    ///
    /// # Errors
    /// As [`build`](Self::build). By default it cannot be built so.
    fn over(
        &self,
        host: Arc<dyn ProcessGroup>,
        context: &GroupContext,
    ) -> Result<Arc<dyn ProcessGroup>> {
        let _ = (host, context);
        Err(Error::Config(format!(
            "trainer.process_group = \"{}\" cannot be built over another process group",
            self.typetag_name()
        )))
    }
}

fulgurite_config::plugin_kind!(
    dyn ProcessGroupConfig,
    fulgurite_config::registry::kind::PROCESS_GROUP,
    "trainer.process_group"
);
