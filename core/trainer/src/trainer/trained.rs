//! [`Trained`].

use std::fmt;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use super::evaluation::evaluate::{EvaluationStage, evaluate_once, predict_once};
use super::module::callback::read_callback;
use super::module::runner::TypedRunner;
use super::session::Session;
use super::{Callback, Evaluation, FitOutcome, LightningModule, Predictions};
use crate::Result;
use crate::fabric::Fabric;
use fulgurite_engine::autograd::no_grad;

/// A module after training, with its data, on the ranks that trained it.
///
/// Under a sharding strategy every rank has shards of the module. So computing with the module is
/// collective, and all ranks must call the same methods.
///
/// ```no_run
/// # use fulgurite_core::Result;
/// # use fulgurite_core::trainer::{LightningModule, RunConfigOf, Trainer};
/// # fn example<M: LightningModule>(run: RunConfigOf<M>) -> Result<()> {
/// let mut trained = Trainer::default().fit::<M>(&run)?;
/// println!("loss {}", trained.outcome().last_loss);
/// let test = trained.test()?;
/// println!("{:?}", test.metrics);
/// let predictions = trained.predict()?;
/// # Ok(())
/// # }
/// ```
pub struct Trained<M: LightningModule> {
    outcome: FitOutcome,
    session: Session,
    module: PhantomData<fn() -> M>,
}

impl<M: LightningModule> Trained<M> {
    /// Wraps `session`, whose runner must be of `M`.
    pub(super) fn new(outcome: FitOutcome, session: Session) -> Self {
        Self { outcome, session, module: PhantomData }
    }

    /// Returns the outcome of the training.
    pub fn outcome(&self) -> &FitOutcome {
        &self.outcome
    }

    /// Returns the module. To compute with it use [`forward`](Self::forward).
    pub fn module(&self) -> &M {
        &self.runner().module
    }

    /// Like [`module`](Self::module), but mutable.
    pub fn module_mut(&mut self) -> &mut M {
        let runner = self.session.runner.as_any_mut();
        &mut runner.downcast_mut::<TypedRunner<M>>().expect("made for this module").module
    }

    /// Returns the data.
    pub fn data(&self) -> &M::Data {
        &self.runner().data
    }

    /// Returns the strategy in use: parameters ([`module_tree`](Fabric::module_tree)), saving
    /// ([`save_full`](Fabric::save_full)), loading.
    pub fn fabric(&self) -> &Fabric {
        &self.session.setup.fabric
    }

    /// Reads the training's first callback of type `C`; `None` if it had none.
    pub fn read_callback<C: Callback, T>(&self, read: impl FnMut(&C) -> T) -> Option<T> {
        read_callback(self.session.callbacks.shared(), read)
    }

    /// Computes with the module as in a validation: without a graph, without dropout. Collective.
    ///
    /// # Errors
    /// As `compute`.
    pub fn forward<T>(&self, compute: impl FnOnce(&M) -> Result<T>) -> Result<T> {
        let _no_grad = no_grad();
        let _scope = self.fabric().forward_scope(false, self.outcome.steps, 0);
        compute(self.module())
    }

    /// Swaps the weights and their average (`trainer.ema_decay`), if any, to predict with it or to
    /// save it.
    ///
    /// A second call restores the weights. After a training with `stochastic_weight_averaging` the
    /// average is in their place already. Collective.
    ///
    /// # Errors
    /// If a peer fails.
    pub fn swap_average(&mut self) -> Result<()> {
        let mut optimizers = self.session.optimizers.iter_mut().flat_map(|all| all.iter_mut());
        optimizers.try_for_each(|(_, optimizer)| optimizer.swap_average())
    }

    /// Writes the model's adapters to a directory in PEFT's format:
    /// [`Checkpoints::save_adapter`](crate::fabric::Checkpoints::save_adapter). Collective.
    ///
    /// # Errors
    /// As [`Checkpoints::save_adapter`](crate::fabric::Checkpoints::save_adapter).
    pub fn save_adapter(&self, dir: impl AsRef<Path>) -> Result<PathBuf> {
        self.fabric().checkpoints().save_adapter(dir)
    }

    /// Validates the module. Collective.
    ///
    /// # Errors
    /// If there is no validation data; [`Error::Interrupted`](crate::Error::Interrupted).
    pub fn validate(&mut self) -> Result<Evaluation> {
        evaluate_once(&mut self.session, EvaluationStage::Validation)
    }

    /// Tests the module. Collective.
    ///
    /// # Errors
    /// If there is no test data; [`Error::Interrupted`](crate::Error::Interrupted).
    pub fn test(&mut self) -> Result<Evaluation> {
        evaluate_once(&mut self.session, EvaluationStage::Test)
    }

    /// Predicts for this rank's samples of
    /// [`Split::Predict`](fulgurite_engine::data::Split::Predict). Collective.
    ///
    /// # Errors
    /// As [`predict_step`](LightningModule::predict_step);
    /// [`Error::Interrupted`](crate::Error::Interrupted).
    pub fn predict(&mut self) -> Result<Predictions> {
        predict_once(&mut self.session)
    }

    fn runner(&self) -> &TypedRunner<M> {
        self.session.runner.as_any().downcast_ref().expect("made for this module")
    }
}

impl<M: LightningModule> fmt::Debug for Trained<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trained").field("outcome", &self.outcome).finish_non_exhaustive()
    }
}
