//! The output of commands: results on stdout, progress on stderr.

use std::path::Path;

use clap::Args;
use fulgurite_checkpoint::tools::{AnyCheckpoint, Progress};
use fulgurite_error::{Error, Result, print};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

/// Options for the output of a command.
#[derive(Debug, Clone, Copy, Args)]
pub(super) struct Verbosity {
    /// Write the result as JSON
    #[arg(long)]
    pub(super) json: bool,
    /// Show no progress bar
    #[arg(short, long)]
    pub(super) quiet: bool,
}

/// Opens the checkpoint at `path`, and prints its warnings to stderr.
pub(super) fn open(path: &Path) -> Result<AnyCheckpoint> {
    let checkpoint = AnyCheckpoint::open(path)?;
    if let Some(warning) = checkpoint.warning() {
        eprintln!("warning: {}: {warning}", path.display());
    }
    Ok(checkpoint)
}

/// Prints a result as JSON.
pub(super) fn print_json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|e| Error::other(format!("encoding the result: {e}")))?;
    print(&(text + "\n"))
}

/// A number with its noun: `1 tensor`, `2 tensors`.
pub(super) fn count(n: usize, what: &str) -> String {
    let s = if n == 1 { "" } else { "s" };
    format!("{} {what}{s}", indicatif::HumanCount(n as u64))
}

pub(super) fn bytes(n: u64) -> indicatif::HumanBytes {
    indicatif::HumanBytes(n)
}

/// A progress bar on stderr, shown only on a terminal.
pub(super) struct Bar(ProgressBar);

impl Bar {
    pub(super) fn new(what: &'static str, verbosity: Verbosity) -> Self {
        let bar = if verbosity.quiet { ProgressBar::hidden() } else { ProgressBar::new(0) };
        let template = "{msg} {wide_bar} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";
        let style = ProgressStyle::with_template(template);
        Self(bar.with_message(what).with_style(style.unwrap_or(ProgressStyle::default_bar())))
    }

    pub(super) fn show(&self, progress: Progress) {
        self.0.set_length(progress.total);
        self.0.set_position(progress.done);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
