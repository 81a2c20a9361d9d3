//! Blocked output: a stopped pager, a terminal after Ctrl-S, a stalled log collector.

use std::fs;

use rustix::process::{Signal, kill_process};

use crate::program::{Job, Running, Scratch, Stream};

/// A run with progress output and `steps` steps. It logs its loss to `runs/version_0/metrics.csv`.
fn shown<'a>(scratch: &'a Scratch, steps: u64) -> Job<'a> {
    let mut job = scratch.small().set(&[
        &format!("trainer.max_steps={steps}"),
        "scheduler=constant",
        "trainer.log_every_n_steps=1",
        "trainer.default_root_dir=runs",
        "trainer.loggers=['csv']",
        "trainer.timeout_secs=3",
    ]);
    job.replace("json", "human");
    job
}

/// Waits until `steps` steps are logged.
fn logged(running: &Running, scratch: &Scratch, steps: usize) {
    let metrics = scratch.path().join("runs/version_0/metrics.csv");
    running.until("the steps to be logged", |_| {
        let text = fs::read_to_string(&metrics).unwrap_or_default();
        (text.lines().count() > steps).then_some(())
    });
}

#[test]
fn run_without_a_reader_completes() {
    for (devices, stream) in [(1, Stream::Stderr), (2, Stream::Stderr)] {
        let scratch = Scratch::with_tokens();
        let strategy = if devices == 1 { "single_device" } else { "ddp" };
        let job = shown(&scratch, 30).on(strategy, devices, 2).unread(stream);
        let run = job.run();
        assert!(run.status.success(), "{devices} ranks, {stream:?}: {}", run.status);
        let metrics = fs::read_to_string(scratch.path().join("runs/version_0/metrics.csv"));
        assert_eq!(metrics.unwrap().lines().count(), 31);
    }
    // JSON events on stdout.
    let scratch = Scratch::with_tokens();
    let run = scratch.small().on("ddp", 2, 2).unread(Stream::Stdout).run();
    assert!(run.status.success(), "{}", run.stderr);
}

#[test]
fn signals_and_timeouts_do_not_wait_for_a_reader() {
    let endless = 100_000_000;
    let ranks = |devices| if devices == 1 { "single_device" } else { "ddp" };
    for (devices, stream) in [(1, Stream::Stderr), (2, Stream::Stderr), (2, Stream::Stdout)] {
        let scratch = Scratch::with_tokens();
        let job = shown(&scratch, endless).on(ranks(devices), devices, 2).unread(stream);
        let running = job.start();
        logged(&running, &scratch, 2);
        running.signal(Signal::TERM);
        assert_eq!(running.wait().code(), Some(143), "{devices} ranks, {stream:?}");
    }
    for (signal, code) in [(Signal::KILL, 137), (Signal::STOP, 1)] {
        let scratch = Scratch::with_tokens();
        let running = shown(&scratch, endless).on("ddp", 2, 2).unread(Stream::Stderr).start();
        logged(&running, &scratch, 2);
        // A stopped rank is waited for until the timeout.
        kill_process(running.rank(1), signal).unwrap();
        assert_eq!(running.wait().code(), Some(code), "{signal:?}");
    }
}
