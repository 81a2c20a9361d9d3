//! A rank started by a launcher.

use fulgurite_error::{Error, Result};
use fulgurite_launch::environment::{ClusterEnvironment, Requeue, Variables};

/// A rank started by a launcher; used by all environments but `local`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Process {
    pub(crate) name: &'static str,
    pub(crate) names: Names,
    pub(crate) world_size: usize,
    pub(crate) global_rank: usize,
    pub(crate) local_rank: usize,
    pub(crate) local_world_size: usize,
    pub(crate) node_rank: usize,
    pub(crate) main_address: String,
    pub(crate) main_port: u16,
    pub(crate) job_id: String,
    pub(crate) restart_count: u64,
    /// [`ClusterEnvironment::restart_id`], if it differs from the job's id.
    pub(crate) restart_id: Option<String>,
    pub(crate) requeue: Option<Requeue>,
}

/// The variables that provided the numbers, for messages.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Names {
    pub(crate) size: &'static str,
    pub(crate) rank: &'static str,
    pub(crate) local_rank: &'static str,
    pub(crate) local_size: &'static str,
}

impl Process {
    /// Checks that the numbers are consistent.
    pub(crate) fn check(self) -> Result<Self> {
        let below = |name: &str, value: usize, of: &str, size: usize| {
            if value < size {
                return Ok(());
            }
            Err(Error::Launch(format!("{name} = {value} must be below {of} = {size}")))
        };
        let Names { size, rank, local_rank, local_size } = self.names;
        if self.world_size == 0 || self.local_world_size == 0 {
            return Err(Error::Launch(format!("{size} and {local_size} must be 1 or more")));
        }
        if self.local_world_size > self.world_size {
            return Err(Error::Launch(format!(
                "{local_size} = {} must not be above {size} = {}",
                self.local_world_size, self.world_size
            )));
        }
        below(rank, self.global_rank, size, self.world_size)?;
        below(local_rank, self.local_rank, local_size, self.local_world_size)?;
        Ok(self)
    }

    /// Like [`check`](Self::check). Also checks that `torchrun`'s variables agree, if set: other
    /// libraries of the program read them, and scripts set them.
    pub(crate) fn check_with(self, variables: &Variables) -> Result<Self> {
        let process = self.check()?;
        let Names { size, rank, local_rank, local_size } = process.names;
        let numbers = [
            ("WORLD_SIZE", size, process.world_size),
            ("RANK", rank, process.global_rank),
            ("LOCAL_RANK", local_rank, process.local_rank),
            ("LOCAL_WORLD_SIZE", local_size, process.local_world_size),
        ];
        for (name, own_name, own) in numbers {
            let Some(other) = variables.parse::<usize>(name, "a number")? else { continue };
            if other != own && name != own_name {
                return Err(Error::Launch(format!(
                    "{name} = {other} contradicts {own_name} = {own} (environment `{}`). Unset {name}, \
                     which the script or an outer launcher has set, or let trainer.environment name the \
                     environment to go by (`torchelastic` reads {name})",
                    process.name
                )));
            }
        }
        Ok(process)
    }

    /// Computes the node's rank, which the launcher does not report. Assumes the same number of
    /// ranks on every node, node after node. `flag` tells in the error message how to start ranks
    /// like that.
    pub(crate) fn with_nodes_in_order(self, flag: &str) -> Result<Self> {
        let Self { global_rank: rank, local_rank, local_world_size: local_size, .. } = self;
        if rank % local_size == local_rank {
            return Ok(Self { node_rank: rank / local_size, ..self });
        }
        Err(Error::Launch(format!(
            "rank {rank} is local rank {local_rank} of {local_size}, so the ranks of a node do not follow \
             one another, or nodes have different numbers of them. Start as many ranks on every node, node \
             after node: {flag}"
        )))
    }
}

impl ClusterEnvironment for Process {
    fn name(&self) -> &'static str {
        self.name
    }

    fn creates_processes_externally(&self) -> bool {
        true
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn global_rank(&self) -> usize {
        self.global_rank
    }

    fn local_rank(&self) -> usize {
        self.local_rank
    }

    fn local_world_size(&self) -> usize {
        self.local_world_size
    }

    fn node_rank(&self) -> usize {
        self.node_rank
    }

    fn main_address(&self) -> String {
        self.main_address.clone()
    }

    fn main_port(&self) -> u16 {
        self.main_port
    }

    fn job_id(&self) -> String {
        self.job_id.clone()
    }

    fn restart_count(&self) -> u64 {
        self.restart_count
    }

    fn restart_id(&self) -> String {
        self.restart_id.clone().unwrap_or_else(|| self.job_id.clone())
    }

    fn requeue(&self) -> Option<Requeue> {
        self.requeue.clone()
    }

    fn validate_settings(&self, devices: usize, num_nodes: usize) -> Result<()> {
        let asked = devices.saturating_mul(num_nodes);
        let Self { name, world_size, local_world_size, names, .. } = self;
        if asked != *world_size {
            return Err(Error::Launch(format!(
                "trainer.devices = {devices} and trainer.num_nodes = {num_nodes} make {asked} \
                 ranks, but {} = {world_size} were started (environment `{name}`). \
                 Set trainer.devices = {local_world_size} and trainer.num_nodes = {}, or start \
                 {asked} processes",
                names.size,
                world_size / local_world_size
            )));
        }
        if devices != *local_world_size {
            return Err(Error::Launch(format!(
                "`trainer.devices` = {devices} and `trainer.num_nodes` = {num_nodes}, but \
                 {local_world_size} of the {world_size} were started on this node (environment `{name}`). \
                 Start {devices} on every node, or set both keys to what is started"
            )));
        }
        Ok(())
    }
}
