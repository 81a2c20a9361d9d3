//! Elastic trainings whose ranks `fulgurite run` starts, on one host and on two.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};
use serde_json::Value;

use crate::agents::{KEY, rank_of};
use crate::program::{Job, Run, Running, Scratch, assert_close, can_mount};
use crate::two_hosts::Hosts;

const STEPS: u64 = 400;

/// An elastic training, whose ranks an agent can start.
pub(crate) fn training<'a>(scratch: &'a Scratch, strategy: &str) -> Job<'a> {
    scratch.small().set(&[
        &format!("trainer.strategy={strategy}"),
        "trainer.devices=auto",
        "trainer.global_batch_size=8",
        &format!("trainer.max_steps={STEPS}"),
        "trainer.elastic.enabled=true",
        // A high rate amplifies the rounding of sums in another order from step to step.
        "optimizer.lr=1e-4",
        "trainer.enable_plan=false",
        "trainer.default_root_dir=runs",
    ])
}

/// A training that goes on until it is [ended](end_soon).
fn endless<'a>(scratch: &'a Scratch, strategy: &str) -> Job<'a> {
    let mut job = training(scratch, strategy).set(&["trainer.max_steps=1000000"]);
    // Losses do not depend on the number of steps.
    job.replace("scheduler.warmup_steps=3", "scheduler=\"constant\"");
    job
}

/// Ends a training ten steps later, as by Ctrl-C. Returns the results, and the option of a training
/// of as many steps.
#[track_caller]
fn end_soon<const N: usize>(running: [Running; N]) -> ([Run; N], String) {
    let steps = || running.iter().map(Running::steps).sum::<usize>();
    let (before, begun) = (steps(), Instant::now());
    while steps() < before + 10 {
        assert!(begun.elapsed() < Duration::from_secs(120), "the training stands still");
        std::thread::sleep(Duration::from_millis(20));
    }
    running[0].signal(Signal::INT);
    let runs = running.map(Running::wait);
    for run in &runs {
        assert_eq!(run.code(), Some(130), "{}{}", run.stdout, run.stderr);
    }
    let summary = runs.iter().flat_map(|run| run.events_of("summary")).next();
    let steps = summary.expect("rank 0 is there")["steps"].as_u64().expect("a number");
    (runs, format!("trainer.max_steps={steps}"))
}

/// The losses of the training on four ranks, of which none is lost.
fn undisturbed(job: &Job<'_>) -> Vec<(u64, f64)> {
    job.clone().set(&["trainer.devices=4"]).succeed().losses().into_iter().collect()
}

/// The losses of the training on one rank, which are the same up to rounding.
fn alone(job: &Job<'_>) -> Vec<(u64, f64)> {
    let job = job.clone().set(&["trainer.devices=1", "trainer.strategy=ddp"]);
    job.succeed().losses().into_iter().collect()
}

/// Where agents meet, and the options that all of them have.
#[derive(Clone)]
pub(crate) struct Agents<'a> {
    job: Job<'a>,
    /// Where agents meet: one endpoint, or several separated by commas.
    endpoint: String,
    nodes: &'a str,
    devices: &'a str,
    keep_alive_secs: &'a str,
    leave_on_sigterm: bool,
}

impl<'a> Agents<'a> {
    pub(crate) fn new(job: Job<'a>, nodes: &'a str, devices: &'a str) -> Self {
        // An agent that is killed is noticed long before it is silent for so long.
        let (keep_alive_secs, leave_on_sigterm) = ("600", false);
        Self { job, endpoint: free_endpoints(1), nodes, devices, keep_alive_secs, leave_on_sigterm }
    }

    /// Agents that meet at three endpoints.
    pub(crate) fn with_three_seats(self) -> Self {
        Self { endpoint: free_endpoints(3), ..self }
    }

    /// Agents on several hosts, whose cables may be cut.
    pub(crate) fn meeting_at(self, endpoint: String) -> Self {
        // A loaded machine may keep a coordinator from its seats for a while.
        let keep_alive_secs = if endpoint.contains(',') { "5" } else { "3" };
        Self { endpoint, keep_alive_secs, ..self }
    }

