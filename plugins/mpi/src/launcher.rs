//! Detects whether an MPI launcher started this process.

/// Variables that MPI launchers set for each process, and the launchers.
const VARIABLES: [(&str, &str); 6] = [
    ("OMPI_COMM_WORLD_RANK", "Open MPI's mpirun"),
    ("PMIX_RANK", "a PMIx launcher, such as srun --mpi=pmix or Open MPI's mpirun"),
    ("PMI_RANK", "a PMI launcher, such as MPICH's mpirun or srun --mpi=pmi2"),
    ("PMI_FD", "a PMI launcher, such as MPICH's mpirun or srun --mpi=pmi2"),
    ("PALS_RANKID", "Cray's mpiexec"),
    ("MV2_COMM_WORLD_RANK", "MVAPICH's mpirun"),
];

/// Returns the first variable that `is_set`, and its launcher.
pub(crate) fn find(is_set: impl Fn(&str) -> bool) -> Option<(&'static str, &'static str)> {
    VARIABLES.into_iter().find(|(variable, _)| is_set(variable))
}

/// Like [`find`], with the environment of this process.
pub(crate) fn current() -> Option<(&'static str, &'static str)> {
    find(|variable| std::env::var_os(variable).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launcher_is_found_by_its_variables() {
        let found = |set: &[&str]| find(|variable| set.contains(&variable)).map(|(_, who)| who);
        assert_eq!(found(&["PMIX_RANK", "OMPI_COMM_WORLD_RANK"]), Some("Open MPI's mpirun"));
        assert_eq!(found(&["PALS_RANKID"]), Some("Cray's mpiexec"));
        assert_eq!(found(&["RANK", "WORLD_SIZE", "SLURM_PROCID"]), None);
    }
}
