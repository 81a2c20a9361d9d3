//! Ranks of a test as real processes: the test program starts itself once for each rank.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fulgurite_core::collective::GroupContext;
use fulgurite_core::launch::Store;
use fulgurite_core::{Error, Result};

/// A store in a directory: a key is a file.
pub(crate) struct DirectoryStore {
    pub(crate) directory: PathBuf,
    pub(crate) rank: usize,
}

impl DirectoryStore {
    fn path(&self, key: &str) -> PathBuf {
        self.directory.join(key.replace('/', "+"))
    }

    /// Writes a file that appears only as a whole.
    fn put(&self, path: &Path, value: &[u8]) -> std::io::Result<()> {
        let draft = path.with_extension(format!("draft{}", self.rank));
        fs::write(&draft, value)?;
        fs::rename(draft, path)
    }

    /// Changes a file that no other rank changes meanwhile.
    fn alone<R>(&self, path: &Path, change: impl FnOnce() -> std::io::Result<R>) -> Result<R> {
        let lock = path.with_extension("lock");
        while File::create_new(&lock).is_err() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let result = change();
        fs::remove_file(&lock).map_err(Error::io("removing", lock))?;
        result.map_err(Error::io("writing", path))
    }
}

impl Store for DirectoryStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let path = self.path(key);
        self.put(&path, value).map_err(Error::io("writing", path))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let start = Instant::now();
        loop {
            if let Ok(value) = fs::read(self.path(key)) {
                return Ok(value);
            }
            if let Some((rank, message)) = self.failure() {
                return Err(Error::PeerFailed { rank, message });
            }
            if start.elapsed() > timeout {
                return Err(Error::Launch(format!("timed out waiting for `{key}`")));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let path = self.path(key);
        self.alone(&path, || {
            let old = fs::read_to_string(&path).ok().and_then(|s| s.parse().ok()).unwrap_or(0i64);
            self.put(&path, (old + amount).to_string().as_bytes())?;
            Ok(old + amount)
        })
    }

    fn compare_set(&self, key: &str, expected: Option<&[u8]>, value: &[u8]) -> Result<bool> {
        let path = self.path(key);
        self.alone(&path, || {
            let is_expected = fs::read(&path).ok().as_deref() == expected;
            if is_expected {
                self.put(&path, value)?;
            }
            Ok(is_expected)
        })
    }

    fn report_failure(&self, message: &str) -> Result<()> {
        let draft = self.directory.join(format!("failure.draft{}", self.rank));
        fs::write(&draft, format!("{} {message}", self.rank))
            .map_err(Error::io("writing", &draft))?;
        // Only the first rank succeeds in making the link.
        match fs::hard_link(&draft, self.directory.join("failure")) {
            Err(e) if e.kind() != ErrorKind::AlreadyExists => Err(Error::io("linking", draft)(e)),
            _ => Ok(()),
        }
    }

    fn failure(&self) -> Option<(usize, String)> {
        let text = fs::read_to_string(self.directory.join("failure")).ok()?;
        let (rank, message) = text.split_once(' ')?;
        Some((rank.parse().ok()?, message.to_owned()))
    }

    fn give_up(&self) -> Option<Error> {
        fs::read(self.path(&format!("asked{}", self.rank))).ok()?;
        self.report_failure("it was asked to end").unwrap();
        Some(Error::Interrupted)
    }
}

/// Environment variables for a rank of a test.
const RANK: &str = "TRANSPORT_TEST_RANK";
const SIZE: &str = "TRANSPORT_TEST_SIZE";
const DIRECTORY: &str = "TRANSPORT_TEST_DIRECTORY";
const SCENARIO: &str = "TRANSPORT_TEST_SCENARIO";

/// The prefix of a rank's printed result.
pub(crate) const RESULT: &str = "RESULT: ";

/// Ranks of one scenario, as processes.
pub(crate) struct Job {
    pub(crate) directory: tempfile::TempDir,
    pub(crate) children: Vec<Child>,
}

impl Job {
    /// Starts this program once for each rank. `test` is the test that calls [`run_as_rank`].
    pub(crate) fn start(test: &str, size: usize, scenario: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let start = |rank: usize| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", test, "--nocapture"])
                .env(RANK, rank.to_string())
                .env(SIZE, size.to_string())
                .env(DIRECTORY, directory.path())
                .env(SCENARIO, scenario)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        };
        let children = (0..size).map(start).collect();
        Self { directory, children }
    }

    pub(crate) fn store(&self) -> DirectoryStore {
        // The launcher, which is not a rank of the job.
        DirectoryStore {
            directory: self.directory.path().to_owned(),
            rank: self.children.len() - 1,
        }
    }

    /// Waits until a rank has set a marker.
    pub(crate) fn wait_for(&self, key: &str) {
        self.store().get(key, Duration::from_secs(60)).unwrap();
    }

    /// Returns each rank's result, `ok` or its error; `None` if the rank died first.
    pub(crate) fn results(mut self) -> Vec<Option<String>> {
        let children = std::mem::take(&mut self.children);
        let outputs: Vec<Output> =
            children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
        let result = |output: &Output| {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let line = text.lines().find_map(|line| line.split_once(RESULT));
            let killed = output.status.code().is_none();
            assert!(
                line.is_some() || killed,
                "a rank said nothing:\n{text}\n{}",
                String::from_utf8_lossy(&output.stderr)
            );
            line.map(|(_, result)| result.to_owned())
        };
        outputs.iter().map(result).collect()
    }

    pub(crate) fn expect_ok(self) {
        for (rank, result) in self.results().into_iter().enumerate() {
            assert_eq!(result.as_deref(), Some("ok"), "rank {rank}");
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

/// Runs one rank of a scenario on one host, if this process was started as one. `timeout_secs` is
/// by scenario.
pub(crate) fn run_as_rank(
    timeout_secs: impl Fn(&str) -> u64,
    run: impl Fn(&str, &GroupContext) -> Result<()>,
) {
    run_as_rank_on(|_, size| vec![0; size], timeout_secs, run);
}

/// Like [`run_as_rank`], on several simulated hosts: `nodes` by scenario and world size.
pub(crate) fn run_as_rank_on(
    nodes: impl Fn(&str, usize) -> Vec<usize>,
    timeout_secs: impl Fn(&str) -> u64,
    run: impl Fn(&str, &GroupContext) -> Result<()>,
) {
    let Ok(rank) = std::env::var(RANK) else { return };
    let rank: usize = rank.parse().unwrap();
    let size: usize = std::env::var(SIZE).unwrap().parse().unwrap();
    let directory = PathBuf::from(std::env::var(DIRECTORY).unwrap());
    let scenario = std::env::var(SCENARIO).unwrap();
    let nodes = nodes(&scenario, size);
    let here = |before: usize| nodes[..before].iter().filter(|&&node| node == nodes[rank]).count();
    let context = GroupContext {
        rank,
        world_size: size,
        local_rank: here(rank),
        local_world_size: here(size),
        node_rank: nodes[rank],
        address: (here(size) < size).then_some(Ipv4Addr::LOCALHOST.into()),
        store: Arc::new(DirectoryStore { directory, rank }),
        timeout: Duration::from_secs(timeout_secs(&scenario)),
    };
    // The harness prints the test's name without a line break.
    println!();
    match run(&scenario, &context) {
        Ok(()) => println!("{RESULT}ok"),
        Err(error) => println!("{RESULT}{error}"),
    }
}
