//! Training over MPI: ranks are started by `mpirun`, or by the command in FULGURITE_MPIRUN. Built
//! with the feature `mpi`; `.ci/mpi` runs the tests under both MPI families.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use crate::hosts::wide;
use crate::program::{Job, Scratch, assert_close};
use crate::two_hosts::Hosts;

/// Makes the processes that `mpirun` started on one host look like ranks of two hosts.
const TWO_HOSTS: &str = r#"
export RANK=${OMPI_COMM_WORLD_RANK:-$PMI_RANK} WORLD_SIZE=4 LOCAL_WORLD_SIZE=2
export LOCAL_RANK=$((RANK % 2)) GROUP_RANK=$((RANK / 2))
exec "$@""#;

/// Strategies for four ranks, and the micro-batch size of a rank.
const STRATEGIES: [(&str, usize); 4] = [
    ("ddp", 3),
    ("fsdp", 3),
    ("{ type = \"hsdp\", data_parallel_replicate_size = 2 }", 3),
    // Tensor-parallel ranks are adjacent, so on one host.
    ("{ type = \"fsdp_tp\", tensor_parallel_size = 2 }", 6),
];

/// The command that starts MPI processes, and whether it belongs to Open MPI.
fn mpirun() -> (String, bool) {
    let mpirun = std::env::var("FULGURITE_MPIRUN").unwrap_or_else(|_| "mpirun".to_owned());
    let version = Command::new(&mpirun).arg("--version").output();
    let version = version.unwrap_or_else(|e| panic!("{mpirun} (FULGURITE_MPIRUN): {e}"));
    let version = String::from_utf8_lossy(&version.stdout);
    let is_open = ["Open MPI", "OpenRTE"].iter().any(|name| version.contains(name));
    (mpirun, is_open)
}

/// Allows root to run the tests.
fn as_root(job: Job<'_>) -> Job<'_> {
    job.env("OMPI_ALLOW_RUN_AS_ROOT", 1).env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", 1)
}

/// Starts four processes of `job` by MPI, through `script` if given.
fn by_mpirun<'a>(job: Job<'a>, script: Option<&str>) -> Job<'a> {
    let (mpirun, is_open) = mpirun();
    let mut command = vec![&*mpirun, "-n", "4"];
    if is_open {
        command.push("--oversubscribe");
    }
    if let Some(script) = script {
        command.extend(["sh", "-euc", script, "sh"]);
    }
    as_root(job).started_by(&command)
}

/// Starts two processes of `job` on each of `hosts` by MPI. `agent` replaces ssh for the other
/// host.
fn by_mpirun_on<'a>(job: Job<'a>, hosts: &Hosts, agent: &str) -> Job<'a> {
    let (mpirun, is_open) = mpirun();
    let [a, b] = [0, 1].map(|host| hosts.address(host));
    let by_agent = match is_open {
        true => format!("--oversubscribe --mca plm_rsh_agent {agent} --host {a}:2,{b}:2"),
        false => format!("-launcher ssh -launcher-exec {agent} -hosts {a},{b} -ppn 2"),
    };
    let mut command = vec!["unshare", "--uts", "sh", "-euc", r#"hostname "$0"; exec "$@""#];
    command.extend([hosts.name(0), &*mpirun, "-n", "4"]);
    command.extend(by_agent.split(' '));
    as_root(job.set(&["trainer.num_nodes=2"]))
        .within(hosts.name(0))
        .started_by(&command)
        .env("MASTER_ADDR", a)
        .env("MASTER_PORT", 29_500)
        .env("FULGURITE_JOB_KEY", "a key of sixteen characters or more")
}

/// A replacement for ssh that runs a command on one of `hosts`: `agent ADDRESS COMMAND…`.
fn agent(scratch: &Scratch, hosts: &Hosts) -> String {
    let host = |host| format!("{}) host={} ;;\n", hosts.address(host), hosts.name(host));
    let script = format!(
        "#!/bin/sh\nwhile case $1 in -*) ;; *) false ;; esac; do shift; done\n\
         case $1 in\n{}{}esac\nshift\n\
         exec ip netns exec $host unshare --uts sh -c \"hostname $host; $*\"\n",
        host(0),
        host(1)
    );
    let path = scratch.file("agent", script);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path.to_str().expect("a folder with a plain name").to_owned()
}

