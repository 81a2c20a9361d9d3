//! Runs the program and inspects it.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// The part that the program plays.
pub(crate) const PROGRAM: &str = "LAUNCH_TEST_PROGRAM";
/// `LaunchOptions::devices`.
pub(crate) const DEVICES: &str = "LAUNCH_TEST_DEVICES";
/// `LaunchOptions::timeout`.
pub(crate) const TIMEOUT_MS: &str = "LAUNCH_TEST_TIMEOUT_MS";

/// Time after which a test gives up. No test asserts a duration.
const PATIENCE: Duration = Duration::from_secs(120);

/// Prefixes of variables that could make the program believe it is already launched.
const FOREIGN: [&str; 24] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_",
    "NODE_RANK",
    "NNODES",
    "MASTER_",
    "TORCHELASTIC_",
    "SLURM_",
    "OMPI_",
    "PMI",
    "MPI_",
    "MV2_",
    "JSM_",
    "LSB_",
    "KUBERNETES_",
    "PET_",
    "JOB_",
    "JOBSET_",
    "FULGURITE_",
    "RAYON_NUM_THREADS",
    "RUST_BACKTRACE",
    "LAUNCH_TEST_",
];

/// A running program.
pub(crate) struct Run {
    process: Child,
    lines: Receiver<String>,
    stderr: Arc<Mutex<Vec<u8>>>,
    stderr_reader: Option<JoinHandle<()>>,
}

/// A program's exit and output.
pub(crate) struct Ended {
    /// The exit code; 128 + the signal if it was killed.
    pub(crate) code: i32,
    /// The lines of stdout that were not read before.
    pub(crate) stdout: Vec<String>,
    /// Without the warnings below.
    pub(crate) stderr: String,
    /// Lines that depend on the number of cores.
    pub(crate) warnings: String,
}

impl Run {
    /// Starts the program in a clean environment plus `variables`.
    pub(crate) fn start(part: &str, variables: &[(&str, &str)]) -> Self {
        // Under `nohup` the tests ignore SIGHUP, and a program that they start would, too.
        let mut command = Command::new("env");
        command.arg("--default-signal=HUP").arg(std::env::current_exe().unwrap());
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy().into_owned();
            if FOREIGN.iter().any(|prefix| name.starts_with(prefix)) {
                command.env_remove(name);
            }
        }
        command.env(PROGRAM, part).envs(variables.iter().copied()).args(["--flag", "a b"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let (send, lines) = channel();
        let stdout = BufReader::new(process.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                let _ = send.send(line);
            }
        });
        let mut stderr = process.stderr.take().unwrap();
        let all = Arc::<Mutex<Vec<u8>>>::default();
        let shared = all.clone();
        let stderr_reader = std::thread::spawn(move || {
            let mut some = [0; 1024];
            while let Ok(n @ 1..) = stderr.read(&mut some) {
                shared.lock().unwrap().extend(&some[..n]);
            }
        });
        Self { process, lines, stderr: all, stderr_reader: Some(stderr_reader) }
    }

    /// Reads the next `n` lines of stdout as JSON, sorted by rank.
    pub(crate) fn ranks(&self, n: usize) -> Vec<serde_json::Value> {
        let lines = (0..n).map(|_| self.lines.recv_timeout(PATIENCE).expect("a rank's line"));
        let mut ranks: Vec<serde_json::Value> =
            lines.map(|line| serde_json::from_str(&line).unwrap()).collect();
        ranks.sort_by_key(|rank| rank["rank"].as_u64());
        ranks
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    /// Waits until the process has a handler for `signal`.
    pub(crate) fn until_it_handles(&self, signal: Signal) {
        let deadline = Instant::now() + PATIENCE;
        let bit = 1_u64 << (signal.as_raw() - 1);
        let status = format!("/proc/{}/status", self.process.id());
        loop {
            let status = std::fs::read_to_string(&status).unwrap();
            let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
            if u64::from_str_radix(caught.trim(), 16).unwrap() & bit != 0 {
                return;
            }
            assert!(Instant::now() < deadline, "the program sets no handler");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn stderr_so_far(&self) -> String {
        String::from_utf8_lossy(&self.stderr.lock().unwrap()).into_owned()
    }

    /// Waits until stderr contains this text.
    pub(crate) fn until_stderr_has(&self, text: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !self.stderr_so_far().contains(text) {
            assert!(Instant::now() < deadline, "stderr has no `{text}`:\n{}", self.stderr_so_far());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub(crate) fn wait(mut self) -> Ended {
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < deadline, "the program does not end");
            std::thread::sleep(Duration::from_millis(5));
        };
        // Ends when the last process that holds the pipe ends.
        self.stderr_reader.take().unwrap().join().unwrap();
        let stderr = self.stderr_so_far();
        let stdout = std::iter::from_fn(|| self.lines.recv_timeout(PATIENCE).ok()).collect();
        let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap());
        let (warnings, stderr) =
            stderr.split_inclusive('\n').partition(|line| line.starts_with("warning: "));
        Ended { code, stdout, stderr, warnings }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The process id in a rank's line.
pub(crate) fn pid(rank: &serde_json::Value) -> Pid {
    Pid::from_raw(rank["pid"].as_i64().unwrap() as i32).unwrap()
}

/// Waits until the process has ended.
pub(crate) fn gone(rank: &serde_json::Value) {
    let stat = format!("/proc/{}/stat", pid(rank).as_raw_nonzero());
    let deadline = Instant::now() + PATIENCE;
    // An orphan without a waiting parent remains a zombie.
    while std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z ")) {
        assert!(Instant::now() < deadline, "rank {} lives on", rank["rank"]);
        std::thread::sleep(Duration::from_millis(5));
    }
}
