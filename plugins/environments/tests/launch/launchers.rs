//! Two ranks find each other with each launcher's variables.

use crate::run::{DEVICES, Run};
use crate::started::{JOB_KEY, free_port, wait};

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("launchers::ranks_of_slurm_meet", ranks_of_slurm_meet),
    ("launchers::ranks_of_jsrun_meet", ranks_of_jsrun_meet),
    ("launchers::ranks_of_open_mpi_meet", ranks_of_open_mpi_meet),
    ("launchers::ranks_of_hydra_meet_by_who_started_them", ranks_of_hydra_meet_by_who_started_them),
    ("launchers::pods_meet", pods_meet),
    ("launchers::bound_ranks_do_not_share_cores", bound_ranks_do_not_share_cores),
];

/// Starts two ranks; `#` in `variables` stands for the rank. Checks that each sees a world of two
/// in `environment`, with `local_size` ranks a node.
fn meet(variables: &[(&str, &str)], environment: &str, local_size: usize) -> String {
    meet_in("identity", variables, environment, local_size)
}

/// Like [`meet`], with another part; returns the warnings of both.
fn meet_in(part: &str, variables: &[(&str, &str)], environment: &str, local_size: usize) -> String {
    let mut warnings = String::new();
    let start = |rank: usize| {
        let number = rank.to_string();
        let own: Vec<(&str, String)> =
            variables.iter().map(|(name, value)| (*name, value.replace('#', &number))).collect();
        let own = own.iter().map(|(name, value)| (*name, value.as_str()));
        Run::start(part, &own.collect::<Vec<_>>())
    };
    let one = start(1);
    for (rank, ended) in wait([start(0), one]).into_iter().enumerate() {
        assert_eq!((ended.code, ended.stderr.as_str()), (0, ""));
        let said: serde_json::Value = serde_json::from_str(&ended.stdout[0]).unwrap();
        assert_eq!(said["environment"], environment);
        assert_eq!((&said["rank"], &said["world_size"]), (&rank.into(), &2.into()));
        assert_eq!(said["local_world_size"], local_size);
        assert_eq!(said["node_rank"], rank / local_size);
        assert_eq!(said["restart_count"], 0);
        warnings.push_str(&ended.warnings);
    }
    warnings
}

const KEY: (&str, &str) = (JOB_KEY, "0123456789abcdef0123456789abcdef");
const ONE_NODE: (&str, &str) = (DEVICES, "2");

fn ranks_of_slurm_meet() {
    let port = free_port();
    let variables = [
        KEY,
        ONE_NODE,
        ("SLURM_NTASKS", "2"),
        ("SLURM_PROCID", "#"),
        ("SLURM_LOCALID", "#"),
        ("SLURM_NODEID", "0"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_STEP_NODELIST", "localhost"),
        ("SLURM_STEP_TASKS_PER_NODE", "2"),
        ("MASTER_PORT", &port),
    ];
    meet(&variables, "slurm", 2);
}

// checklist: Lightning: LSFEnvironment
fn ranks_of_jsrun_meet() {
    let hosts = std::env::temp_dir().join(format!("rank-file-{}", std::process::id()));
    std::fs::write(&hosts, "launch\nlocalhost\nlocalhost\n").unwrap();
    let port = free_port();
    let variables = [
        KEY,
        ONE_NODE,
        ("LSB_JOBID", "7"),
        ("LSB_DJOB_RANKFILE", hosts.to_str().unwrap()),
        ("JSM_NAMESPACE_SIZE", "2"),
        ("JSM_NAMESPACE_RANK", "#"),
        ("JSM_NAMESPACE_LOCAL_RANK", "#"),
        ("MASTER_PORT", &port),
    ];
    meet(&variables, "lsf", 2);
    std::fs::remove_file(hosts).unwrap();
}

// checklist: Lightning: MPIEnvironment
fn ranks_of_open_mpi_meet() {
    let port = free_port();
    let variables = [
        KEY,
        ONE_NODE,
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_RANK", "#"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "#"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ("OMPI_COMM_WORLD_NODE_RANK", "#"),
        ("OMPI_MCA_ess_base_jobid", "2035154945"),
        ("MASTER_PORT", &port),
    ];
    meet(&variables, "mpi", 2);
}

// checklist: Lightning: MPIEnvironment
/// Address, port and job id are derived from the process that started both ranks: this one.
fn ranks_of_hydra_meet_by_who_started_them() {
    meet(&HYDRA, "mpi", 2);
}

const HYDRA: [(&str, &str); 6] = [
    KEY,
    ONE_NODE,
    ("PMI_SIZE", "2"),
    ("PMI_RANK", "#"),
    ("MPI_LOCALRANKID", "#"),
    ("MPI_LOCALNRANKS", "2"),
];

/// Each rank may use one core; the process that started them may use more.
fn bound_ranks_do_not_share_cores() {
    let cores = std::thread::available_parallelism().unwrap().get();
    let warnings =
        meet_in("crowded", &[&HYDRA[..], &[("MASTER_PORT", &free_port())]].concat(), "mpi", 2);
    assert_eq!(warnings.contains("wait for each other"), cores == 1, "{warnings}");
}

// checklist: Lightning: KubeflowEnvironment, never detected
fn pods_meet() {
    let port = free_port();
    let variables = [
        KEY,
        ("PET_NNODES", "2"),
        ("PET_NPROC_PER_NODE", "1"),
        ("PET_NODE_RANK", "#"),
        ("PET_MASTER_ADDR", "127.0.0.1"),
        ("PET_MASTER_PORT", &port),
    ];
    meet(&variables, "kubernetes", 1);
}
