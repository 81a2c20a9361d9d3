//! Each option of `model_checkpoint`, as in Lightning's `ModelCheckpoint`.

use std::sync::atomic::{AtomicBool, Ordering};

use fulgurite::callbacks::ModelCheckpoint;
use fulgurite::core::launch::Interruption;
use fulgurite::core::trainer::{Event, LogOptions, SaveRequest};
use fulgurite::core::{Error, Result};
use fulgurite::prelude::{Callback, HookContext, Hooks, Trainer};
use fulgurite_test_message::assert_says;
use fulgurite_transports::run_ranks;

use crate::callbacks::{Net, config, fit, fit_in, kept};

/// A run with these callbacks and the checkpoints that it keeps. Epochs have six steps. The
/// validation after step n logs as `score` the n-th of 5, 3, 4, 2, 2.5, 6, 7, 1.
struct Row {
    what: &'static str,
    callback: &'static str,
    keys: &'static [&'static str],
    kept: &'static [&'static str],
}

const MANY: &[&str] = &["trainer.max_steps=8"];
const EPOCHS: &[&str] = &["trainer.max_epochs=2"];

const ROWS: &[Row] = &[
    Row {
        what: "by default the newest, at the end of each epoch",
        callback: "",
        keys: EPOCHS,
        kept: &["epoch=1-step=12"],
    },
    Row {
        what: "of all epochs",
        callback: "save_top_k = -1",
        keys: EPOCHS,
        kept: &["epoch=0-step=6", "epoch=1-step=12"],
    },
    Row {
        what: "an epoch that the run ends in",
        callback: "save_top_k = -1",
        keys: MANY,
        kept: &["epoch=0-step=6", "epoch=1-step=8"],
    },
    Row { what: "none", callback: "save_top_k = 0", keys: EPOCHS, kept: &[] },
    Row {
        what: "every second epoch",
        callback: "save_top_k = -1, every_n_epochs = 2",
        keys: &["trainer.max_epochs=3"],
        kept: &["epoch=1-step=12"],
    },
    Row {
        what: "by steps",
        callback: "save_top_k = -1, every_n_steps = 3",
        keys: MANY,
        kept: &["epoch=0-step=3", "epoch=0-step=6"],
    },
    Row {
        what: "by time that always passes",
        callback: "save_top_k = -1, every_secs = 1e-9",
        keys: &["trainer.max_steps=2"],
        kept: &["epoch=0-step=1", "epoch=0-step=2"],
    },
    Row {
        what: "by time that never passes",
        callback: "every_secs = 1e9",
        keys: EPOCHS,
        kept: &[],
    },
    Row {
        what: "the best, not of the sanity check",
        callback: "monitor = 'score', save_top_k = 2, filename = '{step}-{score:.1}'",
        keys: MANY,
        kept: &["step=4-score=2.0", "step=8-score=1.0"],
    },
    Row {
        what: "the largest",
        callback: "monitor = 'score', mode = 'max', filename = '{step}'",
        keys: MANY,
        kept: &["step=7"],
    },
    Row {
        what: "what is no number is worse than any",
        callback: "monitor = 'shaky', save_top_k = 2, filename = '{step}'",
        keys: &["trainer.max_steps=3"],
        kept: &["step=2", "step=3"],
    },
    Row {
        what: "what is no number, if there is nothing better",
        callback: "monitor = 'shaky', filename = '{step}'",
        keys: &["trainer.max_steps=1"],
        kept: &["step=1"],
    },
    Row {
        what: "what is due before a validation waits for it",
        callback: "monitor = 'score', save_top_k = -1, every_n_steps = 2, filename = '{step}'",
        keys: &["trainer.max_steps=8", "trainer.val_check_interval=3"],
        kept: &["step=3", "step=6"],
    },
    Row {
        what: "a metric of the training, where nothing is validated",
        callback: "monitor = 'train_loss', save_top_k = -1, filename = '{step}'",
        keys: &["trainer.max_epochs=2", "trainer.limit_val_batches=0"],
        kept: &["step=12", "step=6"],
    },
    Row {
        what: "a name that is taken gets a version",
        callback: "save_top_k = -1, filename = 'same'",
        keys: EPOCHS,
        kept: &["same", "same-v1"],
    },
    Row {
        what: "a name that is free again does not",
        callback: "filename = 'same'",
        keys: EPOCHS,
        kept: &["same"],
    },
    Row {
        what: "the name of the pointer to the last one is taken",
        callback: "filename = 'last'",
        keys: &["trainer.max_epochs=1"],
        kept: &["last-v1"],
    },
    Row {
        what: "names of others are taken",
        callback: "filename = 'same' }, { type = 'model_checkpoint', filename = 'same', every_n_steps = 4",
        keys: EPOCHS,
        kept: &["same", "same-v1"],
    },
    Row {
        what: "values without their names",
        callback: "filename = '{epoch:02}_{step}', auto_insert_metric_name = false",
        keys: EPOCHS,
        kept: &["01_12"],
    },
    Row {
        what: "a metric that is not there need not be an error",
        callback: "monitor = 'scores', strict = false",
        keys: MANY,
        kept: &[],
    },
    Row {
        what: "nothing in a trial of everything",
        callback: "",
        keys: &["trainer.fast_dev_run=true"],
        kept: &[],
    },
];

