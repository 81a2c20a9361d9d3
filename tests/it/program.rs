//! Runs the example `pretrain` as a user would: as a separate program in its own folder.

#![allow(unreachable_pub, reason = "what other modules use reads best with plain `pub`")]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{PipeReader, PipeWriter, Write as _, pipe};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde_json::Value;
use tempfile::TempDir;

/// Time limit of a run, after which its whole process tree is killed and the test fails. It is far
/// above any run's time, and far below the timeout of a collective.
const LIMIT: Duration = Duration::from_secs(180);
const LOOK: Duration = Duration::from_millis(5);

/// Variables that would make the program believe that a launcher started it as a rank.
const LAUNCHERS: [&str; 12] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "RUST_BACKTRACE",
    "FULGURITE_LOG",
    "FULGURITE_SUPERVISOR",
];

/// The example program. `cargo test` builds it beside the tests; `cargo test --test NAME` does not.
pub fn program() -> PathBuf {
    example("pretrain", "fulgurite")
}

/// The program that links the plugins of `examples/plugin-crate`, built by
/// `cargo test --workspace`.
pub fn plugin_program() -> PathBuf {
    example("train", "fulgurite-local-sgd")
}

/// The program of a package's example; it must be newer than its sources.
fn example(name: &str, package: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().unwrap().with_file_name("examples").join(name);
    let build = format!(
        "build it: cargo build -p {package} --example {name}, with the profile of the test"
    );
    assert!(path.is_file(), "{} is missing; {build}", path.display());
    // Its sources, from cargo's dep-info file: `program: source source …`.
    let sources = fs::read_to_string(path.with_extension("d")).unwrap_or_default();
    let changed = |path: &Path| fs::metadata(path).and_then(|file| file.modified()).ok();
    let newer =
        sources.split_whitespace().skip(1).find(|of| changed(Path::new(of)) > changed(&path));
    assert!(newer.is_none(), "{} is older than {newer:?}; {build}", path.display());
    path
}

/// The program `fulgurite`, built by `cargo test --workspace` or `cargo build -p fulgurite-cli`.
pub fn fulgurite() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().unwrap().with_file_name("fulgurite");
    assert!(path.is_file(), "{} is missing: cargo build -p fulgurite-cli", path.display());
    path
}

/// A script in its own namespaces, to which arguments can be added.
fn unshared(script: &str) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--mount", "sh", "-euc", script, "sh"]);
    command
}

/// Whether this machine allows private mounts for a test; prints a message if not.
pub fn can_mount() -> bool {
    let temp = tempfile::tempdir().unwrap();
    let output = unshared("mount -t tmpfs none .").current_dir(temp.path()).output();
    let complaint = match output {
        Ok(output) if output.status.success() => return true,
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(e) => e.to_string(),
    };
    eprintln!("not tested: `unshare --map-root-user --mount` does not let mount here: {complaint}");
    false
}

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// The program's folder; removed with all contents on drop.
pub struct Scratch {
    root: TempDir,
    /// The user who runs the program under limits, if not the current one.
    owner: Option<u32>,
}

