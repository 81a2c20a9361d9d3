//! Runs on two hosts with their own addresses and a cable between them: network namespaces, which
//! only root can create. Without root the tests print a message and test nothing.

use std::process::Command;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use crate::program::{Job, Run, Running, Scratch};

/// Two hosts, `10.77.N.1` and `10.77.N.2`.
pub(crate) struct Hosts {
    names: [String; 2],
    net: u8,
}

impl Hosts {
    /// `None`, with a message, if namespaces cannot be created.
    pub(crate) fn new() -> Option<Self> {
        static MADE: AtomicU8 = AtomicU8::new(0);
        let net = MADE.fetch_add(1, Ordering::Relaxed);
        let names = ["a", "b"].map(|side| format!("fulgurite-{}-{net}{side}", std::process::id()));
        let hosts = Self { names, net };
        match hosts.set_up() {
            Ok(()) => Some(hosts),
            Err(why) => {
                eprintln!("not tested: network namespaces cannot be made here: {why}");
                None
            }
        }
    }

    fn set_up(&self) -> Result<(), String> {
        let [a, b] = &self.names;
        for name in &self.names {
            ip(&["netns", "add", name])?;
        }
        ip(&["-n", a, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", b])?;
        for (host, name) in self.names.iter().enumerate() {
            let address = format!("{}/24", self.address(host));
            ip(&["-n", name, "addr", "add", &address, "dev", "eth0"])?;
            ip(&["-n", name, "link", "set", "eth0", "up"])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
        }
        Ok(())
    }

    pub(crate) fn name(&self, host: usize) -> &str {
        &self.names[host]
    }

    pub(crate) fn address(&self, host: usize) -> String {
        format!("10.77.{}.{}", self.net, host + 1)
    }

    /// Cuts the cable at both ends.
    pub(crate) fn cut(&self) {
        for name in &self.names {
            ip(&["-n", name, "link", "set", "eth0", "down"]).unwrap();
        }
    }

    /// Starts the ranks of a job, `devices` on each host.
    fn start(&self, job: &Job<'_>, devices: usize) -> Vec<Running> {
        let start = |rank: usize| {
            let job = job.clone().set(&["trainer.num_nodes=2"]).within(&self.names[rank / devices]);
            job.env("RANK", rank)
                .env("LOCAL_RANK", rank % devices)
                .env("WORLD_SIZE", 2 * devices)
                .env("LOCAL_WORLD_SIZE", devices)
                .env("GROUP_RANK", rank / devices)
                .env("MASTER_ADDR", self.address(0))
                .env("MASTER_PORT", 29_500)
                .env("FULGURITE_JOB_KEY", "a key of sixteen characters or more")
                .start()
        };
        (0..2 * devices).map(start).collect()
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = ip(&["netns", "del", name]);
        }
    }
}

fn ip(args: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(args).output().map_err(|e| format!("`ip`: {e}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("ip {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr))),
    }
}

fn wait(ranks: Vec<Running>) -> Vec<Run> {
    ranks.into_iter().map(Running::wait).collect()
}

#[test]
fn two_hosts_train_as_one() {
    let Some(hosts) = Hosts::new() else { return };
    let scratch = Scratch::with_tokens();
    for strategy in ["ddp", "fsdp", "{ type = \"hsdp\", data_parallel_replicate_size = 2 }"] {
        let expected = scratch.small().on(strategy, 4, 3).succeed();
        let runs = wait(hosts.start(&scratch.small().on(strategy, 2, 3), 2));
        for run in &runs {
            assert!(run.status.success(), "{strategy}: {}", run.stderr);
        }
        assert_eq!(runs[0].losses(), expected.losses(), "{strategy}");
    }
}

#[test]
fn lost_host_is_named_and_both_sides_end() {
    let Some(hosts) = Hosts::new() else { return };
    let scratch = Scratch::with_tokens();
    let job = scratch.small().on("fsdp", 2, 3);
    let job = job.set(&["trainer.max_steps=1000000", "trainer.timeout_secs=6"]);
    let ranks = hosts.start(&job, 2);
    ranks[0].reach(5);
    hosts.cut();
    let cut = Instant::now();
    let runs = wait(ranks);
    assert!(cut.elapsed() < Duration::from_secs(45), "they ended only after {:?}", cut.elapsed());
    for (host, ranks) in runs.chunks(2).enumerate() {
        let lost = format!("({})", hosts.address(1 - host));
        let stderr: String = ranks.iter().map(|run| run.stderr.as_str()).collect();
        assert!(ranks.iter().all(|run| !run.status.success()), "{stderr}");
        assert!(stderr.contains("timed out after 6s") && stderr.contains(&lost), "{stderr}");
    }
}

#[test]
fn unreachable_host_is_named() {
    let Some(hosts) = Hosts::new() else { return };
    hosts.cut();
    let scratch = Scratch::with_tokens();
    let job = scratch.small().on("fsdp", 1, 3).set(&["trainer.timeout_secs=4"]);
    let runs = wait(hosts.start(&job, 1));
    assert!(runs.iter().all(|run| !run.status.success()));
    assert!(runs[0].stderr.contains("ranks have not come: 1"), "{}", runs[0].stderr);
    assert!(runs[1].stderr.contains(&hosts.address(0)), "{}", runs[1].stderr);
}
