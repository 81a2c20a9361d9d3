//! Cut cables between the hosts of elastic trainings, at random moments. The part with two of the
//! three seats of the rendezvous goes on, and the other ends.

use std::collections::BTreeMap;
use std::time::Duration;

use super::agents::{assert_nothing_is_left, marked};
use super::trials::{Trial, trials};
use crate::elastic_hosts::{Agents, assert_close_to, training};
use crate::program::{Run, Running, Scratch};
use crate::two_hosts::Hosts;

/// One agent is on the first host, and two are on the second. Returns the number of generations
/// after the cut; `None` without network namespaces.
fn cut_at_random(scratch: &Scratch, trial: &mut Trial) -> Option<usize> {
    let hosts = Hosts::new()?;
    let rng = &mut trial.rng;
    let alone = rng.usize(..3);
    let host_of = |agent: usize| usize::from(agent != alone);
    let strategy = ["ddp", "fsdp"][rng.usize(..2)];
    let mark = format!("{}-partition-{}", std::process::id(), trial.seed);
    let job = training(scratch, strategy).set(&[
        "trainer.max_steps=1500",
        "trainer.global_batch_size=12",
        "checkpoint.every_n_steps=50",
        &format!("trainer.default_root_dir=runs-{}", trial.seed),
    ]);
    let expected = job.clone().set(&["trainer.devices=3"]).succeed().losses();
    let replicas = rng.usize(..2);
    let job = job.set(&[&format!("trainer.elastic.replicas={replicas}")]);
    // An agent at the first endpoint coordinates the job.
    let endpoint = |agent: usize| format!("{}:{}", hosts.address(host_of(agent)), 29_400 + agent);
    let endpoints = [0, 1, 2].map(endpoint).join(",");
    let agents = Agents::new(job.env("CAMPAIGN_MARK", &mark), "1:3", "1").meeting_at(endpoints);
    let mark = format!("CAMPAIGN_MARK={mark}");
    let start =
        |agent: usize| agents.job(&agent.to_string()).within(hosts.name(host_of(agent))).start();
    let running = [0, 1, 2].map(start);
    let ranks = || marked(&mark).iter().filter(|(_, rank)| rank.is_some()).count();
    running[0].until("ranks", |_| (ranks() == 3).then_some(()));
    // Every second trial may cut the cable while ranks start, when a loss may end the job.
    if trial.seed.is_multiple_of(2) {
        running[0].reach(1);
    }
    let wait = Duration::from_millis(rng.u64(..2000));
    std::thread::sleep(wait);
    hosts.cut();
    let runs: Vec<Run> = running.into_iter().map(Running::wait).collect();
    let what = format!("{strategy}, replicas {replicas}, agent {alone} alone after {wait:?}");
    let text = || {
        let said: Vec<String> =
            runs.iter().map(|run| format!("{}\n{}", run.status, run.stderr)).collect();
        format!("{what}\n{}", said.join("---\n"))
    };
    assert_nothing_is_left(&mark);
    assert!(runs.iter().all(|run| !run.stderr.contains("panicked")), "{}", text());
    let (gone, left): (Vec<(usize, &Run)>, Vec<_>) =
        runs.iter().enumerate().partition(|(agent, _)| *agent == alone);
    if left.iter().any(|(_, run)| run.code() != Some(0)) {
        // Some ranks had left the training, or the job was not known to be elastic yet.
        let ended = runs.iter().any(|run| run.stdout.contains("\"summary\""));
        let trains = runs.iter().any(|run| run.stdout.contains("{\"event\":\"step\","));
        assert!(ended || !trains, "{}", text());
        eprintln!("{what}: ended");
        return Some(0);
    }
    let begun: usize = left.iter().map(|(_, run)| run.events_of("generation").len()).sum();
    assert!(begun == 0 || gone[0].1.code() != Some(0), "{}", text());
    eprintln!("{what}: {begun} times");
    let found: BTreeMap<u64, f64> = runs.iter().flat_map(Run::losses_so_far).collect();
    let (found, expected): (Vec<_>, Vec<_>) =
        (found.into_iter().collect(), expected.into_iter().collect());
    assert_close_to(&found, &expected);
    Some(begun)
}

#[test]
fn random_partitions_have_one_winner() {
    let mut generations = None;
    let scratch = Scratch::with_tokens();
    trials(1, |trial| generations = generations.max(cut_at_random(&scratch, trial)));
    assert_ne!(generations, Some(0), "no cable was cut in time");
}
