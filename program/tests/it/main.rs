//! The `fulgurite` program, as a user runs it.

mod bench_checkpoint;
mod bench_steps;
mod checkpoint;
mod report;
mod run;
