//! Training runs that `fulgurite run` starts, on one host and on two.

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;

use rustix::process::{Pid, Signal, kill_process};

use crate::program::{Job, Run, Running, Scratch, assert_close};
use crate::two_hosts::Hosts;

pub(crate) const KEY: &str = "a key of sixteen characters or more";

/// A training run with many steps that saves.
fn training(scratch: &Scratch) -> Job<'_> {
    scratch.small().set(&[
        "trainer.strategy=fsdp",
        "trainer.devices=auto",
        "trainer.global_batch_size=12",
        "data.batch_size=3",
        "trainer.max_steps=120",
        "checkpoint.every_n_steps=10",
        "trainer.default_root_dir=runs",
    ])
}

/// The agents of two nodes on this host, with two ranks each.
fn two_agents(job: &Job<'_>, args: &[&str]) -> [Running; 2] {
    let endpoint = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let common = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-endpoint", &endpoint];
    let start = |rank| {
        let args = [&common, args, &["--node-rank", rank]].concat();
        job.clone()
            .set(&["trainer.num_nodes=2"])
            .env("FULGURITE_JOB_KEY", KEY)
            .under_agent(&args)
            .start()
    };
    ["0", "1"].map(start)
}

/// The losses of all steps, as reported by one node. A repeated step has its last loss.
fn losses(runs: &[Run]) -> BTreeMap<u64, f64> {
    let losses: BTreeMap<u64, f64> = runs.iter().flat_map(Run::losses).collect();
    assert_eq!(losses.len(), 120, "no step is missing");
    losses
}

/// The process of a rank that the agent started.
pub(crate) fn rank_of(agent: &Running, rank: usize) -> Pid {
    let wanted =
        [format!("FULGURITE_AGENT={}", agent.pid().as_raw_nonzero()), format!("RANK={rank}")];
    agent.until("the rank to start", |_| {
        let entries = fs::read_dir("/proc").unwrap().flatten();
        let mut pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        let pid = pids.find(|pid| {
            let variables = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            let variables: Vec<&[u8]> = variables.split(|&byte| byte == 0).collect();
            wanted.iter().all(|wanted| variables.contains(&wanted.as_bytes()))
        })?;
        Pid::from_raw(pid)
    })
}

#[test]
fn agents_train_like_a_single_program() {
    let scratch = Scratch::with_tokens();
    let expected = training(&scratch).set(&["trainer.devices=4"]).succeed();
    let job = training(&scratch).env("FULGURITE_JOB_KEY", KEY);
    let run = job.under_agent(&["--nproc-per-node", "4"]).succeed();
    assert_eq!(losses(&[run]), expected.losses());
    let runs = two_agents(&training(&scratch), &[]).map(Running::wait);
    assert!(runs.iter().all(|run| run.status.success()), "{}{}", runs[0].stderr, runs[1].stderr);
    assert_eq!(losses(&runs), expected.losses());
}

#[test]
fn agent_says_what_it_waits_for() {
    let scratch = Scratch::with_tokens();
    let job = training(&scratch).env("FULGURITE_JOB_KEY", KEY);
    let endpoint = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let args = ["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", &endpoint];
    let agent = job.under_agent(&args).start();
    let expected =
        format!("waits for an agent that hosts the rendezvous at {endpoint}, for 600 s at most");
    agent.until("what it waits for", |this| this.said(&expected).then_some(()));
    agent.signal(Signal::TERM);
    let run = agent.wait();
    assert_eq!(run.code(), Some(143), "{}", run.stderr);
}

#[test]
fn losses_survive_a_lost_rank() {
    let scratch = Scratch::with_tokens();
    let expected = training(&scratch).set(&["trainer.devices=4"]).succeed();
    let agents = two_agents(&training(&scratch), &["--max-restarts", "2"]);
    // Find the process first: the remaining steps take less than a second.
    let rank = rank_of(&agents[1], 3);
    agents[0].reach(25);
    kill_process(rank, Signal::KILL).unwrap();
    let runs = agents.map(Running::wait);
    assert!(runs.iter().all(|run| run.status.success()), "{}{}", runs[0].stderr, runs[1].stderr);
    assert!(
        runs[1].stderr.contains("error: rank 3 on node 1"),
        "{}{}",
        runs[0].stderr,
        runs[1].stderr
    );
    let resumed = runs[0].events_of("resume").remove(0);
    assert!(resumed["step"].as_u64().unwrap() >= 20, "{resumed}");
    assert_eq!(losses(&runs), expected.losses());
}

#[test]
fn elastic_job_trains_on_fewer_ranks() {
    let scratch = Scratch::with_tokens();
    let expected = training(&scratch).set(&["trainer.devices=2"]).succeed();
    let endpoint = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let common = ["--nnodes", "1:2", "--max-restarts", "1", "--rdzv-endpoint", &endpoint];
    let waits = ["--last-call-timeout-secs", "5", "--keep-alive-timeout-secs", "5", "--node-rank"];
    let start = |rank| {
        let job = training(&scratch).env("FULGURITE_JOB_KEY", KEY);
        job.under_agent(&[&common[..], &waits, &[rank]].concat()).start()
    };
    let [first, second] = ["0", "1"].map(start);
    first.reach(25);
    // Like a host that is switched off.
    kill_process(second.pid(), Signal::KILL).unwrap();
    let run = first.wait();
    assert!(run.status.success(), "{}", run.stderr);
    assert_eq!(run.summary()["world_size"], 1);
    assert_close(&losses(&[run]), &expected.losses(), 1e-5);
}

#[test]
fn two_hosts_continue_after_losing_one() {
    let Some(hosts) = Hosts::new() else { return };
    let scratch = Scratch::with_tokens();
    let expected = training(&scratch).set(&["trainer.devices=4"]).succeed();
    let endpoint = format!("{}:29400", hosts.address(0));
    let start = |nodes: &str, host: usize, more: &[&str]| {
        let common = ["--nnodes", nodes, "--nproc-per-node", "2", "--rdzv-endpoint", &endpoint];
        let job = training(&scratch).env("FULGURITE_JOB_KEY", KEY);
        job.under_agent(&[&common, more].concat()).within(hosts.name(host)).start()
    };
    let runs = [0, 1].map(|host| start("2", host, &[])).map(Running::wait);
    assert!(runs.iter().all(|run| run.status.success()), "{}{}", runs[0].stderr, runs[1].stderr);
    assert_eq!(losses(&runs), expected.losses());

    let waits = ["--last-call-timeout-secs", "4", "--keep-alive-timeout-secs", "4"];
    let args = [&waits[..], &["--max-restarts", "1"]].concat();
    // The first agent starts first, so it gets rank 0.
    let first = start("1:2", 0, &[&args[..], &["--node-rank", "0"]].concat());
    let second = start("1:2", 1, &[&args[..], &["--node-rank", "1"]].concat());
    first.reach(25);
    hosts.cut();
    let runs = [first.wait(), second.wait()];
    assert!(runs[0].status.success(), "{}", runs[0].stderr);
    assert!(runs[0].stderr.contains("error: node 1"), "{}", runs[0].stderr);
    assert!(!runs[1].status.success());
    let lost = format!("the rendezvous at {endpoint} has not answered");
    assert!(runs[1].stderr.contains(&lost), "{}", runs[1].stderr);
    assert_close(&losses(&runs[..1]), &expected.losses(), 1e-5);
}
