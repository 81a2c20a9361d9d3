//! The trainer's loop: order of hooks, limits, validation, learning rates.

use std::path::Path;
use std::sync::{Arc, Mutex};

use fulgurite::core::config::ConfigLayers;
use fulgurite::core::run::RunConfig;
use fulgurite::core::trainer::{Event, RunStatus, SavedState};
use fulgurite::core::{Error, Result};
use fulgurite::prelude::*;
use fulgurite_test_message::assert_says;
use serde::{Deserialize, Serialize};

use crate::toy::Events;

/// One weight that learns to double.
struct Double(Linear);

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct DoubleConfig {}

impl LightningModule for Double {
    type Config = DoubleConfig;
    type Data = Numbers;

    fn configure_model(_: &DoubleConfig, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self(Linear::new(&b.pp("double"), 1, 1)?))
    }

    fn training_step(&mut self, (x, y): &(Tensor, Tensor), ctx: &mut StepContext) -> Result<Loss> {
        let error = (self.0.forward(x)? - y)?;
        ctx.log("samples", x.dim(0)? as f64);
        Ok(Loss::new(error.sqr()?.sum_all()?, x.dim(0)? as f64))
    }
}

/// Implements all hooks for a type that notes them.
macro_rules! note_all {
    ($type:ty, $data:ty: $($hook:ident)*) => {
        impl Hooks<$data> for $type {
            $(fn $hook(&mut self, ctx: &mut HookContext<$data>) -> Result<()> {
                self.note(stringify!($hook), ctx)
            })*
            fn on_before_backward(&mut self, _: &Loss, ctx: &mut HookContext<$data>) -> Result<()> {
                self.note("on_before_backward", ctx)
            }
            fn after_save_checkpoint(
                &mut self,
                path: &Path,
                ctx: &mut HookContext<$data>,
            ) -> Result<()> {
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                self.note(&format!("after_save_checkpoint {name}"), ctx)
            }
            fn on_exception(&mut self, error: &Error, ctx: &mut HookContext<$data>) -> Result<()> {
                self.note(&format!("on_exception ({error})"), ctx)
            }
            fn teardown(&mut self, status: &RunStatus, ctx: &mut HookContext<$data>) -> Result<()> {
                self.note(&format!("teardown {status:?}"), ctx)
            }
            fn on_save_checkpoint(&mut self, state: &mut SavedState) -> Result<()> {
                self.write("on_save_checkpoint");
                state.set("answer", &42)
            }
            fn on_load_checkpoint(&mut self, state: &SavedState) -> Result<()> {
                assert_eq!(state.get("answer")?, Some(42));
                self.write("on_load_checkpoint");
                Ok(())
            }
        }
    };
    ($type:ty, $data:ty) => {
        note_all!($type, $data: setup on_fit_start on_sanity_check_start on_sanity_check_end
            on_train_start on_train_epoch_start on_train_batch_start on_after_backward
            on_train_batch_end on_before_optimizer_step on_before_zero_grad on_train_step_end
            on_train_epoch_end on_validation_start on_validation_epoch_start
            on_validation_batch_start on_validation_batch_end on_validation_epoch_end
            on_validation_end on_test_start on_test_epoch_start on_test_batch_start on_test_batch_end
            on_test_epoch_end on_test_end on_predict_start on_predict_epoch_start
            on_predict_batch_start on_predict_batch_end on_predict_epoch_end on_predict_end
            on_train_end on_fit_end);
    };
}

impl Double {
    fn note(&self, hook: &str, _: &HookContext<Numbers>) -> Result<()> {
        self.write(hook);
        Ok(())
    }

    fn write(&self, hook: &str) {
        NOTES.with(|notes| notes.lock().unwrap().push(format!("  module: {hook}")));
    }
}

note_all!(Double, Numbers);

/// The values 0 to 19 for training, 3 more for validation.
struct Numbers;

type Notes = Arc<Mutex<Vec<String>>>;

