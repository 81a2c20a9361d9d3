//! The `fulgurite` program: what is linked into it.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use fulgurite::bench::{self, CheckpointBench, CollectivesBench, OverheadBench, TrainBench};
use fulgurite::cli::{checkpoint, plugins};
use fulgurite::core::Result;
use fulgurite::core::launch::report_and_exit_code;

/// Lightning-style distributed training for candle
#[derive(Parser)]
#[command(version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// The plugins that are linked into this program: strategies, transports, loggers, …
    #[command(subcommand)]
    Plugins(plugins::Command),
    /// Checkpoints on disk: look into, verify, compare and convert them
    #[command(subcommand)]
    Checkpoint(checkpoint::Command),
    /// Measure, on this machine
    #[command(subcommand)]
    Bench(Bench),
}

#[derive(Subcommand)]
enum Bench {
    /// Training steps of a decoder, against its matrix products alone
    Train(TrainBench),
    /// Collectives over the processes of this host
    Collectives(CollectivesBench),
    /// Saving and loading checkpoints, against raw writes and reads of the same bytes
    Checkpoint(CheckpointBench),
    /// What trainer and Fabric add to loops written by hand, and what a start takes
    Overhead(OverheadBench),
}

fulgurite::use_mimalloc!();

fn main() -> ExitCode {
    match Cli::parse().command {
        // It may become several processes, whose failures are one.
        Command::Bench(bench) => report_and_exit_code(match bench {
            Bench::Train(options) => bench::train(&options),
            Bench::Collectives(options) => bench::collectives(&options),
            Bench::Checkpoint(options) => bench::checkpoint(&options),
            Bench::Overhead(options) => bench::overhead(&options),
        }),
        Command::Plugins(command) => exit_code(plugins::run(&command).map(|()| ExitCode::SUCCESS)),
        Command::Checkpoint(command) => exit_code(checkpoint::run(command)),
    }
}

fn exit_code(result: Result<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}
