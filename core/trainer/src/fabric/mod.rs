//! Fabric: strategy, launcher and checkpoints for hand-written training loops.
//!
//! The trainer is built on Fabric.

mod accelerator;
mod adapters;
mod attempts;
mod checkpoints;
mod collectives;
mod data;
mod device_group;
#[expect(clippy::module_inception, reason = "the type is the module's subject")]
mod fabric;
mod gradients;
mod launcher;
mod measurements;
mod optimizer;
mod optimizers;
mod sample_identity;
mod state_dict;
mod step;
mod torch_optimizer;

pub use crate::runtime::{NoSyncGuard, SyncBuffers, UnusedParameters};
pub(crate) use accelerator::host;
pub use checkpoints::Checkpoints;
pub use collectives::GroupCollectives;
pub use data::{TrainBatch, TrainLoader};
pub use fabric::{Fabric, StrategyInfo};
pub use gradients::Gradients;
pub(crate) use launcher::check_frozen;
pub use launcher::{Connection, FabricLauncher};
pub use measurements::Measurements;
pub use optimizer::FabricOptimizer;
pub use optimizers::{FabricOptimizers, OptimizerState};
pub(crate) use sample_identity::SampleIdentity;
pub use state_dict::{FullParams, FullState, OptimizerStateDict};
pub(crate) use step::NON_FINITE_HINT;
pub use step::{PendingStep, StepNumbers};
