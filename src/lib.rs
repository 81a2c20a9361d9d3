//! Fulgurite: Lightning-style distributed training for candle.
//!
//! This crate is the facade: it links the built-in plugins and has the [command line](cli).

pub mod cli;

pub use fulgurite_core as core;
// Linked for what they register: the loggers.
use fulgurite_loggers as _;
