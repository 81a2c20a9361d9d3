//! Elastic trainings under `fulgurite run`: ranks and nodes lost at random moments, and nodes that
//! come back.

use std::collections::BTreeMap;
use std::time::Duration;

use rustix::process::{Signal, kill_process};

use super::agents::{assert_nothing_is_left, marked};
use super::trials::{Trial, trials};
use crate::elastic_hosts::{Agents, assert_close_to, losses, training};
use crate::program::{Run, Running, Scratch};

const STEPS: u64 = 500;

/// What happens to a job.
#[derive(Debug, Clone, Copy)]
enum Strike {
    /// A signal to this rank.
    Rank(usize, Signal),
    /// The agent of this node is killed, and with it its ranks.
    Node(usize),
    /// An agent takes the place of the killed one.
    Return,
    /// The last strike: this node's agent is asked to end the job.
    Interrupt(usize),
}

/// Strikes a job at random, one to three times. It goes on to its end, with the losses of an
/// undisturbed run.
fn strike_at_random(scratch: &Scratch, trial: &mut Trial, generations: &mut usize) {
    let rng = &mut trial.rng;
    let (nodes, devices) = [(2, 1), (2, 2), (3, 1)][rng.usize(..3)];
    let world_size = nodes * devices;
    let strategy = match rng.usize(..3) {
        0 if world_size == 4 => "{ type = \"hsdp\", data_parallel_replicate_size = 2 }",
        1 => "fsdp",
        _ => "ddp",
    };
    let mark = format!("{}-elastic-{}", std::process::id(), trial.seed);
    let job = training(scratch, strategy).set(&[
        &format!("trainer.max_steps={STEPS}"),
        "trainer.global_batch_size=24",
        &format!("trainer.default_root_dir=runs-{}", trial.seed),
    ]);
    let job = match rng.bool() {
        true => job.set(&[
            "trainer.val_check_interval=7",
            "data.validation_fraction=0.2",
            "checkpoint.every_n_steps=9",
            "trainer.ema_decay=0.9",
        ]),
        false => job,
    };
    let expected = job.clone().set(&[&format!("trainer.devices={world_size}")]).succeed().losses();
    let expected: Vec<(u64, f64)> = expected.into_iter().collect();
    let replicas = format!("trainer.elastic.replicas={}", rng.usize(..2));
    let job = job.set(&[&replicas]).env("CAMPAIGN_MARK", &mark);
    let mark = format!("CAMPAIGN_MARK={mark}");
    let (allowed, devices_text) = (format!("1:{nodes}"), devices.to_string());
    let agents = Agents::new(job, &allowed, &devices_text);
    // Without an own host for it, the first node's agent is the coordinator, which is not killed.
    let coordinator = rng.bool().then(|| {
        let coordinator = agents.coordinator().start();
        coordinator.until("the rendezvous", |this| this.said("coordinates the job").then_some(()));
        coordinator
    });
    let first_mortal = usize::from(coordinator.is_none());
    let mut running: Vec<Option<Running>> =
        (0..nodes).map(|node| Some(agents.start(&node.to_string()))).collect();
    let (mut struck, mut killed, mut lost_node) = (Vec::new(), Vec::new(), None);
    let strikes = rng.usize(1..4);
    let interrupts = rng.u32(..4) == 0;
    for at in 0..strikes + usize::from(interrupts) {
        // During the change that the strike before has caused.
        let wait =
            Duration::from_millis(if at == strikes { rng.u64(..400) } else { rng.u64(10..1500) });
        std::thread::sleep(wait);
        let strike = match (rng.usize(..4), lost_node) {
            _ if at == strikes => {
                let left: Vec<usize> = (0..nodes).filter(|node| running[*node].is_some()).collect();
                Strike::Interrupt(left[rng.usize(..left.len())])
            }
            (0, None) => Strike::Node(rng.usize(first_mortal..nodes)),
            (0 | 1, Some(_)) => Strike::Return,
            // A frozen rank hears of no interruption.
            (2, _) if !interrupts => Strike::Rank(rng.usize(..world_size), Signal::STOP),
            _ => Strike::Rank(rng.usize(..world_size), Signal::KILL),
        };
        match strike {
            Strike::Rank(rank, signal) => {
                // Too late if the job has ended, or the rank is not there any more.
                let mut ranks = marked(&mark).into_iter();
                if let Some((pid, _)) = ranks.find(|(_, found)| *found == Some(rank)) {
                    let _ = kill_process(pid, signal);
                }
            }
            Strike::Node(node) => {
                let agent = running[node].take().expect("one node is lost");
                agent.signal(Signal::KILL);
                killed.push(agent.wait());
                lost_node = Some(node);
            }
            Strike::Interrupt(node) => {
                running[node].as_ref().expect("it was chosen").signal(Signal::TERM);
            }
            Strike::Return => {
                let node = lost_node.take().expect("a node is lost");
                running[node] = Some(agents.start(&node.to_string()));
            }
        }
        struck.push((wait, strike));
    }
    eprintln!("{strategy} on {nodes} x {devices}, {replicas}: {struck:?}");
    let mut running = running.into_iter().flatten();
    // The agent that coordinates ends last.
    let coordinator = coordinator.map(Running::wait);
    let mut runs = Vec::new();
    if coordinator.is_none() {
        runs.extend(running.next().map(Running::wait));
    }
    runs.extend(running.filter_map(result));
    let text = || {
        let said: Vec<String> =
            runs.iter().map(|run| format!("{}\n{}", run.status, run.stderr)).collect();
        format!("{strategy} on {nodes} x {devices}, {replicas}: {struck:?}\n{}", said.join("---\n"))
    };
    assert_nothing_is_left(&mark);
    let code = coordinator.as_ref().unwrap_or_else(|| &runs[0]).code();
    let all = || runs.iter().chain(&killed);
    if interrupts && code != Some(0) {
        // In an instant of the change the end of the job is a failure.
        assert!([Some(143), Some(1)].contains(&code), "{}", text());
        assert!(all().all(|run| !run.stderr.contains("panicked")), "{}", text());
        eprintln!("{strategy} on {nodes} x {devices}: {struck:?}, ended with {code:?}");
        return;
    }
    if code != Some(0) {
        // A rank that is lost after another has left ends the job. So does one that is lost before its
        // agent knows that the job is elastic.
        let ended = all().any(|run| run.stdout.contains("\"summary\""))
            && all().all(|run| !run.stderr.contains("panicked"));
        let trains = all().any(|run| run.stdout.contains("{\"event\":\"step\","));
        assert!(ended || !trains, "{}", text());
        return;
    }
    let begun: usize = runs.iter().map(|run| run.events_of("generation").len()).sum();
    *generations += begun;
    let own_host = if coordinator.is_some() { ", a coordinator of its own" } else { "" };
    eprintln!("{strategy} on {nodes} x {devices}, {replicas}{own_host}: {struck:?}, {begun} times");
    let mut found: BTreeMap<u64, f64> = killed.iter().flat_map(Run::losses_so_far).collect();
    found.extend(losses(&runs));
    assert_eq!(found.len() as u64, STEPS, "{}", text());
    assert_close_to(&found.into_iter().collect::<Vec<_>>(), &expected);
}

/// The result of an agent; `None` for one that came after the end of the job, which waits.
fn result(agent: Running) -> Option<Run> {
    const WAITS: &str = "waits for an agent that hosts the rendezvous";
    agent.until("its end", |this| (this.members().is_empty() || this.said(WAITS)).then_some(()));
    if !agent.members().is_empty() {
        agent.signal(Signal::KILL);
    }
    let run = agent.wait();
    (!run.stderr.contains(WAITS)).then_some(run)
}

#[test]
fn random_losses_of_ranks_and_nodes() {
    let mut generations = 0;
    let scratch = Scratch::with_tokens();
    trials(4, |trial| strike_at_random(&scratch, trial, &mut generations));
    assert!(generations > 0, "no trial lost a rank in time");
}
