//! Saved checkpoints, their kinds, and retention.

use fulgurite::core::checkpoint::CheckpointIO as _;
use fulgurite::core::trainer::Event;
use fulgurite_checkpoint_local::LocalDirectory;
use fulgurite_test_message::assert_says;

use super::harness::{Scratch, course, names, resumed, saved};

#[test]
fn background_and_foreground_saves_match() {
    let keys = ["trainer.max_steps=6", "checkpoint.every_n_steps=2", "checkpoint.save_last=true"];
    let scratch = Scratch::new();
    let whole = scratch.succeed(&keys);
    assert_eq!(saved(&whole), [2, 4, 6], "that of the end is there already");
    let background = Scratch::new();
    let keys = [&keys[..], &["checkpoint.async_save=true"]].concat();
    let events = background.succeed(&keys);
    // Reported late, but with the same steps.
    assert_eq!(saved(&events), [2, 4, 6]);
    assert!(matches!(events.last(), Some(Event::Summary { .. })));
    assert_eq!(course(&events), course(&whole));
    assert_eq!(background.kept(), ["last", "step-00000002", "step-00000004", "step-00000006"]);
    for step in ["step-00000002", "step-00000006"] {
        let weights = |scratch: &Scratch| {
            let model = scratch.path("kept").join(step).join("model");
            std::fs::read(model.join("shard-00001-model-00001-of-00001.safetensors")).unwrap()
        };
        assert_eq!(weights(&scratch), weights(&background), "{step}");
    }
    let from = format!("trainer.ckpt_path={:?}", background.path("kept/step-00000002"));
    let more = background.succeed(&[&keys[..], &[&from]].concat());
    assert_eq!(course(&more), course(&whole)[2..]);
}