impl Scratch {
    pub fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        for name in ["work", "tmp", "out"] {
            fs::create_dir(root.path().join(name)).unwrap();
        }
        Self { root, owner: None }
    }

    /// With the data that [`Job::small`] trains on: tokens.u16, 400 ids below 50.
    pub fn with_tokens() -> Self {
        let scratch = Self::new();
        scratch.tokens("tokens.u16", (0..400_u32).map(|i| ((i * i + 7 * i) % 101 % 50) as u16));
        scratch
    }

    /// Gives the folder to another user, as whom the program runs from now on. Returns false if
    /// that is not possible.
    pub fn give_to(&mut self, uid: u32) -> bool {
        let own = |path: &Path| std::os::unix::fs::chown(path, Some(uid), None).is_ok();
        let open = fs::set_permissions(self.root.path(), fs::Permissions::from_mode(0o755)).is_ok();
        self.owner = Some(uid);
        let given =
            own(&self.path()) && own(&self.path().join("tokens.u16")) && own(&self.temporary());
        // The program may be in a folder that other users cannot read.
        open && given && self.job(&["--help"]).limited("-n 64").run().code() == Some(0)
    }

    /// The program's working directory.
    pub fn path(&self) -> PathBuf {
        self.root.path().join("work")
    }

    /// The program's folder for temporary files.
    pub fn temporary(&self) -> PathBuf {
        self.root.path().join("tmp")
    }

    pub fn file(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path().join(name);
        fs::write(&path, content).unwrap();
        path
    }

    pub fn tokens(&self, name: &str, ids: impl IntoIterator<Item = u16>) -> PathBuf {
        self.file(name, ids.into_iter().flat_map(u16::to_le_bytes).collect::<Vec<_>>())
    }

    /// Writes the folder `tokens` with files of 8 ids each. Errors in later files only show in
    /// training.
    pub fn token_files(&self, ids: impl IntoIterator<Item = u16>) {
        fs::create_dir_all(self.path().join("tokens")).unwrap();
        for (i, ids) in ids.into_iter().collect::<Vec<_>>().chunks(8).enumerate() {
            self.tokens(&format!("tokens/{i:03}.u16"), ids.iter().copied());
        }
    }

    /// `pretrain` with these arguments.
    pub fn job(&self, args: &[&str]) -> Job<'_> {
        let args = args.iter().map(|&arg| arg.to_owned()).collect();
        Job {
            scratch: self,
            args,
            envs: Vec::new(),
            shell: None,
            namespace: None,
            starter: vec![],
            limit: None,
            unread: None,
        }
    }

    /// `pretrain fit` of a tiny model on tokens.u16, in order, with JSON on stdout. Its dimensions
    /// are not divisible by most numbers of ranks.
    pub fn small(&self) -> Job<'_> {
        self.job(&["fit", "--output", "json"]).set(&[
            "model.vocab_size=53",
            "model.hidden_size=20",
            "model.intermediate_size=37",
            "model.num_hidden_layers=2",
            "model.num_attention_heads=2",
            "model.num_key_value_heads=1",
            "data.type=tokens",
            "data.path=tokens.u16",
            "data.seq_len=7",
            "data.batch_size=2",
            "data.shuffle=false",
            "trainer.strategy=single_device",
            "trainer.devices=1",
            "scheduler.warmup_steps=3",
            "trainer.max_steps=8",
            "checkpoint.save_last=false",
        ])
    }
}

/// A program to run.
#[derive(Clone)]
pub struct Job<'a> {
    scratch: &'a Scratch,
    args: Vec<String>,
    envs: Vec<(String, String)>,
    /// A script that runs the program as `"$@"`.
    shell: Option<&'static str>,
    namespace: Option<String>,
    /// A command that starts the program.
    starter: Vec<String>,
    limit: Option<String>,
    unread: Option<Stream>,
}

/// One of a program's streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    Stdout,
    Stderr,
}

/// A full pipe: further writes block.
fn full_pipe() -> (PipeReader, PipeWriter) {
    let (reader, writer) = pipe().unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    while (&writer).write(&[b'.'; 4096]).is_ok() {}
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    (reader, writer)
}

