//! The `fulgurite` program: what is linked into it.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use fulgurite::cli::{checkpoint, plugins, print};
use fulgurite::core::{Result, registry};

/// Lightning-style distributed training for candle
#[derive(Parser)]
#[command(version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// The plugins that are linked in: strategies, transports, loggers, …
    #[command(subcommand)]
    Plugins(Plugins),
    /// Checkpoints on disk: look into, verify, compare and convert them
    #[command(subcommand)]
    Checkpoint(checkpoint::Command),
}

#[derive(Subcommand)]
enum Plugins {
    /// List all plugins
    List {
        /// As a JSON array
        #[arg(long)]
        json: bool,
    },
    /// Show one plugin, with an example of its configuration
    Show {
        /// The plugin's name: its `type` in a configuration
        name: String,
    },
}

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<ExitCode> {
    match cli.command {
        Command::Plugins(command) => plugins(command).map(|()| ExitCode::SUCCESS),
        Command::Checkpoint(command) => checkpoint::run(command),
    }
}

fn plugins(command: Plugins) -> Result<()> {
    let all = registry::plugins();
    match command {
        Plugins::List { json: false } => print(&plugins::list(&all))?,
        Plugins::List { json: true } => print(&plugins::list_json(&all))?,
        Plugins::Show { name } => print(&plugins::show(&all, &name)?)?,
    }
    registry::validate()
}