    pub(crate) fn job(&self, node_rank: &str) -> Job<'a> {
        self.with(&["--node-rank", node_rank])
    }

    /// An agent that starts no ranks.
    pub(crate) fn coordinator(&self) -> Job<'a> {
        Self { devices: "0", ..self.clone() }.with(&[])
    }

    fn start_coordinator(&self) -> Running {
        let coordinator = self.coordinator().start();
        // With several seats it says that it may coordinate.
        coordinator.until("the rendezvous", |this| this.said("coordinate").then_some(()));
        coordinator
    }

    /// Agents that leave the job on SIGTERM.
    fn leaving_on_sigterm(self) -> Self {
        Self { leave_on_sigterm: true, ..self }
    }

    fn with(&self, more: &[&str]) -> Job<'a> {
        let leave: &[&str] = if self.leave_on_sigterm { &["--leave-on-sigterm"] } else { &[] };
        let args = [
            "--nnodes",
            self.nodes,
            "--nproc-per-node",
            self.devices,
            "--rdzv-endpoint",
            &self.endpoint,
            "--keep-alive-timeout-secs",
            self.keep_alive_secs,
            "--last-call-timeout-secs",
            "5",
        ];
        self.job.clone().env("FULGURITE_JOB_KEY", KEY).under_agent(&[&args, leave, more].concat())
    }

    pub(crate) fn start(&self, node_rank: &str) -> Running {
        self.job(node_rank).start()
    }

    fn start_two(&self) -> [Running; 2] {
        ["0", "1"].map(|node_rank| self.start(node_rank))
    }
}

/// Endpoints with free ports, separated by commas.
fn free_endpoints(count: usize) -> String {
    let listen = |_| TcpListener::bind("127.0.0.1:0").unwrap();
    let listeners: Vec<TcpListener> = (0..count).map(listen).collect();
    let address = |listener: &TcpListener| listener.local_addr().unwrap().to_string();
    listeners.iter().map(address).collect::<Vec<_>>().join(",")
}

pub(crate) fn losses(runs: &[Run]) -> Vec<(u64, f64)> {
    let all: std::collections::BTreeMap<u64, f64> = runs.iter().flat_map(Run::losses).collect();
    all.into_iter().collect()
}

/// The losses that agents report, one of which was killed.
fn with_killed(killed: &Run, runs: &[Run]) -> Vec<(u64, f64)> {
    let mut all = killed.losses_so_far();
    all.extend(losses(runs));
    all.into_iter().collect()
}

/// Asserts that agents have gone on to the end of the training, and returns the generations that
/// they report.
#[track_caller]
fn gone_on(runs: &[Run]) -> Vec<Value> {
    for run in runs {
        assert_eq!(run.code(), Some(0), "{}{}", run.stdout, run.stderr);
    }
    generations(runs)
}

/// Returns the generations that agents report. None reports an error.
#[track_caller]
fn generations(runs: &[Run]) -> Vec<Value> {
    for run in runs {
        assert!(!run.stderr.contains("error"), "{}", run.stderr);
    }
    let mut generations: Vec<Value> =
        runs.iter().flat_map(|run| run.events_of("generation")).collect();
    generations.sort_by_key(|event| event["generation"].as_u64());
    assert!(!generations.is_empty(), "{}{}", runs[0].stdout, runs[0].stderr);
    generations
}

/// Asserts that no state is left in the run's directory.
#[track_caller]
fn left_nothing(scratch: &Scratch) {
    let run_dirs: Vec<_> = fs::read_dir(scratch.path().join("runs")).unwrap().flatten().collect();
    assert!(!run_dirs.is_empty());
    for run_dir in run_dirs {
        let kept = run_dir.path().join("elastic");
        assert!(!kept.exists(), "{}", kept.display());
    }
}

#[test]
fn agents_replace_a_killed_rank_to_the_bit() {
    let scratch = Scratch::with_tokens();
    let expected = undisturbed(&training(&scratch, "ddp"));
    let agents = Agents::new(training(&scratch, "ddp"), "2", "2");
    for (node, rank) in [(1, 3), (0, 0)] {
        let running = agents.start_two();
        let process = rank_of(&running[node], rank);
        running[0].reach(20);
        kill_process(process, Signal::KILL).unwrap();
        let runs = running.map(Running::wait);
        let generations = gone_on(&runs);
        assert_eq!(generations.len(), 1);
        assert_eq!(generations[0]["world_size"], 4);
        assert_eq!(generations[0]["repeated_steps"], 0);
        assert_eq!(losses(&runs), expected, "rank {rank} was killed");
        left_nothing(&scratch);
    }
}

