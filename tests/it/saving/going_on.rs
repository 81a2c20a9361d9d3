//! Resuming runs from checkpoints.

use std::path::Path;

use fulgurite::core::Error;
use fulgurite::core::checkpoint::DistributedCheckpoint;
use fulgurite::core::launch::Interruption;
use fulgurite::core::trainer::Event;
use fulgurite_test_message::assert_says;

use super::harness::{COUNTED, PATIENCE, Scratch, course, resumed, saved};

#[test]
fn run_interrupted_anywhere_resumes() {
    let keys = [
        "scheduler.type=cosine",
        "trainer.max_epochs=2",
        "trainer.accumulate_grad_batches=2",
        "trainer.val_check_interval=0.4",
        "trainer.ema_decay=0.7",
        "checkpoint.save_last=false",
    ];
    let whole = course(&Scratch::new().succeed(&keys));
    let counted = COUNTED.take();
    assert_eq!(counted["validation"], 5);
    assert_eq!((counted["epoch start"], counted["epoch end"]), (2, 2));
    let mut within_validation = 0;
    for patience in 0.. {
        let scratch = Scratch::new();
        let background = format!("checkpoint.async_save={}", patience % 2 == 0);
        let keys = [&keys[..], &["trainer.ckpt_path=last", &background]].concat();
        // Interrupted twice, the second time soon after the first.
        PATIENCE.set(Some((patience, Interruption::Termination)));
        let (mut events, result) = scratch.fit(&keys);
        PATIENCE.set(Some((patience % 3, Interruption::Preemption)));
        if result.is_ok() {
            assert_eq!(course(&events), whole);
            assert!(!scratch.path("kept").exists(), "it was asked for no checkpoint");
            assert!(patience > 10, "it asks after every step, and within validations");
            break;
        }
        assert!(matches!(result, Err(Error::Interrupted)), "{result:?}");
        let last = saved(&events);
        let steps = course(&events).iter().filter(|line| !line.starts_with('v')).count();
        assert_eq!(last, [steps as u64], "saved once, when it was interrupted");
        let (more, result) = scratch.fit(&keys);
        events.extend(more);
        PATIENCE.set(None);
        if matches!(result, Err(Error::Interrupted)) {
            events.extend(scratch.succeed(&keys));
        } else {
            result.unwrap();
        }
        assert_eq!(course(&events), whole, "interrupted when asked {patience} times");
        assert_eq!(COUNTED.take(), counted, "interrupted when asked {patience} times");
        let manifest = scratch
            .path(&format!("kept/{}/manifest.json", "step-".to_owned() + &format!("{steps:08}")));
        let manifest = std::fs::read_to_string(manifest).unwrap();
        within_validation += usize::from(manifest.contains("\"validation_due\": true"));
    }
    PATIENCE.set(None);
    assert!(within_validation > 4, "{within_validation}");
}

#[test]
fn ctrl_c_saves_if_the_end_of_training_does() {
    for save_last in [false, true] {
        let scratch = Scratch::new();
        PATIENCE.set(Some((1, Interruption::CtrlC)));
        let last = format!("checkpoint.save_last={save_last}");
        let (events, result) = scratch.fit(&[&last, "trainer.val_check_interval=1000"]);
        PATIENCE.set(None);
        assert!(matches!(result, Err(Error::Interrupted)), "{result:?}");
        assert_eq!(saved(&events), if save_last { vec![2] } else { vec![] });
    }
}

#[test]
fn last_file_names_the_checkpoint_to_resume() {
    let scratch = Scratch::new();
    let keys = ["checkpoint.every_n_steps=2"];
    scratch.succeed(&[&keys[..], &["trainer.max_steps=4"]].concat());
    let from = format!("trainer.ckpt_path={:?}", scratch.path("kept/last"));
    let events = scratch.succeed(&[&keys[..], &["trainer.max_steps=6", &from]].concat());
    let (step, path) = resumed(&events).unwrap();
    assert!(step == 4 && path.ends_with("kept/step-00000004"), "{step} {path:?}");
    // The same for its weights only.
    let other = format!("checkpoint.dir={:?}", scratch.path("other"));
    let only = ["trainer.max_steps=1", "checkpoint.weights_only=true", &other, &from];
    let events = scratch.succeed(&[&keys[..], &only].concat());
    let (step, path) = resumed(&events).unwrap();
    assert!(step == 0 && path.ends_with("kept/step-00000006"), "{step} {path:?}");
}

