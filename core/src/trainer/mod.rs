//! The trainer: loop, events, loggers, callbacks.

mod config;
mod event;
mod logger;

pub use config::{Limits, TrainerConfig};
pub use event::{Event, EventSink, RunStatus};
pub use logger::{Logger, LoggerConfig, LoggerSink, RunDir};
