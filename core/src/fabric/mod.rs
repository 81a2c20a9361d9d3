//! Fabric: strategy, launcher and checkpoints without the loop, for people who own their loop. The
//! trainer is built on it.

#[expect(clippy::module_inception, reason = "the type is the module's subject")]
mod fabric;
mod optimizer;

pub use fabric::Fabric;
pub(crate) use fabric::NON_FINITE_HINT;
pub use optimizer::FabricOptimizer;
