//! Cluster environments of the launchers that Fulgurite supports, in the order of detection:
//!
//! | `type` | variables of | who starts the ranks |
//! |---|---|---|
//! | `torchelastic` | `torchrun`: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, … | `torchrun`, or any script that sets them |
//! | `slurm` | Slurm: `SLURM_NTASKS`, `SLURM_PROCID`, … | `srun` |
//! | `local` | none | the program itself (`trainer.devices` of them) |
//!
//! ```
//! use fulgurite_core::environment::{Variables, detect};
//! use fulgurite_environments as _; // links the plugins
//!
//! let variables = Variables::from([
//!     ("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2"),
//!     ("MASTER_ADDR", "node0"), ("MASTER_PORT", "29500"),
//! ]);
//! let environment = detect(&variables)?.expect("`local` always answers").build(&variables)?;
//! assert_eq!(environment.name(), "torchelastic");
//! assert_eq!((environment.global_rank(), environment.node_rank()), (3, 1));
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

mod local;
mod node_list;
mod slurm;
mod torchelastic;

pub use local::Local;
pub use slurm::Slurm;
pub use torchelastic::TorchElastic;

use fulgurite_core::environment::ClusterEnvironment;
use fulgurite_core::{Error, Result};

/// A rank that a launcher has started; read by `torchelastic` and `slurm`.
#[derive(Debug, Clone, PartialEq)]
struct Process {
    name: &'static str,
    world_size: usize,
    global_rank: usize,
    local_rank: usize,
    local_world_size: usize,
    node_rank: usize,
    main_address: String,
    main_port: u16,
    job_id: String,
    /// The variable with the world size, for messages.
    size_variable: &'static str,
}

impl Process {
    /// Checks that the numbers are consistent. The arguments are the names of their variables.
    fn check(self, rank: &str, local_rank: &str, local_size: &str) -> Result<Self> {
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

#[cfg(test)]
mod tests {
    use fulgurite_core::environment::{Variables, by_name, detect};

    #[test]
    fn the_more_specific_environment_is_asked_first() {
        let found = |variables: &[(&str, &str)]| {
            let variables: Variables = variables.iter().copied().collect();
            let config = detect(&variables).unwrap().unwrap();
            serde_json::to_value(config).unwrap()["type"].as_str().unwrap().to_owned()
        };
        let (torch, slurm) = (("RANK", "0"), ("SLURM_NTASKS", "1"));
        assert_eq!(found(&[torch, slurm]), "torchelastic");
        assert_eq!(found(&[slurm, ("MASTER_ADDR", "node0")]), "slurm");
        assert_eq!(found(&[]), "local");
    }

    #[test]
    fn environments_are_known_by_name() {
        assert_eq!(by_name("slurm").unwrap().priority(), 80);
        insta::assert_snapshot!(by_name("slrum").unwrap_err(), @"unknown environment `slrum`; available: local, slurm, torchelastic. If a plugin crate provides `slrum`, link it with `use that_crate as _;` in the program");
    }
}
