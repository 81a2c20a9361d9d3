//! Ranks and agents of `fulgurite run` killed at random moments; many ranks on few cores.

use std::fs;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::trials::{Trial, trials};
use crate::program::{Job, Run, Running, Scratch};

const KEY: &str = "a key of sixteen characters or more";
/// Time limit for a job after a kill; the keep-alive is added if an agent was killed.
const OVER: Duration = Duration::from_secs(20);
const KEEP_ALIVE: u64 = 4;

/// Processes with this variable in their environment, with their ranks.
pub(super) fn marked(mark: &str) -> Vec<(Pid, Option<usize>)> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let found = pids.filter_map(|pid| {
        let variables = fs::read(format!("/proc/{pid}/environ")).ok()?;
        let variables: Vec<&[u8]> = variables.split(|&byte| byte == 0).collect();
        let rank = variables.iter().find_map(|one| one.strip_prefix(b"RANK="));
        let rank = rank.and_then(|rank| std::str::from_utf8(rank).ok()?.parse().ok());
        variables.contains(&mark.as_bytes()).then_some((Pid::from_raw(pid)?, rank))
    });
    found.collect()
}

/// Asserts that no process with this variable remains.
pub(super) fn assert_nothing_is_left(mark: &str) {
    // The kernel ends ranks shortly after their agent.
    let end = Instant::now() + Duration::from_secs(5);
    while !marked(mark).is_empty() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(marked(mark), [], "processes are left");
}

fn start(job: &Job<'_>, ranks: usize, restarts: u64) -> [Running; 2] {
    let endpoint = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let (ranks, restarts) = (ranks.to_string(), restarts.to_string());
    let keep_alive = KEEP_ALIVE.to_string();
    ["0", "1"].map(|node| {
        let args = [
            "--nnodes",
            "2",
            "--nproc-per-node",
            &ranks,
            "--rdzv-endpoint",
            &endpoint,
            "--max-restarts",
            &restarts,
            "--keep-alive-timeout-secs",
            &keep_alive,
            "--join-timeout-secs",
            "5",
            "--node-rank",
            node,
        ];
        job.clone().under_agent(&args).start()
    })
}

fn kill_at_random(scratch: &Scratch, trial: &mut Trial) {
    let rng = &mut trial.rng;
    let (ranks, restarts) = (rng.usize(1..=2), rng.u64(0..=1));
    let mark = format!("{}-{}", std::process::id(), trial.seed);
    let job = scratch.small().set(&[
        "trainer.strategy=fsdp",
        "trainer.devices=auto",
        "data.batch_size=3",
        "trainer.max_steps=60",
        "checkpoint.every_n_steps=5",
        &format!("trainer.default_root_dir=runs-{}", trial.seed),
    ]);
    let job = job.env("FULGURITE_JOB_KEY", KEY).env("CAMPAIGN_MARK", &mark);
    let mark = format!("CAMPAIGN_MARK={mark}");
    let agents = start(&job, ranks, restarts);
    std::thread::sleep(Duration::from_millis(rng.u64(0..2500)));
    let of_agent = rng.u32(..4) == 0;
    let victims: Vec<_> =
        marked(&mark).into_iter().filter(|(_, rank)| rank.is_none() == of_agent).collect();
    let victim = (!victims.is_empty()).then(|| victims[rng.usize(..victims.len())]);
    let killed = victim.filter(|(pid, _)| kill_process(*pid, Signal::KILL).is_ok());
    let struck = Instant::now();
    let runs: Vec<Run> = agents.into_iter().map(Running::wait).collect();
    let took = struck.elapsed();
    let said = || runs.iter().map(|run| run.stderr.as_str()).collect::<Vec<_>>().join("---\n");
    assert!(
        took < OVER + Duration::from_secs(2 * KEEP_ALIVE),
        "over only after {took:?}: {}",
        said()
    );
    assert_nothing_is_left(&mark);
    if let Some((_, Some(rank))) = killed {
        let errors: Vec<&str> =
            runs[rank / ranks].stderr.lines().filter(|line| line.starts_with("error: ")).collect();
        // A rank may have ended just before the kill.
        if let Some(first) = errors.first() {
            let cause = format!("error: rank {rank} on node {}", rank / ranks);
            assert!(first.starts_with(&cause), "{}", said());
        }
        if restarts > 0 {
            assert!(runs.iter().all(|run| run.status.success()), "{}", said());
        }
    }
}

#[test]
fn killed_rank_or_agent_leaves_nothing() {
    let scratch = Scratch::with_tokens();
    trials(3, |trial| kill_at_random(&scratch, trial));
}

