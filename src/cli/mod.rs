//! The command line of a training program.
//!
//! ```
//! use fulgurite::cli::args::{self, Action, CliCommand, Program};
//!
//! let program = Program::new("pretrain", "Trains a language model");
//! let command = args::parse(&program, ["pretrain", "fit", "--set", "trainer.max_steps=10"])?;
//! let CliCommand::Run(request) = command else { panic!("a run was asked for") };
//! assert_eq!(request.action, Action::Fit);
//! let config = request.layers(toml::Table::new())?.resolve();
//! assert_eq!(config["trainer"]["max_steps"].as_integer(), Some(10));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod args;
mod batch_size;
mod child_run;
mod doctor;
mod plan;
pub mod plugins;
mod run;
mod sweep;

use std::io::Write as _;

pub use fulgurite_error::print;
use fulgurite_loggers::JsonLines;
pub use run::{Cli, ModuleEntry, cli, run_rank};

/// Writes to standard output without waiting for its reader, because a run must still react to
/// signals.
fn say(text: &str) {
    // An error means that the reader is gone.
    let _ = fulgurite_error::output::stdout().write_all(text.as_bytes());
}

/// Writes a line of JSON like [`say`]; an event reports lines that were dropped for lack of room.
fn say_json(line: impl std::fmt::Display) {
    let _ = JsonLines::outlet().write_all(format!("{line}\n").as_bytes());
}
