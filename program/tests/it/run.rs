//! `fulgurite run` with small scripts as ranks.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use fulgurite_test_message::assert_says;
use insta::assert_snapshot;
use rustix::process::{Pid, Signal, kill_process};

const KEY: &str = "a key of sixteen characters or more";

fn agent(args: &[&str], script: &str) -> Command {
    // Reset SIGHUP: tests under `nohup` ignore it, and children would inherit that.
    let mut command = Command::new("env");
    command.args(["--default-signal=HUP", env!("CARGO_BIN_EXE_fulgurite"), "run"]);
    command.args(args).args(["--", "sh", "-c", script]);
    for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "RAYON_NUM_THREADS"] {
        command.env_remove(name);
    }
    command.env("FULGURITE_JOB_KEY", KEY).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(args: &[&str], script: &str) -> Output {
    agent(args, script).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Stderr with this host's name replaced.
fn stderr(output: &Output) -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let text = String::from_utf8_lossy(&output.stderr).replace(&format!("({host})"), "(HOST)");
    text.replace(&format!(": {host}."), ": HOST.").replace(&format!(" on {host} "), " on HOST ")
}

fn sorted(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines
}

/// A free endpoint of this host.
fn endpoint() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

/// Starts the agents of several nodes, all on this host.
fn agents(nodes: &str, count: usize, args: &[&str], script: &str) -> Vec<Child> {
    let endpoint = endpoint();
    let start = |_| {
        let common = ["--nnodes", nodes, "--rdzv-endpoint", &endpoint];
        agent(&[&common, args].concat(), script).spawn().unwrap()
    };
    (0..count).map(start).collect()
}

fn wait(children: Vec<Child>) -> Vec<Output> {
    children.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
}

