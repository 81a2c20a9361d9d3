//! A run that goes on from a checkpoint goes on as if it had never stopped.

mod program;

use std::collections::BTreeMap;
use std::fs;

use program::{Job, Run, Scratch, assert_close};
use rustix::process::Signal;

const SPREADS: [(&str, usize); 2] = [("ddp", 2), ("fsdp", 2)];

/// A job whose every part must be taken up again: momentum, schedule, data order, dropout.
fn job(scratch: &Scratch) -> Job<'_> {
    scratch.small().set(&[
        "trainer.max_steps=9",
        "scheduler.type=cosine",
        "data.shuffle=true",
        "model.dropout=0.1",
        "checkpoint.every_n_steps=3",
        "checkpoint.dir=kept",
    ])
}

fn numbers(run: &Run) -> [BTreeMap<u64, f64>; 3] {
    ["train_loss", "grad_norm", "lr"].map(|key| run.steps(key))
}

/// What comes after step `step`.
fn after(step: u64, numbers: &[BTreeMap<u64, f64>; 3]) -> [BTreeMap<u64, f64>; 3] {
    numbers.clone().map(|mut steps| steps.split_off(&(step + 1)))
}

#[test]
fn losses_are_those_of_an_uninterrupted_run_to_the_bit() {
    for (strategy, devices) in SPREADS {
        let scratch = Scratch::with_tokens();
        let job = job(&scratch).on(strategy, devices, 3);
        let whole = job.succeed();
        assert_eq!(whole.losses().len(), 9);

        let resumed = job.clone().set(&["trainer.ckpt_path=kept/step-00000003"]).succeed();
        assert_eq!(numbers(&resumed), after(3, &numbers(&whole)), "{strategy}");
        assert_eq!(resumed.summary()["steps"], 9);

        fs::remove_dir_all(scratch.path().join("kept/step-00000009")).unwrap();
        let resumed = job.clone().set(&["trainer.ckpt_path=last"]).succeed();
        assert_eq!(numbers(&resumed), after(6, &numbers(&whole)), "{strategy}");
    }
}

#[test]
fn another_mesh_may_go_on() {
    let scratch = Scratch::with_tokens();
    let job = job(&scratch);
    let whole = job.clone().on("fsdp", 2, 6).succeed();
    let resume = job.set(&["trainer.ckpt_path=kept/step-00000003", "checkpoint.every_n_steps=100"]);
    for (strategy, devices) in [("ddp", 3), ("single_device", 1), ("fsdp", 4)] {
        let resumed = resume.clone().on(strategy, devices, 12 / devices).succeed();
        let expected = after(3, &numbers(&whole));
        assert_close(&resumed.losses(), &expected[0], 1e-5);
        assert_eq!(resumed.steps("lr"), expected[2], "{strategy}");
    }
}

#[test]
fn a_killed_run_goes_on_from_its_last_checkpoint() {
    let scratch = Scratch::with_tokens();
    let job =
        job(&scratch).on("fsdp", 2, 3).set(&["scheduler=constant", "checkpoint.every_n_steps=20"]);
    let running = job.clone().set(&["trainer.max_steps=1000000"]).start();
    running.reach(50);
    running.signal(Signal::KILL);
    running.until_gone();
    drop(running);

    let resume = job.clone().set(&["trainer.ckpt_path=last"]);
    // It has passed step 40 for sure, and may have come further.
    let first = |run: &Run| *run.losses().keys().next().expect("steps");
    let last = {
        let entries = fs::read_dir(scratch.path().join("kept")).unwrap();
        let whole = entries.flatten().filter(|e| e.path().join("manifest.json").is_file());
        let steps =
            whole.filter_map(|e| e.file_name().to_str()?.strip_prefix("step-")?.parse().ok());
        steps.max().unwrap_or(0_u64)
    };
    assert!(last >= 40, "{last}");
    let end = format!("trainer.max_steps={}", last + 5);
    let resumed = resume.set(&[&end]).succeed();
    assert_eq!(first(&resumed), last + 1);
    let whole = job.set(&[&end, "checkpoint.dir=other"]).succeed();
    assert_eq!(numbers(&resumed), after(last, &numbers(&whole)));
}

#[test]
fn last_without_a_directory_is_the_newest_of_all_runs() {
    let scratch = Scratch::with_tokens();
    let job = scratch.small().on("ddp", 2, 3).set(&["trainer.ckpt_path=last"]);
    // None yet: it starts afresh, and leaves one.
    let to = |steps: u64| {
        let steps = format!("trainer.max_steps={steps}");
        job.clone().set(&[&steps, "scheduler=constant", "checkpoint.save_last=true"]).succeed()
    };
    let keys = |run: &Run| run.losses().into_keys().collect::<Vec<_>>();
    assert_eq!(keys(&to(2)), [1, 2]);
    assert_eq!(keys(&to(4)), [3, 4]);
    // The newest run has no checkpoint.
    fs::remove_dir_all(scratch.path().join("fulgurite_logs/version_1/checkpoints")).unwrap();
    assert_eq!(keys(&to(5)), [3, 4, 5]);
    // A run that is done has nothing left to do.
    let done = to(5);
    assert_eq!(keys(&done), [0_u64; 0]);
    assert_eq!(done.summary()["steps"], 5);
}
