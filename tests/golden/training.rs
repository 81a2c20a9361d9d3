//! Runs cases with their own loop over a `Fabric`.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use fulgurite_checkpoint_local as _;
use fulgurite_core::checkpoint::FullOptions;
use fulgurite_core::collective::{Counter, ProcessGroup};
use fulgurite_core::fabric::{Fabric, FabricOptimizer, PendingStep, StepNumbers, UnusedParameters};
use fulgurite_core::nn::Loss;
use fulgurite_core::optim::{AdamW, OptimizerConfig, SchedulerConfig, WeightAverage};
use fulgurite_core::{Error, Result};
use fulgurite_transports::run_ranks;
use serde::de::DeserializeOwned;

use crate::case::{Clip, Fabricated, Model, Resume};
use crate::outcome::{Outcome, Tally, count, digests};
use fulgurite_test_support::training::{
    Classifier, DecoderTraining, ROUTE, Toy, Training, gather_weights, images, init, strategy,
};

/// Recorded steps.
pub(crate) const STEPS: usize = 5;
/// Steps before the save that a case resumes from.
const STEPS_BEFORE: usize = 2;

/// A case's change to a micro-batch's loss.
type Change<'a> = &'a dyn Fn(Loss) -> Result<Loss>;

/// A rank's model in training.
trait InTraining {
    fn parts(&mut self) -> (&Fabric, &mut FabricOptimizer);
    /// Returns the number of finished steps.
    fn steps(&self) -> u64;
    /// Runs forward and backward of one micro-batch. Gradients synchronise if `last` is true.
    fn micro_step(&self, micro: usize, last: bool, change: Change) -> Result<()>;
    fn end_step(&mut self);
}

impl InTraining for Training {
    fn parts(&mut self) -> (&Fabric, &mut FabricOptimizer) {
        (&self.fabric, &mut self.optimizer)
    }
    fn steps(&self) -> u64 {
        self.step
    }
    fn micro_step(&self, micro: usize, last: bool, change: Change) -> Result<()> {
        self.micro_step_with(micro, last, change)
    }
    fn end_step(&mut self) {
        self.step += 1;
    }
}

impl InTraining for DecoderTraining {
    fn parts(&mut self) -> (&Fabric, &mut FabricOptimizer) {
        (&self.fabric, &mut self.optimizer)
    }
    fn steps(&self) -> u64 {
        self.step
    }
    fn micro_step(&self, micro: usize, last: bool, change: Change) -> Result<()> {
        self.micro_step_with(micro, last, change)
    }
    fn end_step(&mut self) {
        self.step += 1;
    }
}

/// A training of a model that the test support does not train itself.
struct Plain<M> {
    fabric: Fabric,
    model: M,
    optimizer: FabricOptimizer,
    step: usize,
    /// The loss of part `index` of `parts` of a step's global batch.
    loss: fn(&M, step: usize, index: usize, parts: usize) -> Result<Loss>,
    accumulate: usize,
}

impl<M> InTraining for Plain<M> {
    fn parts(&mut self) -> (&Fabric, &mut FabricOptimizer) {
        (&self.fabric, &mut self.optimizer)
    }
    fn steps(&self) -> u64 {
        self.step as u64
    }
    fn micro_step(&self, micro: usize, last: bool, change: Change) -> Result<()> {
        let (rank, size) = (self.fabric.global_rank(), self.fabric.world_size());
        let (index, parts) = (micro * size + rank, size * self.accumulate);
        let loss = change((self.loss)(&self.model, self.step, index, parts)?)?;
        let _no_sync = self.fabric.no_backward_sync(!last);
        self.fabric.backward(&loss)
    }
    fn end_step(&mut self) {
        self.step += 1;
    }
}

fn parse<T: DeserializeOwned>(json: &str) -> Result<T> {
    serde_json::from_str(json).map_err(Error::other)
}

