//! Cases that a `Trainer` drives.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Tensor};
use fulgurite::prelude::*;
use fulgurite_core::checkpoint::TensorSource;
use fulgurite_core::checkpoint::tools::AnyCheckpoint;
use fulgurite_core::collective::{Counter, Counting, ProcessGroup};
use fulgurite_core::config::ConfigLayers;
use fulgurite_core::run::RunConfig;
use fulgurite_core::shard::Region;
use fulgurite_core::trainer::{Event, EventSink, RunStatus};
use fulgurite_transports::run_ranks;
use serde::{Deserialize, Serialize};

use crate::outcome::{Outcome, Tally, count, digests};
use fulgurite_test_support::training::{Transformer, micro_batch};

struct Lit(Transformer);

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct NoKeys {}

impl LightningModule for Lit {
    type Config = NoKeys;
    type Data = Samples;

    fn configure_model(_: &NoKeys, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self(Transformer::new(b)?))
    }

    fn training_step(
        &mut self,
        (ids, targets): &(Tensor, Tensor),
        _: &mut StepContext,
    ) -> Result<Loss> {
        cross_entropy(&self.0.forward(ids)?, targets)
    }
}

impl Hooks<Samples> for Lit {}

/// Samples of the tests' support, shuffled.
struct Samples;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct SamplesConfig {
    batch_size: usize,
}

impl Default for SamplesConfig {
    fn default() -> Self {
        Self { batch_size: 3 }
    }
}

impl DataModule for Samples {
    type Config = SamplesConfig;
    type Batch = (Tensor, Tensor);

    fn setup(_: &SamplesConfig, _: &DataContext) -> Result<Self> {
        Ok(Self)
    }

    fn batch_size(config: &SamplesConfig) -> usize {
        config.batch_size
    }

    fn shuffle(_: &SamplesConfig) -> bool {
        true
    }

    fn len(&self, split: Split) -> u64 {
        match split {
            Split::Train => 40,
            _ => 7,
        }
    }

    fn batch(&self, _: Split, indices: &[u64], _: &Device) -> Result<(Tensor, Tensor)> {
        let samples = indices.iter().map(|&i| micro_batch(i, i as usize % 12, 12));
        let samples = samples.collect::<Result<Vec<_>>>()?;
        let ids: Vec<&Tensor> = samples.iter().map(|sample| &sample.ids).collect();
        let targets: Vec<&Tensor> = samples.iter().map(|sample| &sample.targets).collect();
        Ok((Tensor::cat(&ids, 0)?, Tensor::cat(&targets, 0)?))
    }
}

/// Counts what is communicated until the last step has ended, without what is saved then.
struct Counted {
    counter: Counter,
    tally: Arc<Mutex<Tally>>,
}

impl Counted {
    fn count(&self, phase: &str) -> Result<()> {
        count(&mut self.tally.lock().expect("no panic while counting"), phase, &self.counter);
        Ok(())
    }
}

impl Callback for Counted {}

impl Hooks for Counted {
    fn on_train_start(&mut self, _: &mut HookContext) -> Result<()> {
        self.count("setup")
    }
    fn on_train_step_end(&mut self, _: &mut HookContext) -> Result<()> {
        self.count("steps")
    }
    fn on_validation_end(&mut self, _: &mut HookContext) -> Result<()> {
        self.count("validation")
    }
}

#[derive(Clone, Default)]
struct Events(Arc<Mutex<Vec<Event>>>);

impl EventSink for Events {
    fn event(&mut self, event: &Event) -> Result<()> {
        self.0.lock().expect("no panic while an event is noted").push(event.clone());
        Ok(())
    }
    fn finish(&mut self, _: RunStatus) -> Result<()> {
        Ok(())
    }
}