#[test]
fn run_starts_from_weights_only() {
    let scratch = Scratch::new();
    let keys = ["trainer.max_steps=5", "trainer.val_check_interval=5"];
    let first = scratch.succeed(&keys);
    for (path, place) in [("last", ""), ("", ""), ("", "model")] {
        let kept = scratch.path("kept/step-00000005").join(place);
        let other = format!("checkpoint.dir={:?}", scratch.path("other"));
        let path = if path.is_empty() { kept.to_str().unwrap() } else { path };
        let path = format!("trainer.ckpt_path={path}");
        let only = ["checkpoint.weights_only=true", "checkpoint.overwrite=true", &path];
        let (dir, frozen) = match path.ends_with("last") {
            true => ("checkpoint.save_last=false", "optimizer.lr=0.0"),
            false => (other.as_str(), "optimizer.lr=0.0"),
        };
        let events = scratch.succeed(&[&keys[..], &only, &[dir, frozen]].concat());
        assert_eq!(resumed(&events).unwrap().0, 0);
        let steps = course(&events);
        assert!(steps[0].starts_with("1 "), "{steps:?}");
        assert_eq!(steps.len(), 6);
        // The weights are from the end of the first run, and do not change.
        let validation = |events: &[Event]| course(events).pop().unwrap();
        assert_eq!(validation(&events), validation(&first));
    }
}

#[test]
fn missing_optimizer_state_is_refused() {
    let scratch = Scratch::new();
    let keys = ["trainer.max_steps=4", "checkpoint.every_n_steps=2"];
    let fit = |more: &[&str]| scratch.fit(&[&keys[..], more].concat());
    let from = |path: &Path| format!("trainer.ckpt_path={path:?}");
    let second = scratch.path("kept/step-00000002");
    // Without momentum there is no optimizer state.
    let whole = course(&scratch.succeed(&[&keys[..], &["optimizer=sgd"]].concat()));
    let (events, result) = fit(&["optimizer=sgd", &from(&second)]);
    result.unwrap();
    assert_eq!(course(&events), whole[2..]);
    let checkpoint = DistributedCheckpoint::open(&second).unwrap();
    assert!(checkpoint.optimizer().is_empty() && checkpoint.manifest().step == 2);

    let (_, result) = fit(&["optimizer=adamw", &from(&second)]);
    let error = result.unwrap_err().to_string();
    insta::assert_snapshot!(error.split_once(": ").unwrap().1, @r#"
    does not fit this optimizer:
      missing, the optimizer has it and the checkpoint does not (2):
        state.double.weight.exp_avg
        state.double.weight.exp_avg_sq
    Nothing was loaded. Going on needs the configuration that it was saved with. To begin a training with those of its weights that fit this model, set `checkpoint.weights_only = true` and `checkpoint.load.strict = false`
    "#);
    let only = ["optimizer=adamw", "checkpoint.weights_only=true", &from(&second)];
    let (events, result) = fit(&only);
    result.unwrap();
    assert_eq!(resumed(&events).unwrap().0, 0);
}

#[test]
fn other_data_needs_explicit_permission() {
    let scratch = Scratch::new();
    let keys = ["trainer.max_steps=2"];
    scratch.succeed(&[&keys[..], &["data.from=3"]].concat());
    let resumed_with = |from: &str, more: &[&str]| {
        let longer = ["trainer.max_steps=3", "trainer.ckpt_path=last", from];
        scratch.fit(&[&longer[..], more].concat()).1
    };
    let error = resumed_with("data.from=4", &[]).unwrap_err().to_string();
    let error = error.replace(scratch.path("kept").to_str().unwrap(), "KEPT");
    assert_says!(error, "checkpoint KEPT/step-00000002 … other samples … from 3 … from 4 …");
    // Weights only may be trained on other data.
    resumed_with("data.from=4", &["checkpoint.weights_only=true", "checkpoint.save_last=false"])
        .unwrap();
    resumed_with(
        "data.from=4",
        &["checkpoint.allow_other_data=true", "checkpoint.save_last=false"],
    )
    .unwrap();
    resumed_with("data.from=3", &[]).unwrap();
}