thread_local! {
    static NOTES: Notes = Notes::default();
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct NumbersConfig {
    batch_size: usize,
}

impl Default for NumbersConfig {
    fn default() -> Self {
        Self { batch_size: 4 }
    }
}

impl DataModule for Numbers {
    type Config = NumbersConfig;
    type Batch = (Tensor, Tensor);

    fn setup(_: &NumbersConfig, _: &DataContext) -> Result<Self> {
        Ok(Self)
    }

    fn batch_size(config: &NumbersConfig) -> usize {
        config.batch_size
    }

    fn len(&self, split: Split) -> u64 {
        match split {
            Split::Train => 20,
            _ => 3,
        }
    }

    fn batch(&self, _: Split, indices: &[u64], device: &Device) -> Result<(Tensor, Tensor)> {
        let x: Vec<f32> = indices.iter().map(|&i| i as f32 / 20.0).collect();
        let x = Tensor::from_vec(x, (indices.len(), 1), device)?;
        let y = (&x * 2.0)?;
        Ok((x, y))
    }
}

/// Notes each hook with the run's progress; can stop after a step, or fail at the start of an
/// epoch.
struct Recorder {
    notes: Notes,
    stop_after: Option<u64>,
    fail_in: Option<u64>,
}

impl Recorder {
    fn note(&self, hook: &str, ctx: &mut HookContext) -> Result<()> {
        self.write(&format!("{hook} {}/{}", ctx.step, ctx.epoch));
        match hook {
            "on_train_step_end" if self.stop_after == Some(ctx.step) => ctx.stop(),
            "on_train_epoch_start" if self.fail_in == Some(ctx.epoch) => {
                return Err(Error::other("a callback had enough"));
            }
            _ => {}
        }
        Ok(())
    }

    fn write(&self, text: &str) {
        self.notes.lock().unwrap().push(text.to_owned());
    }
}

impl Callback for Recorder {}

note_all!(Recorder, ());

/// Runs with these overrides, and returns the notes and events.
fn fit(overrides: &[&str], stop_after: Option<u64>) -> (Vec<String>, Vec<Event>) {
    let dir = tempfile::tempdir().unwrap();
    let root = format!("trainer.default_root_dir={:?}", dir.path());
    let layers = overrides.iter().copied().chain([root.as_str(), "trainer.loggers=[]"]);
    let layers = layers.fold(ConfigLayers::new(), |layers, set| layers.set(set).unwrap());
    let run = RunConfig::<DoubleConfig, NumbersConfig>::from_layers(layers).unwrap();
    let notes = NOTES.with(Arc::clone);
    notes.lock().unwrap().clear();
    let events = Events::default();
    Trainer::default()
        .with_callback(Box::new(Recorder { notes: notes.clone(), stop_after, fail_in: None }))
        .with_sink(Box::new(events.clone()))
        .fit::<Double>(&run)
        .unwrap();
    let notes = notes.lock().unwrap().clone();
    let events = events.0.lock().unwrap().clone();
    (notes, events)
}

fn steps(events: &[Event]) -> Vec<u64> {
    let step = |event: &Event| match event {
        Event::Step { step, .. } => Some(*step),
        _ => None,
    };
    events.iter().filter_map(step).collect()
}

fn validations(events: &[Event]) -> Vec<u64> {
    let step = |event: &Event| match event {
        Event::Validation { step, .. } => Some(*step),
        _ => None,
    };
    events.iter().filter_map(step).collect()
}

#[test]
fn hooks_come_in_order() {
    let keys = [
        "trainer.max_epochs=1",
        "trainer.limit_train_batches=4",
        "trainer.limit_val_batches=2",
        "trainer.num_sanity_val_steps=1",
        "trainer.accumulate_grad_batches=2",
        "data.batch_size=2",
        "checkpoint.every_n_steps=1",
    ];
    let (notes, _) = fit(&keys, None);
    insta::assert_snapshot!(notes.join("\n"), @r#"
    setup 0/0
      module: setup
    on_fit_start 0/0
      module: on_fit_start
    on_sanity_check_start 0/0
      module: on_sanity_check_start
    on_validation_start 0/0
      module: on_validation_start
    on_validation_epoch_start 0/0
      module: on_validation_epoch_start
    on_validation_batch_start 0/0
      module: on_validation_batch_start
    on_validation_batch_end 0/0
      module: on_validation_batch_end
    on_validation_epoch_end 0/0
      module: on_validation_epoch_end
    on_validation_end 0/0
      module: on_validation_end
    on_sanity_check_end 0/0
      module: on_sanity_check_end
    on_train_start 0/0
      module: on_train_start
    on_train_epoch_start 0/0
      module: on_train_epoch_start
    on_train_batch_start 0/0
      module: on_train_batch_start
    on_before_backward 0/0
      module: on_before_backward
    on_after_backward 0/0
      module: on_after_backward
    on_train_batch_end 0/0
      module: on_train_batch_end
    on_train_batch_start 0/0
      module: on_train_batch_start
    on_before_backward 0/0
      module: on_before_backward
    on_after_backward 0/0
      module: on_after_backward
    on_train_batch_end 0/0
      module: on_train_batch_end
    on_before_optimizer_step 0/0
      module: on_before_optimizer_step
    on_before_zero_grad 0/0
      module: on_before_zero_grad
    on_train_step_end 1/0
      module: on_train_step_end
    on_save_checkpoint
      module: on_save_checkpoint
    after_save_checkpoint step-00000001 1/0
      module: after_save_checkpoint step-00000001
    on_train_batch_start 1/0
      module: on_train_batch_start
    on_before_backward 1/0
      module: on_before_backward
    on_after_backward 1/0
      module: on_after_backward
    on_train_batch_end 1/0
      module: on_train_batch_end
    on_train_batch_start 1/0
      module: on_train_batch_start
    on_before_backward 1/0
      module: on_before_backward
    on_after_backward 1/0
      module: on_after_backward
    on_train_batch_end 1/0
      module: on_train_batch_end
    on_before_optimizer_step 1/0
      module: on_before_optimizer_step
    on_before_zero_grad 1/0
      module: on_before_zero_grad
    on_train_step_end 2/0
      module: on_train_step_end
    on_validation_start 2/0
      module: on_validation_start
    on_validation_epoch_start 2/0
      module: on_validation_epoch_start
    on_validation_batch_start 2/0
      module: on_validation_batch_start
    on_validation_batch_end 2/0
      module: on_validation_batch_end
    on_validation_batch_start 2/0
      module: on_validation_batch_start
    on_validation_batch_end 2/0
      module: on_validation_batch_end
    on_validation_epoch_end 2/0
      module: on_validation_epoch_end
    on_validation_end 2/0
      module: on_validation_end
    on_train_epoch_end 2/0
      module: on_train_epoch_end
    on_save_checkpoint
      module: on_save_checkpoint
    after_save_checkpoint step-00000002 2/0
      module: after_save_checkpoint step-00000002
    on_train_end 2/0
      module: on_train_end
    on_fit_end 2/0
      module: on_fit_end
    teardown Success 2/0
      module: teardown Success
    "#);
}

/// Like [`hooks_come_in_order`], for a run that resumes and for one that fails.
#[test]
fn hooks_of_resumed_and_failing_runs() {
    let dir = tempfile::tempdir().unwrap();
    let run = |max_epochs: u64, ckpt_path: bool| {
        let kept = dir.path().join("kept");
        let layers = ConfigLayers::new()
            .set(&format!("trainer.default_root_dir={:?}", dir.path().join("runs")))
            .and_then(|l| l.set(&format!("checkpoint.dir={kept:?}")))
            .and_then(|l| l.set(&format!("trainer.max_epochs={max_epochs}")))
            .and_then(|l| l.set("trainer.loggers=[]"))
            .and_then(|l| l.set("data.batch_size=20"))
            .and_then(|l| l.set("trainer.limit_val_batches=0"))
            .and_then(|l| if ckpt_path { l.set("trainer.ckpt_path=last") } else { Ok(l) });
        RunConfig::<DoubleConfig, NumbersConfig>::from_layers(layers.unwrap()).unwrap()
    };
    let notes = NOTES.with(Arc::clone);
    let recorder = |fail_in| Box::new(Recorder { notes: notes.clone(), stop_after: None, fail_in });
    Trainer::default().with_callback(recorder(None)).fit::<Double>(&run(1, false)).unwrap();
    notes.lock().unwrap().clear();
    let trainer = Trainer::default().with_callback(recorder(Some(2)));
    let error = trainer.fit::<Double>(&run(3, true)).unwrap_err();
    assert_says!(error, "a callback had enough");
    insta::assert_snapshot!(notes.lock().unwrap().join("\n"), @r#"
    setup 0/0
      module: setup
    on_fit_start 0/0
      module: on_fit_start
      module: on_load_checkpoint
    on_load_checkpoint
    on_train_start 1/0
      module: on_train_start
    on_train_epoch_start 1/1
      module: on_train_epoch_start
    on_train_batch_start 1/1
      module: on_train_batch_start
    on_before_backward 1/1
      module: on_before_backward
    on_after_backward 1/1
      module: on_after_backward
    on_train_batch_end 1/1
      module: on_train_batch_end
    on_before_optimizer_step 1/1
      module: on_before_optimizer_step
    on_before_zero_grad 1/1
      module: on_before_zero_grad
    on_train_step_end 2/1
      module: on_train_step_end
    on_train_epoch_end 2/1
      module: on_train_epoch_end
    on_train_epoch_start 2/2
    on_exception (a callback had enough) 2/2
      module: on_exception (a callback had enough)
    teardown Failed 2/2
      module: teardown Failed
    "#);
}

#[test]
fn epoch_limits_and_rarer_validations() {
    // 20 samples in batches of 4.
    let (_, events) = fit(&["trainer.max_epochs=4", "trainer.limit_train_batches=2"], None);
    assert_eq!(validations(&events), [2, 4, 6, 8]);
    let (_, events) = fit(&["trainer.max_epochs=4", "trainer.limit_train_batches=0.25"], None);
    assert_eq!(steps(&events).len(), 4);
    let (_, events) = fit(&["trainer.max_epochs=5", "trainer.check_val_every_n_epoch=2"], None);
    assert_eq!(validations(&events), [10, 20]);
}

#[test]
fn run_reaches_its_minimum() {
    let stopped =
        |keys: &[&str]| steps(&fit(&[&["trainer.max_epochs=9"], keys].concat(), Some(2)).1);
    assert_eq!(stopped(&[]).len(), 2);
    assert_eq!(stopped(&["trainer.min_steps=4"]).len(), 4);
    assert_eq!(stopped(&["trainer.min_epochs=2"]).len(), 10);
}

#[test]
fn trial_runs_leave_nothing() {
    let (notes, events) = fit(&["trainer.fast_dev_run=2", "trainer.max_steps=100"], None);
    assert_eq!((steps(&events), validations(&events)), (vec![1, 2], vec![2]));
    assert!(!notes.iter().any(|note| note.contains("sanity") || note.contains("checkpoint")));
    let losses = |keys: &[&str]| {
        let (_, events) =
            fit(&[&["optimizer.lr=0.0", "trainer.max_epochs=3"], keys].concat(), None);
        let loss = |event: &Event| match event {
            Event::Step { train_loss, .. } => Some(train_loss.to_bits()),
            _ => None,
        };
        events.iter().filter_map(loss).collect::<Vec<_>>()
    };
    let overfit = losses(&["trainer.overfit_batches=2", "data.batch_size=4"]);
    assert_eq!(overfit.len(), 6);
    assert_eq!(overfit[..2], overfit[4..], "the same batches in each epoch");
    assert_ne!(overfit[0], overfit[1]);
    assert_ne!(losses(&[])[..5], losses(&[])[5..10], "other batches without it");
}

#[test]
fn first_limit_ends_the_run() {
    // 20 samples in steps of 4.
    assert_eq!(steps(&fit(&[], None).1).len(), 5, "one epoch if nothing is said");
    assert_eq!(steps(&fit(&["trainer.max_steps=7"], None).1), (1..=7).collect::<Vec<_>>());
    let both = ["trainer.max_steps=7", "trainer.max_epochs=1"];
    assert_eq!(steps(&fit(&both, None).1).len(), 5);
    let accumulated = ["trainer.max_epochs=3", "trainer.accumulate_grad_batches=5"];
    assert_eq!(steps(&fit(&accumulated, None).1).len(), 3);
    // An epoch may end within a step.
    assert_eq!(steps(&fit(&["trainer.max_epochs=2", "data.batch_size=3"], None).1).len(), 14);
    let no_time = ["trainer.max_time=0", "trainer.max_steps=100"];
    assert_eq!(steps(&fit(&no_time, None).1), [1], "the time is up in the first step");
    assert_eq!(steps(&fit(&["trainer.max_steps=100"], Some(3)).1), [1, 2, 3]);
}

#[test]
fn validation_counts_every_sample_once() {
    let at = |interval: &str| {
        let interval = format!("trainer.val_check_interval={interval}");
        validations(&fit(&["trainer.max_epochs=2", &interval], None).1)
    };
    assert_eq!(at("1.0"), [5, 10]);
    assert_eq!(at("0.4"), [2, 4, 6, 8, 10]);
    assert_eq!(at("3"), [3, 6, 9]);
    // Epochs that end within a step: 20 samples in steps of 3.
    let (_, events) =
        fit(&["trainer.max_epochs=3", "trainer.val_check_interval=1.0", "data.batch_size=3"], None);
    assert_eq!(validations(&events), [7, 14, 20]);
    let (_, events) = fit(&["trainer.max_steps=5", "trainer.limit_val_batches=0"], None);
    assert!(validations(&events).is_empty());

    // The mean over the three samples, in batches of two and one.
    let loss = |overrides: &[&str]| {
        let (_, events) = fit(overrides, None);
        let loss = events.iter().find_map(|event| match event {
            Event::Validation { val_loss, .. } => Some(*val_loss),
            _ => None,
        });
        loss.unwrap()
    };
    let frozen = ["optimizer.lr=0.0", "trainer.max_steps=1", "trainer.val_check_interval=1"];
    let whole = loss(&[&frozen[..], &["data.batch_size=4"]].concat());
    let parts = loss(&[&frozen[..], &["data.batch_size=2"]].concat());
    assert!((whole - parts).abs() <= 1e-7 * whole, "{whole} {parts}");
}

#[test]
fn step_events_report_progress() {
    let (_, events) = fit(
        &[
            "trainer.max_steps=4",
            "data.batch_size=20",
            "optimizer.lr=0.1",
            "scheduler.type=linear",
            "scheduler.warmup_steps=1",
        ],
        None,
    );
    let Event::Step { metrics, train_loss, grad_norm, .. } = &events[0] else {
        panic!("{:?} is no step", events[0]);
    };
    assert_eq!(metrics["samples"], 20.0);
    assert!(*train_loss > 0.0 && *grad_norm > 0.0);
    let rates: Vec<f64> = events
        .iter()
        .filter_map(|event| match event {
            Event::Step { lr, .. } => Some(*lr),
            _ => None,
        })
        .collect();
    assert_eq!(rates.len(), 4);
    assert!(rates[0] < rates[1] && rates[1] > rates[2] && rates[2] > rates[3], "{rates:?}");
    let Some(Event::Summary { steps, first_loss, last_loss, .. }) = events.last() else {
        panic!("{:?} is no summary", events.last());
    };
    assert_eq!(*steps, 4);
    assert_eq!(first_loss, train_loss);
    assert!(last_loss < first_loss);
}

#[test]
fn single_rank_trainer_refuses_several_ranks() {
    let refusal = |set: &str| {
        let layers = ConfigLayers::new().set(set).unwrap();
        let run = RunConfig::<DoubleConfig, NumbersConfig>::from_layers(layers).unwrap();
        Trainer::default().fit::<Double>(&run).unwrap_err().to_string()
    };
    assert_says!(refusal("trainer.devices=2"), "`trainer.devices` = 2 … this process alone …");
    assert_says!(refusal("trainer.num_nodes=3"), "`trainer.num_nodes` = 3 … this process alone …");
}
