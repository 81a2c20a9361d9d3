//! Runs cases with a `Trainer`.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::{DType, Device, Tensor};
use fulgurite::prelude::*;
use fulgurite_core::checkpoint::TensorSource;
use fulgurite_core::checkpoint::tools::AnyCheckpoint;
use fulgurite_core::collective::{Counter, ProcessGroup};
use fulgurite_core::config::ConfigLayers;
use fulgurite_core::run::RunConfig;
use fulgurite_core::shard::Region;
use fulgurite_core::trainer::{Event, EventSink, RunStatus};
use fulgurite_transports::run_ranks;

use crate::case::{Trained, TrainedModule};
use crate::modules::{Lit, LitPair, ModelConfig, Samples, SamplesConfig};
use crate::outcome::{Outcome, Tally, count, digests};

/// A rank's observations of its run.
#[derive(Default)]
struct Seen {
    /// Collectives until the end of the last step, without the final save.
    tally: Tally,
    /// Loss and norm after each step, if the callback reads them.
    metrics: Vec<[f64; 2]>,
    /// The last step before an error ended the run, and the state then: this rank's shards and its
    /// part of the optimizers' state.
    left: Option<(u64, BTreeMap<String, Vec<f64>>)>,
}

/// Records the rank's observations.
struct Watch {
    counter: Counter,
    reads_metrics: bool,
    seen: Arc<Mutex<Seen>>,
}

impl Watch {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().expect("no panic while something is noted")
    }

    fn count(&self, phase: &str) -> Result<()> {
        count(&mut self.seen().tally, phase, &self.counter);
        Ok(())
    }
}

impl Callback for Watch {}

impl Hooks for Watch {
    fn on_train_start(&mut self, _: &mut HookContext) -> Result<()> {
        self.count("setup")
    }
    fn on_train_step_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        if self.reads_metrics {
            assert_eq!(ctx.metric_step("train_loss"), Some(ctx.step));
            self.seen().metrics.push(["train_loss", "grad_norm"].map(|name| ctx.metrics[name]));
        }
        self.count("steps")
    }
    fn on_validation_end(&mut self, _: &mut HookContext) -> Result<()> {
        self.count("validation")
    }
    fn on_exception(&mut self, _: &Error, ctx: &mut HookContext) -> Result<()> {
        let left = state(ctx)?;
        self.seen().left = Some((ctx.step, left));
        Ok(())
    }
}

