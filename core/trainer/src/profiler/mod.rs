//! Where the time of a run goes: phases of steps, units, collectives, on every rank.
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
//! Without `trainer.profiler` there is no profiler: process groups are not wrapped, and a phase is two looks at an empty option.
//! Units are wrapped if a tool of NVIDIA watches ([`ranges`](fulgurite_engine::accelerator::ranges)), which is shown phases and
//! units too, with a profiler and without one.

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
