//! The `fulgurite` program, as a user runs it.

mod bench_checkpoint;
#[cfg(feature = "mpi")]
mod bench_mpi;
mod bench_steps;
mod book;
#[cfg(feature = "models")]
mod chat;
mod checkpoint;
#[cfg(feature = "models")]
mod choices;
#[cfg(feature = "models")]
mod encoders;
mod experts;
#[cfg(feature = "plugins")]
mod flight;
#[cfg(feature = "models")]
mod generate;
#[cfg(feature = "models")]
mod gguf;
#[cfg(feature = "models")]
mod grpo;
#[cfg(feature = "models")]
mod hub;
#[cfg(feature = "models")]
mod interop;
#[cfg(feature = "models")]
mod models;
#[cfg(feature = "models")]
mod packed;
mod plan;
#[cfg(feature = "models")]
mod preference;
#[cfg(feature = "models")]
mod recipes;
mod report;
mod run;
#[cfg(feature = "models")]
mod schedule;
#[cfg(feature = "models")]
mod schedule_free;
#[cfg(feature = "models")]
mod serve;
mod tasks;
#[cfg(feature = "models")]
mod walk_through;
