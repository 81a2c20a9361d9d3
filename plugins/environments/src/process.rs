//! A rank that a launcher has started.

use fulgurite_core::environment::ClusterEnvironment;
use fulgurite_core::{Error, Result};

/// A rank that a launcher has started; read by `torchelastic` and `slurm`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Process {
    pub(crate) name: &'static str,
    pub(crate) world_size: usize,
    pub(crate) global_rank: usize,
    pub(crate) local_rank: usize,
    pub(crate) local_world_size: usize,
    pub(crate) node_rank: usize,
    pub(crate) main_address: String,
    pub(crate) main_port: u16,
    pub(crate) job_id: String,
    /// The variable with the world size, for messages.
    pub(crate) size_variable: &'static str,
}

impl Process {
    /// Checks that the numbers are consistent. The arguments are the names of their variables.
    pub(crate) fn check(self, rank: &str, local_rank: &str, local_size: &str) -> Result<Self> {
        let below = |name: &str, value: usize, of: &str, size: usize| {
            if value < size {
                return Ok(());
            }
            Err(Error::Launch(format!("{name} = {value} must be below {of} = {size}")))
        };
        let size = self.size_variable;
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

    fn validate_settings(&self, devices: usize, num_nodes: usize) -> Result<()> {
        let asked = devices.saturating_mul(num_nodes);
        let Self { name, world_size, local_world_size, size_variable, .. } = self;
        if asked != *world_size {
            return Err(Error::Launch(format!(
                "trainer.devices = {devices} and trainer.num_nodes = {num_nodes} make {asked} \
                 ranks, but {size_variable} = {world_size} were started (environment `{name}`). \
                 Set trainer.devices = {local_world_size} and trainer.num_nodes = {}, or start \
                 {asked} processes",
                world_size / local_world_size
            )));
        }
        Ok(())
    }
}
