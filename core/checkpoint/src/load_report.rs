//! The differences between a source and what is filled from it.

use std::fmt::Write as _;
use std::path::Path;

use safetensors::Dtype;

use crate::{Error, Result};

/// The differences between a source and a model or optimizer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// Tensors that the model has and the source does not, in the model's order; tied parameters by
    /// their first name.
    pub missing: Vec<String>,
    /// Tensors that the source has and the model does not, sorted.
    pub unexpected: Vec<String>,
    /// Tensors that both have, but in different shapes or, under
    /// [`DtypePolicy::Exact`](super::DtypePolicy::Exact), in different dtypes.
    pub mismatched: Vec<Mismatch>,
}

/// A tensor section shape or dtype in the model is not that in the source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatch {
    /// Its name in the source, after renaming.
    pub name: String,
    /// Its shape in the model.
    pub expected: Vec<usize>,
    /// Its shape in the source.
    pub found: Vec<usize>,
    /// Its dtypes in the model and in the source, if the shapes are equal.
    pub dtypes: Option<(Dtype, Dtype)>,
}

impl LoadReport {
    /// Whether there are no differences.
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty() && self.mismatched.is_empty()
    }

    /// The differences as text, one per line; `section` is `model` or `optimizer`.
    fn describe(&self, section: &str) -> String {
        let mut message = format!("does not fit this {section}:");
        let mut list = |title: &str, lines: &[String]| {
            if !lines.is_empty() {
                // Writing to a string cannot fail.
                let _ = write!(message, "\n  {title} ({}):", lines.len());
                for line in lines {
                    let _ = write!(message, "\n    {line}");
                }
            }
        };
        list(&format!("missing, the {section} has it and the checkpoint does not"), &self.missing);
        list(
            &format!("unexpected, the checkpoint has it and the {section} does not"),
            &self.unexpected,
        );
        let both = |dtypes: bool| -> Vec<String> {
            let of_kind = self.mismatched.iter().filter(|m| m.dtypes.is_some() == dtypes);
            of_kind
                .map(|m| match &m.dtypes {
                    Some((expected, found)) => {
                        format!(
                            "{}: {expected} in the {section}, {found} in the checkpoint",
                            m.name
                        )
                    }
                    None => format!(
                        "{}: {:?} in the {section}, {:?} in the checkpoint",
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

/// One error that lists all differences; `Ok` if there are none. Each report comes with its
/// section, `model` or `optimizer`. `filtered` is
/// [`TensorSource::filtered`](super::TensorSource::filtered).
pub(super) fn refuse_differences(
    location: &Path,
    reports: &[(&LoadReport, &str)],
    filtered: Option<&str>,
) -> Result<()> {
    let parts: Vec<String> = reports
        .iter()
        .filter(|(report, _)| !report.is_empty())
        .map(|(report, section)| report.describe(section))
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
