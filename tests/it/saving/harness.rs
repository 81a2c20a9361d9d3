//! Training of a model with one weight, and a record of its events.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use fulgurite::core::Result;
use fulgurite::core::checkpoint::{DistributedCheckpoint, last};
use fulgurite::core::config::ConfigLayers;
use fulgurite::core::launch::Interruption;
use fulgurite::core::run::RunConfig;
use fulgurite::core::trainer::{Event, EventSink, RunStatus, SavedState};
use fulgurite::prelude::*;
use fulgurite_checkpoint_local::LocalDirectory;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

/// One weight that learns to double.
struct Double(Linear);

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct NoKeys {}

impl LightningModule for Double {
    type Config = NoKeys;
    type Data = Numbers;

    fn configure_model(_: &NoKeys, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self(Linear::new(&b.pp("double"), 1, 1)?))
    }

    fn training_step(&mut self, (x, y): &(Tensor, Tensor), ctx: &mut StepContext) -> Result<Loss> {
        ctx.log("first", x.flatten_all()?.to_vec1::<f32>()?[0]);
        let error = (self.0.forward(x)? - y)?;
        Ok(Loss::new(error.sqr()?.sum_all()?, x.dim(0)? as f64))
    }
}

impl Hooks<Numbers> for Double {}

/// The values 0 to 19 for training and 7 more for validation, in shuffled batches of three.
struct Numbers(NumbersConfig);

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct NumbersConfig {
    /// Added to each value.
    from: u64,
}

impl DataModule for Numbers {
    type Config = NumbersConfig;
    type Batch = (Tensor, Tensor);

    fn setup(config: &NumbersConfig, _: &DataContext) -> Result<Self> {
        Ok(Self(config.clone()))
    }

    fn fingerprint(&self) -> Result<Option<String>> {
        Ok(Some(format!("20 numbers from {}", self.0.from)))
    }

    fn batch_size(_: &NumbersConfig) -> usize {
        3
    }

    fn shuffle(_: &NumbersConfig) -> bool {
        true
    }

    fn len(&self, split: Split) -> u64 {
        match split {
            Split::Train => 20,
            _ => 7,
        }
    }

    fn batch(&self, _: Split, indices: &[u64], device: &Device) -> Result<(Tensor, Tensor)> {
        let x: Vec<f32> = indices.iter().map(|&i| (i + self.0.from) as f32 / 20.0).collect();
        let x = Tensor::from_vec(x, (indices.len(), 1), device)?;
        let y = (&x * 2.0)?;
        Ok((x, y))
    }
}

thread_local! {
    /// Polls of the trainer before an interruption, and its reason.
    pub(crate) static PATIENCE: Cell<Option<(u32, Interruption)>> = const { Cell::new(None) };
    /// Final counts of the last run's callback.
    pub(crate) static COUNTED: RefCell<BTreeMap<String, u64>> = const { RefCell::new(BTreeMap::new()) };
}

fn interrupted() -> Option<Interruption> {
    let (left, why) = PATIENCE.get()?;
    PATIENCE.set(Some((left.saturating_sub(1), why)));
    (left == 0).then_some(why)
}

/// Counts hooks, and continues counting in a resumed run.
#[derive(Default)]
struct Counter(BTreeMap<String, u64>);

impl Counter {
    fn count(&mut self, hook: &str) -> Result<()> {
        *self.0.entry(hook.to_owned()).or_default() += 1;
        Ok(())
    }
}

impl Callback for Counter {}

impl Hooks for Counter {
    fn on_save_checkpoint(&mut self, state: &mut SavedState) -> Result<()> {
        state.set("counts", &self.0)
    }
    fn on_load_checkpoint(&mut self, state: &SavedState) -> Result<()> {
        self.0 = state.get("counts")?.unwrap_or_default();
        Ok(())
    }
    fn on_train_epoch_start(&mut self, _: &mut HookContext) -> Result<()> {
        self.count("epoch start")
    }
    fn on_train_step_end(&mut self, _: &mut HookContext) -> Result<()> {
        self.count("step")
    }
    fn on_train_epoch_end(&mut self, _: &mut HookContext) -> Result<()> {
        self.count("epoch end")
    }
    fn on_validation_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        // Metrics of earlier steps are available, also right after a resume.
        assert!(ctx.metrics.contains_key("train_loss"));
        self.count("validation")
    }
    fn on_fit_end(&mut self, _: &mut HookContext) -> Result<()> {
        COUNTED.set(self.0.clone());
        Ok(())
    }
}

