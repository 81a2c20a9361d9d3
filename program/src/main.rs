//! The `fulgurite` program: starting jobs, tools for checkpoints, reports about runs, the list of
//! built-in plugins, benchmarks.

mod checkpoint;
#[cfg(feature = "models")]
mod data;
#[cfg(feature = "plugins")]
mod flight;
#[cfg(feature = "models")]
mod generate;
mod hub;
#[cfg(feature = "models")]
mod language_model;
#[cfg(feature = "models")]
mod models;
#[cfg(feature = "models")]
mod recipes;
mod report;
mod run;
#[cfg(feature = "plugins")]
mod schedule;
#[cfg(feature = "models")]
mod serve;

use std::io::IsTerminal as _;
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
    /// Train a model, and validate it on the way
    #[cfg(feature = "models")]
    #[command(disable_help_flag = true)]
    Fit(models::Arguments),
    /// Validate the model of `trainer.ckpt_path`
    #[cfg(feature = "models")]
    #[command(disable_help_flag = true)]
    Validate(models::Arguments),
    /// Test the model of `trainer.ckpt_path`
    #[cfg(feature = "models")]
    #[command(disable_help_flag = true)]
    Test(models::Arguments),
    /// Predict with the model of `trainer.ckpt_path`, and write what it predicts to a file
    #[cfg(feature = "models")]
    #[command(disable_help_flag = true)]
    Predict(models::Arguments),
    /// Continue prompts with a language model
    #[cfg(feature = "models")]
    Generate(generate::Generate),
    /// Answer requests over HTTP with a language model, as OpenAI's API does
    #[cfg(feature = "models")]
    Serve(serve::Serve),
    /// Train once with each of several values, and compare them: `fit --sweep KEY=VALUE,VALUE`
    #[cfg(feature = "models")]
    #[command(disable_help_flag = true)]
    Sweep(models::Arguments),
    /// The configuration of a run: whether it can be run, and its schema
    #[cfg(feature = "models")]
    #[command(disable_help_flag = true)]
    Config(models::Arguments),
    /// Plan a run before it is started: memory, collectives, time, on any number of ranks
    #[cfg(feature = "models")]
    #[command(disable_help_flag = true)]
    Plan(models::Arguments),
    /// Look at the machine as a run would find it: cores, memory, limits, launcher, directories
    #[cfg(feature = "models")]
    #[command(disable_help_flag = true)]
    Doctor(models::Arguments),
    /// The data of a run: samples as the model sees them
    #[cfg(feature = "models")]
    #[command(subcommand)]
    Data(data::Command),
    /// Commented configurations to begin with: fine-tuning, adapters, pretraining, …
    #[cfg(feature = "models")]
    #[command(subcommand)]
    Recipes(recipes::Command),
    /// Models of the Hugging Face Hub: download them into the local cache
    #[command(subcommand)]
    Hub(hub::Command),
    /// Schedules of pipelines: draw them, and how long ranks wait
    #[cfg(feature = "plugins")]
    #[command(subcommand)]
    Schedule(schedule::Command),
    /// Checkpoints on disk: look into, verify, compare and convert them
    #[command(subcommand)]
    Checkpoint(checkpoint::Command),
    /// Make a page about runs: curves, settings, memory and time, checkpoints
    ///
    /// One HTML file that loads nothing, from what runs have written to their directories.
    Report(report::Report),
    /// Name the rank that fell behind, by the last collectives that ranks have recorded
    #[cfg(feature = "plugins")]
    Flight(flight::Flight),
    /// Start the ranks of a job on this node, alone or together with other nodes, as torchrun does
    Run(run::Run),
    /// Measure, on this machine
    #[cfg(feature = "bench")]
    #[command(subcommand)]
    Bench(fulgurite_bench::Command),
}

#[cfg(feature = "bench")]
fulgurite::use_mimalloc!();

fn main() -> ExitCode {
    let code = run();
    fulgurite_error::output::flush();
    code
}

/// Shows warnings of libraries.
fn log_to_stderr() {
    let filter = tracing_subscriber::EnvFilter::builder()
        .with_default_directive(tracing_subscriber::filter::LevelFilter::WARN.into())
        .with_env_var("FULGURITE_LOG")
        .from_env_lossy();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        .with_target(false)
        .init();
}

fn run() -> ExitCode {
    match Cli::parse().command {
        #[cfg(feature = "plugins")]
        Command::Plugins(command) => {
            exit_code(fulgurite::cli::plugins::run(&command).map(|()| ExitCode::SUCCESS))
        }
        #[cfg(feature = "models")]
        Command::Fit(_)
        | Command::Validate(_)
        | Command::Test(_)
        | Command::Predict(_)
        | Command::Sweep(_)
        | Command::Config(_)
        | Command::Plan(_)
        | Command::Doctor(_) => models::run(),
        #[cfg(feature = "models")]
        Command::Generate(command) => fulgurite::cli::run_rank(move || command.run()),
        #[cfg(feature = "models")]
        Command::Serve(command) => fulgurite::cli::run_rank(move || command.run()),
        #[cfg(feature = "models")]
        Command::Data(command) => {
            log_to_stderr();
            exit_code(command.run())
        }
        #[cfg(feature = "models")]
        Command::Recipes(command) => exit_code(command.run()),
        Command::Hub(command) => exit_code(command.run()),
        #[cfg(feature = "plugins")]
        Command::Schedule(command) => exit_code(command.run()),
        Command::Checkpoint(command) => {
            log_to_stderr();
            exit_code(checkpoint::run(command))
        }
        Command::Report(command) => exit_code(command.run()),
        #[cfg(feature = "plugins")]
        Command::Flight(command) => exit_code(command.run()),
        Command::Run(command) => exit_code(command.run()),
        // The benchmark reports failures of all its processes itself.
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