#[test]
fn a_single_agent_uses_the_hosts_memory() {
    let scratch = Scratch::with_tokens();
    let expected = undisturbed(&training(&scratch, "fsdp"));
    let job = training(&scratch, "fsdp").set(&["trainer.elastic.replicas=1"]);
    let running = job.under_agent(&["--nproc-per-node", "4"]).start();
    let process = rank_of(&running, 2);
    running.reach(20);
    kill_process(process, Signal::KILL).unwrap();
    let runs = [running.wait()];
    assert_eq!(gone_on(&runs)[0]["from"], "the copies in the host's memory");
    assert_eq!(losses(&runs), expected);
}

#[test]
fn killed_rank_gets_its_shards_from_hosts() {
    let scratch = Scratch::with_tokens();
    let expected = undisturbed(&training(&scratch, "fsdp"));
    let job = training(&scratch, "fsdp").set(&["trainer.elastic.replicas=1"]);
    let running = Agents::new(job, "2", "2").start_two();
    let process = rank_of(&running[1], 2);
    running[0].reach(20);
    kill_process(process, Signal::KILL).unwrap();
    let runs = running.map(Running::wait);
    let generation = &gone_on(&runs)[0];
    assert_eq!(generation["from"], "the copies in the hosts' memory");
    assert!(generation["repeated_steps"].as_u64().unwrap() <= 2, "{generation}");
    assert_eq!(losses(&runs), expected);
    left_nothing(&scratch);
}

#[test]
fn shards_of_a_lost_host_are_with_the_next() {
    let scratch = Scratch::with_tokens();
    let job = endless(&scratch, "fsdp").set(&["trainer.elastic.replicas=1"]);
    let agents = Agents::new(job.clone(), "1:2", "2");
    for node in [0, 1] {
        let coordinator = agents.start_coordinator();
        let mut running = Vec::from(agents.start_two());
        running[0].reach(20);
        let lost = running.remove(node);
        kill_process(lost.pid(), Signal::KILL).unwrap();
        let killed = lost.wait();
        let left = running.remove(0);
        left.until("its steps", |this| (this.count_of("generation") == 1).then_some(()));
        let (runs, steps) = end_soon([left]);
        let coordinator = coordinator.wait();
        assert_eq!(coordinator.code(), Some(130), "{}{}", coordinator.stderr, runs[0].stderr);
        let generation = &generations(&runs)[0];
        assert_eq!(generation["from"], "the copies in the host's memory");
        assert!(generation["repeated_steps"].as_u64().unwrap() <= 2, "{generation}");
        left_nothing(&scratch);
        assert_close_to(&with_killed(&killed, &runs), &undisturbed(&job.clone().set(&[&steps])));
    }
}

#[test]
fn lost_shards_come_back_to_a_new_host() {
    let scratch = Scratch::with_tokens();
    let job = endless(&scratch, "fsdp")
        .set(&["trainer.global_batch_size=12", "trainer.elastic.replicas=1"]);
    let agents = Agents::new(job.clone(), "1:3", "1");
    let [first, second, third] = ["0", "1", "2"].map(|node| agents.start(node));
    first.reach(20);
    kill_process(second.pid(), Signal::KILL).unwrap();
    drop(second);
    first.until("the others to go on", |this| (this.count_of("generation") == 1).then_some(()));
    let back = agents.start("1");
    first.until("the host to come back", |this| (this.count_of("generation") == 2).then_some(()));
    let (runs, steps) = end_soon([first, third, back]);
    let generations = generations(&runs);
    let of = |key: &str| generations.iter().map(|event| event[key].clone()).collect::<Vec<_>>();
    assert_eq!(of("world_size"), [2, 3]);
    // A host that joins takes nothing away: the others hold everything.
    assert_eq!(of("from"), ["the copies in the hosts' memory", "the memory of ranks [0, 1]"]);
    assert!(
        of("repeated_steps").iter().all(|steps| steps.as_u64().unwrap() <= 2),
        "{generations:?}"
    );
    left_nothing(&scratch);
    assert_close_to(&losses(&runs), &alone(&job.set(&[&steps])));
}

