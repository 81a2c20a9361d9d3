//! [`Markdown`], a logger.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use fulgurite_core::config::Documented;
use fulgurite_core::trainer::{Logger, LoggerConfig};
use fulgurite_core::{Error, Result};
use serde::{Deserialize, Serialize};

/// Writes the metrics as a table to `metrics.md` in the run's directory.
#[derive(Debug, Clone, Serialize, Deserialize, Documented)]
#[serde(deny_unknown_fields, default)]
pub struct Markdown {
    /// The names of the metrics to keep, in order.
    #[default(["train_loss", "val_loss", "lr"].map(str::to_owned).into())]
    pub columns: Vec<String>,
}

#[typetag::serde(name = "markdown")]
impl LoggerConfig for Markdown {
    fn build(&self, dir: &Path) -> Result<Box<dyn Logger>> {
        let path = dir.join("metrics.md");
        let file = File::create(&path).map_err(Error::io("creating the log", &path))?;
        let mut logger = MarkdownLogger { path, file, columns: self.columns.clone() };
        logger.row("step", &self.columns)?;
        logger.row("---:", &vec!["---:"; self.columns.len()])?;
        Ok(Box::new(logger))
    }
}

fulgurite_core::register_logger!(
    "markdown",
    Markdown,
    "metrics.md in the run's directory, a table of chosen metrics",
    "{ type = \"markdown\", columns = [\"train_loss\", \"lr\"] }"
);

struct MarkdownLogger {
    path: PathBuf,
    file: File,
    columns: Vec<String>,
}

impl MarkdownLogger {
    fn row<S: AsRef<str>>(&mut self, first: &str, cells: &[S]) -> Result<()> {
        let cells: String = cells.iter().map(|cell| format!(" {} |", cell.as_ref())).collect();
        writeln!(self.file, "| {first} |{cells}").map_err(Error::io("writing the log", &self.path))
    }
}

impl Logger for MarkdownLogger {
    fn name(&self) -> &str {
        "markdown"
    }

    /// Does nothing: the configuration is in the run's directory already.
    fn log_hyperparams(&mut self, _params: &toml::Table) -> Result<()> {
        Ok(())
    }

    fn log_metrics(&mut self, metrics: &BTreeMap<String, f64>, step: u64) -> Result<()> {
        let cell = |name| metrics.get(name).map_or(String::new(), |value| format!("{value:.6}"));
        let cells: Vec<_> = self.columns.iter().map(cell).collect();
        self.row(&step.to_string(), &cells)
    }

    fn save(&mut self) -> Result<()> {
        self.file.flush().map_err(Error::io("writing the log", &self.path))
    }
}
