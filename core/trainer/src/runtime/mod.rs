//! The runtime that owns a [`Strategy`](fulgurite_engine::strategy::Strategy) and does the work
//! that all strategies share.

mod audit;
mod buffers;
mod checkpoints;
mod magnitudes;
mod no_sync;
mod pipeline;
#[expect(clippy::module_inception, reason = "the runtime is the module's subject")]
mod runtime;
mod step;
mod totals;

pub use audit::UnusedParameters;
pub use buffers::SyncBuffers;
pub use no_sync::NoSyncGuard;
pub(crate) use runtime::SamplerShare;
pub(crate) use runtime::StrategyRuntime;
pub(crate) use step::DeviceSums;