/// Sets up `model` on one rank, under the case's strategy or the strategy it resumes from.
fn set_up(
    world: Arc<dyn ProcessGroup>,
    case: &Fabricated,
    config: &str,
    model: Model,
) -> Result<Box<dyn InTraining>> {
    let accumulate = case.accumulate;
    let optimizer = |default: AdamW| -> Result<Box<dyn OptimizerConfig>> {
        case.optimizer.map_or_else(|| Ok(Box::new(default) as _), parse)
    };
    let equip = |fabric: &Fabric, mut optimizer: FabricOptimizer| -> Result<FabricOptimizer> {
        if let Some(scheduler) = case.scheduler {
            let scheduler = parse::<Box<dyn SchedulerConfig>>(scheduler)?;
            optimizer = optimizer.with_scheduler(scheduler, Some(STEPS as u64));
        }
        if let Some(decay) = case.ema {
            let averages = WeightAverage::exponential(fabric.module_tree()?.parameters(), decay)?;
            optimizer = optimizer.with_average(averages);
        }
        if case.swa {
            let mean = WeightAverage::mean(fabric.module_tree()?.parameters())?;
            optimizer = optimizer.with_average(mean);
        }
        if let Some(scale) = case.loss_scale {
            fabric.set_loss_scale(scale)?;
        }
        Ok(optimizer)
    };
    Ok(match model {
        Model::Transformer => {
            let (adamw, dtype) = (optimizer(DecoderTraining::adamw())?, case.compute_dtype);
            let mut training = Training::with_optimizer(world, config, dtype, accumulate, &*adamw)?;
            training.optimizer = equip(&training.fabric, training.optimizer)?;
            Box::new(training)
        }
        Model::Decoder(variant) => {
            let (adamw, frozen) = (optimizer(DecoderTraining::adamw())?, case.frozen);
            let mut training = DecoderTraining::with_optimizer(
                world, config, variant, accumulate, frozen, &*adamw,
            )?;
            training.optimizer = equip(&training.fabric, training.optimizer)?;
            Box::new(training)
        }
        Model::Classifier => {
            let mut fabric = Fabric::new(world, strategy(config)?, init(config)?, 5)?;
            let adamw = optimizer(AdamW { lr: 0.01, eps: 1e-5, ..AdamW::default() })?;
            let (model, optimizer) = fabric.setup(Classifier::new, &*adamw)?;
            let loss = |model: &Classifier, step, index, parts| {
                let (images, labels) = images(step, index, parts)?;
                model.loss(&images, &labels)
            };
            let optimizer = equip(&fabric, optimizer)?;
            Box::new(Plain { fabric, model, optimizer, step: 0, loss, accumulate })
        }
        Model::Toy => {
            let mut fabric = Fabric::new(world, strategy(config)?, init(config)?, 3)?;
            let adamw = optimizer(AdamW { eps: 1e-4, ..AdamW::default() })?;
            let (model, optimizer) = fabric.setup(Toy::new, &*adamw)?;
            let loss = |model: &Toy, _, index, _| model.loss(index, ROUTE);
            let optimizer = equip(&fabric, optimizer)?;
            let optimizer = optimizer.with_unused_parameters(UnusedParameters::Zero);
            Box::new(Plain { fabric, model, optimizer, step: 0, loss, accumulate })
        }
    })
}

/// Runs one optimizer step: its micro-batches and the update. Returns the step's loss and norm. If
/// steps are late, returns the previous step's, which `unread` holds, and stores this step there.
fn step(
    training: &mut dyn InTraining,
    case: &Fabricated,
    unread: &mut Option<PendingStep>,
) -> Result<Option<StepNumbers>> {
    let number = training.steps() + 1;
    let (fabric, _) = training.parts();
    let ranks = (fabric.global_rank(), fabric.world_size());
    let change = |loss| match case.fault {
        Some(fault) => fault.apply(loss, number, ranks),
        None => Ok(loss),
    };
    for micro in 0..case.accumulate {
        let last = case.sync_always || micro + 1 == case.accumulate;
        training.micro_step(micro, last, &change)?;
    }
    let (fabric, optimizer) = training.parts();
    let clip = case.clip_in(number);
    let numbers = match case.late {
        true => {
            let before = unread.replace(optimizer.clip_and_step(clip.limit())?);
            before.map(|before| optimizer.read(before)).transpose()?
        }
        false => {
            let loss = fabric.step_totals(&[])?.mean();
            let grad_norm = match clip {
                Clip::No => optimizer.gradient_norm()?,
                Clip::Norm(most) => fabric.clip_gradients_norm(optimizer, most)?,
                Clip::Value(most) => fabric.clip_gradients_value(optimizer, most)?,
            };
            optimizer.step()?;
            Some(StepNumbers { loss, grad_norm })
        }
    };
    optimizer.update_average()?;
    training.end_step();
    Ok(numbers)
}

/// Reads the last step's loss and norm, if still unread.
fn read_last(
    training: &mut dyn InTraining,
    unread: &mut Option<PendingStep>,
) -> Result<Option<StepNumbers>> {
    unread.take().map(|last| training.parts().1.read(last)).transpose()
}