/// Sets up `job` for two ranks on each of two hosts.
fn on_two_hosts<'a>(job: Job<'a>, process_group: &str) -> Job<'a> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let process_group = format!("trainer.process_group={process_group}");
    by_mpirun(job.set(&["trainer.num_nodes=2", &process_group]), Some(TWO_HOSTS))
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port)
}

/// Runs every strategy over shared memory, and as `over` sets up the job for a number of ranks per
/// host. All runs must agree bit by bit, and be close to one device.
fn compare(devices: usize, over: impl for<'a> Fn(Job<'a>) -> Job<'a>) {
    let scratch = Scratch::with_tokens();
    let one_device = wide(&scratch).on("single_device", 1, 12).succeed();
    for (strategy, batch_size) in STRATEGIES {
        let expected = wide(&scratch).on(strategy, 4, batch_size).succeed();
        let run = over(wide(&scratch).on(strategy, devices, batch_size)).succeed();
        assert_eq!(run.summary()["world_size"], 4, "{strategy}");
        assert_eq!(run.losses(), expected.losses(), "{strategy}");
        assert_eq!(run.steps("grad_norm"), expected.steps("grad_norm"), "{strategy}");
        assert_close(&run.losses(), &one_device.losses(), 1e-5);
        assert_close(&run.steps("grad_norm"), &one_device.steps("grad_norm"), 1e-4);
    }
}

#[test]
fn mpi_matches_shared_memory_bitwise() {
    compare(4, |job| by_mpirun(job.set(&["trainer.process_group=mpi"]), None));
}

#[test]
fn hierarchical_mpi_matches_one_host_bitwise() {
    compare(2, |job| on_two_hosts(job, r#"{ type = "auto", across = "mpi" }"#));
}

#[test]
fn flat_mpi_matches_one_host_bitwise() {
    compare(2, |job| on_two_hosts(job, r#"{ type = "auto", across = "mpi", levels = false }"#));
}

#[test]
fn mpirun_ranks_use_mpi_between_hosts() {
    let scratch = Scratch::with_tokens();
    let mut job = wide(&scratch).on("fsdp", 2, 3);
    job.replace("json", "human");
    let run = on_two_hosts(job, "auto").succeed();
    let told = "4 ranks, strategy fsdp, process group shm within hosts, mpi between them";
    assert!(run.stderr.contains(told), "{}", run.stderr);
}

/// Two hosts with their own addresses and names, which only root can create. Open MPI's messages
/// use the cable. MPICH's messages use shared memory, because UCX detects that both hosts are one
/// machine.
#[test]
fn mpirun_trains_on_two_hosts() {
    let Some(hosts) = Hosts::new() else { return };
    let scratch = Scratch::with_tokens();
    let agent = agent(&scratch, &hosts);
    for (strategy, batch_size) in STRATEGIES {
        let expected = wide(&scratch).on(strategy, 4, batch_size).succeed();
        for process_group in ["auto", "mpi"] {
            let job = wide(&scratch).on(strategy, 2, batch_size);
            let job = job.set(&[&format!("trainer.process_group={process_group}")]);
            let run = by_mpirun_on(job, &hosts, &agent).succeed();
            assert_eq!(run.losses(), expected.losses(), "{strategy} over {process_group}");
            assert_eq!(run.steps("grad_norm"), expected.steps("grad_norm"), "{strategy}");
        }
    }
    let mut job = wide(&scratch).on("fsdp", 2, 3);
    job.replace("json", "human");
    let run = by_mpirun_on(job, &hosts, &agent).succeed();
    let told = "4 ranks, strategy fsdp, process group shm within hosts, mpi between them";
    assert!(run.stderr.contains(told), "{}", run.stderr);
}
