//! The store's address, port and job id for an MPI job. MPI launchers do not report rank 0's host,
//! and each has its own way to identify jobs.

use fulgurite_error::{Error, Result};
use fulgurite_launch::environment::Variables;

use super::launchers::Launcher;
use crate::main_address::{master_port, port_of};

/// Variables that are equal on all ranks of a job and differ between jobs.
const JOB_IDS: [&str; 7] = [
    "OMPI_MCA_ess_base_jobid", // Open MPI 4
    "PMIX_NAMESPACE",          // Open MPI 5, and everything with PMIx
    "I_MPI_HYDRA_UUID",        // Intel MPI
    "PALS_APID",               // HPE's PALS
    "PMI_JOBID",               // Slurm, HPE
    "PMI_ID",
    "MPIRUN_ID", // MVAPICH
];

/// Rank 0's address, the store's port there, and the job's id.
#[derive(Debug, PartialEq)]
pub(super) struct MeetingPoint {
    pub(super) address: String,
    pub(super) port: u16,
    pub(super) job_id: String,
}

/// Finds the process that started the ranks of this host, given the name of the rank's variable,
/// which that process lacks.
pub(super) type FindStarter = dyn Fn(&str) -> Option<u32>;

impl MeetingPoint {
    pub(super) fn find(
        variables: &Variables,
        launcher: &Launcher,
        rank: usize,
        is_one_host: bool,
        starter: &FindStarter,
    ) -> Result<Self> {
        let address = match variables.get("MASTER_ADDR") {
            Some(address) => address.to_owned(),
            None if is_one_host => "127.0.0.1".to_owned(),
            None => launcher_host(variables, launcher, rank)?,
        };
        let known = JOB_IDS.into_iter().find_map(|name| variables.get(name));
        let job_id = match known {
            Some(id) => Some(format!("mpi-{id}")),
            None if is_one_host => {
                starter(launcher.names.rank).map(|process| format!("mpi-process-{process}"))
            }
            None => None,
        };
        let port = match (master_port(variables)?, &job_id) {
            (Some(port), _) => port,
            (None, Some(job_id)) => port_of(job_id),
            (None, None) => {
                return Err(Error::Launch(format!(
                    "the variables of this launcher ({}) do not tell jobs apart, so the port at which ranks \
                     meet must be given: {}",
                    launcher.name,
                    pass(launcher, "MASTER_PORT", "29500")
                )));
            }
        };
        Ok(Self { address, port, job_id: job_id.unwrap_or_else(|| "mpi".to_owned()) })
    }
}

/// Returns the option that passes a variable to all ranks.
fn pass(launcher: &Launcher, name: &str, value: &str) -> String {
    match launcher.name {
        "Open MPI" => format!("`mpirun -x {name}={value}`"),
        "MVAPICH" => format!("`mpirun_rsh … {name}={value} PROGRAM`"),
        _ => format!("`mpiexec -genv {name} {value}`"),
    }
}

/// Returns the host of `mpirun`, from Open MPI's variables, if rank 0 runs there too.
fn launcher_host(variables: &Variables, launcher: &Launcher, rank: usize) -> Result<String> {
    let advice = pass(launcher, "MASTER_ADDR", "HOST");
    // Open MPI 4: contact addresses of mpirun and of this host's daemon; equal on mpirun's host.
    let orte = variables.get("OMPI_MCA_orte_hnp_uri").and_then(|uri| {
        let is_here = variables.get("OMPI_MCA_orte_local_daemon_uri") == Some(uri);
        Some((first_address(uri)?, is_here))
    });
    // Open MPI 5: `prterun-HOST-PROCESS@JOB`.
    let prrte = || {
        let name = variables.get("PMIX_NAMESPACE")?.strip_prefix("prterun-")?;
        let host = name.rsplit_once('-')?.0;
        Some((host.to_owned(), variables.get("PMIX_HOSTNAME") == Some(host)))
    };
    match orte.or_else(prrte) {
        Some((host, is_here)) if rank > 0 || is_here => Ok(host),
        Some((host, _)) => Err(Error::Launch(format!(
            "rank 0 does not run on mpirun's host ({host}), which is the only one that ranks are told of. Name \
             rank 0's host, HOST: {advice}"
        ))),
        None => Err(Error::Launch(format!(
            "MASTER_ADDR is not set, and the variables of this launcher ({}) do not say where rank 0 of a job on \
             several hosts is. Name its host, HOST: {advice}",
            launcher.name
        ))),
    }
}

/// Returns the first address of
/// `2035154944.0;tcp://192.0.2.2,198.51.100.2:39835;tcp6://[fd00::2]:49785`.
fn first_address(uri: &str) -> Option<String> {
    let address = uri.split(';').find_map(|part| part.strip_prefix("tcp://"))?;
    let first = address.split([',', ':']).next()?;
    (!first.is_empty()).then(|| first.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_mpirun() {
        let first = |uri| first_address(uri).unwrap_or_default();
        assert_eq!(first("2035154944.0;tcp://192.0.2.2:39835;tcp6://[fd00::2]:49785"), "192.0.2.2");
        assert_eq!(first("1.0;tcp6://[fd00::2]:1;tcp://192.0.2.2,198.51.100.2:39835"), "192.0.2.2");
        assert_eq!(first("1.0;tcp6://[fd00::2]:49785"), "");
        assert_eq!(first("1.0;tcp://:39835"), "");
    }
}
