//! What the trainer saves and keeps, and how it goes on from it.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use fulgurite::core::checkpoint::{
    CheckpointIO, CheckpointIOConfig, CheckpointReader, CheckpointWriter, Entry,
};
use fulgurite::core::config::{ConfigLayers, RunConfig};
use fulgurite::core::launch::Interruption;
use fulgurite::core::register_checkpoint_io;
use fulgurite::core::trainer::{Event, EventSink, RunStatus};
use fulgurite::core::{Error, Result};
use fulgurite::prelude::*;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

/// One weight that learns to double.
struct Double(Linear);

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct NoKeys {}

impl LightningModule for Double {
    type Config = NoKeys;
    type Batch = (Tensor, Tensor);

    fn configure_model(_: &NoKeys, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self(Linear::new(&b.pp("double"), 1, 1)?))
    }

    fn training_step(&mut self, (x, y): &Self::Batch, ctx: &mut StepContext) -> Result<Loss> {
        ctx.log("first", x.flatten_all()?.to_vec1::<f32>()?[0].into());
        let error = (self.0.forward(x)? - y)?;
        Ok(Loss::new(error.sqr()?.sum_all()?, x.dim(0)? as f64))
    }
}

/// The numbers 0 to 19 for training, 7 more for validation, by threes and shuffled.
struct Numbers;

impl DataModule for Numbers {
    type Config = NoKeys;
    type Batch = (Tensor, Tensor);

    fn setup(_: &NoKeys, _: &DataContext) -> Result<Self> {
        Ok(Self)
    }

    fn batch_size(_: &NoKeys) -> usize {
        3
    }

    fn shuffle(_: &NoKeys) -> bool {
        true
    }

    fn len(&self, split: Split) -> u64 {
        match split {
            Split::Train => 20,
            _ => 7,
        }
    }

    fn batch(&self, _: Split, indices: &[u64], device: &Device) -> Result<(Tensor, Tensor)> {
        let x: Vec<f32> = indices.iter().map(|&i| i as f32 / 20.0).collect();
        let x = Tensor::from_vec(x, (indices.len(), 1), device)?;
        let y = (&x * 2.0)?;
        Ok((x, y))
    }
}

thread_local! {
    /// How often the trainer may ask before somebody interrupts it, and why.
    static PATIENCE: Cell<Option<(u32, Interruption)>> = const { Cell::new(None) };
    /// What the callback of the last run had counted in the end.
    static COUNTED: RefCell<BTreeMap<String, u64>> = const { RefCell::new(BTreeMap::new()) };
}

fn interrupted() -> Option<Interruption> {
    let (left, why) = PATIENCE.get()?;
    PATIENCE.set(Some((left.saturating_sub(1), why)));
    (left == 0).then_some(why)
}

/// Counts hooks, and goes on counting in a resumed run.
#[derive(Default)]
struct Counter(BTreeMap<String, u64>);

impl Counter {
    fn count(&mut self, hook: &str) -> Result<()> {
        *self.0.entry(hook.to_owned()).or_default() += 1;
        Ok(())
    }
}

impl Callback for Counter {
    fn state(&self) -> Option<serde_json::Value> {
        serde_json::to_value(&self.0).ok()
    }
    fn load_state(&mut self, state: serde_json::Value) -> Result<()> {
        self.0 = serde_json::from_value(state).map_err(Error::other)?;
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
        // Metrics of earlier steps are there, also right after a resume.
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
        self.0.lock().unwrap().push(event.clone());
        Ok(())
    }
    fn finish(&mut self, _: RunStatus) -> Result<()> {
        Ok(())
    }
}

struct Scratch(TempDir);

impl Scratch {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Trains, and returns what happened until the end or an error.
    fn fit(&self, overrides: &[&str]) -> (Vec<Event>, Result<()>) {
        let root = format!("trainer.default_root_dir={:?}", self.path("runs"));
        let dir = format!("checkpoint.dir={:?}", self.path("kept"));
        let always = ["trainer.loggers=[]", "scheduler=constant", "optimizer.lr=0.05", &root, &dir];
        let layers = always.iter().chain(overrides);
        let layers = layers.fold(ConfigLayers::new(), |layers, set| layers.set(set).unwrap());
        let run = RunConfig::<NoKeys, NoKeys>::from_layers(layers).unwrap();
        let events = Events::default();
        let result = Trainer::default()
            .with_callback(Box::new(Counter::default()))
            .with_sink(Box::new(events.clone()))
            .with_interrupt(interrupted)
            .fit::<Double, Numbers>(&run);
        let events = events.0.lock().unwrap().clone();
        (events, result.map(drop))
    }

