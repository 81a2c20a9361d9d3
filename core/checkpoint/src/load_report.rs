//! How what a source has and what is to be filled differ.

use std::fmt::Write as _;
use std::path::Path;

use safetensors::Dtype;

use crate::{Error, Result};

/// How what a source has and what a model or an optimizer wants differ.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// What the model has and the source does not, in the model's order; tied parameters by their
    /// first name.
    pub missing: Vec<String>,
    /// What the source has and the model does not, sorted.
    pub unexpected: Vec<String>,
    /// What both have, in different shapes, or, under
    /// [`DtypePolicy::Exact`](super::DtypePolicy::Exact), in different dtypes.
    pub mismatched: Vec<Mismatch>,
}

/// A tensor of one shape in the model and another in the source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatch {
    /// Its name in the source, after renaming.
    pub name: String,
    /// Its shape in the model.
    pub expected: Vec<usize>,
    /// Its shape in the source.
    pub found: Vec<usize>,
    /// Its dtypes in the model and in the source, where the shapes are the same and these are not.
    pub dtypes: Option<(Dtype, Dtype)>,
}

impl LoadReport {
    /// Whether there is no difference.
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty() && self.mismatched.is_empty()
    }

    /// The differences in words, a line each; `whose` is `model` or `optimizer`.
    fn describe(&self, whose: &str) -> String {
        let mut message = format!("does not fit this {whose}:");
        let mut list = |title: &str, lines: &[String]| {
            if !lines.is_empty() {
                // Writing to a string cannot fail.
                let _ = write!(message, "\n  {title} ({}):", lines.len());
                for line in lines {
                    let _ = write!(message, "\n    {line}");
                }
            }
        };
        list(&format!("missing, the {whose} has it and the checkpoint does not"), &self.missing);
        list(
            &format!("unexpected, the checkpoint has it and the {whose} does not"),
            &self.unexpected,
        );
        let both = |dtypes: bool| -> Vec<String> {
            let of_kind = self.mismatched.iter().filter(|m| m.dtypes.is_some() == dtypes);
            of_kind
                .map(|m| match &m.dtypes {
                    Some((expected, found)) => {
                        format!("{}: {expected} in the {whose}, {found} in the checkpoint", m.name)
                    }
                    None => format!(
                        "{}: {:?} in the {whose}, {:?} in the checkpoint",
                        m.name, m.expected, m.found
                    ),
                })
                .collect()
        };
        list("of another shape", &both(false));
        list("of another dtype", &both(true));
        message
    }
}

/// One error that lists everything in which these differ; `Ok` if nothing does. With each report,
/// whose it is: `model` or `optimizer`. `filtered` is
/// [`TensorSource::filtered`](super::TensorSource::filtered).
pub(super) fn refuse_differences(
    location: &Path,
    reports: &[(&LoadReport, &str)],
    filtered: Option<&str>,
) -> Result<()> {
    let parts: Vec<String> = reports
        .iter()
        .filter(|(report, _)| !report.is_empty())
        .map(|(report, whose)| report.describe(whose))
        .collect();
    if parts.is_empty() {
        return Ok(());
    }
    let mut message = parts.join("\nand ");
    message.push_str("\nNothing was loaded. ");
    match filtered {
        Some(what) => {
            let _ = write!(
                message,
                "It was saved with a filter and holds only: {what}. Load with the same filter or \
                 with `strict = false`"
            );
        }
        None => message.push_str("Use the configuration that it was saved with"),
    }
    Err(Error::checkpoint(location, message))
}