impl Job<'_> {
    /// Gives the program an output stream without a reader.
    #[must_use]
    pub fn unread(self, stream: Stream) -> Self {
        Self { unread: Some(stream), ..self }
    }

    #[must_use]
    pub fn set(mut self, assignments: &[&str]) -> Self {
        for assignment in assignments {
            self.args.extend(["--set".to_owned(), (*assignment).to_owned()]);
        }
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args(mut self, args: &[&str]) -> Self {
        self.args.extend(args.iter().map(|&arg| arg.to_owned()));
        self
    }

    /// Sets strategy, number of ranks, and micro-batch size of a rank.
    #[must_use]
    pub fn on(self, strategy: &str, devices: usize, batch_size: usize) -> Self {
        self.set(&[
            &format!("trainer.strategy={strategy}"),
            &format!("trainer.devices={devices}"),
            &format!("data.batch_size={batch_size}"),
        ])
    }

    /// Replaces one argument.
    pub fn replace(&mut self, argument: &str, by: &str) {
        let found = self.args.iter_mut().find(|found| *found == argument);
        by.clone_into(found.expect("the argument is there"));
    }

    /// All arguments.
    pub fn arguments(&self) -> &[String] {
        &self.args
    }

    /// All assignments so far, except keys with these two prefixes.
    pub fn assignments(&self, but: &str, and: &str) -> Vec<&str> {
        let set = self.args.iter().filter(|arg| arg.contains('='));
        set.map(String::as_str)
            .filter(|arg| !arg.starts_with(but) && !arg.starts_with(and))
            .collect()
    }

    #[must_use]
    pub fn env(mut self, name: &str, value: impl ToString) -> Self {
        self.envs.push((name.to_owned(), value.to_string()));
        self
    }

    /// Runs the program's ranks by `fulgurite run` with these arguments.
    #[must_use]
    pub fn under_agent(self, args: &[&str]) -> Self {
        let agent = fulgurite();
        let agent = agent.to_str().expect("the tests are in a folder with a plain name");
        self.started_by(&[&[agent, "run"], args, &["--"]].concat())
    }

    /// Runs the program by this command, which gets the program and its arguments appended.
    #[must_use]
    pub fn started_by(self, command: &[&str]) -> Self {
        Self { starter: command.iter().map(|&arg| arg.to_owned()).collect(), ..self }
    }

    /// Runs the program in a network namespace, so with its own network addresses.
    #[must_use]
    pub fn within(self, namespace: &str) -> Self {
        Self { namespace: Some(namespace.to_owned()), ..self }
    }

    /// Runs the program from this script, as `"$@"`, as root of its own namespace. The script can
    /// mount file systems that other processes do not see; see [`can_mount`].
    #[must_use]
    pub fn mounting(self, script: &'static str) -> Self {
        Self { shell: Some(script), ..self }
    }

    /// Runs the program under a limit of `ulimit`: `-n 12`.
    #[must_use]
    pub fn limited(self, limit: &str) -> Self {
        Self { limit: Some(limit.to_owned()), ..self }
    }

    pub fn start(&self) -> Running {
        static COUNT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        let n = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let out = self.scratch.root.path().join("out");
        let (stdout, stderr) = (out.join(format!("{n}.stdout")), out.join(format!("{n}.stderr")));
        let mut command = match (self.shell, &self.limit) {
            (Some(script), _) => unshared(script),
            (None, Some(limit)) => {
                // Some shells' `ulimit` lacks `-u`.
                let script = match limit.strip_prefix("-u ") {
                    Some(processes) => format!("exec prlimit --nproc={processes} \"$@\""),
                    None => format!("ulimit {limit}; exec \"$@\""),
                };
                let mut command = Command::new("sh");
                // Root has no limit on processes.
                if let Some(uid) = self.scratch.owner {
                    command = Command::new("setpriv");
                    command.args([&format!("--reuid={uid}"), "--clear-groups", "sh"]);
                }
                command.args(["-euc", &script, "sh"]);
                command
            }
            (None, None) => match &self.namespace {
                None => Command::new("env"),
                Some(namespace) => {
                    let mut command = Command::new("ip");
                    command.args(["netns", "exec", namespace]);
                    command
                }
            },
        };
        command.args(&self.starter).arg(program());
        for name in LAUNCHERS {
            command.env_remove(name);
        }
        command
            .args(&self.args)
            .envs(self.envs.iter().map(|(name, value)| (name, value)))
            .env("TMPDIR", self.scratch.temporary())
            .env("RAYON_NUM_THREADS", "1")
            .current_dir(self.scratch.path())
            .stdin(Stdio::null())
            .stdout(File::create(&stdout).unwrap())
            .stderr(File::create(&stderr).unwrap())
            .process_group(0);
        let unread = self.unread.map(|stream| {
            let (reader, writer) = full_pipe();
            match stream {
                Stream::Stdout => command.stdout(writer),
                Stream::Stderr => command.stderr(writer),
            };
            reader
        });
        let child = command.spawn().unwrap();
        let started = Instant::now();
        Running { child, stdout, stderr, started, ended: false, _unread: unread }
    }

    pub fn run(&self) -> Run {
        self.start().wait()
    }

    /// Runs the program and asserts success.
    pub fn succeed(&self) -> Run {
        let run = self.run();
        assert!(run.status.success(), "{:?} ended with {}:\n{}", self.args, run.status, run.stderr);
        run
    }

    /// Runs the program, asserts failure, and returns its stderr with variable parts removed.
    pub fn fail(&self) -> String {
        let run = self.run();
        assert_eq!(run.code(), Some(1), "{:?}:\n{}{}", self.args, run.stdout, run.stderr);
        let root = self.scratch.root.path().display().to_string();
        without_model(&run.stderr.replace(&root, "[DIR]")).trim_end().to_owned()
    }
}

