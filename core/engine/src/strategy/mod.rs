//! Strategies: how a model is spread over ranks, and what that means for a step.
//!
//! [`Strategy`] is the run-time trait; [`StrategyConfig`] is what a configuration file names. A
//! strategy holds a [`StrategyState`], on which the trait's provided methods work, so that a small
//! one has little to write: [`materialize::replicate`] gives every rank the whole model, and the
//! provided methods do loss totals, gradient norms, clipping and checks on any mesh.

mod audit;
mod loss;
pub mod materialize;
mod parallelize;
mod state;
#[expect(clippy::module_inception, reason = "the trait is the module's subject")]
mod strategy;

pub use audit::UnusedParameters;
pub use loss::Loss;
pub use parallelize::{ParallelizeConfig, ParallelizeFn};
pub use state::{NoSyncGuard, StepTotals, StrategyState};
pub use strategy::{BuildContext, Capabilities, SamplerShare, Strategy, StrategyConfig};
