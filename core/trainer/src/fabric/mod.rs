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
mod launcher;
mod optimizer;
mod optimizers;
mod sample_identity;
mod state_dict;
mod step;
mod torch_optimizer;

pub use crate::runtime::{NoSyncGuard, SamplerShare, SyncBuffers, UnusedParameters};
pub use data::{TrainBatch, TrainLoader};
pub use fabric::Fabric;
pub(crate) use launcher::check_frozen;
pub use launcher::{Connection, FabricLauncher};
pub use optimizer::FabricOptimizer;
pub use optimizers::{FabricOptimizers, OptimizerState};
pub(crate) use sample_identity::SampleIdentity;
pub use state_dict::{FullParams, OptimizerStateDict};
pub(crate) use step::NON_FINITE_HINT;
pub use step::{PendingStep, StepNumbers};
