//! Elastic trainings under `fulgurite run`: ranks and nodes lost at random moments, and nodes that
//! come back; a few times, or until the last steps.

use std::collections::BTreeMap;
use std::time::Duration;

use rustix::process::{Signal, kill_process};

use super::agents::{assert_nothing_is_left, marked};
use super::losses::{SOON, Tally};
use super::trials::{Trial, trials};
use crate::elastic_hosts::{Agents, assert_close_to, losses, training};
use crate::program::{Run, Running, Scratch};

/// Which agents may coordinate a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Coordinators {
    /// The first node's agent, which is not killed.
    First,
    /// An agent without ranks, which is not killed.
    Own,
    /// Any of three agents. One at a time may be lost.
    Three,
}

/// What happens to a job.
#[derive(Debug, Clone, Copy)]
enum Strike {
    /// A signal to this rank.
    Rank(usize, Signal),
    /// The agent of this node is killed, and with it its ranks.
    Node(usize),
    /// The agent without ranks is killed.
    Coordinator,
    /// An agent takes the place of the killed one.
    Return,
    /// The last strike: this node's agent is asked to end the job.
    Interrupt(usize),
}

impl Strike {
    fn name(self) -> &'static str {
        match self {
            Self::Rank(_, Signal::STOP) => "frozen ranks",
            Self::Rank(..) => "killed ranks",
            Self::Node(_) => "killed nodes",
            Self::Coordinator => "killed coordinators without ranks",
            Self::Return => "returns",
            Self::Interrupt(_) => "interruptions",
        }
    }
}

/// How often nodes are lost: all are on one host, which a job takes in again so often.
const MAX_NODE_LOSSES: usize = 3;

/// How often a job is struck.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Strikes {
    /// One to three times.
    Few,
    /// Until the last steps.
    Storm,
}

impl Strikes {
    fn steps(self) -> u64 {
        match self {
            Self::Few => 500,
            Self::Storm => 1500,
        }
    }
}