/// The lines without the table of the model's parameters, and without those about data, ranks and
/// the run's directory.
fn without_model(stderr: &str) -> String {
    let mut in_table = false;
    let lines = stderr.lines().filter(|line| {
        in_table |= line.starts_with("module ") && line.ends_with("  parameters");
        let data = line.starts_with("data.") && line.contains(" tokens");
        let of_run = line.contains(" ranks, strategy ") || line.starts_with("run directory ");
        let shown = !in_table && !data && !of_run;
        in_table &= !line.ends_with(" units") && !line.ends_with(" unit");
        shown
    });
    lines.map(|line| format!("{line}\n")).collect()
}

/// A running program. Dropping it kills the program's whole process tree.
pub struct Running {
    child: Child,
    stdout: PathBuf,
    stderr: PathBuf,
    started: Instant,
    ended: bool,
    /// The read end of a pipe without a reader, kept open while the program runs.
    _unread: Option<PipeReader>,
}

impl Running {
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// The process of rank `rank`; waits until it exists.
    pub fn rank(&self, rank: usize) -> Pid {
        self.until("the rank to start", |this| this.find_rank(rank))
    }

    /// The process of rank `rank`; waits until it exists. `None` if the program ends first.
    pub fn rank_if_any(&self, rank: usize) -> Option<Pid> {
        self.until("the rank to start or the program to end", |this| {
            let found = this.find_rank(rank);
            (found.is_some() || this.members().is_empty()).then_some(found)
        })
    }

    /// The process of rank `rank`, if it exists.
    pub fn find_rank(&self, rank: usize) -> Option<Pid> {
        let wanted = format!("RANK={rank}");
        self.members().into_iter().filter(|&pid| pid != self.pid()).find(|pid| {
            // Before its exec, a child still has the test's environment.
            let path = format!("/proc/{}/environ", pid.as_raw_nonzero());
            let variables = fs::read(path).unwrap_or_default();
            variables.split(|&byte| byte == 0).any(|v| v == wanted.as_bytes())
        })
    }

    /// A variable of rank 0's environment.
    pub fn variable(&self, name: &str) -> String {
        let path = format!("/proc/{}/environ", self.rank(0).as_raw_nonzero());
        let variables = String::from_utf8(fs::read(path).unwrap()).unwrap();
        let mut pairs = variables.split('\0').filter_map(|variable| variable.split_once('='));
        pairs.find(|(found, _)| *found == name).expect("the rank has the variable").1.to_owned()
    }

    /// The address of the ranks' store.
    pub fn store(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.variable("MASTER_PORT").parse().unwrap()))
    }

    /// All live processes of the program, including the first one.
    pub fn members(&self) -> Vec<Pid> {
        let group = self.pid().as_raw_nonzero().to_string();
        let entries = fs::read_dir("/proc").unwrap().flatten();
        entries
            .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
            .filter(|pid| {
                let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
                // `pid (name) state parent group …`
                let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
                let mut fields = after_name.split_whitespace();
                !matches!(fields.next(), None | Some("Z" | "X")) && fields.nth(1) == Some(&*group)
            })
            .filter_map(Pid::from_raw)
            .collect()
    }

    /// Waits until step `step` is reported.
    pub fn reach(&self, step: u64) {
        let wanted = format!("{{\"event\":\"step\",\"step\":{step},");
        self.until("the step", |this| {
            let out = fs::read_to_string(&this.stdout).unwrap();
            assert!(!out.contains("\"summary\""), "the run is over:\n{out}");
            out.contains(&wanted).then_some(())
        });
    }

    /// Number of steps reported so far.
    pub fn steps(&self) -> usize {
        self.count_of("step")
    }

    /// The last step reported so far.
    pub fn last_step(&self) -> Option<u64> {
        let out = fs::read_to_string(&self.stdout).unwrap();
        let (_, last) = out.rsplit_once("{\"event\":\"step\",\"step\":")?;
        last.split_once(',')?.0.parse().ok()
    }

    /// Whether stderr has this text so far.
    pub fn said(&self, text: &str) -> bool {
        fs::read_to_string(&self.stderr).unwrap().contains(text)
    }

    /// Number of events of a kind reported so far.
    pub fn count_of(&self, kind: &str) -> usize {
        let begin = format!("{{\"event\":\"{kind}\",");
        fs::read_to_string(&self.stdout).unwrap().matches(&begin).count()
    }

    /// Waits until another step is reported.
    pub fn reach_next(&self) {
        let steps = self.steps();
        self.until("another step", |this| (this.steps() > steps).then_some(()));
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Waits until rank `rank` has a handler for `signal`.
    pub fn until_rank_handles(&self, rank: usize, signal: Signal) {
        self.until_handles(self.rank(rank), signal);
    }

    /// Waits until a process has a handler for `signal`.
    pub fn until_handles(&self, pid: Pid, signal: Signal) {
        let pid = pid.as_raw_nonzero();
        self.until("a process to handle a signal", |_| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
            let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"))?;
            let caught = u64::from_str_radix(caught.trim(), 16).ok()?;
            (caught >> (signal.as_raw() - 1) & 1 == 1).then_some(())
        });
    }

    /// Waits until no process of the program remains.
    pub fn until_gone(&self) {
        self.until("all processes to end", |this| this.members().is_empty().then_some(()));
    }

    pub fn until<T>(&self, what: &str, found: impl Fn(&Self) -> Option<T>) -> T {
        loop {
            let has_ended = self.members().is_empty();
            if let Some(found) = found(self) {
                return found;
            }
            let err = fs::read_to_string(&self.stderr).unwrap();
            assert!(!has_ended, "the program has ended before {what}:\n{err}");
            assert!(self.started.elapsed() < LIMIT, "waited in vain for {what}:\n{err}");
            std::thread::sleep(LOOK);
        }
    }

    pub fn wait(mut self) -> Run {
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            let err = fs::read_to_string(&self.stderr).unwrap();
            assert!(self.started.elapsed() < LIMIT, "the program does not end:\n{err}");
            std::thread::sleep(LOOK);
        };
        let orphans = self.members();
        self.ended = orphans.is_empty();
        assert!(orphans.is_empty(), "processes were left: {orphans:?}");
        let read = |path: &Path| String::from_utf8(fs::read(path).unwrap()).unwrap();
        Run { status, stdout: read(&self.stdout), stderr: read(&self.stderr) }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.ended {
            let _ = kill_process_group(self.pid(), Signal::KILL);
            let _ = self.child.wait();
        }
    }
}

