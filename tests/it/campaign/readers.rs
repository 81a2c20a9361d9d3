//! Blocked readers, while ranks are killed, frozen and signalled at random moments.

use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};

use super::trials::{Trial, trials};
use crate::program::{Scratch, Stream};

/// `trainer.timeout_secs` of the jobs.
const TIMEOUT: u64 = 2;
/// Time limit for a job: its timeout, the ranks' own shutdown, and the wait for the reader.
const OVER: Duration = Duration::from_secs(20);

#[derive(Debug, Clone, Copy)]
enum Strike {
    Nothing,
    Signal(Signal),
    Twice(Signal),
    Kill(usize),
    Freeze(usize),
}

fn strike_at_random(trial: &mut Trial) {
    let rng = &mut trial.rng;
    let scratch = Scratch::with_tokens();
    let devices = rng.usize(1..=2);
    let rank = rng.usize(..devices);
    let signal = [Signal::INT, Signal::TERM, Signal::USR1, Signal::HUP][rng.usize(..4)];
    let strike = match rng.u32(..5) {
        0 => Strike::Nothing,
        1 => Strike::Signal(signal),
        2 if signal == Signal::INT || signal == Signal::TERM => Strike::Twice(signal),
        3 if devices == 2 => Strike::Kill(rank),
        4 if devices == 2 => Strike::Freeze(rank),
        _ => Strike::Signal(Signal::TERM),
    };
    let steps = if matches!(strike, Strike::Nothing) { 20 } else { 100_000_000 };
    let stream = [Stream::Stdout, Stream::Stderr][rng.usize(..2)];
    let strategy = if devices == 1 { "single_device" } else { "fsdp" };
    let mut job = scratch.small().on(strategy, devices, 2).set(&[
        &format!("trainer.max_steps={steps}"),
        &format!("trainer.timeout_secs={TIMEOUT}"),
        "scheduler=constant",
        "trainer.log_every_n_steps=1",
    ]);
    if rng.bool() {
        job.replace("json", "human");
    }
    let running = job.unread(stream).start();
    // Wait for the handlers; before them, a signal ends a process by default.
    match devices {
        1 => running.until_handles(running.pid(), Signal::TERM),
        _ => (0..2).for_each(|rank| running.until_rank_handles(rank, Signal::TERM)),
    }
    std::thread::sleep(Duration::from_millis(rng.u64(0..2000)));
    let ranks = |of, signal| kill_process(running.rank(of), signal).unwrap();
    match strike {
        Strike::Nothing => {}
        Strike::Signal(signal) => running.signal(signal),
        Strike::Twice(signal) => {
            running.signal(signal);
            std::thread::sleep(Duration::from_millis(100));
            // The process may have ended already.
            let _ = kill_process(running.pid(), signal);
        }
        Strike::Kill(rank) => ranks(rank, Signal::KILL),
        Strike::Freeze(rank) => ranks(rank, Signal::STOP),
    }
    let struck = Instant::now();
    let run = running.wait();
    let took = struck.elapsed();
    let text = format!("{strike:?}, {devices} ranks, {stream:?}: {}: {}", run.status, run.stderr);
    assert!(took < OVER, "over only after {took:?}: {text}");
    let expected = match strike {
        Strike::Nothing => 0,
        Strike::Signal(signal) | Strike::Twice(signal) => 128 + signal.as_raw(),
        Strike::Kill(_) => 137,
        Strike::Freeze(_) => 1,
    };
    assert_eq!(run.code(), Some(expected), "{text}");
}

#[test]
fn job_without_a_reader_ends_normally() {
    trials(3, strike_at_random);
}