#[test]
fn hosts_need_no_shared_directory() {
    if !can_mount() {
        return;
    }
    /// Other hosts see neither its run directories nor its memory.
    const APART: &str =
        "mkdir -p runs; mount -t tmpfs none runs; mount -t tmpfs none /dev/shm; exec \"$@\"";
    let hsdp = "{ type = \"hsdp\", data_parallel_replicate_size = 2 }";
    for (strategy, replicas) in [("ddp", 0), (hsdp, 0), ("fsdp", 1)] {
        let scratch = Scratch::with_tokens();
        let job =
            endless(&scratch, strategy).set(&[&format!("trainer.elastic.replicas={replicas}")]);
        let agents = Agents::new(job.clone(), "1:2", "2");
        let start = |node: &str| agents.job(node).mounting(APART).start();
        let [first, second] = ["0", "1"].map(start);
        first.reach(20);
        kill_process(second.pid(), Signal::KILL).unwrap();
        drop(second);
        first.until("the other to go on", |this| (this.count_of("generation") == 1).then_some(()));
        let back = start("1");
        first.until("the host to come", |this| (this.count_of("generation") == 2).then_some(()));
        let (runs, steps) = end_soon([first, back]);
        let generations = generations(&runs);
        let repeated = |event: &Value| event["repeated_steps"].as_u64().unwrap();
        assert!(generations.iter().all(|event| repeated(event) <= 2 * replicas), "{generations:?}");
        let from = |generation: usize| generations[generation]["from"].as_str().unwrap();
        let memory = if replicas == 0 { "the memory of rank" } else { "the copies in the host's" };
        assert!(from(0).starts_with(memory), "{strategy}: {}", from(0));
        assert!(from(1).starts_with("the memory of rank"), "{strategy}: {}", from(1));
        assert_close_to(&losses(&runs), &alone(&job.set(&[&steps])));
    }
}

#[test]
fn two_lost_neighbours_leave_the_checkpoint() {
    let scratch = Scratch::with_tokens();
    let job = training(&scratch, "fsdp").set(&["trainer.global_batch_size=12"]);
    let expected = alone(&job);
    let job = job.set(&["trainer.elastic.replicas=1", "checkpoint.every_n_steps=8"]);
    let agents = Agents::new(job, "1:3", "1");
    let [first, second, third] = ["0", "1", "2"].map(|node| agents.start(node));
    first.reach(20);
    kill_process(second.pid(), Signal::KILL).unwrap();
    kill_process(third.pid(), Signal::KILL).unwrap();
    let runs = [first.wait()];
    let last = gone_on(&runs).pop().unwrap();
    assert_eq!((&last["from"], &last["world_size"]), (&"the last checkpoint".into(), &1.into()));
    assert!(runs[0].stderr.contains("part was on two hosts"), "{}", runs[0].stderr);
    assert_close_to(&losses(&runs), &expected);
}

#[test]
fn ranks_of_all_nodes_may_be_lost_at_once() {
    let scratch = Scratch::with_tokens();
    let job = training(&scratch, "ddp");
    let expected = job.clone().set(&["trainer.devices=2"]).succeed().losses();
    let agents = Agents::new(job.set(&["checkpoint.every_n_steps=8"]), "2", "1");
    let running = agents.start_two();
    let ranks = [rank_of(&running[0], 0), rank_of(&running[1], 1)];
    running[0].reach(20);
    for signal in [Signal::STOP, Signal::KILL] {
        ranks.iter().for_each(|rank| kill_process(*rank, signal).unwrap());
    }
    let runs = running.map(Running::wait);
    assert_eq!(gone_on(&runs).last().unwrap()["from"], "the last checkpoint");
    assert_eq!(losses(&runs), expected.into_iter().collect::<Vec<_>>());
    let run_dirs = fs::read_dir(scratch.path().join("runs")).unwrap().count();
    assert_eq!(run_dirs, 2, "the run goes on in its directory");
}

