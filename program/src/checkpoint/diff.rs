//! `fulgurite checkpoint diff`.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use fulgurite_checkpoint::tools::{self, Change, Comparison, DiffOptions, ValueDifference};
use fulgurite_error::{Result, print};

use super::output::{Bar, Verbosity, count, open, print_json};

/// The arguments.
#[derive(Debug, Args)]
pub(crate) struct Diff {
    /// A checkpoint of any format
    a: PathBuf,
    /// Another one
    b: PathBuf,
    /// Leave the optimizers' states out
    #[arg(long)]
    model_only: bool,
    /// Let values be this far apart, whatever their dtypes; without, their bits must be the same
    #[arg(long, value_name = "DISTANCE")]
    atol: Option<f64>,
    #[command(flatten)]
    verbosity: Verbosity,
}

impl Diff {
    pub(super) fn run(&self) -> Result<ExitCode> {
        let (a, b) = (open(&self.a)?, open(&self.b)?);
        let options = DiffOptions { model_only: self.model_only, atol: self.atol };
        let bar = Bar::new("comparing", self.verbosity);
        let comparison = tools::diff(&a, &b, &options, &mut |progress| bar.show(progress))?;
        drop(bar);
        if self.verbosity.json {
            print_json(&comparison)?;
        } else {
            print(&show(&comparison))?;
        }
        let is_same = comparison.differences.is_empty();
        Ok(if is_same { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

fn show(comparison: &Comparison) -> String {
    // Writing to a string cannot fail.
    let mut text = String::new();
    for difference in &comparison.differences {
        let change = match &difference.change {
            Change::OnlyInA => "only in A".to_owned(),
            Change::OnlyInB => "only in B".to_owned(),
            Change::Shape { a, b } => format!("of shape {a:?} in A, {b:?} in B"),
            Change::Dtype { a, b, values } => {
                format!("{a} in A, {b} in B; {}", distance(values))
            }
            Change::Values(values) => distance(values),
            Change::Bytes { bytes, of } => format!("{bytes} of {of} bytes differ"),
        };
        let _ = writeln!(text, "{} {}: {change}", difference.section, difference.name);
    }
    let same = comparison.same;
    let _ = match comparison.differences.len() {
        0 => writeln!(text, "the same: {}", count(same, "tensor")),
        n => writeln!(text, "different: {}; the same: {same}", count(n, "tensor")),
    };
    text
}

fn distance(values: &ValueDifference) -> String {
    let ValueDifference { elements, of, max_abs } = values;
    if *elements == 0 {
        return "the values are the same".to_owned();
    }
    let most = if max_abs.is_nan() {
        "some are numbers in one of them only".to_owned()
    } else {
        format!("by {max_abs:.3e} at most")
    };
    format!("{elements} of {of} values differ, {most}")
}
