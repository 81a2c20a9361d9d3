//! Configuration of transports, and the context in which they connect the ranks.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use fulgurite_store::Store;

use super::ProcessGroup;
use crate::{Error, Result};

/// Context in which a transport builds its world group.
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
    /// The address at which other hosts reach this one. `None` if unknown, or if there are no other
    /// hosts.
    pub address: Option<IpAddr>,
    /// The job's store.
    pub store: Arc<dyn Store>,
    /// Time limit of a collective's wait for its peers.
    pub timeout: Duration,
}

/// Memory that the ranks of a host share for one process group, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GroupMemory {
    /// Used by all ranks together.
    pub used: u64,
    /// Mapped by each rank. Counts against the limit on a process's address space.
    pub mapped: u64,
}

/// A transport's configuration: `trainer.process_group.type = "shm"`.
///
/// Registered with `#[typetag::serde(name = "…")]` and
/// [`register_process_group!`](fulgurite_config::register_process_group).
#[typetag::serde(tag = "type")]
pub trait ProcessGroupConfig: std::fmt::Debug + Send + Sync {
    /// Checks the options before any process is started.
    ///
    /// # Errors
    /// If an option is out of range. The default checks nothing and leaves errors to
    /// [`build`](Self::build).
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Memory that `ranks` ranks of one host share for a group. Before any rank is started, it is
    /// compared with the host's memory, group by group. By default zero.
    fn memory(&self, ranks: usize) -> GroupMemory {
        let _ = ranks;
        GroupMemory::default()
    }

    /// Builds the group of all ranks. Collective: every rank of the job calls it once.
    ///
    /// # Errors
    /// If the transport cannot connect these ranks, for example shared memory across hosts or a
    /// missing library. The message names a transport that can.
    fn build(&self, context: &GroupContext) -> Result<Arc<dyn ProcessGroup>>;

    /// Whether a process group for the ranks' devices, if they have any, may be built over this
    /// one. True for a transport that chooses one for them, such as `"auto"`. By default false.
    fn leaves_devices_open(&self) -> bool {
        false
    }

    /// The kind of devices, as in `trainer.accelerator`, between which it carries tensors in
    /// programs built for them. By default `None`.
    fn device_kind(&self) -> Option<&'static str> {
        None
    }

    /// Whether this process can use the transport. Checks things found at run time, such as
    /// libraries. By default it can.
    ///
    /// # Errors
    /// If it cannot, with the reason.
    fn available(&self) -> Result<()> {
        Ok(())
    }

    /// Builds the device group of a transport with a [`device_kind`](Self::device_kind) over a host
    /// group of all ranks, with default options. Collective.
    ///
    /// # Errors
    /// As [`build`](Self::build). The default is an error.
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