#[test]
fn a_rank_that_is_lost_too_often_stays_out() {
    let scratch = Scratch::with_tokens();
    // Long enough for its agent to be taken in again, which it must not.
    let job = training(&scratch, "ddp")
        .set(&["trainer.elastic.max_restarts=0", "trainer.max_steps=3000"]);
    let running = Agents::new(job, "1:2", "1").start_two();
    let process = rank_of(&running[1], 1);
    running[0].reach(20);
    kill_process(process, Signal::KILL).unwrap();
    let runs = running.map(Running::wait);
    assert_eq!(gone_on(&runs).len(), 1);
    assert_eq!(runs[0].summary()["world_size"], 1);
}

#[test]
fn a_lost_node_comes_back() {
    let scratch = Scratch::with_tokens();
    let job = endless(&scratch, "ddp").set(&["trainer.elastic.max_restarts=0"]);
    let agents = Agents::new(job.clone(), "1:2", "2");
    let [first, second] = agents.start_two();
    first.reach(20);
    // Like a host that is switched off.
    kill_process(second.pid(), Signal::KILL).unwrap();
    let is_in = |generation| {
        move |this: &Running| (this.count_of("generation") == generation).then_some(())
    };
    first.until("the others to go on", is_in(1));
    drop(second);
    let third = agents.start("1");
    first.until("the node to come back", is_in(2));
    let (runs, steps) = end_soon([first, third]);
    let sizes: Vec<Value> =
        generations(&runs).iter().map(|event| event["world_size"].clone()).collect();
    assert_eq!(sizes, [2, 4]);
    assert_close_to(&losses(&runs), &undisturbed(&job.set(&[&steps])));
}

#[test]
fn nodes_that_are_drained_leave() {
    let scratch = Scratch::with_tokens();
    let job = endless(&scratch, "fsdp")
        .set(&["trainer.elastic.replicas=1", "trainer.global_batch_size=12"]);
    let agents = Agents::new(job.clone(), "1:3", "1").with_three_seats().leaving_on_sigterm();
    let [first, second, third] = ["0", "1", "2"].map(|node_rank| agents.start(node_rank));
    let leave = |this: Running| {
        this.signal(Signal::TERM);
        let run = this.wait();
        assert_eq!(run.code(), Some(143), "{}", run.stderr);
        assert!(run.stderr.contains("this node has left the job, which goes on"), "{}", run.stderr);
        run
    };
    first.reach(20);
    // It coordinates the job, and reports its steps.
    let first = leave(first);
    // Before another one coordinates it.
    let fourth = agents.start("0");
    second.until("the node to come", |this| this.said(" with 3 ranks").then_some(()));
    leave(third);
    let (runs, steps) = end_soon([second, fourth]);
    let sizes: Vec<Value> =
        generations(&runs).iter().map(|event| event["world_size"].clone()).collect();
    assert!(sizes.ends_with(&[3.into(), 2.into()]), "{sizes:?}");
    let said = "leaves the job, as it was asked to. The job goes on";
    assert!(first.stderr.contains(said), "{}", first.stderr);
    assert_close_to(&with_killed(&first, &runs), &alone(&job.set(&[&steps])));
}

#[test]
fn the_last_node_to_be_drained_ends_the_job() {
    let scratch = Scratch::with_tokens();
    let job = training(&scratch, "ddp").set(&["trainer.max_steps=100000"]);
    let agents = Agents::new(job, "1:2", "1").leaving_on_sigterm();
    let coordinator = agents.start_coordinator();
    let running = agents.start_two();
    running[0].reach(20);
    // All at once, as a scheduler asks.
    running.iter().for_each(|this| this.signal(Signal::TERM));
    let runs = running.map(Running::wait);
    for run in &runs {
        assert_eq!(run.code(), Some(143), "{}", run.stderr);
    }
    let saved = runs[0].events_of("checkpoint");
    assert_eq!(saved.last().expect("a checkpoint")["step"], runs[0].summary()["steps"]);
    let coordinator = coordinator.wait();
    assert!(coordinator.stderr.contains("the job ends, because node 0"), "{}", coordinator.stderr);
}

