//! The trainer's loop: hooks in order, limits, validation, learning rates.

use std::path::Path;
use std::sync::{Arc, Mutex};

use fulgurite::core::Result;
use fulgurite::core::config::ConfigLayers;
use fulgurite::core::run::RunConfig;
use fulgurite::core::trainer::Event;
use fulgurite::prelude::*;
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

/// Notes each hook with its data module.
impl Hooks<Numbers> for Double {
    fn on_fit_start(&mut self, ctx: &mut HookContext<Numbers>) -> Result<()> {
        ctx.data().note("fit_start")
    }
    fn on_train_start(&mut self, ctx: &mut HookContext<Numbers>) -> Result<()> {
        ctx.data().note("train_start")
    }
    fn on_train_epoch_start(&mut self, ctx: &mut HookContext<Numbers>) -> Result<()> {
        ctx.data().note("epoch_start")
    }
    fn on_before_optimizer_step(&mut self, ctx: &mut HookContext<Numbers>) -> Result<()> {
        ctx.data().note("before_optimizer_step")
    }
    fn on_train_step_end(&mut self, ctx: &mut HookContext<Numbers>) -> Result<()> {
        ctx.data().note("step_end")
    }
    fn on_train_epoch_end(&mut self, ctx: &mut HookContext<Numbers>) -> Result<()> {
        ctx.data().note("epoch_end")
    }
    fn on_validation_start(&mut self, ctx: &mut HookContext<Numbers>) -> Result<()> {
        ctx.data().note("validation_start")
    }
    fn on_validation_end(&mut self, ctx: &mut HookContext<Numbers>) -> Result<()> {
        ctx.data().note("validation_end")
    }
    fn on_save_checkpoint(&mut self, path: &Path, ctx: &mut HookContext<Numbers>) -> Result<()> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        ctx.data().note(&format!("save {name}"))
    }
    fn on_train_end(&mut self, ctx: &mut HookContext<Numbers>) -> Result<()> {
        ctx.data().note("train_end")
    }
    fn on_fit_end(&mut self, ctx: &mut HookContext<Numbers>) -> Result<()> {
        ctx.data().note("fit_end")
    }
}

/// The numbers 0 to 19 for training, 3 more for validation; it also keeps what hooks note.
struct Numbers(Notes);

impl Numbers {
    fn note(&self, hook: &str) -> Result<()> {
        self.0.lock().unwrap().push(format!("  module: {hook}"));
        Ok(())
    }
}

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
        Ok(Self(NOTES.with(Arc::clone)))
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

/// Notes each hook with how far the run is; asks to stop after a step.
struct Recorder {
    notes: Notes,
    stop_after: Option<u64>,
}

impl Recorder {
    fn note(&self, hook: &str, ctx: &HookContext) -> Result<()> {
        self.notes.lock().unwrap().push(format!("{hook} {}/{}", ctx.step, ctx.epoch));
        Ok(())
    }
}

impl Callback for Recorder {}

impl Hooks for Recorder {
    fn on_fit_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        self.note("fit_start", ctx)
    }
    fn on_train_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        self.note("train_start", ctx)
    }
    fn on_train_epoch_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        self.note("epoch_start", ctx)
    }
    fn on_before_optimizer_step(&mut self, ctx: &mut HookContext) -> Result<()> {
        self.note("before_optimizer_step", ctx)
    }
    fn on_train_step_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        if self.stop_after == Some(ctx.step) {
            ctx.stop();
        }
        self.note("step_end", ctx)
    }
    fn on_train_epoch_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        self.note("epoch_end", ctx)
    }
    fn on_validation_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        self.note("validation_start", ctx)
    }
    fn on_validation_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        self.note("validation_end", ctx)
    }
    fn on_save_checkpoint(&mut self, path: &Path, ctx: &mut HookContext) -> Result<()> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        self.note(&format!("save {name}"), ctx)
    }
    fn on_train_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        self.note("train_end", ctx)
    }
    fn on_fit_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        self.note("fit_end", ctx)
    }
}