#[derive(Clone, Default)]
struct Events(Arc<Mutex<Vec<Event>>>);

impl EventSink for Events {
    fn event(&mut self, event: &Event) -> Result<()> {
        // A reported checkpoint exists, is complete, and is the last one.
        if let Event::Checkpoint { path, step, .. } = event
            && path.is_absolute()
        {
            DistributedCheckpoint::open(path)?.verify()?;
            let place = LocalDirectory::new(path.parent().unwrap());
            assert_eq!(last(&place)?.unwrap().step, *step);
        }
        self.0.lock().unwrap().push(event.clone());
        Ok(())
    }
    fn finish(&mut self, _: RunStatus) -> Result<()> {
        Ok(())
    }
}

pub(crate) struct Scratch(TempDir);

impl Scratch {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run_config(&self, overrides: &[&str]) -> RunConfig<NoKeys, NumbersConfig> {
        let root = format!("trainer.default_root_dir={:?}", self.path("runs"));
        let dir = format!("checkpoint.dir={:?}", self.path("kept"));
        let always = [
            "trainer.loggers=[]",
            "trainer.num_sanity_val_steps=0",
            "scheduler=constant",
            "optimizer.lr=0.05",
            &root,
            &dir,
        ];
        let layers = always.iter().chain(overrides);
        let layers = layers.fold(ConfigLayers::new(), |layers, set| layers.set(set).unwrap());
        RunConfig::from_layers(layers).unwrap()
    }

    /// Trains, and returns the events up to the end or an error.
    pub(crate) fn fit(&self, overrides: &[&str]) -> (Vec<Event>, Result<()>) {
        let run = self.run_config(overrides);
        let events = Events::default();
        let result = Trainer::default()
            .with_callback(Box::new(Counter::default()))
            .with_sink(Box::new(events.clone()))
            .with_interrupt(interrupted)
            .fit::<Double>(&run);
        let events = events.0.lock().unwrap().clone();
        (events, result.map(drop))
    }

    pub(crate) fn succeed(&self, overrides: &[&str]) -> Vec<Event> {
        let (events, result) = self.fit(overrides);
        result.unwrap();
        events
    }

    /// Validates and returns the loss.
    pub(crate) fn validate(&self, overrides: &[&str]) -> Result<f64> {
        Ok(Trainer::default().validate::<Double>(&self.run_config(overrides))?.loss)
    }

    pub(crate) fn kept(&self) -> Vec<String> {
        names(&self.path("kept"))
    }
}

pub(crate) fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap().flatten();
    let mut names: Vec<_> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// All step and validation events, without speeds.
pub(crate) fn course(events: &[Event]) -> Vec<String> {
    let told = events.iter().filter_map(|event| match event {
        Event::Step { step, epoch, train_loss, grad_norm, lr, metrics, .. } => {
            Some(format!("{step} {epoch} {train_loss} {grad_norm} {lr} {metrics:?}"))
        }
        Event::Validation { step, val_loss, batches, .. } => {
            Some(format!("validation {step} {val_loss} {batches}"))
        }
        _ => None,
    });
    told.collect()
}

pub(crate) fn saved(events: &[Event]) -> Vec<u64> {
    let step = |event: &Event| match event {
        Event::Checkpoint { step, .. } => Some(*step),
        _ => None,
    };
    events.iter().filter_map(step).collect()
}

pub(crate) fn resumed(events: &[Event]) -> Option<(u64, PathBuf)> {
    events.iter().find_map(|event| match event {
        Event::Resume { step, path } => Some((*step, path.clone())),
        _ => None,
    })
}