#[test]
fn a_node_that_cannot_leave_says_why() {
    let scratch = Scratch::with_tokens();
    let elastic = training(&scratch, "ddp").set(&["trainer.max_steps=100000"]);
    let other = elastic.clone().set(&["trainer.elastic.enabled=false"]);
    for (job, node, why) in [
        (elastic, 0, "no other host has the rendezvous: the job ends"),
        (other, 1, "the job is not elastic, or has just begun: the job ends"),
    ] {
        let running = Agents::new(job, "1:2", "1").leaving_on_sigterm().start_two();
        running[0].reach(20);
        running[node].signal(Signal::TERM);
        let runs = running.map(Running::wait);
        for run in &runs {
            assert_eq!(run.code(), Some(143), "{}", run.stderr);
        }
        assert!(runs[node].stderr.contains(why), "{}", runs[node].stderr);
    }
}

#[test]
fn a_node_is_lost_before_all_have_begun() {
    let scratch = Scratch::with_tokens();
    let job = endless(&scratch, "ddp").set(&["trainer.global_batch_size=12"]);
    let agents = Agents::new(job.clone(), "1:3", "1");
    let coordinator = agents.start_coordinator();
    let [first, second, third] = ["0", "1", "2"].map(|node_rank| agents.start(node_rank));
    let process = rank_of(&second, 1);
    first.reach(20);
    // The first agent does not begin the generation in which the second one's rank is replaced.
    kill_process(first.pid(), Signal::STOP).unwrap();
    kill_process(process, Signal::KILL).unwrap();
    coordinator.until("generation 1", |this| this.said("generation 1 ").then_some(()));
    kill_process(third.pid(), Signal::KILL).unwrap();
    let killed = third.wait();
    std::thread::sleep(Duration::from_secs(4));
    kill_process(first.pid(), Signal::CONT).unwrap();
    first.until("the third one's loss", |this| this.said(" with 2 ranks").then_some(()));
    let (runs, steps) = end_soon([first, second]);
    let sizes: Vec<Value> =
        generations(&runs).iter().map(|event| event["world_size"].clone()).collect();
    assert_eq!(sizes.last(), Some(&2.into()));
    assert_eq!(coordinator.wait().code(), Some(130));
    assert_close_to(&with_killed(&killed, &runs), &alone(&job.set(&[&steps])));
}

#[test]
fn a_cut_cable_costs_no_step() {
    let Some(hosts) = Hosts::new() else { return };
    let scratch = Scratch::with_tokens();
    let expected = undisturbed(&training(&scratch, "ddp"));
    let endpoint = format!("{}:29400", hosts.address(0));
    let agents = Agents::new(training(&scratch, "ddp"), "1:2", "2").meeting_at(endpoint);
    let [first, second] =
        [0, 1].map(|host| agents.job(&host.to_string()).within(hosts.name(host)).start());
    first.reach(20);
    hosts.cut();
    let runs = [first.wait(), second.wait()];
    assert!(!runs[1].status.success(), "the half without the rendezvous stops");
    let generation = &gone_on(&runs[..1])[0];
    assert_eq!((&generation["world_size"], &generation["repeated_steps"]), (&2.into(), &0.into()));
    assert_close_to(&losses(&runs[..1]), &expected);
}

#[test]
fn coordinator_without_ranks_survives_all_hosts() {
    let scratch = Scratch::with_tokens();
    let job = training(&scratch, "ddp");
    let expected = undisturbed(&job);
    let agents = Agents::new(job, "1:2", "2");
    let coordinator = agents.start_coordinator();
    let [first, second] = agents.start_two();
    first.reach(20);
    // The host of rank 0.
    kill_process(first.pid(), Signal::KILL).unwrap();
    let killed = first.wait();
    let runs = [second.wait()];
    assert_eq!(gone_on(&runs)[0]["world_size"], 2);
    let coordinator = coordinator.wait();
    assert_eq!(coordinator.code(), Some(0), "{}", coordinator.stderr);
    assert!(coordinator.stderr.contains("node 0 ("), "{}", coordinator.stderr);
    assert_close_to(&with_killed(&killed, &runs), &expected);
}

