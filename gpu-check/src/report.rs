//! The report, as JSON and as text.

use std::path::Path;

use fulgurite_error::{Error, Result};
use serde::Serialize;

use crate::checks::Step;
use crate::findings::Findings;
use crate::process::{Ended, Outcome};
use crate::target::Target;

/// Outcome of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Status {
    Passed,
    /// A requirement failed.
    Wrong,
    /// The step returned an error, or crashed.
    Failed,
    TimedOut,
    Skipped,
}

impl Status {
    fn word(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Wrong => "WRONG",
            Self::Failed => "FAILED",
            Self::TimedOut => "TIMED OUT",
            Self::Skipped => "skipped",
        }
    }
}

#[derive(Debug, Serialize)]
struct Row {
    step: &'static str,
    status: Status,
    secs: f64,
    #[serde(flatten)]
    findings: Findings,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<String>,
}

/// All steps so far.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    version: &'static str,
    device: &'static str,
    steps: Vec<Row>,
}

impl Report {
    /// A report without steps.
    pub(crate) fn new(target: &Target) -> Self {
        let version = env!("CARGO_PKG_VERSION");
        Self { version, device: target.device.name(), steps: Vec::new() }
    }

    /// Adds a completed step and prints its outcome.
    pub(crate) fn add(&mut self, step: &Step, ended: Ended) {
        let (status, findings, message) = match ended.outcome {
            Outcome::Found(Findings { skipped: Some(why), .. }) => {
                (Status::Skipped, Findings::default(), Some(why))
            }
            Outcome::Found(findings) if findings.wrong.is_empty() => {
                (Status::Passed, findings, None)
            }
            Outcome::Found(findings) => (Status::Wrong, findings, None),
            Outcome::Failed(why) => (Status::Failed, Findings::default(), Some(why)),
            Outcome::TimedOut(said) => (Status::TimedOut, Findings::default(), Some(said)),
        };
        self.push(Row { step: step.name, status, secs: ended.secs, findings, message });
    }

    /// Adds a skipped step and prints the reason.
    pub(crate) fn skip(&mut self, step: &Step, why: &str) {
        let (findings, message) = (Findings::default(), Some(why.to_owned()));
        self.push(Row { step: step.name, status: Status::Skipped, secs: 0.0, findings, message });
    }

    fn push(&mut self, row: Row) {
        println!("{:<24} {:<9} {:>7.1} s", row.step, row.status.word(), row.secs);
        let told = row.findings.wrong.iter().chain(&row.message);
        told.flat_map(|text| text.lines()).for_each(|line| println!("    {line}"));
        self.steps.push(row);
    }

    /// Whether every step passed or was skipped.
    pub(crate) fn passed(&self) -> bool {
        self.steps.iter().all(|row| matches!(row.status, Status::Passed | Status::Skipped))
    }

    /// A one-line summary.
    pub(crate) fn summary(&self) -> String {
        let all =
            [Status::Passed, Status::Wrong, Status::Failed, Status::TimedOut, Status::Skipped];
        let count = |status| self.steps.iter().filter(|row| row.status == status).count();
        let counts = all.iter().map(|&status| (status, count(status))).filter(|(_, n)| *n > 0);
        let counts: Vec<String> =
            counts.map(|(status, n)| format!("{n} {}", status.word())).collect();
        format!("{} steps on {}: {}", self.steps.len(), self.device, counts.join(", "))
    }

    /// Writes the report as JSON.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let json = serde_json::to_string_pretty(self).map_err(Error::other)?;
        std::fs::write(path, json + "\n").map_err(Error::io("writing", path))
    }
}
