//! The order of the tests.

use std::sync::Arc;

use serde::Deserialize as _;

use super::model::{Batch, MICRO_BATCHES, Probe, Variant};
use super::reference;
use crate::{Error, Result};
use fulgurite_config::registry::{self, kind};
use fulgurite_engine::autograd::no_grad;
use fulgurite_engine::collective::ProcessGroup;
use fulgurite_engine::data::DataContext;
use fulgurite_engine::module::ModuleInit;
use fulgurite_engine::optim::Sgd;
use fulgurite_engine::strategy::{BuildContext, Strategy, StrategyConfig};
use fulgurite_nn::Loss;
use fulgurite_trainer::fabric::{Fabric, UnusedParameters};

pub(super) const SEED: u64 = 42;
const STEPS: usize = 6;
/// Relative tolerance; f32 sums in another order differ by much less.
const TOLERANCE: f64 = 1e-4;

/// The reference for a strategy's training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Equivalence {
    /// Training on one rank with all data: losses and gradient norms must be equal, up to f32
    /// rounding.
    OneRank,
    /// Nothing, for strategies with other mathematics or precision: the loss must fall.
    None,
}

/// Checks the contract of [`Strategy`] on a small model on the CPU.
///
/// Collective: every rank of `world` calls it, for any world size the strategy runs on. The
/// strategy is built several times from `config`, which must be registered. The group stays usable.
///
/// # Errors
/// The first broken promise, and the expectation. Other ranks may then wait in a collective until
/// the group is aborted.
pub fn strategy<S: StrategyConfig>(
    config: &S,
    world: &Arc<dyn ProcessGroup>,
    equivalence: Equivalence,
) -> Result<()> {
    let suite = Suite { config, world, init: ModuleInit::default() };
    suite.configuration()?;
    suite.before_setup()?;
    suite.training(equivalence)?;
    suite.unused_parameters()?;
    suite.different_models()?;
    world.barrier()?.wait()
}

pub(super) fn optimizer() -> Sgd {
    Sgd { lr: 0.02, momentum: 0.5, ..Sgd::default() }
}

/// A strategy under test.
pub(super) struct Suite<'a> {
    config: &'a dyn StrategyConfig,
    pub(super) world: &'a Arc<dyn ProcessGroup>,
    init: ModuleInit,
}

