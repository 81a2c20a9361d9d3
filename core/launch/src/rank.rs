//! A launched rank: [`LaunchedRank`] for the program, `Membership` for the process.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::attempt::restart_count;
use super::link::Link;
use super::process::PROCESS;
use crate::{Error, Result};
use fulgurite_store::Store;
use fulgurite_store::{StoreServer, TcpStore};

/// A rank's numbers in its job and on its node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct RankInfo {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) local_rank: usize,
    pub(super) local_world_size: usize,
    pub(super) node_rank: usize,
}

impl RankInfo {
    /// A job of one process.
    pub(super) const ALONE: Self =
        Self { rank: 0, world_size: 1, local_rank: 0, local_world_size: 1, node_rank: 0 };

    /// Checks that the numbers are consistent. `rank` and `size` name rank and world size in
    /// messages.
    pub(super) fn check(&self, rank: &str, size: &str) -> Result<()> {
        let Self { local_rank, local_world_size, .. } = self;
        if self.rank >= self.world_size {
            return Err(Error::Launch(format!(
                "{rank} = {} is not below {size} = {}",
                self.rank, self.world_size
            )));
        }
        if local_rank >= local_world_size || *local_world_size > self.world_size {
            return Err(Error::Launch(format!(
                "local rank {local_rank} of {local_world_size} processes on this node does not \
                 fit {size} = {}",
                self.world_size
            )));
        }
        Ok(())
    }
}

/// A launched rank, returned by [`launch`](super::launch()). Hold it as long as the rank takes part
/// in the job: dropping the last clone announces that the rank leaves, so that its end is not a
/// failure.
#[derive(Clone)]
#[non_exhaustive]
pub struct LaunchedRank {
    /// This process's rank in the job.
    pub rank: usize,
    /// Number of processes of the job.
    pub world_size: usize,
    /// This process's rank on its node.
    pub local_rank: usize,
    /// Number of the job's processes on this node.
    pub local_world_size: usize,
    /// This node's rank among the job's nodes.
    pub node_rank: usize,
    /// The address at which ranks of other hosts reach this rank: the address of the interface
    /// through which this host reaches rank 0's. `None` if all ranks are on one host.
    pub address: Option<IpAddr>,
    /// The job's store.
    pub store: Arc<dyn Store>,
    /// When the job's program was started, in seconds since 1970: by the supervisor's clock if
    /// there is one, else by this process's.
    pub program_start: f64,
    /// The environment that provided the numbers: `local`, or the name of a plugin.
    pub environment: &'static str,
    /// Number of restarts by the job's launcher or scheduler; see
    /// [`restart_count`](crate::environment::ClusterEnvironment::restart_count).
    pub restart_count: u64,
    /// The job's generation: 0 until it loses a rank; see [`Elastic`](super::Elastic).
    pub generation: u64,
    /// Held for its `Drop`. `None` in a job of one process.
    _presence: Option<Arc<Presence>>,
}

impl LaunchedRank {
    pub(super) fn new(
        info: RankInfo,
        address: Option<IpAddr>,
        store: Arc<dyn Store>,
        program_start: f64,
        environment: &'static str,
        generation: u64,
        presence: Option<Arc<Presence>>,
    ) -> Self {
        let RankInfo { rank, world_size, local_rank, local_world_size, node_rank } = info;
        Self {
            rank,
            world_size,
            local_rank,
            local_world_size,
            node_rank,
            address,
            store,
            program_start,
            environment,
            restart_count: restart_count(),
            generation,
            _presence: presence,
        }
    }
}

impl std::fmt::Debug for LaunchedRank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LaunchedRank")
            .field("rank", &self.rank)
            .field("world_size", &self.world_size)
            .field("local_rank", &self.local_rank)
            .field("local_world_size", &self.local_world_size)
            .field("node_rank", &self.node_rank)
            .field("environment", &self.environment)
            .field("restart_count", &self.restart_count)
            .field("generation", &self.generation)
            .finish_non_exhaustive()
    }
}

/// A token for taking part in the job: dropping the last one announces that this rank leaves. A
/// program may launch again after that.
pub(super) struct Presence(&'static Membership);

impl Drop for Presence {
    fn drop(&mut self) {
        // A panic is not an announced end; the panic hook reports it.
        if !std::thread::panicking() {
            self.0.set_left(true);
        }
    }
}

/// This process's part in a job of several ranks. Lives as long as the process, because the end of
/// the process is reported too.
pub(super) struct Membership {
    pub(super) info: RankInfo,
    /// The job's generation; see [`Elastic`](super::Elastic).
    pub(super) generation: u64,
    /// Number of ranks of the first generation.
    pub(super) first_world_size: usize,
    /// Like [`LaunchedRank::address`].
    pub(super) address: Option<IpAddr>,
    pub(super) client: Arc<TcpStore>,
    /// The store's server, if this process hosts it.
    pub(super) server: Option<StoreServer>,
    /// Who started this rank.
    pub(super) link: Link,
    pub(super) environment: &'static str,
    pub(super) started: f64,
    pub(super) presence: Mutex<Weak<Presence>>,
}

/// This process's part in a job of several ranks, once launched.
pub(super) fn membership() -> Option<&'static Membership> {
    *PROCESS.membership.read().unwrap_or_else(PoisonError::into_inner)
}

impl Membership {
    /// Makes this the process's membership; called once in each generation.
    pub(super) fn enter(self) -> &'static Self {
        let membership = &*Box::leak(Box::new(self));
        if let Some(agent) = &membership.link.agent {
            agent.pass_failures_to(&membership.client);
        }
        *PROCESS.membership.write().unwrap_or_else(PoisonError::into_inner) = Some(membership);
        membership
    }

    /// A [`LaunchedRank`] for the program.
    pub(super) fn launched(&'static self) -> LaunchedRank {
        let mut presence = self.presence.lock().unwrap_or_else(PoisonError::into_inner);
        let present = presence.upgrade().unwrap_or_else(|| {
            self.set_left(false);
            let new = Arc::new(Presence(self));
            *presence = Arc::downgrade(&new);
            new
        });
        let store = self.client.clone();
        LaunchedRank::new(
            self.info,
            self.address,
            store,
            self.started,
            self.environment,
            self.generation,
            Some(present),
        )
    }

    /// Announces that this rank leaves, so that its end is not a failure; `false` withdraws that.
    pub(super) fn set_left(&self, left: bool) {
        self.client.set_left(left);
        if let Some(agent) = &self.link.agent {
            agent.client().set_left(left);
        }
        if let Some(server) = &self.server {
            server.set_left(left);
        }
    }

    /// The job's failure, if another rank failed.
    pub(super) fn peer_failure(&self) -> Option<(usize, String)> {
        self.client.failure().filter(|(rank, _)| *rank != self.info.rank)
    }
}