#[test]
fn coordinators_are_replaced_one_after_another() {
    let scratch = Scratch::with_tokens();
    let job = endless(&scratch, "ddp")
        .set(&["trainer.global_batch_size=12", "trainer.elastic.max_restarts=0"]);
    let agents = Agents::new(job.clone(), "1:3", "1").with_three_seats();
    let mut running: Vec<Running> = Vec::new();
    // In the order of the endpoints: each hosts the first one that is free.
    for (node, endpoint) in agents.endpoint.split(',').enumerate() {
        let agent = agents.start(&node.to_string());
        agent.until("its seat", |_| TcpStream::connect(endpoint).ok());
        running.push(agent);
    }
    let mut found = std::collections::BTreeMap::new();
    let mut ended = Vec::new();
    // The coordinator is on the first of the nodes that are left, which reports.
    for node in ["0", "1"] {
        running[0].until("steps", |this| (this.count_of("step") >= 20).then_some(()));
        let killed = running.remove(0);
        kill_process(killed.pid(), Signal::KILL).unwrap();
        ended.push(killed.wait());
        let has_begun =
            |this: &Running, count| (this.count_of("generation") == count).then_some(());
        running[0].until("the others to go on", |this| has_begun(this, 1));
        let another = running.iter().any(|this| this.said("This agent coordinates it now"));
        assert!(another, "node {node} was lost");
        running.push(agents.start(node));
        running[0].until("the node to come back", |this| has_begun(this, 2));
    }
    let running: [Running; 3] = running.try_into().ok().expect("three nodes");
    let (runs, steps) = end_soon(running);
    found.extend(ended.iter().flat_map(Run::losses_so_far));
    found.extend(losses(&runs));
    left_nothing(&scratch);
    let expected = job.set(&["trainer.devices=1", &steps]).succeed().losses();
    assert_close(&found, &expected, 1e-6);
}

#[test]
fn a_coordinator_without_ranks_is_replaced() {
    let scratch = Scratch::with_tokens();
    let job = endless(&scratch, "ddp");
    let agents = Agents::new(job.clone(), "2", "2").with_three_seats();
    let coordinator = agents.start_coordinator();
    let running = agents.start_two();
    // It hosts the store of the second generation.
    let process = rank_of(&running[1], 3);
    running[0].reach(20);
    kill_process(process, Signal::KILL).unwrap();
    let begun = |this: &Running, count| (this.count_of("generation") == count).then_some(());
    running[0].until("the second generation", |this| begun(this, 1));
    kill_process(coordinator.pid(), Signal::KILL).unwrap();
    running[0].until("the third generation", |this| begun(this, 2));
    coordinator.wait();
    let (runs, steps) = end_soon(running);
    assert_eq!(generations(&runs)[1]["world_size"], 4, "all ranks are kept");
    assert_eq!(losses(&runs), undisturbed(&job.set(&[&steps])));
    let said = format!("{}{}", runs[0].stderr, runs[1].stderr);
    assert!(said.contains("the agent that coordinated the job, on"), "{said}");
}

#[test]
fn a_coordinator_is_lost_while_ranks_start() {
    let scratch = Scratch::with_tokens();
    let job = training(&scratch, "ddp");
    let expected = undisturbed(&job);
    let agents = Agents::new(job, "2", "2").with_three_seats();
    let coordinator = agents.start_coordinator();
    let running = agents.start_two();
    // It hosts the store that this rank has yet to reach.
    let _process = rank_of(&running[1], 3);
    kill_process(coordinator.pid(), Signal::KILL).unwrap();
    coordinator.wait();
    let runs = running.map(Running::wait);
    for run in &runs {
        assert_eq!(run.code(), Some(0), "{}{}", run.stdout, run.stderr);
    }
    assert_eq!(losses(&runs), expected);
}

#[test]
fn a_coordinator_is_lost_before_nodes_come() {
    let scratch = Scratch::with_tokens();
    let job = training(&scratch, "ddp");
    let expected = undisturbed(&job);
    let agents = Agents::new(job, "2", "2").with_three_seats();
    let coordinator = agents.start_coordinator();
    let (other, first_node) = (agents.coordinator().start(), agents.start("0"));
    coordinator.until("the first node", |this| this.said("1 of 2 nodes").then_some(()));
    kill_process(coordinator.pid(), Signal::KILL).unwrap();
    coordinator.wait();
    let runs = [first_node, agents.start("1"), other].map(Running::wait);
    for run in &runs {
        assert_eq!(run.code(), Some(0), "{}{}", run.stdout, run.stderr);
    }
    assert_eq!(losses(&runs), expected);
}

