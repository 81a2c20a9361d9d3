//! Cluster environments of the launchers that Fulgurite supports, in the order of detection:
//!
//! | `type` | variables | ranks started by |
//! |---|---|---|
//! | `kubernetes` | PyTorchJob, TrainJob, JobSet: `RANK`, … | a controller, one rank a pod |
//! | `torchelastic` | `torchrun`: `RANK`, `LOCAL_RANK`, … | `torchrun`, or similar scripts |
//! | `slurm` | Slurm: `SLURM_NTASKS`, `SLURM_PROCID`, … | `srun` |
//! | `lsf` | LSF: `JSM_NAMESPACE_RANK`, `LSB_JOBID`, … | `jsrun` |
//! | `mpi` | Open MPI, MPICH, …: `OMPI_COMM_WORLD_RANK`, `PMI_RANK`, … | `mpirun`, `mpiexec` |
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

mod kubernetes;
mod local;
mod lsf;
mod main_address;
mod mpi;
mod node_list;
mod process;
mod slurm;
mod starter;
mod torchelastic;

pub use kubernetes::Kubernetes;
pub use local::Local;
pub use lsf::Lsf;
pub use mpi::Mpi;
pub use slurm::{RequeueSignal, Slurm};
pub use torchelastic::TorchElastic;

#[cfg(test)]
mod tests {
    use fulgurite_launch::environment::{Variables, by_name, detect};
    use fulgurite_test_message::assert_says;

    #[test]
    fn the_more_specific_environment_is_asked_first() {
        let found = |variables: &[(&str, &str)]| {
            let variables: Variables = variables.iter().copied().collect();
            let config = detect(&variables).unwrap().unwrap();
            serde_json::to_value(config).unwrap()["type"].as_str().unwrap().to_owned()
        };
        let (torch, slurm) = (("RANK", "0"), ("SLURM_NTASKS", "1"));
        assert_eq!(found(&[torch, slurm]), "torchelastic");
        let (lsf, mpi) = (("JSM_NAMESPACE_RANK", "0"), ("OMPI_COMM_WORLD_RANK", "0"));
        assert_eq!(found(&[slurm, ("MASTER_ADDR", "node0")]), "slurm");
        assert_eq!(found(&[torch, slurm, lsf, mpi]), "torchelastic");
        assert_eq!(found(&[slurm, lsf]), "slurm");
        // jsrun also sets Open MPI's variables.
        assert_eq!(found(&[lsf, mpi]), "lsf");
        assert_eq!(found(&[mpi, ("WORLD_SIZE", "2")]), "mpi");
        // mpirun in an allocation.
        assert_eq!(found(&[slurm, mpi]), "mpi");
        assert_eq!(found(&[]), "local");
    }

    #[test]
    fn environments_are_known_by_name() {
        assert_eq!(by_name("slurm").unwrap().priority(), 80);
        for name in ["kubernetes", "local", "lsf", "mpi", "slurm", "torchelastic"] {
            by_name(name).unwrap();
        }
        assert_says!(by_name("slrum").unwrap_err(), "unknown environment `slrum` … mean `slurm` …");
    }
}
