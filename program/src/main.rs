//! The `fulgurite` program: tools for checkpoints, the list of built-in plugins, benchmarks.

mod checkpoint;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use fulgurite_error::Result;

/// Lightning-style distributed training for candle
#[derive(Parser)]
#[command(name = "fulgurite", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// The plugins that are linked into this program: strategies, transports, loggers, …
    #[cfg(feature = "plugins")]
    #[command(subcommand)]
    Plugins(fulgurite::cli::plugins::Command),
    /// Checkpoints on disk: look into, verify, compare and convert them
    #[command(subcommand)]
    Checkpoint(checkpoint::Command),
    /// Measure, on this machine
    #[cfg(feature = "bench")]
    #[command(subcommand)]
    Bench(fulgurite_bench::Command),
}

#[cfg(feature = "bench")]
fulgurite::use_mimalloc!();

fn main() -> ExitCode {
    match Cli::parse().command {
        #[cfg(feature = "plugins")]
        Command::Plugins(command) => {
            exit_code(fulgurite::cli::plugins::run(&command).map(|()| ExitCode::SUCCESS))
        }
        Command::Checkpoint(command) => exit_code(checkpoint::run(command)),
        // Reports the failure of any of its processes.
        #[cfg(feature = "bench")]
        Command::Bench(command) => {
            fulgurite::core::launch::report_and_exit_code(fulgurite_bench::run(&command))
        }
    }
}

fn exit_code(result: Result<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|error| {
        fulgurite_error::print_message(&format!("error: {error}"));
        ExitCode::FAILURE
    })
}
