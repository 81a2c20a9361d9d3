//! Ranks and agents of `fulgurite run` killed at random moments, and many ranks on few cores.

use std::fs;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::trials::{Trial, trials};
use crate::program::{Job, Run, Running, Scratch};

const KEY: &str = "a key of sixteen characters or more";
/// When a job whose rank was killed must be over; one of whose agents was, after its keep-alive too.
const OVER: Duration = Duration::from_secs(20);
const KEEP_ALIVE: u64 = 4;

/// Processes with this variable in their environment, and the ranks that they are.
fn marked(mark: &str) -> Vec<(Pid, Option<usize>)> {
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
    // The kernel ends ranks with their agent, a moment later.
    let end = Instant::now() + Duration::from_secs(5);
    while !marked(&mark).is_empty() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(marked(&mark), [], "processes are left");
    if let Some((_, Some(rank))) = killed {
        let errors: Vec<&str> =
            runs[rank / ranks].stderr.lines().filter(|line| line.starts_with("error: ")).collect();
        // A rank may have ended just before.
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
fn a_job_whose_rank_or_agent_is_killed_leaves_nothing() {
    let scratch = Scratch::with_tokens();
    trials(3, |trial| kill_at_random(&scratch, trial));
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
