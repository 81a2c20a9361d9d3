//! The benchmarks of `fulgurite bench`.
//!
//! Every time is taken on the slowest rank, as the median over the repeats, which begin at a
//! barrier. Its limit (raw writes and reads of the same bytes, or only the matrix products) is
//! measured in the same run.

mod bare_mpi;
mod checkpoint;
mod collectives;
mod floor;
mod gemm;
mod hardware;
mod loops;
mod memory;
mod model;
mod overhead;
mod overlap;
mod pipeline;
mod ranks;
mod startup;
mod switch;
mod tiny_models;
mod train;

use clap::Subcommand;
use fulgurite::prelude::*;
pub(crate) use model::{Decoder, DecoderSize, SizeOptions, Workload};

/// The benchmarks.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Training steps of a decoder, against its matrix products alone
    Train(train::TrainBench),
    /// Collectives between processes, of this host or of several
    Collectives(collectives::CollectivesBench),
    /// The share of a step's communication that computing hides
    Overlap(overlap::OverlapBench),
    /// Steps of a pipeline by each schedule, against the schedule's simulation
    Pipeline(pipeline::PipelineBench),
    /// Saving and loading checkpoints, against raw writes and reads of the same bytes
    Checkpoint(checkpoint::CheckpointBench),
    /// Matrix products alone, in operations a second and core
    Gemm(gemm::GemmBench),
    /// The speeds of this host, as a table for `fulgurite plan --hardware`
    Hardware(hardware::HardwareBench),
    /// The time that trainer and Fabric add to hand-written loops, and the time of a start
    Overhead(overhead::OverheadBench),
}

/// Runs a benchmark. Launches the other ranks; returns in ranks only. Collective.
///
/// # Errors
/// If ranks cannot be started, or the benchmark fails.
pub fn run(command: &Command) -> Result<()> {
    match command {
        Command::Train(options) => train::train(options),
        Command::Collectives(options) => collectives::collectives(options),
        Command::Overlap(options) => overlap::overlap(options),
        Command::Pipeline(options) => pipeline::pipeline(options),
        Command::Checkpoint(options) => checkpoint::checkpoint(options),
        Command::Gemm(options) => gemm::run(options),
        Command::Hardware(options) => hardware::run(options),
        Command::Overhead(options) => overhead::overhead(options),
    }
}
