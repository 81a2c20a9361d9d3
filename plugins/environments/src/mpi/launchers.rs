//! The variables of MPI's launchers.

use fulgurite_error::{Error, Result};
use fulgurite_launch::environment::Variables;

use crate::process::Names;

/// The variables in which a launcher passes a process its ranks.
pub(super) struct Launcher {
    /// The launcher's name, for messages.
    pub(super) name: &'static str,
    pub(super) names: Names,
}

/// The launchers; a launcher that also sets another's variables comes before it.
const LAUNCHERS: [Launcher; 4] = [
    Launcher {
        name: "Open MPI",
        names: Names {
            size: "OMPI_COMM_WORLD_SIZE",
            rank: "OMPI_COMM_WORLD_RANK",
            local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
            local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
        },
    },
    Launcher {
        name: "MVAPICH",
        names: Names {
            size: "MV2_COMM_WORLD_SIZE",
            rank: "MV2_COMM_WORLD_RANK",
            local_rank: "MV2_COMM_WORLD_LOCAL_RANK",
            local_size: "MV2_COMM_WORLD_LOCAL_SIZE",
        },
    },
    Launcher {
        name: "Hydra",
        names: Names {
            size: "PMI_SIZE",
            rank: "PMI_RANK",
            local_rank: "MPI_LOCALRANKID",
            local_size: "MPI_LOCALNRANKS",
        },
    },
    Launcher {
        name: "PMI",
        names: Names {
            size: "PMI_SIZE",
            rank: "PMI_RANK",
            local_rank: "PMI_LOCAL_RANK",
            local_size: "PMI_LOCAL_SIZE",
        },
    },
];

/// Returns whether an MPI launcher started this process: with nested launchers, the innermost
/// counts.
///
/// `srun` also sets `PMI_RANK` or `PMIX_RANK` for MPI programs (`--mpi=pmi2`, `--mpi=pmix`), equal
/// to `SLURM_PROCID`. An `mpirun` in an allocation has `srun` start a daemon on each node; under
/// it, `SLURM_PROCID` is the daemon's.
pub(crate) fn has_started(variables: &Variables) -> bool {
    let never_of_srun = ["OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "MPI_LOCALRANKID"];
    if never_of_srun.into_iter().any(|name| variables.is_set(name)) {
        return true;
    }
    let srun = variables.get("SLURM_PROCID").filter(|_| variables.is_set("SLURM_STEP_ID"));
    let ranks = ["PMI_RANK", "PMIX_RANK"].into_iter().filter_map(|name| variables.get(name));
    ranks.into_iter().any(|rank| srun != Some(rank))
}

impl Launcher {
    /// Finds the launcher whose variables are set.
    pub(super) fn find(variables: &Variables) -> Result<&'static Self> {
        let has = |launcher: &&Self| {
            let Names { rank, size, local_rank, .. } = launcher.names;
            // Hydra and other PMI launchers differ in the local rank's variable.
            let is_pmi = rank == "PMI_RANK";
            match is_pmi {
                true => variables.is_set(rank) && variables.is_set(local_rank),
                false => variables.is_set(rank) || variables.is_set(size),
            }
        };
        if let Some(found) = LAUNCHERS.iter().find(has) {
            return Ok(found);
        }
        let set = |name| variables.get(name).map(|value| format!("{name} = {value}"));
        if let Some(rank) = set("PMI_RANK") {
            return Err(Error::Launch(format!(
                "{rank} is set, but not which of its host's ranks this is. `mpiexec.hydra` (MPICH, Intel MPI) \
                 says so in MPI_LOCALRANKID and MPI_LOCALNRANKS; under another launcher set PMI_LOCAL_RANK and \
                 PMI_LOCAL_SIZE for each rank"
            )));
        }
        if let Some(rank) = set("PMIX_RANK") {
            return Err(Error::Launch(format!(
                "{rank} is set, but not how many ranks there are, which PMIx tells to MPI programs alone. \
                 `mpirun` of Open MPI says so in OMPI_COMM_WORLD_SIZE, and so does `prterun --personality ompi`"
            )));
        }
        Err(Error::Launch(
            "no launcher of MPI has started this process: none of OMPI_COMM_WORLD_RANK, MV2_COMM_WORLD_RANK, \
             PMI_RANK and PMIX_RANK is set. Start the program with `mpirun` or `mpiexec`, or leave \
             trainer.environment out"
                .into(),
        ))
    }
}
