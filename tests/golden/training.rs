//! Cases with a loop of their own, over a `Fabric`.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use fulgurite_checkpoint as _;
use fulgurite_core::checkpoint::FullOptions;
use fulgurite_core::collective::{Counter, Counting, ProcessGroup};
use fulgurite_core::fabric::UnusedParameters;
use fulgurite_core::fabric::{Fabric, FabricOptimizer};
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

/// Steps on record, and those before a save that is resumed from.
const STEPS: usize = 5;
const STEPS_BEFORE: usize = 2;

/// A rank's model in training.
trait InTraining {
    fn parts(&mut self) -> (&Fabric, &mut FabricOptimizer);
    /// One micro-batch, forward and backward. `last` says whether gradients synchronise.
    fn micro_step(&self, micro: usize, last: bool) -> Result<()>;
    fn end_step(&mut self);
}

impl InTraining for Training {
    fn parts(&mut self) -> (&Fabric, &mut FabricOptimizer) {
        (&self.fabric, &mut self.optimizer)
    }
    fn micro_step(&self, micro: usize, last: bool) -> Result<()> {
        self.micro_step(micro, last)
    }
    fn end_step(&mut self) {
        self.step += 1;
    }
}

impl InTraining for DecoderTraining {
    fn parts(&mut self) -> (&Fabric, &mut FabricOptimizer) {
        (&self.fabric, &mut self.optimizer)
    }
    fn micro_step(&self, micro: usize, last: bool) -> Result<()> {
        self.micro_step(micro, last)
    }
    fn end_step(&mut self) {
        self.step += 1;
    }
}

/// A model without a training of its own in the tests' support.
struct Plain<M> {
    fabric: Fabric,
    model: M,
    optimizer: FabricOptimizer,
    step: usize,
    /// Of part `index` of `parts` of a step's global batch.
    loss: fn(&M, step: usize, index: usize, parts: usize) -> Result<Loss>,
    accumulate: usize,
}

impl<M> InTraining for Plain<M> {
    fn parts(&mut self) -> (&Fabric, &mut FabricOptimizer) {
        (&self.fabric, &mut self.optimizer)
    }
    fn micro_step(&self, micro: usize, last: bool) -> Result<()> {
        let (rank, size) = (self.fabric.global_rank(), self.fabric.world_size());
        let (index, parts) = (micro * size + rank, size * self.accumulate);
        let loss = (self.loss)(&self.model, self.step, index, parts)?;
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

/// A rank's model, as a case or what it resumes from has it.
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

/// One optimizer step: its loss and gradient norm.
fn step(training: &mut dyn InTraining, case: &Fabricated) -> Result<(f64, f64)> {
    for micro in 0..case.accumulate {
        training.micro_step(micro, case.sync_always || micro + 1 == case.accumulate)?;
    }
    let (fabric, optimizer) = training.parts();
    let loss = fabric.step_totals(&[])?.mean();
    let norm = match case.clip {
        Clip::No => fabric.gradient_norm(optimizer)?,
        Clip::Norm(most) => fabric.clip_gradients_norm(optimizer, most)?,
        Clip::Value(most) => fabric.clip_gradients_value(optimizer, most)?,
    };
    optimizer.step()?;
    training.end_step();
    Ok((loss, norm))
}

/// Trains for some steps as a case resumes from, and saves.
fn save(case: &Fabricated, resume: &Resume, path: &Path) -> Result<()> {
    run_ranks(resume.ranks, |world| {
        let model = Model::Decoder(resume.variant);
        let mut training = set_up(world, case, &resume.strategy, model)?;
        for _ in 0..STEPS_BEFORE {
            step(&mut *training, case)?;
        }
        let (fabric, optimizer) = training.parts();
        match resume.full {
            true => fabric.save_full(path, Some(optimizer), &(), &FullOptions::default()),
            false => fabric.save(path, optimizer, &()),
        }
    })?;
    Ok(())
}

/// Goes on from what was saved.
fn load(training: &mut dyn InTraining, resume: &Resume, path: &Path) -> Result<()> {
    let (fabric, optimizer) = training.parts();
    match resume.full {
        true => fabric.load_raw(path, true).map(drop)?,
        false => fabric.load::<()>(path, Some(optimizer))?,
    }
    (0..STEPS_BEFORE).for_each(|_| training.end_step());
    Ok(())
}

/// A case on one rank.
fn run_rank(world: Arc<dyn ProcessGroup>, case: &Fabricated, saved: &Path) -> Result<Outcome> {
    let (counter, mut tally) = (Counter::default(), Tally::new());
    let world = Arc::new(Counting::new(world, counter.clone()));
    let mut training = set_up(world, case, &case.strategy, case.model)?;
    count(&mut tally, "setup", &counter);
    if let Some(resume) = &case.resume {
        load(&mut *training, resume, saved)?;
        count(&mut tally, "load", &counter);
    }
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for i in 0..STEPS {
        let (loss, norm) = step(&mut *training, case)?;
        losses.push(loss);
        norms.push(norm);
        count(&mut tally, if i == 0 { "first step" } else { "later steps" }, &counter);
    }
    let (fabric, optimizer) = training.parts();
    let tree = fabric.module_tree()?;
    let gathered = || gather_weights(tree, &**fabric.world()).map(digests);
    let mut tensors = BTreeMap::from([("weights".to_owned(), gathered()?)]);
    if case.ema.is_some() {
        optimizer.swap_average()?;
        tensors.insert("averages".to_owned(), gathered()?);
    }
    let numbers = BTreeMap::from([("loss".to_owned(), losses), ("norm".to_owned(), norms)]);
    Ok(Outcome { numbers, tensors, tallies: vec![tally] })
}

/// A case on all ranks.
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
