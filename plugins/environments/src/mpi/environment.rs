//! [`Mpi`].

use fulgurite_config::register_environment;
use fulgurite_error::Result;
use fulgurite_launch::environment::{ClusterEnvironment, EnvironmentConfig, Variables};
use serde::{Deserialize, Serialize};

use super::launchers::{Launcher, has_started};
use super::meeting_point::{FindStarter, MeetingPoint};
use crate::process::{Names, Process};
use crate::starter::starter;

/// `environment.type = "mpi"`: the ranks were started by `mpirun` or `mpiexec`.
///
/// The variables for rank, world size, local rank and local size, by launcher:
///
/// - Open MPI: `OMPI_COMM_WORLD_RANK`, `OMPI_COMM_WORLD_SIZE`, `OMPI_COMM_WORLD_LOCAL_RANK`,
///   `OMPI_COMM_WORLD_LOCAL_SIZE`. (`OMPI_COMM_WORLD_NODE_RANK` is not the node's rank, but the
///   process's rank among all jobs on its host.)
/// - Hydra (MPICH, Intel MPI): `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID`, `MPI_LOCALNRANKS`.
/// - Other launchers with PMI, such as HPE's: `PMI_RANK`, `PMI_SIZE`, `PMI_LOCAL_RANK`,
///   `PMI_LOCAL_SIZE`.
/// - MVAPICH: `MV2_COMM_WORLD_RANK`, `MV2_COMM_WORLD_SIZE`, `MV2_COMM_WORLD_LOCAL_RANK`,
///   `MV2_COMM_WORLD_LOCAL_SIZE`.
///
/// Rank 0's address does not come from the launcher:
///
/// - `MASTER_ADDR`: rank 0's host. Without it, 127.0.0.1 if all ranks are on one host. Else the
///   host of `mpirun`, if rank 0 is there and Open MPI names the host (`OMPI_MCA_orte_hnp_uri`,
///   `PMIX_NAMESPACE`); else an error.
/// - `MASTER_PORT`: a free port there. Without it, derived from the job's id
///   (`OMPI_MCA_ess_base_jobid`, `PMIX_NAMESPACE`, `I_MPI_HYDRA_UUID`, …) or, on a single host,
///   from the process that started the ranks.
///
/// Every host must have the same number of ranks, one host after the other. This is the default of
/// all these launchers.
///
/// Detected by a variable with the rank. Under Slurm, `srun` also sets `PMI_RANK` or `PMIX_RANK`;
/// they count only outside of a step or if they differ from `SLURM_PROCID`.
#[derive(Debug, Clone, Default, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields)]
pub struct Mpi {}

register_environment!(
    "mpi",
    Mpi,
    "Ranks started by mpirun or mpiexec (Open MPI, MPICH, Intel MPI)",
    r#"{ type = "mpi" }"#
);

#[typetag::serde(name = "mpi")]
impl EnvironmentConfig for Mpi {
    fn priority(&self) -> i32 {
        60
    }

    fn detect(&self, variables: &Variables) -> bool {
        has_started(variables)
    }

    fn build(&self, variables: &Variables) -> Result<Box<dyn ClusterEnvironment>> {
        read(variables, &starter).map(|process| Box::new(process) as Box<dyn ClusterEnvironment>)
    }
}