#[test]
fn the_larger_half_of_a_partition_goes_on() {
    let Some(hosts) = Hosts::new() else { return };
    let scratch = Scratch::with_tokens();
    let job = training(&scratch, "ddp").set(&["trainer.global_batch_size=12"]);
    let expected = job.clone().set(&["trainer.devices=3"]).succeed().losses();
    let (first, second) = (hosts.address(0), hosts.address(1));
    let endpoint = format!("{first}:29400,{second}:29401,{second}:29402");
    let agents = Agents::new(job, "1:3", "1").meeting_at(endpoint);
    // The coordinator is alone on the first host.
    let start = |node: usize| {
        let job = agents.job(&node.to_string());
        job.within(hosts.name(usize::from(node > 0))).start()
    };
    let running = [0, 1, 2].map(start);
    running[0].reach(20);
    hosts.cut();
    let [alone, runs @ ..] = running.map(Running::wait);
    assert!(!alone.status.success(), "{}", alone.stdout);
    assert!(alone.stderr.contains("fewer than a majority of the 3 hosts"), "{}", alone.stderr);
    let generation = &gone_on(&runs)[0];
    assert_eq!((&generation["world_size"], &generation["repeated_steps"]), (&2.into(), &0.into()));
    let mut found = alone.losses_so_far();
    found.extend(losses(&runs));
    assert_close(&found, &expected, 1e-6);
}

#[test]
fn a_node_that_cannot_join_is_refused() {
    let scratch = Scratch::with_tokens();
    let job = endless(&scratch, "ddp");
    let agents = Agents::new(job.clone(), "1:2", "1");
    let first = agents.start("0");
    first.reach(20);
    // Its ranks find no such device.
    let second = agents.job("1").env("FULGURITE_TRAINER__ACCELERATOR", "cuda").start().wait();
    assert_eq!(second.code(), Some(1), "{}", second.stderr);
    assert!(second.stderr.contains("the job goes on without this node"), "{}", second.stderr);
    first.until("the next generation", |this| this.said(" with 1 rank").then_some(()));
    let (runs, steps) = end_soon([first]);
    let sizes: Vec<Value> =
        generations(&runs).iter().map(|event| event["world_size"].clone()).collect();
    assert_eq!(sizes.last(), Some(&1.into()));
    assert_close_to(&losses(&runs), &alone(&job.set(&[&steps])));
}

#[test]
fn too_few_ranks_end_the_job() {
    let scratch = Scratch::with_tokens();
    let job = training(&scratch, "ddp")
        .set(&["trainer.elastic.max_restarts=0", "trainer.elastic.min_ranks=4"]);
    let running = Agents::new(job, "2", "2").start_two();
    let process = rank_of(&running[1], 3);
    running[0].reach(20);
    kill_process(process, Signal::KILL).unwrap();
    let runs = running.map(Running::wait);
    for run in &runs {
        assert_eq!(run.code(), Some(137), "{}", run.stderr);
    }
    let said = &runs[0].stderr;
    assert!(said.contains("was killed by signal 9 (SIGKILL), and the job cannot go on"), "{said}");
}

#[test]
fn own_errors_end_all_nodes() {
    let scratch = Scratch::new();
    scratch.token_files((0..200).map(|i| if i == 130 { 60 } else { i % 50 }));
    let job = training(&scratch, "ddp").set(&["data.path=tokens"]);
    let runs = Agents::new(job, "2", "2").start_two().map(Running::wait);
    for run in &runs {
        assert_eq!(run.code(), Some(1), "{}", run.stderr);
    }
    let said = format!("{}{}", runs[0].stderr, runs[1].stderr);
    assert!(said.contains("id 60 is out of range"), "{said}");
}

#[track_caller]
pub(crate) fn assert_close_to(found: &[(u64, f64)], expected: &[(u64, f64)]) {
    let map = |losses: &[(u64, f64)]| losses.iter().copied().collect();
    assert_close(&map(found), &map(expected), 1e-6);
}