/// `trainer.timeout_secs` of a job with a frozen rank.
const TIMEOUT: u64 = 3;

fn signal_with_a_frozen_rank(scratch: &Scratch, trial: &mut Trial) {
    let rng = &mut trial.rng;
    let mark = format!("{}-frozen-{}", std::process::id(), trial.seed);
    let job = scratch.small().set(&[
        "trainer.strategy=fsdp",
        "trainer.devices=auto",
        "trainer.max_steps=100000000",
        "scheduler=constant",
        &format!("trainer.timeout_secs={TIMEOUT}"),
        &format!("trainer.default_root_dir=runs-{}", trial.seed),
    ]);
    let job = job.env("FULGURITE_JOB_KEY", KEY).env("CAMPAIGN_MARK", &mark);
    let mark = format!("CAMPAIGN_MARK={mark}");
    let agents = start(&job, 1, 0);
    agents[0].reach(2);
    let frozen = rng.usize(..2);
    let ranks = marked(&mark);
    let (pid, _) = ranks.iter().find(|(_, rank)| *rank == Some(frozen)).unwrap();
    kill_process(*pid, Signal::STOP).unwrap();
    std::thread::sleep(Duration::from_millis(rng.u64(0..1000)));
    let signal = [Signal::TERM, Signal::HUP, Signal::INT][rng.usize(..3)];
    let told = rng.usize(..2);
    agents[told].signal(signal);
    let struck = Instant::now();
    let runs: Vec<Run> = agents.into_iter().map(Running::wait).collect();
    let took = struck.elapsed();
    let said = runs.iter().map(|run| run.stderr.as_str()).collect::<Vec<_>>().join("---\n");
    assert!(took < OVER + Duration::from_secs(TIMEOUT), "over only after {took:?}: {said}");
    let expected = Some(128 + signal.as_raw());
    assert!(runs.iter().all(|run| run.code() == expected), "{signal:?} to agent {told}: {said}");
    assert!(said.contains(&format!("rank {frozen}")), "the frozen rank is not named: {said}");
    assert_nothing_is_left(&mark);
}

#[test]
fn signal_ends_job_with_frozen_rank() {
    let scratch = Scratch::with_tokens();
    trials(2, |trial| signal_with_a_frozen_rank(&scratch, trial));
}

fn freeze_an_agent(scratch: &Scratch, trial: &mut Trial) {
    let rng = &mut trial.rng;
    let mark = format!("{}-agent-{}", std::process::id(), trial.seed);
    let job = scratch.small().set(&[
        "trainer.strategy=fsdp",
        "trainer.devices=auto",
        "trainer.max_steps=100000000",
        "scheduler=constant",
        &format!("trainer.timeout_secs={TIMEOUT}"),
        &format!("trainer.default_root_dir=runs-{}", trial.seed),
    ]);
    let job = job.env("FULGURITE_JOB_KEY", KEY).env("CAMPAIGN_MARK", &mark);
    let mark = format!("CAMPAIGN_MARK={mark}");
    let agents = start(&job, 1, 0);
    agents[0].reach(2);
    let frozen = rng.usize(..2);
    let [first, second] = agents;
    let (frozen, other) = if frozen == 0 { (first, second) } else { (second, first) };
    frozen.signal(Signal::STOP);
    if rng.bool() {
        // Stop the agent's ranks too, like a host that hangs.
        for (pid, rank) in marked(&mark) {
            if rank.is_some() && parent(pid) == Some(frozen.pid()) {
                let _ = kill_process(pid, Signal::STOP);
            }
        }
    }
    let run = other.wait();
    assert!(!run.status.success(), "{}", run.stderr);
    frozen.signal(Signal::CONT);
    let run = frozen.wait();
    assert!(!run.status.success(), "{}", run.stderr);
    assert_nothing_is_left(&mark);
}

/// The parent of a process.
fn parent(pid: Pid) -> Option<Pid> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    Pid::from_raw(stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()?)
}

#[test]
fn frozen_agent_ends_when_it_wakes() {
    let scratch = Scratch::with_tokens();
    trials(1, |trial| freeze_an_agent(&scratch, trial));
}

#[test]
fn many_ranks_on_few_cores_start_and_end() {
    let scratch = Scratch::with_tokens();
    trials(1, |_| {
        let job = scratch.small().set(&[
            "trainer.strategy=ddp",
            "trainer.devices=auto",
            "data.batch_size=1",
            "trainer.max_steps=2",
        ]);
        let args = ["--nproc-per-node", "32"];
        let run = job.env("FULGURITE_JOB_KEY", KEY).under_agent(&args).succeed();
        assert_eq!(run.summary()["world_size"], 32);
    });
}