/// Trains on the ranks, and returns rank 0's events and what each rank communicated.
fn fit(ranks: usize, dir: &Path, keys: &[&str]) -> Result<(Vec<Event>, Vec<Tally>)> {
    let always = [
        "trainer.loggers=[]".to_owned(),
        "trainer.num_sanity_val_steps=0".to_owned(),
        "trainer.enable_progress_bar=false".to_owned(),
        "trainer.freeze=['layers.*.self_attn.k_proj.weight']".to_owned(),
        format!("trainer.devices={ranks}"),
        format!("trainer.default_root_dir={:?}", dir.join("runs")),
        format!("checkpoint.dir={:?}", dir.join("kept")),
    ];
    let always = always.iter().map(String::as_str);
    let layers = always
        .chain(keys.iter().copied())
        .try_fold(ConfigLayers::new(), |all, set| all.set(set))?;
    let run = RunConfig::<NoKeys, SamplesConfig>::from_layers(layers)?;
    let events = Events::default();
    let tallies = run_ranks(ranks, |world| {
        let (counter, tally) = (Counter::default(), Arc::<Mutex<Tally>>::default());
        let world: Arc<dyn ProcessGroup> = Arc::new(Counting::new(world, counter.clone()));
        Trainer::new(world)
            .with_callback(Box::new(Counted { counter, tally: tally.clone() }))
            .with_sink(Box::new(events.clone()))
            .fit::<Lit>(&run)?;
        Ok(std::mem::take(&mut *tally.lock().expect("no panic while counting")))
    })?;
    let events = std::mem::take(&mut *events.0.lock().expect("no panic while an event is noted"));
    Ok((events, tallies))
}

/// Digests of all tensors of a checkpoint's part.
fn saved(source: &dyn TensorSource) -> Result<BTreeMap<String, u64>> {
    let read = |name: &str| {
        let region = Region::full(&source.info(name).expect("it has what it names").shape);
        let values = source.read(name, &region, DType::F64, &Device::Cpu)?;
        Ok((name.to_owned(), values.to_vec1::<f64>()?))
    };
    Ok(digests(source.names().into_iter().map(read).collect::<Result<BTreeMap<_, _>>>()?))
}

/// What a run told and saved.
fn outcome(events: &[Event], tallies: Vec<Tally>, checkpoint: &Path) -> Result<Outcome> {
    let mut numbers = BTreeMap::<String, Vec<f64>>::new();
    for event in events {
        let told: &[(&str, f64)] = match event {
            Event::Step { train_loss, grad_norm, lr, epoch, .. } => {
                &[("loss", *train_loss), ("norm", *grad_norm), ("lr", *lr), ("epoch", *epoch)]
            }
            Event::Validation { val_loss, batches, .. } => {
                &[("val_loss", *val_loss), ("val_batches", *batches as f64)]
            }
            _ => continue,
        };
        for (what, number) in told {
            numbers.entry((*what).to_owned()).or_default().push(*number);
        }
    }
    let checkpoint = AnyCheckpoint::open(checkpoint)?;
    let mut tensors = BTreeMap::from([("weights".to_owned(), saved(checkpoint.model())?)]);
    if let Some(optimizer) = checkpoint.optimizer() {
        tensors.insert("optimizer state".to_owned(), saved(optimizer)?);
    }
    Ok(Outcome { numbers, tensors, tallies })
}

/// A case on all ranks.
pub(crate) fn run(name: &str, ranks: usize, keys: &[&str], then: Option<&[&str]>) -> Outcome {
    let scratch = tempfile::tempdir().expect("a directory for temporary files");
    let run = || {
        let (mut events, mut tallies) = fit(ranks, scratch.path(), keys)?;
        if let Some(then) = then {
            let keys = [keys, &["trainer.ckpt_path=last"], then].concat();
            (events, tallies) = fit(ranks, scratch.path(), &keys)?;
        }
        let steps = events.iter().rev().find_map(|event| match event {
            Event::Checkpoint { step, .. } => Some(*step),
            _ => None,
        });
        let last = format!("kept/step-{:08}", steps.expect("a run saves in the end"));
        outcome(&events, tallies, &scratch.path().join(last))
    };
    run().unwrap_or_else(|error: Error| panic!("{name}: {error}"))
}
