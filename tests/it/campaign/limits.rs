//! Full disks and low system limits at random: the job's first error is the cause, whatever else
//! its ranks report.

use std::fs;

use super::trials::{Trial, trials};
use crate::program::{Job, Run, Scratch, can_mount, left_in_shared_memory};

/// Texts of the causes.
const CAUSES: [&str; 6] = [
    "No space left on device",
    "Too many open files",
    "No file descriptors available",
    "memory",
    "threads",
    "File too large",
];

fn saving<'a>(scratch: &'a Scratch, trial: &mut Trial) -> Job<'a> {
    let rng = &mut trial.rng;
    let (strategy, devices) = [("fsdp", 2), ("ddp", 3), ("fsdp", 4)][rng.usize(..3)];
    scratch.small().on(strategy, devices, 1).set(&[
        "scheduler=constant",
        "trainer.max_steps=12",
        "checkpoint.dir=kept",
        "checkpoint.keep_last=1000",
        "checkpoint.every_n_steps=1",
        "data.validation_fraction=0.2",
        &format!("checkpoint.async_save={}", rng.bool()),
    ])
}

/// Checks that the run succeeded, or that its first error names the cause.
fn check(run: &Run, what: &str) {
    let text = format!("{what}: {}\n{}", run.status, run.stderr);
    if run.code() == Some(0) {
        return;
    }
    // A failed allocation aborts the process.
    assert!(matches!(run.code(), Some(1 | 134)), "{text}");
    // A rank that has not joined yet reports its own error.
    let first = run.first_error();
    assert!(CAUSES.iter().any(|cause| first.contains(cause)), "{text}");
    assert!(!run.stderr.contains("panicked") && !first.contains("exit code 79"), "{text}");
    assert_eq!(left_in_shared_memory(), [""; 0], "{text}");
}

#[test]
fn full_disk_is_reported_first() {
    if !can_mount() {
        return;
    }
    trials(4, |trial| {
        let scratch = Scratch::with_tokens();
        fs::create_dir(scratch.path().join("kept")).unwrap();
        let job = saving(&scratch, trial);
        let kib = trial.rng.u32(8..300);
        let run = job
            .env("KIB", kib)
            .mounting("mount -t tmpfs -o size=${KIB}k,nr_inodes=1k none kept; \"$@\"")
            .run();
        check(&run, &format!("a disk of {kib} KiB"));
    });
}

#[test]
fn low_limit_is_reported_first() {
    trials(4, |trial| {
        let scratch = Scratch::with_tokens();
        let job = saving(&scratch, trial);
        let limit = match trial.rng.u32(..3) {
            0 => format!("-n {}", trial.rng.u32(4..24)),
            1 => format!("-v {}", trial.rng.u32(100_000..700_000)),
            _ => format!("-f {}", trial.rng.u32(1..40)),
        };
        let run = job.limited(&limit).run();
        check(&run, &limit);
    });
}