fn until(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(60), "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A word that occurs in no other process's command line.
fn marker(line: u32) -> String {
    format!("marker-{}-{line}", std::process::id())
}

/// A script for ranks that end on SIGTERM; each creates a file in the directory once it is ready.
fn traps(directory: &tempfile::TempDir, marker: &str) -> String {
    let dir = directory.path().display();
    format!(
        "exec 2> /dev/null; : {marker}; trap 'exit 143' TERM; touch {dir}/$RANK; while true; do sleep 0.1; done"
    )
}

fn terminate(child: &Child) {
    signal(child, Signal::TERM);
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// Two agents with node ranks 0 and 1, and one rank each that runs the given script.
fn two_agents(scripts: [&str; 2]) -> Vec<Child> {
    let endpoint = endpoint();
    let start = |rank: usize| {
        let node_rank = rank.to_string();
        let args = ["--nnodes", "2", "--rdzv-endpoint", &endpoint, "--node-rank", &node_rank];
        agent(&args, scripts[rank]).spawn().unwrap()
    };
    vec![start(0), start(1)]
}

/// Whether a process with this word in its command line is alive.
fn lives(word: &str) -> bool {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    entries.filter(|entry| entry.path().join("cmdline").is_file()).any(|entry| {
        let state = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let zombie = state.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z'));
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        !zombie && String::from_utf8_lossy(&line).contains(word)
    })
}

#[test]
fn ranks_get_torchrun_variables() {
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE \
                  $TORCHELASTIC_RUN_ID $TORCHELASTIC_RESTART_COUNT $MASTER_ADDR $RAYON_NUM_THREADS";
    let output = run(&["--nproc-per-node", "2", "--rdzv-id", "me"], script);
    assert!(output.status.success(), "{}", stderr(&output));
    let threads = (std::thread::available_parallelism().unwrap().get() / 2).max(1);
    let line = |rank| format!("{rank}/2 {rank}/2 0/1 me 0 127.0.0.1 {threads}");
    assert_eq!(sorted(&stdout(&output)), [line(0), line(1)]);
}

#[test]
fn agents_of_two_nodes_make_one_job() {
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE $MASTER_PORT";
    let outputs = wait(agents("2", 2, &["--nproc-per-node", "2"], script));
    let all: String = outputs.iter().map(stdout).collect();
    let port = all.split_whitespace().last().unwrap();
    let lines = ["0/4 0/2 0/2", "1/4 1/2 0/2", "2/4 0/2 1/2", "3/4 1/2 1/2"];
    assert_eq!(sorted(&all), lines.map(|line| format!("{line} {port}")));
    assert!(outputs.iter().all(|output| output.status.success()));
}

#[test]
fn first_failure_is_reported_on_all_nodes() {
    let marker = marker(line!());
    let script = format!(
        "if [ $RANK = 3 ]; then exit 7; fi; sleep 1000 & : {marker}; trap '' TERM; while true; do sleep 1; done"
    );
    let endpoint = endpoint();
    let start = |rank: &str| {
        let args = [
            "--nnodes",
            "2",
            "--nproc-per-node",
            "2",
            "--rdzv-endpoint",
            &endpoint,
            "--node-rank",
            rank,
        ];
        agent(&args, &script).spawn().unwrap()
    };
    let outputs = wait(vec![start("0"), start("1")]);
    assert_eq!(outputs[0].status.code(), Some(7));
    assert_eq!(outputs[1].status.code(), Some(7));
    assert_says!(stderr(&outputs[0]), "error: rank 3 on node 1 (HOST) ended with exit code 7");
    assert_says!(stderr(&outputs[1]), "error: rank 3 on node 1 (HOST) ended with exit code 7");
    assert!(!lives(&marker), "a rank is left");
}

#[test]
fn restarts_up_to_the_limit() {
    let directory = tempfile::tempdir().unwrap();
    let script = format!(
        "touch {}/$RANK.$TORCHELASTIC_RESTART_COUNT.$TORCHELASTIC_MAX_RESTARTS; \
         if [ $TORCHELASTIC_RESTART_COUNT -lt 2 ]; then kill -9 $$; fi",
        directory.path().display()
    );
    let output = run(&["--nproc-per-node", "2", "--max-restarts", "2"], &script);
    assert!(output.status.success(), "{}", stderr(&output));
    let count = fs::read_dir(directory.path()).unwrap().count();
    assert_eq!(count, 6);
    let output = run(&["--max-restarts", "1"], "exit 5");
    assert_eq!(output.status.code(), Some(5));
    assert_snapshot!(stderr(&output), @"
    error: rank 0 on node 0 (HOST) ended with exit code 5
    the job starts again (0 restarts left)
    error: rank 0 on node 0 (HOST) ended with exit code 5
    ");
}

#[test]
fn rank_logs_and_line_prefixes() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().display().to_string();
    let script = "echo out $RANK; echo err $RANK >&2; exit $((1 - TORCHELASTIC_RESTART_COUNT))";
    let args =
        ["--nproc-per-node", "2", "--rdzv-id", "job", "--log-dir", &dir, "--max-restarts", "1"];
    let output = run(&args, script);
    assert_eq!(stdout(&output), "");
    let jobs = || -> Vec<PathBuf> {
        let entries = fs::read_dir(directory.path()).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    };
    let [first] = &jobs()[..] else { panic!("the logs of one job: {:?}", jobs()) };
    assert!(first.file_name().unwrap().to_str().unwrap().starts_with("job_"));
    let log = |job: &Path, attempt: u32, rank: usize, name: &str| {
        let path = format!("attempt_{attempt}/{rank}/{name}.log");
        fs::read_to_string(job.join(path)).unwrap()
    };
    let stdout_and_stderr = (log(first, 0, 1, "stdout"), log(first, 1, 0, "stderr"));
    assert_eq!(stdout_and_stderr, ("out 1\n".into(), "err 0\n".into()));
    // The location of logs is printed even if a rank fails. Either rank may be first.
    let said = stderr(&output).replace(&first.display().to_string(), "JOB");
    let said = said.replace("rank 1 ", "rank 0 ").replace("/1/", "/0/");
    assert_snapshot!(said, @"
    the output of the ranks is in JOB/attempt_0/
    error: rank 0 on node 0 (HOST) ended with exit code 1; see JOB/attempt_0/0/stderr.log
    the job starts again (0 restarts left)
    the output of the ranks is in JOB/attempt_1/
    ");
    let output = run(&[&args[..], &["--tee"]].concat(), script);
    assert!(output.status.success());
    let expected = ["[rank0]: out 0", "[rank0]: out 0", "[rank1]: out 1", "[rank1]: out 1"];
    assert_eq!(sorted(&stdout(&output)), expected);
    assert!(stderr(&output).contains("[rank1]: err 1\n"));
    // An earlier job with the same id keeps its own folder.
    let second = jobs().into_iter().find(|job| job != first).expect("a folder of its own");
    assert_eq!(log(&second, 1, 1, "stdout"), "out 1\n");
}

#[test]
fn elastic_job_continues_on_fewer_nodes() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().display();
    // The killed agent's rank is not a Fulgurite program and may outlive it briefly.
    let script =
        format!("touch {dir}/$RANK.of.$WORLD_SIZE; if [ $WORLD_SIZE = 2 ]; then exec sleep 60; fi");
    let args = [
        "--max-restarts",
        "1",
        "--last-call-timeout-secs",
        "4",
        "--keep-alive-timeout-secs",
        "600",
    ];
    let endpoint = endpoint();
    let start = |rank: &str| {
        let common = ["--nnodes", "1:2", "--rdzv-endpoint", &endpoint, "--node-rank", rank];
        agent(&[&common, &args[..]].concat(), &script).spawn().unwrap()
    };
    let (first, mut second) = (start("0"), start("1"));
    let is_there = |name: &str| directory.path().join(name).exists();
    until("both ranks", || is_there("0.of.2") && is_there("1.of.2"));
    // Long before it is considered lost for its silence.
    second.kill().unwrap();
    second.wait().unwrap();
    let outputs = wait(vec![first]);
    assert!(outputs[0].status.success(), "{}", stderr(&outputs[0]));
    assert!(is_there("0.of.1"));
    assert_snapshot!(stderr(&outputs[0]), @"
    error: node 1 (HOST) has not been heard of for 2s: it is down, or cut off, or its agent was killed
    the job starts again (0 restarts left)
    ");
}

#[test]
fn returning_node_rejoins_at_next_restart() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().display();
    let script = format!(
        "touch {dir}/$RANK.of.$WORLD_SIZE; while [ $WORLD_SIZE = 1 ] && [ ! -e {dir}/go ]; do sleep 0.1; done; \
         [ $WORLD_SIZE = 2 ] || exit 1"
    );
    let args = ["--max-restarts", "1", "--last-call-timeout-secs", "1"];
    let endpoint = endpoint();
    let start = || {
        let common = ["--nnodes", "1:2", "--rdzv-endpoint", &endpoint];
        agent(&[&common, &args[..]].concat(), &script).spawn().unwrap()
    };
    let first = start();
    until("the first rank", || directory.path().join("0.of.1").exists());
    let mut second = start();
    // The agent has joined once it reports that it waits.
    let mut said = String::new();
    BufReader::new(second.stderr.as_mut().unwrap()).read_line(&mut said).unwrap();
    assert_says!(said.trim_end(), "the job runs on other nodes … waits until it is taken in");
    fs::write(directory.path().join("go"), "").unwrap();
    let outputs = wait(vec![first, second]);
    assert!(outputs.iter().all(|output| output.status.success()), "{}", stderr(&outputs[0]));
    assert!(directory.path().join("1.of.2").exists());
}

#[test]
fn signal_ends_ranks_without_restart() {
    let (directory, marker) = (tempfile::tempdir().unwrap(), marker(line!()));
    let args = ["--nproc-per-node", "2", "--max-restarts", "3"];
    let child = agent(&args, &traps(&directory, &marker)).spawn().unwrap();
    until("the ranks", || fs::read_dir(directory.path()).unwrap().count() == 2);
    terminate(&child);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(143));
    assert_says!(stderr(&output), "interrupted: the ranks finish their step; interrupt again …");
    assert!(!lives(&marker), "a rank is left");
}

#[test]
fn signal_to_one_agent_ends_all_nodes() {
    let (directory, marker) = (tempfile::tempdir().unwrap(), marker(line!()));
    let args = ["--nproc-per-node", "2", "--max-restarts", "3"];
    let children = agents("2", 2, &args, &traps(&directory, &marker));
    until("the ranks", || fs::read_dir(directory.path()).unwrap().count() == 4);
    terminate(&children[1]);
    let outputs = wait(children);
    assert_eq!(
        outputs.iter().map(|output| output.status.code()).collect::<Vec<_>>(),
        [Some(143); 2]
    );
    assert_snapshot!(stderr(&outputs[0]), @"");
    assert_says!(stderr(&outputs[1]), "interrupted … finish their step; interrupt again …");
    assert!(!lives(&marker), "a rank is left");
}

#[test]
fn failure_after_signal_ends_all_nodes() {
    let (directory, marker) = (tempfile::tempdir().unwrap(), marker(line!()));
    let dir = directory.path().display();
    let script = |on_term: &str| {
        format!(
            "exec 2> /dev/null; : {marker}; trap '{on_term}' TERM; touch {dir}/$RANK; \
             while true; do sleep 0.1; done"
        )
    };
    // Rank 0 is stuck, and rank 1 notices it.
    let children = two_agents([&script(""), &script("exit 5")]);
    until("the ranks", || fs::read_dir(directory.path()).unwrap().count() == 2);
    terminate(&children[0]);
    let outputs = wait(children);
    let codes: Vec<_> = outputs.iter().map(|output| output.status.code()).collect();
    assert_eq!(codes, [Some(143); 2]);
    assert_snapshot!(stderr(&outputs[0]), @"
    interrupted: the ranks finish their step; interrupt again to end them at once
    error: rank 1 on node 1 (HOST) ended with exit code 5
    ");
    assert_says!(stderr(&outputs[1]), "error: rank 1 on node 1 (HOST) ended with exit code 5");
    assert!(!lives(&marker), "a rank is left");
}

#[test]
fn second_signal_ends_all_nodes() {
    let (directory, marker) = (tempfile::tempdir().unwrap(), marker(line!()));
    let dir = directory.path().display();
    let script = format!(
        "exec 2> /dev/null; : {marker}; trap '' TERM; touch {dir}/$RANK; while true; do sleep 0.1; done"
    );
    let mut children = two_agents([&script, &script]);
    until("the ranks", || fs::read_dir(directory.path()).unwrap().count() == 2);
    // Two signals within one poll count as one.
    while children[1].try_wait().unwrap().is_none() {
        terminate(&children[1]);
        std::thread::sleep(Duration::from_millis(200));
    }
    let outputs = wait(children);
    assert!(outputs.iter().all(|output| output.status.code() == Some(143)));
    assert!(!lives(&marker), "a rank is left");
}

#[test]
fn hangup_ends_the_job_unless_ignored() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().display();
    let script = format!(
        "exec 2> /dev/null; trap 'exit 129' HUP; trap 'exit 143' TERM; touch {dir}/$RANK; \
         while true; do sleep 0.1; done"
    );
    let children = two_agents([&script, &script]);
    let there = || fs::read_dir(directory.path()).unwrap().count();
    until("the ranks", || there() == 2);
    // A closing terminal sends SIGHUP twice.
    signal(&children[1], Signal::HUP);
    signal(&children[1], Signal::HUP);
    let codes: Vec<_> = wait(children).iter().map(|output| output.status.code()).collect();
    assert_eq!(codes, [Some(129); 2]);

    let inner = agent(&["--rdzv-id", "job"], &format!("touch {dir}/nohup; sleep 1000"));
    let mut ignoring = Command::new("sh");
    // Drop `env`'s option, which would restore the signal's default.
    ignoring.args(["-c", "trap '' HUP; exec \"$@\"", "sh"]).args(inner.get_args().skip(1));
    ignoring.stdout(Stdio::piped()).stderr(Stdio::piped());
    let ignoring = ignoring.spawn().unwrap();
    until("the rank", || there() == 3);
    signal(&ignoring, Signal::HUP);
    terminate(&ignoring);
    assert_eq!(ignoring.wait_with_output().unwrap().status.code(), Some(143));
}

#[test]
fn process_in_own_session_ends_with_rank() {
    // No other process sleeps for this duration.
    let sleep = format!("sleep 9{}.{}", std::process::id(), line!());
    let script = format!(
        "setsid {sleep} & session() {{ cut -d' ' -f6 /proc/$1/stat; }}; \
         while [ $(session $!) = $(session $$) ]; do sleep 0.01; done"
    );
    let output = run(&[], &script);
    assert!(output.status.success());
    assert_says!(stderr(&output), "ended with the job: 1 orphan …");
    assert!(!lives(&sleep.replace(' ', "\0")), "a process is left");
}

#[test]
fn blocked_terminal_does_not_block_ranks() {
    let directory = tempfile::tempdir().unwrap();
    let done = directory.path().join("done");
    // Far more than a pipe and the queue hold.
    let script = format!("yes a line | head -c 20000000; touch {}; exit 3", done.display());
    for args in [&["--tee"][..], &["--tee", "--log-dir", directory.path().to_str().unwrap()]] {
        let mut child = agent(args, &script).spawn().unwrap();
        until("the rank to end", || done.exists());
        fs::remove_file(&done).unwrap();
        // The output was never read.
        assert_eq!(child.wait().unwrap().code(), Some(3));
    }
}

#[test]
fn dropped_lines_are_counted() {
    let directory = tempfile::tempdir().unwrap();
    let done = directory.path().join("done");
    let dir = directory.path().display();
    let script = format!(
        "yes a line | head -n 2000000; touch {dir}/done; while [ ! -e {dir}/read ]; do sleep 0.1; done"
    );
    let child = agent(&["--tee"], &script).spawn().unwrap();
    until("the lines", || done.exists());
    fs::write(directory.path().join("read"), "").unwrap();
    let said = stdout(&child.wait_with_output().unwrap());
    let lines = said.lines().filter(|line| *line == "[rank0]: a line").count();
    let missing = said
        .lines()
        .filter_map(|line| line.strip_prefix("warning: ")?.strip_suffix(" lines left out here"));
    let missing: usize = missing.map(|count| count.parse::<usize>().unwrap()).sum();
    assert!(missing > 0);
    assert_eq!(lines + missing, 2_000_000);
}

#[test]
fn node_rank_belongs_to_one_live_agent() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().display();
    // As above, the killed agent's rank stays for up to a minute.
    let script = format!(
        "touch {dir}/$RANK.$TORCHELASTIC_RESTART_COUNT; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exec sleep 60"
    );
    let endpoint = endpoint();
    let start = |rank: &str| {
        let args = ["--nnodes", "2", "--max-restarts", "1", "--rdzv-endpoint", &endpoint];
        agent(&[&args, &["--node-rank", rank][..]].concat(), &script).spawn().unwrap()
    };
    let (first, mut second) = (start("0"), start("1"));
    until("both ranks", || ["0.0", "1.0"].iter().all(|name| directory.path().join(name).exists()));
    let twin = wait(vec![start("1")]);
    assert_snapshot!(stderr(&twin[0]), @"
    the job runs on other nodes; this one waits until it is taken in
    error: launch: this agent was told --node-rank 1, which another one on HOST has
    ");
    // Like a host that restarts long before it is considered lost.
    second.kill().unwrap();
    second.wait().unwrap();
    let outputs = wait(vec![first, start("1")]);
    assert!(outputs.iter().all(|output| output.status.success()), "{}", stderr(&outputs[0]));
    assert!(directory.path().join("1.1").exists());
    assert_snapshot!(stderr(&outputs[0]), @"
    error: node 1 (HOST) has not been heard of for 2s: it is down, or cut off, or its agent was killed
    the job starts again (0 restarts left)
    ");
}

#[test]
fn wrong_input_is_named() {
    let error = |args: &[&str]| stderr(&run(args, "true"));
    assert_says!(error(&["--nproc-per-node", "many"]), "error: … --nproc-per-node is `many` …");
    assert_says!(error(&["--nproc-per-node", "0"]), "error: launch: --nproc-per-node must be 1 …");
    assert_says!(error(&["--nnodes", "2"]), "error: launch … several nodes … --rdzv-endpoint …");
    assert_snapshot!(error(&["--nnodes", "2:1"]), @"
    error: invalid value '2:1' for '--nnodes <M|MIN:MAX>': launch: the nodes are `2:1`; they should be a number such as 2, or the least and the most such as 1:4, of 1 to 4096

    For more information, try '--help'.
    ");
    assert_snapshot!(error(&["--nnodes", "2", "--rdzv-endpoint", "here:0"]), @"
    error: invalid value 'here:0' for '--rdzv-endpoint <HOST[:PORT]>': launch: the rendezvous endpoint is `here:0`; it should be a host and a port such as node0:29400, [fd00::1]:29400 or 10.0.0.1:29400

    For more information, try '--help'.
    ");
    assert_says!(
        error(&["--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:9", "--node-rank", "2"]),
        "error: launch: --node-rank is 2 … 2 nodes … 0 to 1"
    );
    assert_says!(
        error(&["--nnodes", "2", "--rdzv-endpoint", "a,b"]),
        "error: launch: --rdzv-endpoint names 2 hosts … one, or an odd number …"
    );
    assert_says!(
        error(&["--nnodes", "2", "--rdzv-endpoint", "a,b,a:29400"]),
        "error: launch: --rdzv-endpoint names a:29400 twice"
    );
    let mut keyless = agent(&["--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:9"], "true");
    assert_says!(
        stderr(&keyless.env_remove("FULGURITE_JOB_KEY").output().unwrap()),
        "error: launch … several nodes need a secret … FULGURITE_JOB_KEY … --job-key-file"
    );
    let mut missing = Command::new(env!("CARGO_BIN_EXE_fulgurite"));
    let missing = missing.args(["run", "--", "/no/such/program"]).output().unwrap();
    assert_says!(stderr(&missing), "error: node 0 (HOST) … rank 0 cannot … `/no/such/program` …");
    assert_says!(error(&["--rdzv-id", "../other"]), "error: launch: --rdzv-id is `../other` …");
    let unreachable = [
        "--nnodes",
        "2",
        "--node-rank",
        "1",
        "--rdzv-endpoint",
        "127.0.0.1:9",
        "--join-timeout-secs",
        "1",
    ];
    assert_says!(error(&unreachable), "error: launch … 127.0.0.1:9 … Connection refused …");
    // Another listener, not a store, holds the port.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = taken.local_addr().unwrap().to_string();
    let taken_by_another = ["--nnodes", "2", "--rdzv-endpoint", &at, "--join-timeout-secs", "1"];
    assert_says!(error(&taken_by_another).replace(&at, "HERE"), "error: launch … HERE … listens …");
    let alone = Command::new(env!("CARGO_BIN_EXE_fulgurite")).args(["run"]).output().unwrap();
    assert!(stderr(&alone).contains("required arguments were not provided"), "{}", stderr(&alone));
}

#[test]
fn agents_with_other_endpoints_are_refused() {
    let [first, second, third] = [(); 3].map(|()| endpoint());
    let start = |endpoints: &[&String]| {
        let endpoints: Vec<&str> = endpoints.iter().map(|one| one.as_str()).collect();
        let endpoints = endpoints.join(",");
        let args = ["--nnodes", "2", "--join-timeout-secs", "20", "--rdzv-endpoint", &endpoints];
        agent(&args, "true").spawn().unwrap()
    };
    for others in [&[&second, &first, &third][..], &[&first]] {
        let mut one = start(&[&first, &second, &third]);
        until("its seat", || TcpStream::connect(&first).is_ok());
        let refused = wait(vec![start(others)]);
        let said = stderr(&refused[0]);
        assert!(said.contains("they must be told the same, in the same order"), "{said}");
        assert!(said.contains(&format!("the others {first},{second},{third}")), "{said}");
        // It may have been refused too, by the seat of the other one.
        let _ = one.kill();
        one.wait().unwrap();
    }
}

#[test]
fn agents_with_other_options_are_refused() {
    let endpoint = endpoint();
    let start = |args: &[&str]| {
        let args = [args, &["--rdzv-endpoint", &endpoint, "--join-timeout-secs", "3"]].concat();
        agent(&args, "true").spawn().unwrap()
    };
    let first = start(&["--nnodes", "2", "--node-rank", "0"]);
    until("the rendezvous", || TcpStream::connect(&endpoint).is_ok());
    let other = wait(vec![start(&["--nnodes", "3", "--node-rank", "1"])]);
    assert_says!(stderr(&other[0]), "error: launch … told --nnodes 3 … rendezvous 2 … the same");
    let other = wait(vec![start(&["--nnodes", "2", "--node-rank", "1", "--max-restarts", "2"])]);
    assert_says!(stderr(&other[0]), "error: launch … --max-restarts 2 … rendezvous 0 … the same");
    assert_says!(stderr(&wait(vec![first])[0]), "error: the job has failed … 1 of 2 nodes: HOST …");
}