/// What jobs have left in this host's shared memory. The directories of elastic jobs do not count:
/// another test's job may be running.
pub fn left_in_shared_memory() -> Vec<String> {
    let entries = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names
        .filter(|name| name.contains("fulgurite") && !name.starts_with("fulgurite-elastic-"))
        .collect()
}

/// The result of a program.
pub struct Run {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Run {
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    pub fn signal(&self) -> Option<i32> {
        self.status.signal()
    }

    /// The JSON lines of stdout.
    pub fn events(&self) -> Vec<Value> {
        let parse = |line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: `{line}`"));
        self.stdout.lines().map(parse).collect()
    }

    pub fn events_of(&self, kind: &str) -> Vec<Value> {
        self.events().into_iter().filter(|event| event["event"] == kind).collect()
    }

    /// One value of each step event.
    pub fn steps(&self, key: &str) -> BTreeMap<u64, f64> {
        let steps = self.events_of("step");
        steps.iter().map(|e| (e["step"].as_u64().unwrap(), e[key].as_f64().unwrap())).collect()
    }

    pub fn losses(&self) -> BTreeMap<u64, f64> {
        self.steps("train_loss")
    }

    /// The losses of a killed run, whose output may end within a line.
    pub fn losses_so_far(&self) -> BTreeMap<u64, f64> {
        let (whole, _) = self.stdout.rsplit_once('\n').unwrap_or_default();
        let run = Self { stdout: whole.to_owned(), stderr: String::new(), status: self.status };
        run.losses()
    }

    pub fn summary(&self) -> Value {
        let last = self.events().pop().expect("stdout has lines");
        assert_eq!(last["event"], "summary", "{last}");
        last
    }

    /// The first line of stderr that reports an error.
    pub fn first_error(&self) -> &str {
        self.stderr.lines().find(|line| line.contains("error")).unwrap_or("no error was shown")
    }
}

/// Asserts that two series have the same steps, and values equal within a relative `tolerance`.
#[track_caller]
pub fn assert_close(found: &BTreeMap<u64, f64>, expected: &BTreeMap<u64, f64>, tolerance: f64) {
    let steps = |of: &BTreeMap<u64, f64>| of.keys().copied().collect::<Vec<_>>();
    assert_eq!(steps(found), steps(expected));
    assert!(!found.is_empty(), "no steps");
    for (step, expected) in expected {
        let found = found[step];
        assert!(
            (found - expected).abs() <= tolerance * expected.abs(),
            "step {step}: {found} instead of {expected}"
        );
    }
}