/// Logs `shaky`: NaN in the first validation, then 1.
struct Shaky;

impl Callback for Shaky {}

impl Hooks for Shaky {
    fn on_validation_epoch_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        ctx.log("shaky", if ctx.step == 1 { f64::NAN } else { 1.0 });
        Ok(())
    }
}

fn callbacks(options: &str) -> String {
    let comma = if options.is_empty() { "" } else { "," };
    format!("trainer.callbacks=[{{ type = 'model_checkpoint'{comma} {options} }}]")
}

#[test]
fn retention_options() {
    for Row { what, callback, keys, kept: expected } in ROWS {
        let dir = tempfile::tempdir().unwrap();
        let run = config(dir.path(), &[keys, &[&*callbacks(callback)][..]].concat());
        let trainer = Trainer::default().with_callback(Box::new(Shaky));
        trainer.fit::<Net>(&run).unwrap_or_else(|error| panic!("{what}: {error}"));
        let mut names = kept(dir.path());
        names.retain(|name| name != "last");
        assert_eq!(names, *expected, "{what}");
    }
}

#[test]
fn unlogged_metric_is_an_error() {
    for options in ["monitor = 'scores'", "monitor = 'scores', every_n_steps = 1"] {
        let keys = ["trainer.max_steps=8", "trainer.val_check_interval=2", &callbacks(options)];
        let (_dir, events, result) = fit(&keys);
        assert_says!(
            result.unwrap_err(),
            "… model_checkpoint: `monitor` … no metric `scores` … score, train_loss, val_loss"
        );
        let validated = events.iter().any(|event| matches!(event, Event::Validation { .. }));
        assert!(validated, "not before the first validation");
    }
}

#[test]
fn resumed_checkpoint_is_never_removed() {
    let dir = tempfile::tempdir().unwrap();
    for (options, first, second) in [
        ("filename = '{step}'", &["last", "step=6"][..], &["last", "step=12", "step=6"][..]),
        // The checkpoint is not replaced either.
        ("filename = 'same'", &["last", "same"], &["last", "same", "same-v1"]),
    ] {
        let dir = dir.path().join(second.len().to_string() + second[1]);
        let callbacks = callbacks(options);
        let keys = |epochs| [epochs, &*callbacks, "trainer.ckpt_path=last"];
        fit_in(&dir, &keys("trainer.max_epochs=1")).1.unwrap();
        assert_eq!(kept(&dir), first);
        fit_in(&dir, &keys("trainer.max_epochs=2")).1.unwrap();
        assert_eq!(kept(&dir), second);
        // From the second resume on, the first checkpoint belongs to no run.
        fit_in(&dir, &keys("trainer.max_epochs=3")).1.unwrap();
        assert!(kept(&dir).contains(&first[1].to_owned()));
    }
}

