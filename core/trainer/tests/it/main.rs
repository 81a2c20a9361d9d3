//! The configuration of a run.

mod config;