#[test]
fn full_and_sharded_saves_replace_each_other() {
    let scratch = Scratch::new();
    let strategy = |distributed: bool| {
        format!("trainer.strategy={{type = \"tp\", save_distributed_checkpoint = {distributed}}}")
    };
    let fit = |distributed: bool, more: &[&str]| {
        let keys = ["checkpoint.every_n_steps=2", "trainer.val_check_interval=1000"];
        scratch.succeed(&[&keys[..], &[&*strategy(distributed)], more].concat())
    };
    let manifests = || {
        let inside = |step: &String| names(&scratch.path("kept").join(step));
        let steps = scratch.kept().into_iter().filter(|name| name != "last");
        let kind = |step: &String| match inside(step) {
            names if names == ["manifest.json", "model", "optimizer"] => "distributed",
            names if names.contains(&"model.safetensors".to_owned()) => "full",
            names => panic!("{names:?}"),
        };
        steps.map(|step| (step[12..].to_owned(), kind(&step))).collect::<Vec<_>>()
    };
    let kinds = |of: &[(&str, &'static str)]| -> Vec<(String, &'static str)> {
        of.iter().map(|&(step, kind)| (step.to_owned(), kind)).collect()
    };
    let whole = course(&fit(true, &["trainer.max_steps=4"]));
    assert_eq!(manifests(), kinds(&[("2", "distributed"), ("4", "distributed")]));
    let second = format!("trainer.ckpt_path={:?}", scratch.path("kept/step-00000002"));
    // Save again under the same name, as the other kind.
    for (distributed, kind) in [(false, "full"), (true, "distributed"), (false, "full")] {
        let events = fit(distributed, &["trainer.max_steps=4", &second]);
        assert_eq!(course(&events), whole[2..]);
        assert_eq!(manifests(), kinds(&[("2", "distributed"), ("4", kind)]));
    }
    // A run that resumes from a full checkpoint by path keeps it, and removes older ones.
    let fourth = format!("trainer.ckpt_path={:?}", scratch.path("kept/step-00000004"));
    let more = ["trainer.max_steps=8", "checkpoint.keep_last=1", &fourth];
    assert_eq!(saved(&fit(false, &more)), [6, 8]);
    assert_eq!(manifests(), kinds(&[("4", "full"), ("8", "full")]));
}

#[test]
fn async_full_checkpoints_are_refused() {
    let scratch = Scratch::new();
    let strategy = "trainer.strategy={type = \"tp\", save_distributed_checkpoint = false}";
    let (events, result) = scratch.fit(&[strategy, "checkpoint.async_save=true"]);
    assert_eq!(course(&events), [""; 0]);
    assert_says!(result.unwrap_err(), "`checkpoint.async_save`: full checkpoints … background …");
}

#[test]
fn resumed_run_keeps_newest_and_best() {
    let run = |keys: &[&str], from: Option<&str>| {
        let scratch = Scratch::new();
        let always = ["checkpoint.every_n_steps=1", "trainer.val_check_interval=1"];
        let fit = |more: &[&str]| scratch.succeed(&[&always, keys, more].concat());
        fit(&["trainer.max_steps=4"]);
        let first = scratch.kept();
        let from = from.map_or("last".to_owned(), |name| {
            scratch.path("kept").join(name).to_string_lossy().into_owned()
        });
        fit(&["trainer.max_steps=7", &format!("trainer.ckpt_path={from}")]);
        let digits = |names: Vec<String>| -> String {
            names.iter().filter_map(|name| name.strip_prefix("step-0000000")).collect()
        };
        let kept = scratch.kept();
        assert!(kept.iter().all(|name| name == "last" || name.starts_with("step-0000000")));
        (digits(first), digits(kept))
    };
    let kept = |first: &str, then: &str| (first.to_owned(), then.to_owned());
    assert_eq!(run(&[], None), kept("1234", "1234567"));
    assert_eq!(run(&["checkpoint.async_save=true"], None), kept("1234", "1234567"));
    // The resumed checkpoint is kept.
    for background in ["checkpoint.async_save=true", "checkpoint.async_save=false"] {
        let keys = ["checkpoint.keep_last=2", background];
        assert_eq!(run(&keys, None), kept("34", "467"));
    }
    // The run does not know the checkpoint of step 4, and replaces it with its own.
    assert_eq!(run(&["checkpoint.keep_last=2"], Some("step-00000003")), kept("34", "367"));
    assert_eq!(run(&["checkpoint.save_top_k=0"], None), kept("4", "47"));
    // The loss falls with each step: the oldest checkpoints are the worst.
    let worst = ["checkpoint.save_top_k=2", "checkpoint.monitor=val_loss", "checkpoint.mode=max"];
    assert_eq!(run(&worst, None), kept("124", "1247"));
    let best = ["checkpoint.save_top_k=2", "checkpoint.monitor=val_loss"];
    assert_eq!(run(&best, None), kept("34", "467"));
}

#[test]
fn checkpoint_has_no_value_of_another_step() {
    // Validated after steps 3 and 6. Step 3 has the best value; step 4 must not get that value.
    let keys = [
        "checkpoint.every_n_steps=2",
        "checkpoint.save_top_k=1",
        "checkpoint.monitor=val_loss",
        "checkpoint.mode=max",
        "trainer.max_steps=7",
        "trainer.val_check_interval=3",
    ];
    let scratch = Scratch::new();
    scratch.succeed(&keys);
    let kept = scratch.kept();
    assert!(kept.contains(&"step-00000006".to_owned()), "{kept:?}");
    assert!(!kept.contains(&"step-00000004".to_owned()), "{kept:?}");
}

#[test]
fn missing_metric_is_found_in_time() {
    let keys = [
        "checkpoint.every_n_steps=1",
        "checkpoint.save_top_k=1",
        "checkpoint.monitor=loss",
        "trainer.max_steps=3",
        "trainer.val_check_interval=2",
    ];
    let (events, result) = Scratch::new().fit(&keys);
    assert_eq!(saved(&events), [1], "nothing was validated then");
    assert_says!(result.unwrap_err(), "`checkpoint.monitor` … no metric `loss` … train_loss …");
}

#[test]
fn failing_save_ends_the_run() {
    for background in [false, true] {
        let scratch = Scratch::new();
        std::fs::write(scratch.path("file"), "").unwrap();
        let dir = format!("checkpoint.dir={:?}", scratch.path("file/kept"));
        let background = format!("checkpoint.async_save={background}");
        let keys = [&*dir, &background, "checkpoint.every_n_steps=2", "trainer.max_steps=4"];
        let (events, result) = scratch.fit(&keys);
        assert_eq!(saved(&events), [0; 0]);
        let error = result.unwrap_err().to_string();
        assert!(error.contains("file/kept: Not a directory"), "{error}");
    }
}

#[test]
fn run_killed_after_commit_resumes() {
    let scratch = Scratch::new();
    let keys = ["trainer.max_steps=6", "checkpoint.every_n_steps=2"];
    let whole = scratch.succeed(&keys);
    // The state after a kill between the commit and the update of `last`.
    std::fs::write(scratch.path("kept/last"), "step-00000004\n").unwrap();
    let longer = ["trainer.max_steps=8", "checkpoint.every_n_steps=2", "trainer.ckpt_path=last"];
    let events = scratch.succeed(&longer);
    assert_eq!(resumed(&events).unwrap().0, 6);
    // A run resumed from an earlier checkpoint is newer than later steps of the other run.
    let from = format!("trainer.ckpt_path={:?}", scratch.path("kept/step-00000002"));
    let other = ["trainer.max_steps=3", "checkpoint.every_n_steps=3", &from];
    scratch.succeed(&other);
    std::fs::write(scratch.path("kept/last"), "step-00000008\n").unwrap();
    let events = scratch.succeed(&longer);
    assert_eq!(resumed(&events).unwrap().0, 3);
    assert_eq!(course(&events)[..1], course(&whole)[3..4]);
}

#[test]
fn one_run_at_a_time_saves_to_a_directory() {
    let scratch = Scratch::new();
    let keys = ["trainer.max_steps=2"];
    scratch.succeed(&keys);
    let lock = LocalDirectory::new(scratch.path("kept")).lock("").unwrap();
    let (events, result) = scratch.fit(&[&keys[..], &["checkpoint.overwrite=true"]].concat());
    let error = result.unwrap_err().to_string();
    assert!(error.contains("another run saves here: process "), "{error}");
    assert_eq!(events, [], "it is found before a step");
    // Runs that do not save there are not affected.
    scratch.validate(&["trainer.ckpt_path=last"]).unwrap();
    scratch.succeed(&[&keys[..], &["checkpoint.save_last=false"]].concat());
    drop(lock);
    scratch.succeed(&[&keys[..], &["checkpoint.overwrite=true"]].concat());
    assert_eq!(scratch.kept(), ["last", "step-00000002"]);
}
