//! Ranks as processes started by `mpirun`: the test program starts itself again.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use fulgurite_core::collective::GroupContext;
use fulgurite_core::launch::{LaunchOptions, launch, report_and_exit_code};
use fulgurite_core::{Error, Result};
use fulgurite_environments::TorchElastic;

/// Environment variables for a rank of a test.
const SIZE: &str = "WORLD_SIZE";
const DIRECTORY: &str = "MPI_TEST_DIRECTORY";
const SCENARIO: &str = "MPI_TEST_SCENARIO";
const TIMEOUT: &str = "MPI_TEST_TIMEOUT_SECS";

/// Turns a process of a launcher into a rank. `$FLIP` reverses the order of ranks. `$LINGER` delays
/// the end of the process that the launcher sees by some seconds, as may happen on other hosts.
const BECOME_RANK: &str = r#"
rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-$RANK}}
[ -z "$FLIP" ] || rank=$((WORLD_SIZE - 1 - rank))
export RANK=$rank LOCAL_RANK=$rank
[ -n "$LINGER" ] || exec "$@"
"$@"
sleep 5"#;

/// Allows Open MPI to start as root.
const AS_ROOT: [(&str, &str); 2] =
    [("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")];

/// How ranks are started.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum By {
    /// `mpirun`, or the command in FULGURITE_MPIRUN.
    Mpirun,
    /// The same, but the launcher learns of a rank's end later than the other ranks.
    Lingering,
    /// `mpirun`, with the job's ranks in reverse order.
    Flipped,
    /// The launcher of the other MPI family, in FULGURITE_OTHER_MPIRUN.
    Other,
    /// Without a launcher: processes side by side.
    Hand,
}

/// Ranks of one scenario.
pub(crate) struct Job {
    directory: tempfile::TempDir,
    size: usize,
    children: Vec<Child>,
}

/// The outcome of a job.
#[derive(Debug)]
pub(crate) struct Ended {
    /// Each rank's result, `ok` or its error; `None` if the rank died first.
    pub(crate) results: Vec<Option<String>>,
    /// Whether the launcher succeeded.
    pub(crate) success: bool,
    pub(crate) stderr: String,
}

fn mpirun() -> String {
    std::env::var("FULGURITE_MPIRUN").unwrap_or_else(|_| "mpirun".to_owned())
}

/// Whether `mpirun` is Open MPI's.
fn is_open_mpi(mpirun: &str) -> bool {
    let output = Command::new(mpirun).arg("--version").output();
    let output = output.unwrap_or_else(|e| panic!("{mpirun} (FULGURITE_MPIRUN): {e}"));
    let text = String::from_utf8_lossy(&output.stdout);
    ["Open MPI", "OpenRTE"].iter().any(|name| text.contains(name))
}

/// Returns a port that is free now.
fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Job {
    pub(crate) fn start(size: usize, scenario: &str, timeout_secs: u64, by: By) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let launcher = match by {
            By::Hand => None,
            By::Other => Some(std::env::var("FULGURITE_OTHER_MPIRUN").unwrap()),
            _ => Some(mpirun()),
        };
        let mut command = Command::new(launcher.as_deref().unwrap_or("sh"));
        if let Some(launcher) = &launcher {
            if is_open_mpi(launcher) {
                command.arg("--oversubscribe").envs(AS_ROOT);
            }
            command.args(["-n", &size.to_string(), "sh"]);
        }
        command.args(["-c", BECOME_RANK, "sh"]).arg(std::env::current_exe().unwrap());
        command.args(["--exact", "job::a_rank", "--nocapture"]);
        command.env(SIZE, size.to_string()).env("LOCAL_WORLD_SIZE", size.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", free_port().to_string());
        command.env(DIRECTORY, directory.path()).env(SCENARIO, scenario);
        command.env(TIMEOUT, timeout_secs.to_string());
        command.env("FLIP", if by == By::Flipped { "yes" } else { "" });
        command.env("LINGER", if by == By::Lingering { "yes" } else { "" });
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let children = match by {
            By::Hand => (0..size)
                .map(|rank| command.env("RANK", rank.to_string()).spawn().unwrap())
                .collect(),
            _ => vec![command.spawn().unwrap()],
        };
        Self { directory, size, children }
    }

    pub(crate) fn end(mut self) -> Ended {
        let children = std::mem::take(&mut self.children);
        let outputs: Vec<Output> =
            children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
        let path = |rank: usize| self.directory.path().join(rank.to_string());
        Ended {
            results: (0..self.size).map(|rank| fs::read_to_string(path(rank)).ok()).collect(),
            success: outputs.iter().all(|output| output.status.success()),
            stderr: outputs.iter().map(|o| String::from_utf8_lossy(&o.stderr)).collect(),
        }
    }

    /// Asserts that all ranks succeed and MPI ends without a complaint.
    pub(crate) fn expect_ok(self) {
        let Ended { results, success, stderr } = self.end();
        for (rank, result) in results.into_iter().enumerate() {
            assert_eq!(result.as_deref(), Some("ok"), "rank {rank}:\n{stderr}");
        }
        assert!(success, "{stderr}");
        assert!(!stderr.contains("mpirun") && !stderr.contains("MPI_Finalize"), "{stderr}");
    }

    /// Like [`expect_ok`](Self::expect_ok), for a process group that fails as expected, so MPI is
    /// not finalised.
    pub(crate) fn expect_ok_without_finalize(self) {
        let Ended { results, stderr, .. } = self.end();
        for (rank, result) in results.into_iter().enumerate() {
            assert_eq!(result.as_deref(), Some("ok"), "rank {rank}:\n{stderr}");
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// One rank of a scenario, if this process was started as one.
#[test]
fn a_rank() {
    let Ok(scenario) = std::env::var(SCENARIO) else { return };
    let directory = PathBuf::from(std::env::var(DIRECTORY).unwrap());
    let timeout = std::env::var(TIMEOUT).unwrap().parse().unwrap();
    let result = be_rank(&scenario, Duration::from_secs(timeout), &directory);
    let failed = result.is_err();
    // Waits for the other ranks if necessary, and prints the error.
    report_and_exit_code(result);
    std::process::exit(failed.into());
}

fn be_rank(scenario: &str, timeout: Duration, directory: &std::path::Path) -> Result<()> {
    let environment = Some(Box::new(TorchElastic {}) as _);
    let launched = launch(LaunchOptions { environment, ..Default::default() })?;
    let context = GroupContext {
        rank: launched.rank,
        world_size: launched.world_size,
        local_rank: launched.local_rank,
        local_world_size: launched.local_world_size,
        node_rank: 0,
        address: None,
        store: launched.store.clone(),
        timeout,
    };
    let result = crate::start::run(scenario, &context)
        .or_else(|| crate::wire::run(scenario, &context))
        .or_else(|| crate::group::run(scenario, &context))
        .unwrap_or_else(|| Err(Error::other(format!("no scenario {scenario}"))));
    let text = result.as_ref().map_or_else(ToString::to_string, |()| "ok".to_owned());
    fs::write(directory.join(context.rank.to_string()), text).unwrap();
    if result.is_ok() {
        // Without MPI_Finalize, the launcher ends the other ranks when the first one ends.
        context.store.set(&format!("wrote/{}", context.rank), b"")?;
        for rank in 0..context.world_size {
            let _ = context.store.get(&format!("wrote/{rank}"), Duration::from_secs(20));
        }
    }
    result
}
