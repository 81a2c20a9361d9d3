//! `fulgurite checkpoint verify`.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use fulgurite_checkpoint::tools::{self, AnyCheckpoint, CheckpointKind, Verification};
use fulgurite_error::{Result, print};

use super::output::{Bar, Verbosity, bytes, count, print_json};

/// The arguments.
#[derive(Debug, Args)]
pub(crate) struct Verify {
    /// A checkpoint's directory
    path: PathBuf,
    #[command(flatten)]
    verbosity: Verbosity,
}

impl Verify {
    pub(super) fn run(&self) -> Result<ExitCode> {
        let checkpoint = match AnyCheckpoint::open(&self.path) {
            Err(error) if self.verbosity.json => {
                let error = error.to_string();
                print_json(&serde_json::json!({ "path": self.path, "error": error }))?;
                return Ok(ExitCode::FAILURE);
            }
            checkpoint => checkpoint?,
        };
        let bar = Bar::new("verifying", self.verbosity);
        let verification = tools::verify(&checkpoint, &mut |progress| bar.show(progress));
        drop(bar);
        if self.verbosity.json {
            print_json(&verification)?;
        } else {
            print(&show(&verification))?;
        }
        let is_whole = verification.damages.is_empty();
        Ok(if is_whole { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

fn show(verification: &Verification) -> String {
    let path = verification.path.display();
    let tensors = count(verification.tensors, "tensor");
    // Writing to a string cannot fail.
    let mut text = String::new();
    for damage in &verification.damages {
        let _ = writeln!(text, "{damage}");
    }
    let _ = if !verification.damages.is_empty() {
        let n = verification.damages.len();
        writeln!(text, "{path} is damaged in {}", count(n, "place"))
    } else if verification.bytes == 0
        && matches!(verification.kind, CheckpointKind::Weights | CheckpointKind::Torch)
    {
        writeln!(text, "{path}: {tensors}; the headers are sound, and there are no checksums")
    } else {
        let bytes = bytes(verification.bytes);
        writeln!(text, "{path}: {tensors}, {bytes}, all as written")
    };
    if let Some(warning) = &verification.warning {
        let _ = writeln!(text, "warning: {warning}");
    }
    text
}