fn read(variables: &Variables, starter: &FindStarter) -> Result<Process> {
    let launcher = Launcher::find(variables)?;
    let Names { size, rank, local_rank, local_size } = launcher.names;
    let number = |name| variables.require::<usize>(name, "a number that the launcher sets");
    let (global_rank, world_size) = (number(rank)?, number(size)?);
    let (local_rank, local_world_size) = (number(local_rank)?, number(local_size)?);
    let flag = "`--map-by slot` (Open MPI), `-ppn N` (MPICH, Intel MPI)";
    let is_one_host = local_world_size == world_size;
    let MeetingPoint { address, port, job_id } =
        MeetingPoint::find(variables, launcher, global_rank, is_one_host, starter)?;
    Process {
        name: "mpi",
        names: launcher.names,
        world_size,
        global_rank,
        local_rank,
        local_world_size,
        node_rank: 0,
        main_address: address,
        main_port: port,
        job_id,
        restart_count: 0,
        restart_id: None,
        requeue: None,
    }
    .check_with(variables)?
    .with_nodes_in_order(flag)
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    /// The variables of Open MPI 4.1's `mpirun` that are read, on two hosts.
    const OPEN_MPI_4: [(&str, &str); 11] = [
        ("OMPI_COMM_WORLD_SIZE", "4"),
        ("OMPI_COMM_WORLD_RANK", "3"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ("OMPI_COMM_WORLD_NODE_RANK", "1"),
        ("OMPI_MCA_ess_base_jobid", "2035154945"),
        ("OMPI_MCA_orte_hnp_uri", "2035154944.0;tcp://192.0.2.2:39835"),
        ("OMPI_MCA_orte_local_daemon_uri", "2035154944.1;tcp://192.0.2.3:39836"),
        ("PMIX_RANK", "3"),
        ("PMIX_NAMESPACE", "2035154945"),
        ("PMIX_HOSTNAME", "node1"),
    ];

    /// The variables of Open MPI 5.0's `mpirun` that are read, on two hosts.
    const OPEN_MPI_5: [(&str, &str); 7] = [
        ("OMPI_COMM_WORLD_SIZE", "4"),
        ("OMPI_COMM_WORLD_RANK", "0"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ("PMIX_RANK", "0"),
        ("PMIX_NAMESPACE", "prterun-rack-1-node0-8168@1"),
        ("PMIX_HOSTNAME", "rack-1-node0"),
    ];

    /// The variables of MPICH 4.0's Hydra, on one host.
    const HYDRA: [(&str, &str); 5] = [
        ("PMI_RANK", "1"),
        ("PMI_SIZE", "2"),
        ("PMI_FD", "8"),
        ("MPI_LOCALRANKID", "1"),
        ("MPI_LOCALNRANKS", "2"),
    ];

    /// A variable set with changes; an empty value removes a variable.
    fn with<'a>(full: &[(&'a str, &'a str)], changes: &[(&'a str, &'a str)]) -> Variables {
        let kept = full.iter().filter(|(name, _)| changes.iter().all(|(other, _)| name != other));
        kept.chain(changes.iter().filter(|(_, value)| !value.is_empty())).copied().collect()
    }

    fn build(full: &[(&str, &str)], changes: &[(&str, &str)]) -> Process {
        read(&with(full, changes), &|_| Some(4711)).unwrap()
    }

    fn error(full: &[(&str, &str)], changes: &[(&str, &str)]) -> String {
        let variables = with(full, changes);
        assert!(Mpi {}.detect(&variables), "partly set variables are recognised");
        read(&variables, &|_| None).unwrap_err().to_string()
    }

    const RANK_0: [(&str, &str); 2] =
        [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_LOCAL_RANK", "0")];

    // checklist: Lightning: MPIEnvironment
    #[test]
    fn open_mpis_variables_are_read() {
        let rank = build(&OPEN_MPI_4, &[]);
        assert_eq!((rank.global_rank, rank.world_size), (3, 4));
        assert_eq!((rank.local_rank, rank.local_world_size, rank.node_rank), (1, 2, 1));
        assert_eq!((&*rank.main_address, &*rank.job_id), ("192.0.2.2", "mpi-2035154945"));
        // On mpirun's host both daemons are the same.
        let here = ("OMPI_MCA_orte_local_daemon_uri", "2035154944.0;tcp://192.0.2.2:39835");
        let zero = build(&OPEN_MPI_4, &[RANK_0[0], RANK_0[1], here]);
        assert_eq!((&*zero.main_address, zero.main_port), ("192.0.2.2", rank.main_port));

        let zero = build(&OPEN_MPI_5, &[]);
        assert_eq!((&*zero.main_address, zero.node_rank), ("rack-1-node0", 0));
        assert_eq!(zero.job_id, "mpi-prterun-rack-1-node0-8168@1");
        let one_host = build(&OPEN_MPI_5, &[("OMPI_COMM_WORLD_LOCAL_SIZE", "4")]);
        assert_eq!(one_host.main_address, "127.0.0.1");
    }

    // checklist: Lightning: MPIEnvironment
    #[test]
    fn hydras_variables_are_read() {
        let rank = build(&HYDRA, &[]);
        assert_eq!((rank.global_rank, rank.world_size), (1, 2));
        assert_eq!((rank.local_rank, rank.local_world_size, rank.node_rank), (1, 2, 0));
        assert_eq!((&*rank.main_address, &*rank.job_id), ("127.0.0.1", "mpi-process-4711"));
        let intel = build(&HYDRA, &[("I_MPI_HYDRA_UUID", "f91f0000-29d5")]);
        assert_eq!(intel.job_id, "mpi-f91f0000-29d5");
        assert_ne!(intel.main_port, rank.main_port);
        let given = [("MPI_LOCALNRANKS", "1"), ("MPI_LOCALRANKID", "0")];
        let given = [&given[..], &[("MASTER_ADDR", "node0"), ("MASTER_PORT", "29500")]].concat();
        let rank = build(&HYDRA, &given);
        assert_eq!((&*rank.main_address, rank.main_port, rank.node_rank), ("node0", 29500, 1));
    }

    #[test]
    fn reads_local_ranks_of_other_launchers() {
        let pmi = [("MPI_LOCALRANKID", ""), ("MPI_LOCALNRANKS", "")];
        let own = [("PMI_LOCAL_RANK", "1"), ("PMI_LOCAL_SIZE", "2"), ("PALS_APID", "6e5-1")];
        let rank = build(&HYDRA, &[&pmi[..], &own].concat());
        assert_eq!((rank.local_rank, rank.local_world_size), (1, 2));
        assert_eq!(rank.job_id, "mpi-6e5-1");
        let mvapich = [
            ("MV2_COMM_WORLD_RANK", "1"),
            ("MV2_COMM_WORLD_SIZE", "2"),
            ("MV2_COMM_WORLD_LOCAL_RANK", "1"),
            ("MV2_COMM_WORLD_LOCAL_SIZE", "2"),
            ("MPIRUN_ID", "77"),
        ];
        assert_eq!(build(&mvapich, &[]).job_id, "mpi-77");
    }

    #[test]
    fn ranks_of_srun_are_not_mpirun_ranks() {
        let started = |variables: &[(&str, &str)]| has_started(&with(variables, &[]));
        let step = |rank| [("SLURM_STEP_ID", "0"), ("SLURM_PROCID", rank)];
        // `srun --mpi=pmi2`, `--mpi=pmix`.
        for name in ["PMI_RANK", "PMIX_RANK"] {
            assert!(!started(&[&step("1")[..], &[(name, "1")]].concat()), "{name}");
            assert!(started(&[&step("0")[..], &[(name, "1")]].concat()), "{name}");
            // A batch script, outside of a step, has started mpirun.
            assert!(started(&[("SLURM_PROCID", "1"), (name, "1")]), "{name}");
        }
        // A daemon started by srun is rank 1 of the daemons.
        let daemon = [("OMPI_COMM_WORLD_RANK", "1"), ("PMIX_RANK", "1")];
        assert!(started(&[&step("1")[..], &daemon].concat()));
        assert!(started(&[&step("1")[..], &HYDRA].concat()));
        assert!(!started(&step("1")));
        assert!(!started(&[]));
    }

    #[test]
    fn mistakes_are_named() {
        assert_says!(
            error(&OPEN_MPI_4, &[("OMPI_COMM_WORLD_SIZE", "")]),
            "launch: … OMPI_COMM_WORLD_SIZE … is not set … unset them all …"
        );
        assert_says!(
            error(&OPEN_MPI_4, &[("OMPI_COMM_WORLD_LOCAL_RANK", "")]),
            "launch: … OMPI_COMM_WORLD_LOCAL_RANK … is not set … unset them all …"
        );
        assert_says!(
            error(&OPEN_MPI_4, &[("OMPI_COMM_WORLD_RANK", "x")]),
            "launch: … OMPI_COMM_WORLD_RANK is `x`, but should be a number …"
        );
        assert_says!(
            error(&OPEN_MPI_4, &[("OMPI_COMM_WORLD_RANK", "5")]),
            "launch: OMPI_COMM_WORLD_RANK = 5 … below OMPI_COMM_WORLD_SIZE = 4"
        );
        assert_says!(
            error(&OPEN_MPI_4, &[("OMPI_COMM_WORLD_RANK", "2")]),
            "launch: rank 2 is local rank 1 of 2 … not follow … `--map-by slot` … `-ppn N` …"
        );
        assert_says!(error(&OPEN_MPI_4, &RANK_0), "launch: rank 0 … not run on … (192.0.2.2) …");
        assert_says!(
            error(&OPEN_MPI_4, &[("OMPI_MCA_orte_hnp_uri", "")]),
            "launch: MASTER_ADDR is not set … (Open MPI) … `mpirun -x MASTER_ADDR=HOST`"
        );
        assert_says!(
            error(&OPEN_MPI_5, &[("PMIX_HOSTNAME", "other")]),
            "launch: rank 0 … not run on … (rack-1-node0) … `mpirun -x MASTER_ADDR=HOST`"
        );
        assert_says!(
            error(&OPEN_MPI_4, &[("WORLD_SIZE", "8")]),
            "launch: WORLD_SIZE = 8 contradicts OMPI_COMM_WORLD_SIZE = 4 (environment `mpi`) …"
        );
        assert_says!(error(&OPEN_MPI_4, &[("MASTER_PORT", "0")]), "launch: MASTER_PORT is `0` …");
        assert_says!(error(&HYDRA, &[]), "launch: … (Hydra) … `mpiexec -genv MASTER_PORT 29500`");
        let two_hosts = [("MPI_LOCALRANKID", "0"), ("MPI_LOCALNRANKS", "1")];
        assert_says!(error(&HYDRA, &two_hosts), "launch: MASTER_ADDR is not set … (Hydra) …");
        let address = [&two_hosts[..], &[("MASTER_ADDR", "node0")]].concat();
        assert_says!(error(&HYDRA, &address), "launch: … jobs … `mpiexec -genv MASTER_PORT 29500`");
        assert_says!(
            error(&[("PMI_RANK", "1"), ("PMI_SIZE", "2")], &[]),
            "launch: PMI_RANK = 1 is set, but not which … MPI_LOCALRANKID … PMI_LOCAL_RANK …"
        );
        assert_says!(
            error(&[("PMIX_RANK", "1"), ("PMIX_NAMESPACE", "a@1")], &[]),
            "launch: PMIX_RANK = 1 is set, but not how many ranks … OMPI_COMM_WORLD_SIZE …"
        );
        assert_says!(
            Mpi {}.build(&Variables::default()).unwrap_err(),
            "launch: no launcher of MPI … `mpirun` or `mpiexec` … trainer.environment …"
        );
    }

    #[test]
    fn settings_must_fit() {
        let two_by_two = build(&OPEN_MPI_4, &[]);
        two_by_two.validate_settings(2, 2).unwrap();
        assert_says!(
            two_by_two.validate_settings(8, 1).unwrap_err(),
            "launch: trainer.devices = 8 … 8 ranks, but OMPI_COMM_WORLD_SIZE = 4 … start 8 …"
        );
        assert_says!(
            two_by_two.validate_settings(1, 4).unwrap_err(),
            "launch: `trainer.devices` = 1 … = 4, but 2 of the 4 were started … Start 1 …"
        );
    }
}
