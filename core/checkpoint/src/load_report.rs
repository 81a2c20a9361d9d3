//! The differences between a source and a model or optimizer that is filled from it.

use std::fmt::{self, Write as _};
use std::path::Path;

use safetensors::Dtype;

use crate::{Error, Result};

/// The differences between a source and a model or optimizer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// The parameters or optimizer state tensors that are filled, in the model's order; tied
    /// parameters by their first name.
    pub loaded: Vec<String>,
    /// Tensors that only the model has, in the model's order; tied parameters by their first name.
    /// They keep their initial values.
    pub missing: Vec<String>,
    /// Optional parameters ([`LoadOptions::optional`](super::LoadOptions::optional)) that the
    /// source lacks. They keep their initial values, and do not count as differences.
    pub new: Vec<String>,
    /// Tensors that only the source has, sorted.
    pub unexpected: Vec<String>,
    /// Tensors with different shapes in both or, under
    /// [`DtypePolicy::Exact`](super::DtypePolicy::Exact), different dtypes.
    pub mismatched: Vec<Mismatch>,
}

/// A tensor whose shape or dtype differs between the model and the source.
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
    /// Whether there are no differences. Loaded tensors do not matter.
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty() && self.mismatched.is_empty()
    }

    /// Describes the differences, the first ones of each kind on a line each; `section` is `model`
    /// or `optimizer`.
    pub(super) fn describe(&self, section: &str) -> String {
        let mut message = format!("does not fit this {section}:");
        let mut list = |title: &str, lines: &[String]| {
            if !lines.is_empty() {
                // Writing to a string cannot fail.
                let _ = write!(message, "\n  {title} ({}):", lines.len());
                for line in lines.iter().take(MAX_LISTED) {
                    let _ = write!(message, "\n    {line}");
                }
                if let more @ 1.. = lines.len().saturating_sub(MAX_LISTED) {
                    let _ = write!(message, "\n    and {more} more");
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

/// How many names of a kind a message lists.
const MAX_LISTED: usize = 20;

/// How many names of a kind a [`LoadReport`] prints.
const MAX_PRINTED: usize = 5;

/// The number of loaded tensors, and the differences in PyTorch's words, a few names of each kind.
impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return write!(f, "<All keys matched successfully>, {} loaded", self.loaded.len());
        }
        write!(f, "{} loaded", self.loaded.len())?;
        let mut list = |title: &str, names: &[String]| {
            let (few, more) = names.split_at(names.len().min(MAX_PRINTED));
            if few.is_empty() {
                return Ok(());
            }
            write!(f, "; {title} ({}): {}", names.len(), few.join(", "))?;
            if more.is_empty() { Ok(()) } else { f.write_str(", …") }
        };
        list("missing keys, which keep their initial values", &self.missing)?;
        list("unexpected keys, which are not used", &self.unexpected)?;
        for mismatch in self.mismatched.iter().take(MAX_PRINTED) {
            let Mismatch { name, expected, found, dtypes } = mismatch;
            match dtypes {
                Some((expected, found)) => write!(
                    f,
                    "; dtype mismatch for {name}: {found} in the checkpoint, {expected} in the current model"
                )?,
                None => write!(
                    f,
                    "; size mismatch for {name}: {found:?} in the checkpoint, the shape in the current model \
                     is {expected:?}"
                )?,
            }
        }
        match self.mismatched.len().saturating_sub(MAX_PRINTED) {
            0 => Ok(()),
            more => write!(f, "; size mismatch for {more} more"),
        }
    }
}

/// Returns one error that lists the differences, if there are any.
///
/// Each report comes with its section, `model` or `optimizer`. `filtered` is
/// [`TensorSource::filtered`](super::TensorSource::filtered).
pub(super) fn refuse_differences(
    location: &Path,
    reports: &[(&LoadReport, &str)],
    filtered: Option<&str>,
    advice: Option<&str>,
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
    match (filtered, advice) {
        (_, Some(advice)) => message.push_str(advice),
        (Some(what), None) => {
            let _ = write!(
                message,
                "It was saved with a filter and holds only: {what}. Load with the same filter or \
                 with `strict = false`"
            );
        }
        (None, None) => message.push_str(
            "Use the configuration that it was saved with, or `LoadOptions` with `strict: false`, a \
             `filter` or other `names`",
        ),
    }
    Err(Error::checkpoint(location, message))
}
