//! Measures the time of a run on every rank: phases of steps, units, collectives.
//!
//! ```
//! use fulgurite_core::config::ConfigLayers;
//! use fulgurite_core::profiler::ProfilerConfig;
//! # use fulgurite_core::run::RunConfig;
//!
//! let layers = ConfigLayers::new()
//!     .text("run.toml", "trainer.profiler = { type = 'trace', skip_steps = 2, steps = 3 }")?;
//! let run = RunConfig::<toml::Table, toml::Table>::from_layers(layers)?;
//! assert_eq!(run.trainer.profiler, Some(ProfilerConfig::Trace { skip_steps: 2, steps: 3 }));
//! # Ok::<(), fulgurite_core::Error>(())
//! ```
//!
//! Without `trainer.profiler` nothing is recorded: process groups are not wrapped, and a phase only
//! checks two empty options. Phases and units are also shown to NVIDIA's tools
//! ([`ranges`](fulgurite_engine::accelerator::ranges)), with or without a profiler. Units are
//! wrapped if such a tool is attached.

mod config;
mod device;
mod group;
mod log_execution_time;
mod profile;
mod recorder;
mod trace;
mod unit;

pub use config::ProfilerConfig;
pub use log_execution_time::LogExecutionTime;
pub use profile::{Profile, ProfiledSpan, SpanKind};
pub use recorder::Phase;
pub(crate) use recorder::Profiler;
pub(crate) use unit::watch_units;