/// Trains for `STEPS_BEFORE` steps under the strategy to resume from, and saves.
fn save(case: &Fabricated, resume: &Resume, path: &Path) -> Result<()> {
    run_ranks(resume.ranks, |world| {
        let model = Model::Decoder(resume.variant);
        let mut training = set_up(world, case, &resume.strategy, model)?;
        let mut unread = None;
        for _ in 0..STEPS_BEFORE {
            step(&mut *training, case, &mut unread)?;
        }
        read_last(&mut *training, &mut unread)?;
        let (fabric, optimizer) = training.parts();
        match resume.full {
            true => fabric.save_full(path, Some(optimizer), &(), &FullOptions::default()),
            false => fabric.save(path, optimizer, &()),
        }
    })?;
    Ok(())
}

/// Loads the saved checkpoint and skips its steps.
fn load(training: &mut dyn InTraining, resume: &Resume, path: &Path) -> Result<()> {
    let (fabric, optimizer) = training.parts();
    match resume.full {
        true => fabric.load_raw(path, true).map(drop)?,
        false => fabric.load::<()>(path, Some(optimizer))?,
    }
    (0..STEPS_BEFORE).for_each(|_| training.end_step());
    Ok(())
}

/// Losses and norms of a case's steps.
#[derive(Default)]
struct Steps {
    losses: Vec<f64>,
    norms: Vec<f64>,
    /// The step with a non-finite loss or norm.
    failed: Option<u64>,
}

impl Steps {
    /// Adds a step's loss and norm. Returns whether the training continues.
    fn add(&mut self, numbers: Result<Option<StepNumbers>>) -> Result<bool> {
        match numbers {
            Ok(Some(StepNumbers { loss, grad_norm })) => {
                self.losses.push(loss);
                self.norms.push(grad_norm);
            }
            Ok(None) => {}
            Err(Error::NonFinite { step, .. }) => self.failed = Some(step),
            Err(error) => return Err(error),
        }
        Ok(self.failed.is_none())
    }

    fn into_numbers(self) -> BTreeMap<String, Vec<f64>> {
        let failed = self.failed.map(|step| ("failed".to_owned(), vec![step as f64]));
        let numbers = [("loss".to_owned(), self.losses), ("norm".to_owned(), self.norms)];
        numbers.into_iter().chain(failed).collect()
    }
}

/// Runs a case on one rank.
fn run_rank(world: Arc<dyn ProcessGroup>, case: &Fabricated, saved: &Path) -> Result<Outcome> {
    let (counter, mut tally) = (Counter::default(), Tally::new());
    let world = counter.watch(world);
    let mut training = set_up(world, case, &case.strategy, case.model)?;
    count(&mut tally, "setup", &counter);
    if let Some(resume) = &case.resume {
        load(&mut *training, resume, saved)?;
        count(&mut tally, "load", &counter);
    }
    let mut steps = Steps::default();
    let mut unread = None;
    for i in 0..STEPS {
        let step = step(&mut *training, case, &mut unread);
        count(&mut tally, if i == 0 { "first step" } else { "later steps" }, &counter);
        if !steps.add(step)? {
            break;
        }
    }
    if steps.failed.is_none() {
        steps.add(read_last(&mut *training, &mut unread))?;
    }
    let (fabric, optimizer) = training.parts();
    let tree = fabric.module_tree()?;
    let gathered = || gather_weights(tree, &**fabric.world()).map(digests);
    let mut tensors = BTreeMap::from([("weights".to_owned(), gathered()?)]);
    let mut numbers = steps.into_numbers();
    if case.scalars {
        let scalars = optimizer.scalars().into_iter();
        numbers.extend(scalars.map(|(name, number)| (format!("state, {name}"), vec![number])));
    }
    if case.ema.is_some() || case.swa {
        optimizer.swap_average()?;
        tensors.insert("averages".to_owned(), gathered()?);
    }
    Ok(Outcome { numbers, tensors, tallies: vec![tally] })
}

/// Runs a case on all ranks.
pub(crate) fn run(name: &str, ranks: usize, case: &Fabricated) -> Outcome {
    let scratch = tempfile::tempdir().expect("a directory for temporary files");
    let saved = scratch.path().join("saved");
    let outcomes = match &case.resume {
        Some(resume) => save(case, resume, &saved),
        None => Ok(()),
    }
    .and_then(|()| run_ranks(ranks, |world| run_rank(world, case, &saved)));
    Outcome::of_ranks(name, outcomes.unwrap_or_else(|error| panic!("{name}: {error}")))
}
