//! Strategies distribute a model over ranks and run the communication of its steps.
//!
//! [`Strategy`] is the run-time trait, and a [`StrategyConfig`] is named in a configuration file.
//! [`StrategyExtensions`] has the methods that few strategies need, and [`Pipeline`] is the work of
//! those whose ranks compute different stages of the model.
//! Small strategies stay short: [`materialize::replicate`] gives every rank the whole model, and
//! the runtime that owns a strategy handles the common work (losses, norms, checks, checkpoints).

mod extensions;
mod gradient_compression;
mod loss;
pub mod materialize;
mod parallelize;
mod pipeline;
mod plan;
#[expect(clippy::module_inception, reason = "the trait is the module's subject")]
mod strategy;

pub use extensions::{STRATEGY_STATE, StrategyExtensions};
pub use gradient_compression::{
    GradientBucket, GradientCompression, GradientCompressionConfig, GradientPart,
};
pub use loss::{Loss, StepTotals};
pub use parallelize::{ParallelizeConfig, ParallelizeFn};
pub use pipeline::{BorderId, DryBorders, Pipeline, StageWork};
pub use plan::{Bytes, RankMemory};
pub use strategy::{BuildContext, Capabilities, Strategy, StrategyConfig, StrategyContext};