impl Suite<'_> {
    pub(super) fn ensure(&self, holds: bool, what: impl std::fmt::Display) -> Result<()> {
        if holds {
            return Ok(());
        }
        let (rank, size) = (self.world.rank(), self.world.size());
        let config = self.config;
        Err(Error::other(format!("conformance, rank {rank} of {size}: {what}; it is {config:?}")))
    }

    fn build(&self) -> Result<Box<dyn Strategy>> {
        self.config.build(&BuildContext::new(self.world.size()))
    }

    fn fabric(&self) -> Result<Fabric> {
        Fabric::new(self.world.clone(), self.build()?, self.init.clone(), SEED)
    }

    /// The configuration can be serialised and read back, and its name is registered.
    fn configuration(&self) -> Result<()> {
        let written = toml::Table::try_from(self.config).map_err(Error::other)?;
        let name = written.get("type").and_then(toml::Value::as_str).unwrap_or_default();
        registry::require(kind::STRATEGY, name)?;
        let read = Box::<dyn StrategyConfig>::deserialize(written.clone()).map_err(Error::other)?;
        let again = toml::Table::try_from(&*read).map_err(Error::other)?;
        self.ensure(
            written == again,
            format!("the configuration {written} becomes {again} when it is written and read"),
        )
    }

    fn before_setup(&self) -> Result<()> {
        let strategy = self.build()?;
        self.ensure(!strategy.name().is_empty(), "name() is empty")?;
        let capabilities = strategy.capabilities();
        self.ensure(
            capabilities.distributed || self.world.size() == 1,
            "capabilities() say it is not distributed, but it was built for several ranks",
        )
    }

    /// A whole run, with checks after every call of the first step.
    fn training(&self, equivalence: Equivalence) -> Result<()> {
        let mut fabric = self.fabric()?;
        let share = self.mesh(&fabric)?;
        let (model, mut optimizer) =
            fabric.setup(|b| Probe::new(b, Variant::default()), &optimizer())?;
        self.initial_values(&fabric)?;
        self.values_outside_units(&fabric, "after setup")?;
        self.state_tensors(&fabric, &mut optimizer)?;
        self.loss_without_graph(&fabric, &model, share)?;
        let before = self.local_values(&fabric)?;
        let mut found = Vec::with_capacity(STEPS);
        for step in 0..STEPS {
            let local = self.backward(&fabric, &model, share)?;
            if step == 0 {
                self.gradients(&fabric)?;
                self.totals(&fabric, &local)?;
            }
            let loss = fabric.step_totals(&[])?.mean();
            let norm = self.norm(&optimizer)?;
            optimizer.step()?;
            if step == 0 {
                self.after_step(&fabric, &before)?;
            }
            found.push((loss, norm));
        }
        // A forward without gradients works at any time, and does not change the next step.
        let no_grad = no_grad();
        model.loss(&self.batch(share, 0)?)?.sum_value()?;
        drop(no_grad);
        self.saved(&fabric, &mut optimizer)?;
        self.compare(equivalence, &found, share.data_parallel_size)
    }

    fn batch(&self, share: DataContext, micro_batch: usize) -> Result<Batch> {
        Batch::new(
            share.data_parallel_rank,
            share.data_parallel_size,
            micro_batch,
            &self.init.device,
        )
    }

    /// Runs the micro-batches of one step; returns this rank's loss.
    fn backward(&self, fabric: &Fabric, model: &Probe, share: DataContext) -> Result<Loss> {
        let mut sum: Option<Loss> = None;
        for micro_batch in 0..MICRO_BATCHES {
            let loss = model.loss(&self.batch(share, micro_batch)?)?;
            let _no_sync = fabric.no_backward_sync(micro_batch + 1 < MICRO_BATCHES);
            fabric.backward(&loss)?;
            let loss = loss.detach();
            sum = Some(match &sum {
                Some(sum) => (sum + &loss)?,
                None => loss,
            });
        }
        sum.ok_or_else(|| Error::other("a step has no micro-batches"))
    }

    /// A loss without a graph is an error, and training goes on after it.
    fn loss_without_graph(&self, fabric: &Fabric, model: &Probe, share: DataContext) -> Result<()> {
        let loss = {
            let _no_grad = no_grad();
            model.loss(&self.batch(share, 0)?)?
        };
        let refused = fabric.backward(&loss).is_err();
        self.ensure(refused, "backward() takes a loss that depends on no parameter")
    }

    fn compare(
        &self,
        equivalence: Equivalence,
        found: &[(f64, f64)],
        replicas: usize,
    ) -> Result<()> {
        let (first, last) = (found[0].0, found[STEPS - 1].0);
        self.ensure(
            last < first,
            format!("the loss does not fall: {first} at first, then {last}"),
        )?;
        if equivalence == Equivalence::None {
            return Ok(());
        }
        let expected = reference::train(STEPS, replicas, &self.init)?;
        let near = |a: f64, b: f64| (a - b).abs() <= TOLERANCE * b.abs();
        for (step, (&(loss, norm), &(loss_1, norm_1))) in found.iter().zip(&expected).enumerate() {
            let step = step + 1;
            self.ensure(
                near(loss, loss_1),
                format!("the loss of step {step} is {loss}, that of one rank {loss_1}"),
            )?;
            self.ensure(
                near(norm, norm_1),
                format!("the gradient norm of step {step} is {norm}, that of one rank {norm_1}"),
            )?;
        }
        Ok(())
    }

    /// A parameter that no rank uses is reported; one that some ranks use is not.
    fn unused_parameters(&self) -> Result<()> {
        let mut fabric = self.fabric()?;
        let variant = Variant { unused: true, ..Variant::default() };
        let model = fabric.setup_module(|b| Probe::new(b, variant))?;
        let share = fabric.data_context()?;
        self.backward(&fabric, &model, share)?;
        let names = match fabric.gradients()?.audit(UnusedParameters::Error) {
            Err(Error::UnusedParameters { names, .. }) => names,
            Err(error) => return Err(error),
            Ok(()) => Vec::new(),
        };
        self.ensure(
            names == ["never"],
            format!("Gradients::audit() names {names:?} as unused, not `never` alone"),
        )?;
        fabric.gradients()?.audit(UnusedParameters::Ignore)?;
        let tree = fabric.module_tree()?;
        for parameter in tree.trainable() {
            let fqn = parameter.fqn();
            self.ensure(
                parameter.local_grad().is_some() == (fqn != "never"),
                format!("with unused parameters ignored, the gradient of `{fqn}` is wrong"),
            )?;
        }
        Ok(())
    }

    /// Ranks that built different models all get an error.
    fn different_models(&self) -> Result<()> {
        if self.world.size() == 1 {
            return Ok(());
        }
        let mut fabric = self.fabric()?;
        let last = self.world.rank() + 1 == self.world.size();
        let variant = Variant { extra_outputs: usize::from(last), ..Variant::default() };
        let result = fabric.setup_module(|b| Probe::new(b, variant));
        self.ensure(result.is_err(), "setup_module() accepts ranks with different models")
    }
}
