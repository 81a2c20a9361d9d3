//! `fulgurite checkpoint inspect`.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use fulgurite_checkpoint::tools::{self, CheckpointSummary, TensorSet};
use fulgurite_error::{Result, print};

use super::output::{bytes, count, open, print_json};

/// The arguments.
#[derive(Debug, Args)]
pub(crate) struct Inspect {
    /// A checkpoint's directory, a Hugging Face directory, a file of safetensors or of `torch.save`
    path: PathBuf,
    /// List the tensors
    #[arg(short, long)]
    tensors: bool,
    /// Write everything as JSON
    #[arg(long)]
    json: bool,
}

impl Inspect {
    pub(super) fn run(&self) -> Result<ExitCode> {
        let summary = tools::inspect(&open(&self.path)?);
        if self.json {
            print_json(&summary)?;
        } else {
            print(&show(&summary, self.tensors))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn show(summary: &CheckpointSummary, tensors: bool) -> String {
    let mut text = format!("{}: {}", summary.path.display(), summary.kind);
    // Writing to a string cannot fail.
    if let (Some(version), Some(library)) = (summary.format_version, &summary.library_version) {
        let _ = write!(text, ", format {version}, written by Fulgurite {library}");
    }
    text.push('\n');
    if let (Some(step), Some(ranks), Some(mesh)) = (summary.step, summary.world_size, &summary.mesh)
    {
        let _ = write!(text, "step {step}, saved by {}", count(ranks, "rank"));
        let sizes: Vec<_> = mesh
            .iter()
            .filter(|(_, size)| *size > 1)
            .map(|(name, size)| format!("{name} {size}"))
            .collect();
        if !sizes.is_empty() {
            let _ = write!(text, " ({})", sizes.join(", "));
        }
        text.push('\n');
    }
    if let Some(files) = summary.files {
        let _ = writeln!(text, "{}", count(files, "safetensors file"));
    }
    let sets = [("model", Some(&summary.model)), ("optimizer", summary.optimizer.as_ref())];
    for (name, set) in sets.iter().filter_map(|(name, set)| Some((name, (*set)?))) {
        let dtypes: Vec<_> = set.dtypes.iter().map(|(dtype, n)| format!("{n} {dtype}")).collect();
        let _ = writeln!(
            text,
            "{name}: {} ({}), {}, {}",
            count(set.tensors.len(), "tensor"),
            dtypes.join(", "),
            count(set.elements as usize, "element"),
            bytes(set.bytes)
        );
        if tensors {
            text.push_str(&table(set));
        }
        for (name, reason) in &set.unreadable {
            let _ = writeln!(text, "  {name} {reason}");
        }
    }
    text
}

fn table(set: &TensorSet) -> String {
    let rows: Vec<[String; 5]> = set
        .tensors
        .iter()
        .map(|(name, tensor)| {
            let parts = tensor.parts.map_or(String::new(), |n| count(n, "part"));
            let shape = format!("{:?}", tensor.shape);
            [name.clone(), shape, tensor.dtype.clone(), bytes(tensor.bytes).to_string(), parts]
        })
        .collect();
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..5).map(width).collect();
    let mut text = String::new();
    for row in &rows {
        let cells: Vec<_> =
            row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:<width$}")).collect();
        let _ = writeln!(text, "  {}", cells.join("  ").trim_end());
    }
    text
}
