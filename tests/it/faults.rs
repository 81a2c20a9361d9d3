//! Killed, interrupted and failing processes.

use std::fs;

use crate::program::{Job, Running, Scratch, left_in_shared_memory};
use rustix::process::{Signal, kill_process};

/// Trains until it is ended from outside.
fn endless(scratch: &Scratch) -> Job<'_> {
    scratch.small().set(&["trainer.max_steps=100000000", "scheduler=constant"])
}

/// Asserts that no temporary file and no shared memory remain.
fn assert_nothing_is_left(scratch: &Scratch) {
    let left: Vec<_> = fs::read_dir(scratch.temporary()).unwrap().flatten().collect();
    assert!(left.is_empty(), "{left:?}");
    assert_eq!(left_in_shared_memory(), [""; 0]);
}

fn training(job: &Job) -> Running {
    let running = job.start();
    running.reach(3);
    running
}

#[test]
fn killed_rank_ends_the_others() {
    for (strategy, devices, rank) in [("fsdp", 2, 1), ("ddp", 3, 0)] {
        let scratch = Scratch::with_tokens();
        let running = training(&endless(&scratch).on(strategy, devices, 2));
        assert_eq!(running.members().len(), devices + 1);
        kill_process(running.rank(rank), Signal::KILL).unwrap();
        let run = running.wait();
        assert_eq!(run.code(), Some(128 + 9), "{}", run.stderr);
        let expected = format!("error: rank {rank} was killed by signal 9 (SIGKILL)");
        assert_eq!(run.first_error(), expected, "{}", run.stderr);
        assert!(!run.stdout.contains("\"summary\""), "{}", run.stdout);
        assert_nothing_is_left(&scratch);
    }
}

#[test]
fn ranks_end_with_their_supervisor() {
    let scratch = Scratch::with_tokens();
    let running = training(&endless(&scratch).on("fsdp", 3, 2));
    running.signal(Signal::KILL);
    running.until_gone();
    assert_eq!(running.wait().signal(), Some(9));
    assert_nothing_is_left(&scratch);
}

#[test]
fn ctrl_c_saves_and_ends() {
    for (strategy, devices) in [("single_device", 1), ("fsdp", 2)] {
        let scratch = Scratch::with_tokens();
        let job = endless(&scratch)
            .on(strategy, devices, 2)
            .set(&["checkpoint.save_last=true", "checkpoint.dir=kept"]);
        let running = training(&job);
        running.signal(Signal::INT);
        let run = running.wait();
        assert_eq!(run.code(), Some(130), "{}", run.stderr);
        let steps = run.losses().len();
        assert_eq!(run.summary()["steps"], steps);
        let saved = run.events_of("checkpoint");
        assert_eq!(saved.last().expect("a checkpoint")["step"], steps);
        assert!(run.stderr.contains("interrupted"), "{}", run.stderr);
        assert!(!run.stderr.contains("error"), "{}", run.stderr);
        assert_nothing_is_left(&scratch);

        let more = format!("trainer.max_steps={}", steps + 2);
        let resumed = job.set(&["trainer.ckpt_path=last", &more]).succeed();
        let keys: Vec<_> = resumed.losses().into_keys().collect();
        assert_eq!(keys, [steps as u64 + 1, steps as u64 + 2]);
    }
}

#[test]
fn signal_to_one_rank_ends_all() {
    for (signal, code, rank) in [(Signal::TERM, 143, 1), (Signal::USR1, 138, 0)] {
        let scratch = Scratch::with_tokens();
        let running = training(&endless(&scratch).on("fsdp", 3, 2));
        kill_process(running.rank(rank), signal).unwrap();
        let run = running.wait();
        assert_eq!(run.code(), Some(code), "{}", run.stderr);
        assert!(!run.stderr.contains("error"), "{}", run.stderr);
        assert_nothing_is_left(&scratch);
    }
}

#[test]
fn signal_ends_a_validation() {
    let scratch = Scratch::with_tokens();
    let tokens = (0..8_000_000_u32).map(|i| (i % 50) as u16);
    scratch.tokens("tokens.u16", tokens);
    let mut job = scratch
        .small()
        .on("ddp", 2, 1)
        .set(&["data.validation_fraction=0.9", "trainer.limit_val_batches=1.0"]);
    job.replace("fit", "validate");
    let running = job.start();
    running.until_rank_handles(1, Signal::TERM);
    kill_process(running.rank(1), Signal::TERM).unwrap();
    let run = running.wait();
    assert_eq!(run.code(), Some(143), "{}", run.stderr);
    assert!(!run.stdout.contains("\"summary\""), "{}", run.stdout);
}

#[test]
fn failing_rank_is_reported_first() {
    let scratch = Scratch::new();
    // 40 steps of one sample each; the last sample is out of range and falls to the last rank.
    let ids = (0..320).map(|i| if i == 319 { 60 } else { i % 50 });
    scratch.token_files(ids);
    let job = scratch.small().set(&["data.path=tokens", "trainer.max_steps=100"]);
    for (strategy, devices) in [("ddp", 2), ("fsdp", 4)] {
        let run = job.clone().on(strategy, devices, 1).run();
        assert_eq!(run.code(), Some(1), "{}", run.stderr);
        let expected = format!("error: rank {} failed: ", devices - 1);
        assert!(run.first_error().starts_with(&expected), "{}", run.stderr);
        assert_eq!(run.stderr.matches("error").count(), 1, "{}", run.stderr);
        assert_eq!(run.losses().len(), 40 / devices - 1);
        assert_nothing_is_left(&scratch);
    }
    let alone = job.on("single_device", 1, 1).run();
    assert_eq!(alone.code(), Some(1));
    assert!(alone.first_error().starts_with("error: "), "{}", alone.stderr);
}