/// Strikes a job at random. It goes on to its end, with the losses of an undisturbed run.
fn strike_at_random(scratch: &Scratch, trial: &mut Trial, strikes: Strikes, tally: &mut Tally) {
    let (rng, is_storm) = (&mut trial.rng, strikes == Strikes::Storm);
    let steps = strikes.steps();
    let (nodes, devices) = [(2, 1), (2, 2), (3, 1)][rng.usize(..3)];
    let world_size = nodes * devices;
    let strategy = match rng.usize(..3) {
        0 if world_size == 4 => "{ type = \"hsdp\", data_parallel_replicate_size = 2 }",
        1 => "fsdp",
        _ => "ddp",
    };
    let mark = format!("{}-elastic-{}", std::process::id(), trial.seed);
    let job = training(scratch, strategy).set(&[
        &format!("trainer.max_steps={steps}"),
        "trainer.global_batch_size=24",
        &format!("trainer.default_root_dir=runs-{}", trial.seed),
        if is_storm {
            "trainer.elastic.max_restarts=1000"
        } else {
            "trainer.elastic.max_restarts=3"
        },
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
    let copies = rng.usize(..2);
    let replicas = format!("trainer.elastic.replicas={copies}");
    // Without copies, a loss may take all steps since the last checkpoint again.
    let job = match is_storm && copies == 0 {
        true => job.set(&["checkpoint.every_n_steps=20"]),
        false => job,
    };
    let job = job.set(&[&replicas]).env("CAMPAIGN_MARK", &mark);
    let mark = format!("CAMPAIGN_MARK={mark}");
    let (allowed, devices_text) = (format!("1:{nodes}"), devices.to_string());
    let agents = Agents::new(job, &allowed, &devices_text);
    let coordinators =
        [Coordinators::First, Coordinators::Own, Coordinators::Three][rng.usize(..3)];
    let agents = match coordinators {
        Coordinators::Three => agents.with_three_seats(),
        _ => agents,
    };
    let has_own =
        coordinators == Coordinators::Own || coordinators == Coordinators::Three && nodes == 2;
    let mut coordinator = has_own.then(|| {
        let coordinator = agents.coordinator().start();
        let is_there = |this: &Running| this.said("coordinate").then_some(());
        match coordinators {
            Coordinators::Own => coordinator.until("the rendezvous", is_there),
            // Three agents make one.
            _ => std::thread::sleep(Duration::from_millis(100)),
        }
        coordinator
    });
    let first_mortal = usize::from(coordinators == Coordinators::First);
    let mut running: Vec<Option<Running>> =
        (0..nodes).map(|node| Some(agents.start(&node.to_string()))).collect();
    if coordinators == Coordinators::Three {
        // At the start all three must be there.
        running[0]
            .as_ref()
            .expect("it is there")
            .until("ranks", |_| marked(&mark).iter().any(|(_, rank)| rank.is_some()).then_some(()));
    }
    let (mut struck, mut killed, mut lost_node) = (Vec::new(), Vec::new(), None);
    let strikes = if is_storm { usize::MAX } else { rng.usize(1..4) };
    let interrupts = !is_storm && rng.u32(..4) == 0;
    if is_storm {
        // Before the first steps a loss ends the job.
        running[0].as_ref().expect("it is there").reach(1);
    }
    for at in 0..strikes.saturating_add(usize::from(interrupts)) {
        // During the change that the strike before has caused.
        let wait =
            Duration::from_millis(if at == strikes { rng.u64(..400) } else { rng.u64(10..1500) });
        std::thread::sleep(wait);
        let last = running.iter().flatten().filter_map(Running::last_step).max();
        let has_ended = || running.iter().flatten().all(|agent| agent.members().is_empty());
        if is_storm && (last.is_some_and(|step| step + 200 > steps) || has_ended()) {
            break;
        }
        let one_is_lost = lost_node.is_some() || has_own && coordinator.is_none();
        let strike = match (rng.usize(..4), one_is_lost) {
            _ if at == strikes => {
                let left: Vec<usize> = (0..nodes).filter(|node| running[*node].is_some()).collect();
                Strike::Interrupt(left[rng.usize(..left.len())])
            }
            (0, false) if has_own && coordinators == Coordinators::Three && rng.bool() => {
                Strike::Coordinator
            }
            (0, false) if killed.len() < MAX_NODE_LOSSES => {
                Strike::Node(rng.usize(first_mortal..nodes))
            }
            (0 | 1, true) => Strike::Return,
            // A frozen rank hears of no interruption.
            (2, _) if !interrupts => Strike::Rank(rng.usize(..world_size), Signal::STOP),
            _ => Strike::Rank(rng.usize(..world_size), Signal::KILL),
        };
        if wait < SOON {
            tally.count("of these, soon after another");
        }
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
            Strike::Coordinator => {
                let agent = coordinator.take().expect("it is there");
                agent.signal(Signal::KILL);
                agent.wait();
            }
            Strike::Interrupt(node) => {
                running[node].as_ref().expect("it was chosen").signal(Signal::TERM);
            }
            Strike::Return => {
                match lost_node.take() {
                    Some(node) => running[node] = Some(agents.start(&node.to_string())),
                    None => coordinator = Some(agents.coordinator().start()),
                }
                // Another one may be lost once this one's seat counts.
                if coordinators == Coordinators::Three {
                    std::thread::sleep(Duration::from_secs(5));
                }
            }
        }
        tally.count(strike.name());
        struck.push((wait, strike));
    }
    let strikes = format!("{} strikes: {struck:?}", struck.len());
    let what =
        format!("{strategy} on {nodes} x {devices}, {replicas}, {coordinators:?}, {strikes}");
    if !is_storm {
        eprintln!("{what}");
    }
    let mut running = running.into_iter().flatten();
    let mut runs = Vec::new();
    let mut code = None;
    // The agent that coordinates ends last.
    match (coordinators, coordinator) {
        (Coordinators::First, _) => runs.extend(running.next().map(Running::wait)),
        (Coordinators::Own, Some(coordinator)) => code = coordinator.wait().code(),
        (_, Some(other)) => drop(result(other)),
        (_, None) => {}
    }
    runs.extend(running.filter_map(result));
    let text = || {
        let said: Vec<String> =
            runs.iter().map(|run| format!("{}\n{}", run.status, run.stderr)).collect();
        format!("{what}\n{}", said.join("---\n"))
    };
    assert_nothing_is_left(&mark);
    let code = code.or_else(|| runs[0].code());
    let all = || runs.iter().chain(&killed);
    let trains = all().any(|run| run.stdout.contains("{\"event\":\"step\","));
    if interrupts && code != Some(0) {
        // In an instant of the change the end of the job is a failure.
        assert!([Some(143), Some(1)].contains(&code) || !trains, "{}", text());
        assert!(all().all(|run| !run.stderr.contains("panicked")), "{}", text());
        eprintln!("{what}, ended with {code:?}");
        return;
    }
    if code != Some(0) && !is_storm {
        // A rank that is lost after another has left ends the job. So does one that is lost before
        // its agent knows that the job is elastic.
        let ended = all().any(|run| run.stdout.contains("\"summary\""))
            && all().all(|run| !run.stderr.contains("panicked"));
        assert!(ended || !trains, "{}", text());
        return;
    }
    assert_eq!(code, Some(0), "{}", text());
    for run in all() {
        for _ in run.stderr.matches("This agent coordinates it now") {
            tally.count("coordinators replaced");
        }
    }
    eprintln!("{what}, {} times", tally.add(all()));
    let mut found: BTreeMap<u64, f64> = killed.iter().flat_map(Run::losses_so_far).collect();
    found.extend(losses(&runs));
    assert_eq!(found.len() as u64, steps, "{}", text());
    assert_close_to(&found.into_iter().collect::<Vec<_>>(), &expected);
}

/// The result of an agent; `None` for one that came after the end of the job, which waits.
fn result(agent: Running) -> Option<Run> {
    const WAITS: &str = "waits for ";
    agent.until("its end", |this| (this.members().is_empty() || this.said(WAITS)).then_some(()));
    if !agent.members().is_empty() {
        agent.signal(Signal::KILL);
    }
    let run = agent.wait();
    (!run.stderr.contains(WAITS)).then_some(run)
}

#[test]
fn random_losses_of_ranks_and_nodes() {
    let (scratch, mut tally) = (Scratch::with_tokens(), Tally::default());
    trials(4, |trial| strike_at_random(&scratch, trial, Strikes::Few, &mut tally));
    tally.assert_gone_on();
}

#[test]
#[ignore = "takes a minute or more a trial"]
fn storms_of_losses_of_ranks_and_nodes() {
    let (scratch, mut tally) = (Scratch::with_tokens(), Tally::default());
    trials(1, |trial| strike_at_random(&scratch, trial, Strikes::Storm, &mut tally));
    tally.assert_gone_on();
}