    fn succeed(&self, overrides: &[&str]) -> Vec<Event> {
        let (events, result) = self.fit(overrides);
        result.unwrap();
        events
    }

    fn kept(&self) -> Vec<String> {
        names(&self.path("kept"))
    }
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap().flatten();
    let mut names: Vec<_> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// All that steps and validations say, but for how fast they were.
fn course(events: &[Event]) -> Vec<String> {
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

fn saved(events: &[Event]) -> Vec<u64> {
    let step = |event: &Event| match event {
        Event::Checkpoint { step, .. } => Some(*step),
        _ => None,
    };
    events.iter().filter_map(step).collect()
}

fn resumed(events: &[Event]) -> Option<(u64, PathBuf)> {
    events.iter().find_map(|event| match event {
        Event::Resume { step, path } => Some((*step, path.clone())),
        _ => None,
    })
}

#[test]
fn a_run_interrupted_anywhere_goes_on_as_if_it_had_never_stopped() {
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
        // Interrupted twice, the second time soon after.
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
fn averages_of_the_weights_are_validated_and_not_trained() {
    let keys =
        ["trainer.max_steps=6", "trainer.val_check_interval=2", "checkpoint.every_n_steps=2"];
    let run = |decay: &str, dir: &str| {
        let scratch = Scratch::new();
        let events = scratch.succeed(&[&keys[..], &[decay][..]].concat());
        let model = scratch.path("kept/step-00000006").join(dir);
        let file = model.join("shard-00001-model-00001-of-00001.safetensors");
        let course = course(&events);
        let (validations, steps): (Vec<_>, Vec<_>) =
            course.into_iter().partition(|line| line.starts_with('v'));
        (steps, validations, std::fs::read(file).unwrap())
    };
    let plain = run("trainer.log_every_n_steps=1", "model");
    let averaged = run("trainer.ema_decay=0.9", "model");
    assert_eq!(averaged.0, plain.0);
    assert_ne!(averaged.1, plain.1);
    assert_eq!(averaged.2, plain.2, "the weights themselves are the model's in a checkpoint");
    let held = |bytes: &[u8]| String::from_utf8_lossy(bytes).contains("state.double.weight.ema");
    assert!(held(&run("trainer.ema_decay=0.9", "optimizer").2));
    // An average over the last step alone is the weights.
    assert_eq!(run("trainer.ema_decay=0.0", "model"), plain);

    // It goes on only from where it was kept.
    let scratch = Scratch::new();
    scratch.succeed(&keys);
    let more = ["trainer.ckpt_path=last", "trainer.max_steps=8", "trainer.ema_decay=0.9"];
    let error = scratch.fit(&[&keys[..], &more[..]].concat()).1.unwrap_err().to_string();
    assert!(error.contains("state.double.weight.ema"), "{error}");
    let only = [&keys[..], &more[..], &["checkpoint.weights_only=true"]].concat();
    scratch.succeed(&only);
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
fn checkpoints_of_the_background_are_those_of_the_foreground() {
    let keys = ["trainer.max_steps=6", "checkpoint.every_n_steps=2", "checkpoint.save_last=false"];
    let scratch = Scratch::new();
    let whole = scratch.succeed(&keys);
    assert_eq!(saved(&whole), [2, 4, 6]);
    let background = Scratch::new();
    let keys = [&keys[..], &["checkpoint.async_save=true"]].concat();
    let events = background.succeed(&keys);
    // Whenever it is told of them.
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
fn the_newest_and_the_best_are_kept_also_by_a_resumed_run() {
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
    // The one that it resumed from stays.
    for background in ["checkpoint.async_save=true", "checkpoint.async_save=false"] {
        let keys = ["checkpoint.keep_last=2", background];
        assert_eq!(run(&keys, None), kept("34", "467"));
    }
    // It did not know of the fourth, which its own replaces.
    assert_eq!(run(&["checkpoint.keep_last=2"], Some("step-00000003")), kept("34", "367"));
    assert_eq!(run(&["checkpoint.save_top_k=0"], None), kept("4", "47"));
    // The loss falls from step to step: the worst are the oldest.
    let worst = ["checkpoint.save_top_k=2", "checkpoint.monitor=val_loss", "checkpoint.mode=max"];
    assert_eq!(run(&worst, None), kept("124", "1247"));
    let best = ["checkpoint.save_top_k=2", "checkpoint.monitor=val_loss"];
    assert_eq!(run(&best, None), kept("34", "467"));
}

#[test]
fn a_metric_that_does_not_exist_is_found_when_it_should() {
    let keys = [
        "checkpoint.every_n_steps=1",
        "checkpoint.save_top_k=1",
        "checkpoint.monitor=loss",
        "trainer.max_steps=3",
        "trainer.val_check_interval=2",
    ];
    let (events, result) = Scratch::new().fit(&keys);
    assert_eq!(saved(&events), [1], "nothing was validated then");
    insta::assert_snapshot!(result.unwrap_err(), @"`checkpoint.monitor`: there is no metric `loss`; there are: first, grad_norm, lr, train_loss, val_loss");
}

#[test]
fn weights_alone_may_be_what_a_run_starts_from() {
    let scratch = Scratch::new();
    let keys = ["trainer.max_steps=5", "trainer.val_check_interval=5"];
    let first = scratch.succeed(&keys);
    for (path, place) in [("last", ""), ("", ""), ("", "model")] {
        let kept = scratch.path("kept/step-00000005").join(place);
        let other = format!("checkpoint.dir={:?}", scratch.path("other"));
        let path = if path.is_empty() { kept.to_str().unwrap() } else { path };
        let path = format!("trainer.ckpt_path={path}");
        let only = ["checkpoint.weights_only=true", &path];
        let (dir, frozen) = match path.ends_with("last") {
            true => ("checkpoint.save_last=false", "optimizer.lr=0.0"),
            false => (other.as_str(), "optimizer.lr=0.0"),
        };
        let events = scratch.succeed(&[&keys[..], &only, &[dir, frozen]].concat());
        assert_eq!(resumed(&events).unwrap().0, 0);
        let steps = course(&events);
        assert!(steps[0].starts_with("1 "), "{steps:?}");
        assert_eq!(steps.len(), 6);
        // The weights are those of the end, and do not change.
        let validation = |events: &[Event]| course(events).pop().unwrap();
        assert_eq!(validation(&events), validation(&first));
    }
}

#[test]
fn what_cannot_be_saved_ends_the_run() {
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

/// Checkpoints in memory, by the place's root.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MemoryConfig {}

#[typetag::serde(name = "test_memory")]
impl CheckpointIOConfig for MemoryConfig {
    fn build(&self, root: &Path) -> Result<Arc<dyn CheckpointIO>> {
        let mut places = PLACES.lock().unwrap();
        let files = places.entry(root.to_owned()).or_default().clone();
        Ok(Arc::new(Memory { root: root.to_owned(), files }))
    }
}

register_checkpoint_io!("test_memory", MemoryConfig, "for this test", "\"test_memory\"");

type Files = Arc<Mutex<BTreeMap<String, Arc<Vec<u8>>>>>;

static PLACES: Mutex<BTreeMap<PathBuf, Files>> = Mutex::new(BTreeMap::new());

#[derive(Debug)]
struct Memory {
    root: PathBuf,
    files: Files,
}

struct MemoryWriter {
    files: Files,
    path: String,
    bytes: Vec<u8>,
}

impl Write for MemoryWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.bytes.write(bytes)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl CheckpointWriter for MemoryWriter {
    fn finish(self: Box<Self>) -> Result<()> {
        let Self { files, path, bytes } = *self;
        files.lock().unwrap().insert(path, Arc::new(bytes));
        Ok(())
    }
}

struct MemoryReader(Arc<Vec<u8>>);

impl CheckpointReader for MemoryReader {
    fn len(&self) -> std::io::Result<u64> {
        Ok(self.0.len() as u64)
    }
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
        let offset = offset as usize;
        let bytes = self.0.get(offset..offset + buffer.len()).ok_or(ErrorKind::UnexpectedEof)?;
        buffer.copy_from_slice(bytes);
        Ok(())
    }
}

impl Memory {
    fn inside(&self, path: &str) -> Vec<String> {
        let files = self.files.lock().unwrap();
        let prefix = if path.is_empty() { String::new() } else { format!("{path}/") };
        files.keys().filter_map(|file| file.strip_prefix(&prefix)).map(str::to_owned).collect()
    }
}

impl CheckpointIO for Memory {
    fn location(&self, path: &str) -> PathBuf {
        let root = Path::new("memory:").join(self.root.strip_prefix("/").unwrap_or(&self.root));
        if path.is_empty() { root } else { root.join(path) }
    }

    fn create(&self, path: &str) -> Result<Box<dyn CheckpointWriter>> {
        let files = self.files.clone();
        Ok(Box::new(MemoryWriter { files, path: path.to_owned(), bytes: Vec::new() }))
    }

    fn open(&self, path: &str) -> Result<Arc<dyn CheckpointReader>> {
        let found = self.files.lock().unwrap().get(path).cloned();
        let missing = || Error::Io {
            action: "opening",
            path: self.location(path),
            source: ErrorKind::NotFound.into(),
        };
        Ok(Arc::new(MemoryReader(found.ok_or_else(missing)?)))
    }

    fn list(&self, path: &str) -> Result<Vec<Entry>> {
        let mut entries = BTreeMap::new();
        for file in self.inside(path) {
            let (name, is_directory) = match file.split_once('/') {
                Some((directory, _)) => (directory.to_owned(), true),
                None => (file.clone(), false),
            };
            let full = if path.is_empty() { file } else { format!("{path}/{file}") };
            let bytes = if is_directory { 0 } else { self.open(&full)?.len().unwrap() };
            entries.insert(name.clone(), Entry { name, is_directory, bytes });
        }
        Ok(entries.into_values().collect())
    }

    fn remove(&self, path: &str) -> Result<()> {
        let inside = format!("{path}/");
        self.files.lock().unwrap().retain(|file, _| file != path && !file.starts_with(&inside));
        Ok(())
    }

    fn commit(&self, staged: &str, name: &str) -> Result<()> {
        self.remove(name)?;
        let inside = self.inside(staged);
        let mut files = self.files.lock().unwrap();
        for file in inside {
            let bytes = files.remove(&format!("{staged}/{file}")).unwrap();
            files.insert(format!("{name}/{file}"), bytes);
        }
        Ok(())
    }
}

#[test]
fn any_place_is_resumed_from() {
    let scratch = Scratch::new();
    let keys = ["checkpoint.io=test_memory", "checkpoint.every_n_steps=2"];
    let fit = |more: &[&str]| scratch.succeed(&[&keys[..], more].concat());
    let last = ["trainer.ckpt_path=last"];
    let whole = course(&Scratch::new().succeed(&["trainer.max_steps=7"]));
    let mut events = fit(&[&last[..], &["trainer.max_steps=4"]].concat());
    assert_eq!(resumed(&events), None);
    events.extend(fit(&[&last[..], &["trainer.max_steps=7"]].concat()));
    assert_eq!(course(&events), whole);
    let (step, location) = resumed(&events).unwrap();
    assert_eq!(step, 4);
    assert!(location.starts_with("memory:") && location.ends_with("step-00000004"));
    assert!(!scratch.path("kept").exists());

    // By its name, and by what messages call it.
    for path in ["step-00000002", &location.to_string_lossy().replace("04", "02")] {
        let path = format!("trainer.ckpt_path={path:?}");
        let more = fit(&[&path, "trainer.max_steps=7", "checkpoint.async_save=true"]);
        assert_eq!(course(&more), whole[2..]);
    }
    let path = format!("trainer.ckpt_path={:?}", scratch.path("nowhere"));
    let missing = scratch.fit(&[&keys[..], &[&path]].concat()).1.unwrap_err().to_string();
    assert!(missing.contains("nowhere: there is no checkpoint here"), "{missing}");
    let missing = scratch.fit(&[&keys[..], &["trainer.ckpt_path=step-00000099"]].concat());
    let missing = missing.1.unwrap_err().to_string();
    assert!(missing.contains("memory:"), "{missing}");

    // A local one, of a run that keeps its own in memory.
    let local = Scratch::new();
    local.succeed(&["trainer.max_steps=3"]);
    let path = format!("trainer.ckpt_path={:?}", local.path("kept/step-00000003"));
    assert_eq!(course(&fit(&[&path, "trainer.max_steps=7"])), whole[3..]);
}