/// Asks to remove the checkpoint that the run resumed from.
struct Careless;

impl Callback for Careless {}

impl Hooks for Careless {
    fn on_train_step_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        let mut request = SaveRequest::default();
        request.name = Some(format!("careless-{}", ctx.step));
        request.remove.extend(ctx.resumed_from().map(str::to_owned));
        request.remove.push(format!("careless-{}", ctx.step - 1));
        ctx.save_checkpoint(request);
        Ok(())
    }
}

#[test]
fn resumed_checkpoint_survives_a_callback() {
    let dir = tempfile::tempdir().unwrap();
    let fit = |steps: &str| {
        let run = config(dir.path(), &[steps, "trainer.ckpt_path=last"]);
        Trainer::default().with_callback(Box::new(Careless)).fit::<Net>(&run).unwrap();
        kept(dir.path())
    };
    assert_eq!(fit("trainer.max_steps=2"), ["careless-2", "last"]);
    assert_eq!(fit("trainer.max_steps=4"), ["careless-2", "careless-4", "last"]);
}

#[test]
fn callback_state_is_per_directory() {
    let dir = tempfile::tempdir().unwrap();
    let callbacks = callbacks("monitor = 'score', filename = '{step}'");
    // Step 8 has the best score of all, step 4 the best of the first 5.
    fit_in(dir.path(), &["trainer.max_steps=5", &callbacks, "checkpoint.save_last=true"])
        .1
        .unwrap();
    let from = dir.path().join("kept/step-00000005");
    let from = format!("trainer.ckpt_path={from:?}");
    let (other, _, result) = fit(&["trainer.max_steps=6", &callbacks, &from]);
    let best =
        result.unwrap().read_callback(|c: &ModelCheckpoint| c.best_model_name().map(str::to_owned));
    assert_eq!(best, Some(Some("step=6".to_owned())));
    assert_eq!(kept(other.path()), ["last", "step=6"]);
}

/// Logs a different value on each rank.
struct Own;

impl Callback for Own {}

impl Hooks for Own {
    fn on_validation_epoch_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        let value = if ctx.rank == 0 { ctx.step as f64 } else { -(ctx.step as f64) };
        ctx.log_with("own", value, LogOptions::default().sync(false));
        Ok(())
    }
}

#[test]
fn disagreeing_ranks_follow_rank_0() {
    let dir = tempfile::tempdir().unwrap();
    let callbacks = callbacks("monitor = 'own', filename = '{own}'");
    let run = config(
        dir.path(),
        &["trainer.max_steps=3", "trainer.devices=2", "trainer.strategy=fsdp", &callbacks],
    );
    let best = run_ranks(2, |world| {
        let trained = Trainer::new(world).with_callback(Box::new(Own)).fit::<Net>(&run)?;
        Ok(trained.read_callback(|c: &ModelCheckpoint| c.best_model_name().map(str::to_owned)))
    });
    assert_eq!(best.unwrap(), [Some(Some("own=1".to_owned())), Some(Some("own=1".to_owned()))]);
    assert_eq!(kept(dir.path()), ["last", "own=1"]);
}

/// Asks the run to stop within the validation after step 3.
struct Impatient;

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

impl Callback for Impatient {}

impl Hooks for Impatient {
    fn on_validation_batch_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        INTERRUPTED.store(ctx.step == 3, Ordering::Relaxed);
        Ok(())
    }
}

#[test]
fn due_save_survives_interrupted_validation() {
    let dir = tempfile::tempdir().unwrap();
    let options = callbacks("every_n_steps = 3, filename = '{step}'");
    let run = config(dir.path(), &["trainer.max_steps=8", &options]);
    let interrupted = || INTERRUPTED.load(Ordering::Relaxed).then_some(Interruption::CtrlC);
    let trainer = Trainer::default().with_callback(Box::new(Impatient)).with_interrupt(interrupted);
    assert!(matches!(trainer.fit::<Net>(&run), Err(Error::Interrupted)));
    assert_eq!(kept(dir.path()), ["last", "step=3"]);
}
