//! `fulgurite checkpoint`: looking at checkpoints on disk, and making others of them.
//!
//! The work is done by [`fulgurite_core::checkpoint::tools`].

mod arguments;
mod convert;
mod diff;
mod inspect;
mod progress;
mod verify;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use fulgurite_core::checkpoint::tools::AnyCheckpoint;
use fulgurite_core::{Error, Result};
use serde::Serialize;

use super::print;

/// What can be done with checkpoints.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Say what is in a checkpoint, without reading its values
    Inspect(inspect::Inspect),
    /// Read all of a checkpoint and compare it with its checksums
    ///
    /// Exits with 1 and names file and tensor of everything that is damaged.
    Verify(verify::Verify),
    /// Compare the tensors of two checkpoints: names, shapes, dtypes, values
    ///
    /// Formats, shards and meshes do not matter. Exits with 1 if there is a difference.
    Diff(diff::Diff),
    /// Make a full checkpoint: whole tensors in files that `transformers` and candle load
    Consolidate(convert::Consolidate),
    /// Make a checkpoint of another format, dtype or with other names
    Convert(convert::Convert),
    /// Make a distributed checkpoint of another number of shards
    Reshard(convert::Reshard),
}

/// How much a command says.
#[derive(Debug, Clone, Copy, Args)]
struct Verbosity {
    /// Write the result as JSON
    #[arg(long)]
    json: bool,
    /// Show no progress bar
    #[arg(short, long)]
    quiet: bool,
}

/// Does what the command says and prints the result; the exit code is that of the program.
///
/// # Errors
/// If what it needs is no checkpoint, or incomplete, or its output cannot be written.
pub fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Inspect(command) => command.run(),
        Command::Verify(command) => command.run(),
        Command::Diff(command) => command.run(),
        Command::Consolidate(command) => command.run(),
        Command::Convert(command) => command.run(),
        Command::Reshard(command) => command.run(),
    }
}

fn open(path: &PathBuf) -> Result<AnyCheckpoint> {
    AnyCheckpoint::open(path)
}

fn print_json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|e| Error::other(format!("encoding the result: {e}")))?;
    print(&(text + "\n"))
}

/// `1 tensor`, `2 tensors`.
fn count(n: usize, what: &str) -> String {
    let s = if n == 1 { "" } else { "s" };
    format!("{} {what}{s}", indicatif::HumanCount(n as u64))
}

fn bytes(n: u64) -> indicatif::HumanBytes {
    indicatif::HumanBytes(n)
}
