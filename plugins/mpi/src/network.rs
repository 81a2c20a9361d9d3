//! [`MpiNetwork`]: connecting the members of a group.

use std::sync::Arc;
use std::time::Duration;

use fulgurite_core::Result;
use fulgurite_core::collective::GroupContext;
use fulgurite_core::launch::Store;
use fulgurite_transports::network::{Network, Wire};

use crate::Mpi;
use crate::meeting::Meeting;
use crate::process::MpiProcess;
use crate::wire::MpiWire;

/// MPI as a network, for [`connect_world`](fulgurite_transports::network::connect_world) and for
/// programs that exchange messages themselves.
pub struct MpiNetwork {
    process: Arc<MpiProcess>,
    store: Arc<dyn Store>,
}

impl MpiNetwork {
    /// Starts MPI, unless this process has already started it. Collective: every rank of the job
    /// calls it.
    ///
    /// # Errors
    /// If an option is out of range, MPI cannot be started, or its processes are not the ranks of
    /// the job. The last happens without an MPI launcher, or with a launcher of another family than
    /// the library's.
    pub fn new(config: &Mpi, context: &GroupContext) -> Result<Self> {
        fulgurite_core::collective::ProcessGroupConfig::check(config)?;
        let process = MpiProcess::of_job(context, config.piece_bytes)?;
        Ok(Self { process, store: context.store.clone() })
    }

    fn take_tag(&self) -> Result<usize, String> {
        let number = self.store.add("mpi/groups", 1).map_err(|e| e.to_string())?;
        let tag = usize::try_from(number).unwrap_or(usize::MAX);
        if tag > self.process.last_tag {
            return Err(format!(
                "this job has made more process groups than MPI has tags ({}). Build groups once, and \
                 use them again",
                self.process.last_tag
            ));
        }
        Ok(tag)
    }
}

impl Network for MpiNetwork {
    fn name(&self) -> &'static str {
        "mpi"
    }

    fn connect(
        self: Arc<Self>,
        key: &str,
        members: &[usize],
        own: usize,
        timeout: Duration,
        wanted: &dyn Fn() -> Result<()>,
    ) -> Result<Box<dyn Wire>> {
        let key = format!("{key}/mpi");
        let purpose = format!("to connect the process group `{key}`");
        let meeting = Meeting {
            store: &*self.store,
            key: &key,
            purpose: &purpose,
            members,
            own,
            timeout,
            wanted,
        };
        let tag = meeting.agree(&(), |_| self.take_tag())?;
        let peers = members.iter().map(|&rank| self.process.mpi_rank(rank)).collect();
        Ok(Box::new(MpiWire::new(self.process.clone(), peers, tag)))
    }

    fn place(&self, rank: usize) -> Option<String> {
        self.process.host(rank)
    }
}