/// Returns the rank's shards and its part of the optimizers' state.
fn state(ctx: &mut HookContext) -> Result<BTreeMap<String, Vec<f64>>> {
    let values = |tensor: &Tensor| -> Result<_> { Ok(tensor.to_dtype(DType::F64)?.to_vec1()?) };
    let mut tensors = BTreeMap::new();
    for parameter in ctx.fabric().module_tree()?.parameters() {
        tensors.insert(parameter.fqn().to_owned(), values(&parameter.local()?.values)?);
    }
    let optimizers = ctx.optimizers_mut().expect("a training has some");
    for (_, optimizer) in optimizers.iter_mut() {
        for state in optimizer.state_tensors()? {
            tensors.insert(format!("{}, {}", state.fqn, state.name), values(&state.values)?);
        }
        let scalars = optimizer.scalars().into_iter();
        tensors.extend(scalars.map(|(name, number)| (name, vec![number])));
    }
    Ok(tensors)
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

/// The result of a training.
struct Fit {
    /// Rank 0's events.
    events: Vec<Event>,
    /// Observations by rank.
    seen: Vec<Seen>,
    result: Result<()>,
}

/// Trains on `ranks` ranks.
fn fit<M>(ranks: usize, dir: &Path, keys: &[&str], reads_metrics: bool) -> Result<Fit>
where
    M: LightningModule<Config = ModelConfig, Data = Samples>,
{
    let always = [
        "trainer.loggers=[]".to_owned(),
        "trainer.num_sanity_val_steps=0".to_owned(),
        "trainer.enable_progress_bar=false".to_owned(),
        format!("trainer.devices={ranks}"),
        format!("trainer.default_root_dir={:?}", dir.join("runs")),
        format!("checkpoint.dir={:?}", dir.join("kept")),
    ];
    let always = always.iter().map(String::as_str);
    let layers = always
        .chain(keys.iter().copied())
        .try_fold(ConfigLayers::new(), |all, set| all.set(set))?;
    let run = RunConfig::<ModelConfig, SamplesConfig>::from_layers(layers)?;
    let events = Events::default();
    let seen: Vec<Arc<Mutex<Seen>>> = (0..ranks).map(|_| Arc::default()).collect();
    let result = run_ranks(ranks, |world| {
        let (counter, seen) = (Counter::default(), seen[world.rank()].clone());
        let world: Arc<dyn ProcessGroup> = counter.watch(world);
        Trainer::new(world)
            .with_callback(Box::new(Watch { counter, reads_metrics, seen }))
            .with_sink(Box::new(events.clone()))
            .fit::<M>(&run)
            .map(drop)
    });
    let take = |seen: &Arc<Mutex<Seen>>| {
        std::mem::take(&mut *seen.lock().expect("no panic while something is noted"))
    };
    let events = std::mem::take(&mut *events.0.lock().expect("no panic while an event is noted"));
    Ok(Fit { events, seen: seen.iter().map(take).collect(), result: result.map(drop) })
}

/// Returns digests of all tensors of a checkpoint's model or optimizer.
fn saved(source: &dyn TensorSource) -> Result<BTreeMap<String, u64>> {
    let read = |name: &str| {
        let region = Region::full(&source.info(name).expect("it has what it names").shape);
        let values = source.read(name, &region, DType::F64, &Device::Cpu)?;
        Ok((name.to_owned(), values.to_vec1::<f64>()?))
    };
    Ok(digests(source.names().into_iter().map(read).collect::<Result<BTreeMap<_, _>>>()?))
}

/// Collects the logged values of steps and validations, by name.
fn numbers(events: &[Event]) -> BTreeMap<String, Vec<f64>> {
    let mut numbers = BTreeMap::<String, Vec<f64>>::new();
    for event in events {
        let (told, logged): (&[(&str, f64)], _) = match event {
            Event::Step { train_loss, grad_norm, lr, epoch, metrics, .. } => (
                &[("loss", *train_loss), ("norm", *grad_norm), ("lr", *lr), ("epoch", *epoch)],
                Some(metrics),
            ),
            Event::Validation { val_loss, batches, .. } => {
                (&[("val_loss", *val_loss), ("val_batches", *batches as f64)], None)
            }
            _ => continue,
        };
        let logged = logged.into_iter().flatten().map(|(what, number)| (what.as_str(), *number));
        for (what, number) in told.iter().copied().chain(logged) {
            numbers.entry(what.to_owned()).or_default().push(number);
        }
    }
    numbers
}

/// Returns digests of a checkpoint's tensors, by kind.
fn checkpoint(path: &Path) -> Result<BTreeMap<String, BTreeMap<String, u64>>> {
    let checkpoint = AnyCheckpoint::open(path)?;
    let mut tensors = BTreeMap::from([("weights".to_owned(), saved(checkpoint.model())?)]);
    if let Some(optimizer) = checkpoint.optimizer() {
        tensors.insert("optimizer state".to_owned(), saved(optimizer)?);
    }
    Ok(tensors)
}

/// Collects a run's outcome: its events, observations and last checkpoint. For a failing run, takes
/// the state at the error in place of the checkpoint.
fn outcome(fit: Fit, dir: &Path, case: &Trained) -> Result<Outcome> {
    let Fit { events, seen, result } = fit;
    let mut numbers = numbers(&events);
    if case.reads_metrics {
        for (i, what) in
            ["loss that a callback read", "norm that a callback read"].iter().enumerate()
        {
            let read = seen[0].metrics.iter().map(|metrics| metrics[i]).collect();
            numbers.insert((*what).to_owned(), read);
        }
    }
    let mut tensors = BTreeMap::new();
    match result {
        Err(Error::NonFinite { step, .. }) if case.fails => {
            numbers.insert("failed".to_owned(), vec![step as f64]);
            for (rank, seen) in seen.iter().enumerate() {
                let (step, left) = seen.left.clone().expect("the error was on every rank");
                numbers.insert(format!("last step of rank {rank}"), vec![step as f64]);
                tensors.insert(format!("state of rank {rank}"), digests(left));
            }
        }
        result => {
            result?;
            assert!(!case.fails, "the run ended without an error");
            let steps = events.iter().rev().find_map(|event| match event {
                Event::Checkpoint { step, .. } => Some(*step),
                _ => None,
            });
            let last = format!("kept/step-{:08}", steps.expect("a run saves in the end"));
            tensors = checkpoint(&dir.join(last))?;
        }
    }
    let mut tallies: Vec<Tally> = seen.into_iter().map(|seen| seen.tally).collect();
    if case.loads_replicas {
        tallies.iter_mut().for_each(|tally| drop(tally.remove("setup")));
    }
    Ok(Outcome { numbers, tensors, tallies })
}

fn run_as<M>(ranks: usize, keys: &[&str], case: &Trained) -> Result<Outcome>
where
    M: LightningModule<Config = ModelConfig, Data = Samples>,
{
    let scratch = tempfile::tempdir().expect("a directory for temporary files");
    let keys = [keys, case.keys].concat();
    let mut fitted = fit::<M>(ranks, scratch.path(), &keys, case.reads_metrics)?;
    if let Some(then) = case.then {
        fitted.result?;
        let keys = [&keys[..], &["trainer.ckpt_path=last"], then].concat();
        fitted = fit::<M>(ranks, scratch.path(), &keys, case.reads_metrics)?;
    }
    outcome(fitted, scratch.path(), case)
}

/// Runs a case on all ranks.
pub(crate) fn run(name: &str, ranks: usize, case: &Trained) -> Outcome {
    let outcome = match case.module {
        TrainedModule::Transformer => {
            let frozen = "trainer.freeze=['layers.*.self_attn.k_proj.weight']";
            run_as::<Lit>(ranks, &[frozen], case)
        }
        TrainedModule::Pair => run_as::<LitPair>(ranks, &[], case),
    };
    outcome.unwrap_or_else(|error| panic!("{name}: {error}"))
}
