//! The configuration of a run.

mod config;
mod suggestions;