/// Runs with these keys of `[trainer]` and others, and returns what happened.
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
        .with_callback(Box::new(Recorder { notes: notes.clone(), stop_after }))
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
    let (notes, _) =
        fit(&["trainer.max_epochs=2", "data.batch_size=10", "checkpoint.every_n_steps=3"], None);
    insta::assert_snapshot!(notes.join("\n"), @"
    fit_start 0/0
      module: fit_start
    train_start 0/0
      module: train_start
    epoch_start 0/0
      module: epoch_start
    before_optimizer_step 0/0
      module: before_optimizer_step
    step_end 1/0
      module: step_end
    before_optimizer_step 1/0
      module: before_optimizer_step
    step_end 2/0
      module: step_end
    validation_start 2/0
      module: validation_start
    validation_end 2/0
      module: validation_end
    epoch_end 2/0
      module: epoch_end
    epoch_start 2/1
      module: epoch_start
    before_optimizer_step 2/1
      module: before_optimizer_step
    step_end 3/1
      module: step_end
    save step-00000003 3/1
      module: save step-00000003
    before_optimizer_step 3/1
      module: before_optimizer_step
    step_end 4/1
      module: step_end
    validation_start 4/1
      module: validation_start
    validation_end 4/1
      module: validation_end
    epoch_end 4/1
      module: epoch_end
    save step-00000004 4/1
      module: save step-00000004
    train_end 4/1
      module: train_end
    fit_end 4/1
      module: fit_end
    ");
}

#[test]
fn limits_end_a_run_whichever_comes_first() {
    // 20 samples in steps of 4.
    assert_eq!(steps(&fit(&[], None).1).len(), 5, "one epoch if nothing is said");
    assert_eq!(steps(&fit(&["trainer.max_steps=7"], None).1), (1..=7).collect::<Vec<_>>());
    let both = ["trainer.max_steps=7", "trainer.max_epochs=1"];
    assert_eq!(steps(&fit(&both, None).1).len(), 5);
    let accumulated = ["trainer.max_epochs=3", "trainer.accumulate_grad_batches=5"];
    assert_eq!(steps(&fit(&accumulated, None).1).len(), 3);
    // An epoch that is no whole number of steps ends within one.
    assert_eq!(steps(&fit(&["trainer.max_epochs=2", "data.batch_size=3"], None).1).len(), 14);
    let no_time = ["trainer.max_time=0", "trainer.max_steps=100"];
    assert_eq!(steps(&fit(&no_time, None).1), [1], "the time is up in the first step");
    assert_eq!(steps(&fit(&["trainer.max_steps=100"], Some(3)).1), [1, 2, 3]);
}

#[test]
fn validation_comes_when_it_is_due_and_counts_every_sample_once() {
    let at = |interval: &str| {
        let interval = format!("trainer.val_check_interval={interval}");
        validations(&fit(&["trainer.max_epochs=2", &interval], None).1)
    };
    assert_eq!(at("1.0"), [5, 10]);
    assert_eq!(at("0.4"), [2, 4, 6, 8, 10]);
    assert_eq!(at("3"), [3, 6, 9]);
    // Epochs that are no whole number of steps: 20 samples in steps of 3.
    let (_, events) =
        fit(&["trainer.max_epochs=3", "trainer.val_check_interval=1.0", "data.batch_size=3"], None);
    assert_eq!(validations(&events), [7, 14, 20]);
    let (_, events) = fit(&["trainer.max_steps=5", "trainer.limit_val_batches=0"], None);
    assert!(validations(&events).is_empty());

    // The mean over the three samples, of batches of two and of one.
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
fn steps_tell_what_happened() {
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
fn a_trainer_that_is_alone_refuses_to_train_for_several() {
    let refusal = |set: &str| {
        let layers = ConfigLayers::new().set(set).unwrap();
        let run = RunConfig::<DoubleConfig, NumbersConfig>::from_layers(layers).unwrap();
        Trainer::default().fit::<Double>(&run).unwrap_err().to_string()
    };
    insta::assert_snapshot!(refusal("trainer.devices=2"), @"`trainer.devices` = 2: `Trainer::default()` trains in this process alone. Start the ranks with `let connection = run.trainer.connect()?;`, and train with `Trainer::new(connection.world.clone())`");
    insta::assert_snapshot!(refusal("trainer.num_nodes=3"), @"`trainer.num_nodes` = 3: `Trainer::default()` trains in this process alone. Start the ranks with `let connection = run.trainer.connect()?;`, and train with `Trainer::new(connection.world.clone())`");
}
