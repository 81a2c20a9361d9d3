//! A run resumed from a checkpoint continues as if it had never stopped.

use std::collections::BTreeMap;
use std::fs;

use crate::program::{Job, Run, Scratch, assert_close};
use rustix::process::Signal;

const STRATEGIES: [(&str, usize); 2] = [("ddp", 2), ("fsdp", 2)];

/// A job with all kinds of state to restore: momentum, schedule, data order, dropout.
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

/// The values after step `step`.
fn after(step: u64, numbers: &[BTreeMap<u64, f64>; 3]) -> [BTreeMap<u64, f64>; 3] {
    numbers.clone().map(|mut steps| steps.split_off(&(step + 1)))
}

#[test]
fn resumed_losses_match_bitwise() {
    for (strategy, devices) in STRATEGIES {
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

/// Optimizers of whole tensors, whose ranks communicate in the update.
#[test]
fn muon_and_adafactor_resume_on_any_mesh() {
    let muon = "optimizer={ type = 'muon', lr = 0.02, adamw = { lr = 0.003 } }";
    for optimizer in [muon, "optimizer={ type = 'adafactor', lr = 0.02 }"] {
        let scratch = Scratch::with_tokens();
        let job = job(&scratch).set(&[optimizer]);
        let whole = job.clone().on("fsdp", 2, 6).succeed();
        let resume =
            job.set(&["trainer.ckpt_path=kept/step-00000003", "checkpoint.every_n_steps=100"]);
        let expected = after(3, &numbers(&whole));
        assert!(whole.losses()[&9] < whole.losses()[&1]);
        let resumed = resume.clone().on("fsdp", 2, 6).succeed();
        assert_eq!(numbers(&resumed), expected, "{optimizer}");
        for (strategy, devices) in [("ddp", 3), ("single_device", 1), ("fsdp", 4)] {
            let resumed = resume.clone().on(strategy, devices, 12 / devices).succeed();
            assert_close(&resumed.losses(), &expected[0], 1e-4);
        }
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
fn killed_run_resumes_from_last_checkpoint() {
    let scratch = Scratch::with_tokens();
    let job =
        job(&scratch).on("fsdp", 2, 3).set(&["scheduler=constant", "checkpoint.every_n_steps=20"]);
    let running = job.clone().set(&["trainer.max_steps=1000000"]).start();
    running.reach(50);
    running.signal(Signal::KILL);
    running.until_gone();
    drop(running);

    let resume = job.clone().set(&["trainer.ckpt_path=last"]);
    // The run has passed step 40, perhaps by more.
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
fn last_is_the_newest_of_all_runs() {
    let scratch = Scratch::with_tokens();
    let job = scratch.small().on("ddp", 2, 3).set(&["trainer.ckpt_path=last"]);
    // No checkpoint yet: the run starts fresh and saves one.
    let to = |steps: u64| {
        let steps = format!("trainer.max_steps={steps}");
        job.clone().set(&[&steps, "scheduler=constant", "checkpoint.save_last=true"]).succeed()
    };
    let keys = |run: &Run| run.losses().into_keys().collect::<Vec<_>>();
    let first = to(2);
    assert_eq!(keys(&first), [1, 2]);
    let said = "there is no checkpoint in fulgurite_logs yet, so training starts at step 0";
    assert_eq!(first.stderr.matches(said).count(), 1, "{}", first.stderr);
    let second = to(4);
    assert_eq!(keys(&second), [3, 4]);
    assert!(!second.stderr.contains("there is no checkpoint"), "{}", second.stderr);
    // The newest run has no checkpoint.
    fs::remove_dir_all(scratch.path().join("fulgurite_logs/version_1/checkpoints")).unwrap();
    assert_eq!(keys(&to(5)), [3, 4, 5]);
    // A completed run has no steps left.
    let done = to(5);
    assert_eq!(keys(&done), [0_u64; 0]);
    assert_eq!(done.summary()["steps"], 5);
}

#[test]
fn background_saves_resume_bitwise() {
    for (strategy, devices) in STRATEGIES {
        let scratch = Scratch::with_tokens();
        let job = job(&scratch).on(strategy, devices, 3).set(&[
            "checkpoint.async_save=true",
            "data.validation_fraction=0.2",
            "trainer.val_check_interval=2",
            "trainer.ema_decay=0.9",
        ]);
        let whole = job.clone().set(&["checkpoint.every_n_steps=1"]).succeed();
        let saved = whole.events_of("checkpoint");
        let steps: Vec<_> = saved.iter().map(|event| event["step"].as_u64().unwrap()).collect();
        assert_eq!(steps, (1..=9).collect::<Vec<_>>(), "in order, and all told of");
        assert!(saved.iter().all(|event| event["blocked_s"].as_f64().unwrap() > 0.0));
        for (from, step) in [("kept/step-00000002", 2), ("step-00000007", 7)] {
            let from = format!("trainer.ckpt_path={from}");
            let resumed = job.clone().set(&[&from]).succeed();
            assert_eq!(numbers(&resumed), after(step, &numbers(&whole)), "{strategy}");
            let validations = |run: &Run| {
                let all = run.events_of("validation").into_iter();
                all.filter(|event| event["step"].as_u64().unwrap() > step).collect::<Vec<_>>()
            };
            assert!(!validations(&whole).is_empty());
            assert_eq!(validations(&resumed), validations(&whole), "{strategy}");
        }
        // Validation of a checkpoint uses the averages of the weights, as in training.
        let validate = scratch
            .job(&["validate", "--output", "json"])
            .set(&job.assignments("trainer.ckpt_path", "checkpoint.every"))
            .set(&["trainer.ckpt_path=kept/step-00000008"])
            .succeed();
        let losses: Vec<_> = [&validate, &whole]
            .map(|run| run.events_of("validation").pop().expect("a validation")["val_loss"].clone())
            .into();
        assert_eq!(losses[0], losses[1], "{strategy}");
        // `last` is the checkpoint saved last, not the one of the highest step.
        let back = ["trainer.ckpt_path=kept/step-00000002", "trainer.max_steps=4"];
        job.clone().set(&back).set(&["checkpoint.save_last=true"]).succeed();
        let resumed = job.clone().set(&["trainer.ckpt_path=last"]).succeed();
        assert_eq!(resumed.events_of("resume")[0]["step"], 4);
        assert_eq!(resumed.losses().into_keys().collect::<Vec<_>>(), [5, 6, 7, 8, 9]);
    }
}

#[test]
fn preemption_signal_saves_first() {
    for (signals, codes, strategy, devices) in [
        (&[Signal::TERM][..], &[143][..], "fsdp", 2),
        (&[Signal::USR1], &[138], "ddp", 2),
        (&[Signal::USR1], &[138], "single_device", 1),
        // A notice, then the announced end: not a second request. The ranks may have agreed to end
        // for the notice before the second signal arrives.
        (&[Signal::USR1, Signal::TERM], &[138, 143], "single_device", 1),
        (&[Signal::USR1, Signal::TERM], &[138, 143], "ddp", 2),
    ] {
        let scratch = Scratch::with_tokens();
        // The run saves even without configured checkpoints, and in the foreground despite
        // `async_save`.
        let job = scratch.small().on(strategy, devices, 6 / devices).set(&[
            "scheduler=constant",
            "data.shuffle=true",
            "model.dropout=0.1",
            "checkpoint.dir=kept",
            "checkpoint.async_save=true",
        ]);
        let running = job.clone().set(&["trainer.max_steps=1000000"]).start();
        running.reach(5);
        signals.iter().for_each(|&signal| running.signal(signal));
        let stopped = running.wait();
        let code = stopped.code().unwrap();
        assert!(codes.contains(&code), "{code}: {}", stopped.stderr);
        assert!(!stopped.stderr.contains("error"), "{}", stopped.stderr);
        let step = stopped.losses().len() as u64;
        let saved = stopped.events_of("checkpoint");
        assert_eq!(saved.len(), 1);
        assert_eq!(saved[0]["step"], step);
        assert_eq!(stopped.summary()["steps"], step);

        let end = format!("trainer.max_steps={}", step + 3);
        let resumed = job.clone().set(&["trainer.ckpt_path=last", &end]).succeed();
        let whole = job.set(&[&end]).succeed();
        assert_eq!(numbers(&resumed), after(step, &numbers(&whole)), "{strategy}");
        let mut both = stopped.losses();
        both.extend(resumed.losses());
        assert_eq!(both, whole.losses());
    }
}

#[test]
fn several_ranks_remove_old_checkpoints() {
    let scratch = Scratch::with_tokens();
    let job = job(&scratch).set(&["checkpoint.every_n_steps=1", "checkpoint.async_save=true"]);
    let kept = || {
        let entries = fs::read_dir(scratch.path().join("kept")).unwrap().flatten();
        let mut names: Vec<_> =
            entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    let keys =
        ["checkpoint.keep_last=2", "checkpoint.save_top_k=1", "checkpoint.monitor=train_loss"];
    let whole = job.clone().on("fsdp", 4, 2).set(&keys).set(&["checkpoint.mode=max"]).succeed();
    let losses = whole.losses();
    let worst = losses.iter().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
    let mut expected: Vec<u64> = vec![*worst, 8, 9];
    expected.sort_unstable();
    expected.dedup();
    let mut names = vec!["last".to_owned()];
    names.extend(expected.iter().map(|step| format!("step-{step:08}")));
    assert_eq!(kept(), names);
}

#[test]
fn other_samples_are_refused_and_named() {
    let scratch = Scratch::with_tokens();
    let job = scratch.small().set(&["trainer.max_steps=2", "checkpoint.dir=kept"]);
    job.clone().set(&["checkpoint.save_last=true"]).succeed();
    let resume = job.set(&["trainer.ckpt_path=last", "trainer.max_steps=3"]);
    for (key, says) in [
        ("data.seq_len=6", "`data.seq_len` was 7 and is 6"),
        ("data.stride=3", "`data.stride` was 7 and is 3"),
        ("data.validation_fraction=0.2", "the number of training samples was 57 and is 46"),
        ("data.shuffle=true", "the order of training samples was in order and is shuffled"),
    ] {
        let error = resume.clone().set(&[key]).fail();
        assert!(error.contains(says), "{error}");
        assert!(error.contains("checkpoint.allow_other_data"), "{error}");
        let allowed = resume.clone().set(&[key, "checkpoint.allow_other_data=true"]).succeed();
        assert!(allowed.stderr.contains(says), "{}", allowed.stderr);
        assert_eq!(allowed.losses().len(), 1);
    }
    // Keys that do not affect the samples may change.
    resume.set(&["data.batch_size=4", "trainer.limit_val_batches=0"]).succeed();
}

#[test]
fn another_model_of_the_same_shapes_is_a_warning() {
    let scratch = Scratch::with_tokens();
    let job = scratch.small().set(&["checkpoint.dir=kept", "checkpoint.save_last=true"]);
    job.clone().set(&["trainer.max_steps=2"]).succeed();
    let resume = job.set(&["trainer.ckpt_path=last", "trainer.max_steps=4"]);
    let warning = "saved with another configuration of the model";
    let other = resume.clone().set(&["model.rms_norm_eps=0.1"]).succeed();
    let line = other.stderr.lines().find(|line| line.contains(warning)).unwrap_or_default();
    assert!(line.contains("`model.rms_norm_eps` was 0.00001 and is 0.1"), "{}", other.stderr);
    let same = resume.set(&["trainer.max_steps=6", "model.rms_norm_eps=0.1"]).succeed();
    assert!(!same.stderr.contains(warning), "{}", same.stderr);
}

#[test]
fn learning_rate_jump_is_a_warning() {
    let scratch = Scratch::with_tokens();
    let job = scratch.small().set(&["checkpoint.dir=kept", "scheduler.type=linear"]);
    let short = ["trainer.max_steps=6", "checkpoint.save_last=true"];
    job.clone().set(&short).succeed();
    let warning = "the learning rate jumps";
    let resume = job.set(&["trainer.ckpt_path=kept/step-00000006"]);
    let longer = resume.clone().set(&["trainer.max_steps=12"]).succeed();
    let line = longer.stderr.lines().find(|line| line.contains(warning)).unwrap_or_default();
    assert!(line.contains("which was 6 steps and is 12 now"), "{line}");
    assert!(line.contains("would have 0e0 in the run that is resumed"), "{line}");
    let lr = longer.steps("lr")[&7];
    assert!(line.contains(&format!("{lr:e}")), "{line}");
    let as_before = ["trainer.max_steps=12", "scheduler.decay_steps=6"];
    let as_before = resume.set(&as_before).succeed();
    // The length of the decay came from the run.
    assert!(!as_before.stderr.contains(warning), "{}", as_before.stderr);
}
