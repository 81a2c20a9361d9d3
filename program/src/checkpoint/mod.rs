//! `fulgurite checkpoint`: the command line of [`fulgurite_checkpoint::tools`].

mod arguments;
mod convert;
mod diff;
#[cfg(feature = "models")]
mod gguf;
mod inspect;
mod output;
#[cfg(feature = "models")]
mod peft;
mod verify;

use std::process::ExitCode;

use clap::Subcommand;
use fulgurite_error::Result;

/// The subcommands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
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
    /// Make a checkpoint of another format, dtype or with other names, a GGUF file or PEFT's
    /// adapter
    Convert(convert::Convert),
    /// Make a distributed checkpoint of another number of shards
    Reshard(convert::Reshard),
}

/// Runs the command, prints the result, and returns the program's exit code.
///
/// # Errors
/// If the input is incomplete or not a checkpoint, or the output cannot be written.
pub(crate) fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Inspect(command) => command.run(),
        Command::Verify(command) => command.run(),
        Command::Diff(command) => command.run(),
        Command::Consolidate(command) => command.run(),
        Command::Convert(command) => command.run(),
        Command::Reshard(command) => command.run(),
    }
}
