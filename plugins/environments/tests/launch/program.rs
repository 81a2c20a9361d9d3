//! The program that is launched.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use fulgurite_core::launch::{
    Interruption, LaunchOptions, LaunchedRank, Starting, agree_on, interrupt_requested, launch,
};
use fulgurite_core::{Error, Result};

use crate::run::{DEVICES, TIMEOUT_MS};

/// Longer than any test may take: a rank that waits this long was not told.
const LONG: Duration = Duration::from_secs(600);

pub(crate) fn play(part: &str) -> Result<()> {
    if part == "crowded" {
        let mut one = rustix::thread::CpuSet::new();
        let all = rustix::thread::sched_getaffinity(None).map_err(Error::other)?;
        one.set((0..rustix::thread::CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).unwrap_or(0));
        rustix::thread::sched_setaffinity(None, &one).map_err(Error::other)?;
    }
    let mut options = LaunchOptions { devices: number(DEVICES), ..Default::default() };
    if let Some(ms) = number(TIMEOUT_MS) {
        options.timeout = Duration::from_millis(ms as u64);
    }
    let number_of_rank = number("RANK");
    if let ("waits_for_rank_1" | "waits_for_rank_2", Some(rank)) = (part, number_of_rank) {
        println!("{}", serde_json::json!({ "pid": std::process::id(), "rank": rank }));
        if rank == 1 && part == "waits_for_rank_1" {
            loop {
                std::thread::park();
            }
        }
    }
    let starting = (part == "starts").then(Starting::new);
    let launched = launch(options)?;
    if part == "leaves" {
        let script = format!("echo '{{\"rank\":{},\"pid\":'$$'}}'; exec sleep 1000", launched.rank);
        let mut left = Command::new("setsid");
        left.args(["sh", "-c", &script]).stdout(Stdio::piped()).stderr(Stdio::null());
        let left = left.spawn().map_err(Error::other)?;
        // Its first line confirms that it has its own session.
        let mut said = String::new();
        BufReader::new(left.stdout.expect("it is piped"))
            .read_line(&mut said)
            .map_err(Error::other)?;
        print!("{said}");
        return Ok(());
    }
    announce(&launched);
    let rank = launched.rank;
    match (part, rank) {
        ("identity" | "crowded", _) => Ok(()),
        ("error", 1) => Err(Error::other("the disk is full")),
        ("forged_error", 1) => {
            Err(Error::other("\u{1b}[2Kall is well\r\nerror: rank 0 failed: not me"))
        }
        ("error_everywhere", _) => Err(Error::other("no such file: corpus.txt")),
        ("panic", 1) => panic!("index 7 is out of range"),
        ("panic_in_thread", 1) => {
            let thread = std::thread::Builder::new().name("loader".into());
            let thread = thread.spawn(|| panic!("bad record")).map_err(Error::other)?;
            let _ = thread.join();
            wait(&launched)
        }
        ("exit", 1) => std::process::exit(7),
        // Reports its failure but does not end.
        ("stuck", 1) => {
            launched.store.get("rank 0 is here", LONG)?;
            launched.store.report_failure("the link is down")?;
            loop {
                std::thread::park();
            }
        }
        // Reacts to nothing.
        ("stuck", _) | ("deaf", _) => {
            launched.store.set(&format!("rank {rank} is here"), b"")?;
            loop {
                std::thread::park();
            }
        }
        // An error other than "a peer failed", but caused by the peer's failure.
        ("symptom", 1) => Err(Error::other("the cause")),
        ("symptom", _) => {
            wait(&launched).expect_err("rank 1 fails");
            Err(Error::other("broken pipe"))
        }
        ("collective", 1) => {
            launched.store.get("rank 0 is about to see the connection break", LONG)?;
            Err(Error::other("the cause"))
        }
        ("collective", _) => {
            launched.store.set("rank 0 is about to see the connection break", b"")?;
            Err(Error::Collective {
                rank,
                group: "world".into(),
                op: "all_reduce",
                message: "connection reset by peer".into(),
            })
        }
        ("interrupt", _) => {
            while !interrupt_requested() {
                std::thread::sleep(Duration::from_millis(5));
            }
            // All ranks get here, so all were asked.
            if launched.store.add("asked", 1)? == launched.world_size as i64 {
                launched.store.set("all asked", b"")?;
            }
            launched.store.get("all asked", LONG)?;
            println!("rank {rank} finished its step");
            Err(Error::Interrupted)
        }
        // The key is never set, so the job stays in its start phase.
        ("starts", _) => {
            let waited = wait(&launched);
            drop(starting);
            waited
        }
        // The ranks agree on preemption, whatever signal they received.
        ("agrees", _) => {
            while !interrupt_requested() {
                std::thread::sleep(Duration::from_millis(5));
            }
            agree_on(Interruption::Preemption);
            Err(Error::Interrupted)
        }
        // Rank 0 ends because of a failure that is not known yet. Rank 1 reports the failure once
        // rank 0 is gone, or never.
        ("hears_first" | "hears_nothing", 0) => {
            launched.store.set("rank 0", std::process::id().to_string().as_bytes())?;
            Err(Error::PeerFailed { rank: 1, message: "it left the process group".into() })
        }
        ("hears_first" | "hears_nothing", _) => {
            let pid = String::from_utf8_lossy(&launched.store.get("rank 0", LONG)?).into_owned();
            while part == "hears_nothing" || Path::new("/proc").join(&pid).exists() {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(Error::other("the cause"))
        }
        // Rank 0, which may host the store, is done long before the others.
        ("finish_early", 0) => launched.store.set("rank 0 has finished", b""),
        // Goes on for many requests, in whose course rank 0 ends.
        ("finish_early", _) => {
            launched.store.get("rank 0 has finished", LONG)?;
            (1..=2000).try_for_each(|i| {
                let sum = launched.store.add("requests", 1)?;
                assert_eq!(sum, i);
                Ok(())
            })
        }
        ("twice", _) => {
            drop(launched);
            let again = launch(LaunchOptions { devices: number(DEVICES), ..Default::default() })?;
            announce(&again);
            // Once a rank has failed the other could not launch any more.
            again.store.add("announced", 1)?;
            while again.store.add("announced", 0)? < again.world_size as i64 {
                std::thread::yield_now();
            }
            let other = LaunchOptions { devices: Some(9), ..Default::default() };
            Err(launch(other).expect_err("another number of ranks"))
        }
        _ => wait(&launched),
    }
}

/// One line of JSON that tells what this rank is.
fn announce(launched: &LaunchedRank) {
    let names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"];
    let names = names.into_iter().chain(["RAYON_NUM_THREADS"]);
    let variables: BTreeMap<_, _> =
        names.map(|name| (name, std::env::var(name).unwrap_or_default())).collect();
    let line = serde_json::json!({
        "pid": std::process::id(),
        "rank": launched.rank,
        "world_size": launched.world_size,
        "local_rank": launched.local_rank,
        "local_world_size": launched.local_world_size,
        "node_rank": launched.node_rank,
        "environment": launched.environment,
        "restart_count": launched.restart_count,
        "started": launched.program_start,
        "arguments": std::env::args().skip(1).collect::<Vec<_>>(),
        "variables": variables,
    });
    println!("{line}");
}

fn wait(launched: &LaunchedRank) -> Result<()> {
    launched.store.get("nobody sets this", LONG).map(drop)
}

fn number(variable: &str) -> Option<usize> {
    std::env::var(variable).ok()?.parse().ok()
}
