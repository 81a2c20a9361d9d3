//! Strategies: how a model is distributed over ranks, and what its steps communicate.
//!
//! [`Strategy`] is the run-time trait; [`StrategyConfig`] is what a configuration file names. A small
//! strategy has little to write: [`materialize::replicate`] gives every rank the whole model, and what all
//! strategies do alike (losses, norms, checks, checkpoints) is done by the runtime that owns it.

mod gradient_compression;
mod loss;
pub mod materialize;
mod parallelize;
mod plan;
#[expect(clippy::module_inception, reason = "the trait is the module's subject")]
mod strategy;

pub use gradient_compression::{
    GradientBucket, GradientCompression, GradientCompressionConfig, GradientPart,
};
pub use loss::{Loss, StepTotals};
pub use parallelize::{ParallelizeConfig, ParallelizeFn};
pub use plan::{Bytes, RankMemory};
pub use strategy::{
    BuildContext, Capabilities, STRATEGY_STATE, Strategy, StrategyConfig, StrategyContext,
};
