//! Runs cases with their own loop and two optimizers.

use std::collections::BTreeMap;
use std::sync::Arc;

use fulgurite_core::Result;
use fulgurite_core::collective::{Counter, ProcessGroup};
use fulgurite_core::fabric::{Fabric, FabricOptimizer, FabricOptimizers, StepNumbers};
use fulgurite_core::optim::{AdamW, Sgd};
use fulgurite_test_support::training::{gather_weights, init, micro_batch, strategy};
use fulgurite_transports::run_ranks;

use crate::case::{Clip, Several};
use crate::outcome::{Outcome, Tally, count, digests};
use crate::pair::Pair;
use crate::training::STEPS;

/// Clips and updates. Returns the step's loss and norm.
fn end_step(
    fabric: &Fabric,
    optimizer: &mut FabricOptimizer,
    case: &Several,
) -> Result<StepNumbers> {
    if case.late {
        let numbers = optimizer.clip_and_step(case.clip.limit())?;
        return optimizer.read(numbers);
    }
    let totals = optimizer.step_totals(&[])?;
    let loss = optimizer.check_loss(&totals)?;
    let grad_norm = match case.clip {
        Clip::No => optimizer.gradient_norm()?,
        Clip::Norm(limit) => fabric.clip_gradients_norm(optimizer, limit)?,
        Clip::Value(limit) => fabric.clip_gradients_value(optimizer, limit)?,
    };
    optimizer.step()?;
    Ok(StepNumbers { loss, grad_norm })
}

/// Runs a case on one rank.
fn run_rank(world: Arc<dyn ProcessGroup>, case: &Several) -> Result<Outcome> {
    let (counter, mut tally) = (Counter::default(), Tally::new());
    let world = counter.watch(world);
    let mut fabric = Fabric::new(world, strategy(&case.strategy)?, init(&case.strategy)?, 11)?;
    let pair = fabric.setup_module(Pair::new)?;
    let adamw = AdamW { lr: 0.02, ..AdamW::default() };
    let sgd = Sgd { lr: 0.01, momentum: 0.9, ..Sgd::default() };
    let mut optimizers = FabricOptimizers::default()
        .with("critic", fabric.setup_optimizer_for(&sgd, &["critic"])?)
        .with("generator", fabric.setup_optimizer_for(&adamw, &["generator"])?);
    count(&mut tally, "setup", &counter);

    let (rank, ranks) = (fabric.global_rank(), fabric.world_size());
    let mut numbers = BTreeMap::<String, Vec<f64>>::new();
    for step in 0..STEPS {
        for name in Pair::OPTIMIZERS {
            let turn = match case.turns {
                true => Some(fabric.toggle_optimizer(optimizers.get(name)?)?),
                false => None,
            };
            for micro in 0..case.accumulate {
                let sample =
                    micro_batch(step as u64, micro * ranks + rank, ranks * case.accumulate)?;
                let loss = pair.loss(name, &sample.ids)?;
                let _no_sync = fabric.no_backward_sync(micro + 1 < case.accumulate);
                fabric.backward(&loss)?;
            }
            drop(turn);
            let StepNumbers { loss, grad_norm } =
                end_step(&fabric, optimizers.get_mut(name)?, case)?;
            for (what, number) in [("loss", loss), ("norm", grad_norm)] {
                numbers.entry(format!("{what} of {name}")).or_default().push(number);
            }
            if !case.turns {
                let mut others = optimizers.iter_mut().filter(|(other, _)| *other != name);
                others.try_for_each(|(_, other)| other.zero_grad())?;
            }
        }
        count(&mut tally, if step == 0 { "first step" } else { "later steps" }, &counter);
    }
    let weights = digests(gather_weights(fabric.module_tree()?, &**fabric.world())?);
    let tensors = BTreeMap::from([("weights".to_owned(), weights)]);
    Ok(Outcome { numbers, tensors, tallies: vec![tally] })
}

/// Runs a case on all ranks.
pub(crate) fn run(name: &str, ranks: usize, case: &Several) -> Outcome {
    let outcomes = run_ranks(ranks, |world| run_rank(world, case));
    Outcome::of_ranks(name, outcomes.unwrap_or_else(|error| panic!("{name}: {error}")))
}
