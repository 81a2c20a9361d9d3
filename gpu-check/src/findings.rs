//! What a step finds.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What a step finds. It has passed if nothing is wrong.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Findings {
    /// What is not as it should be.
    pub(crate) wrong: Vec<String>,
    /// What was measured. Names end in their units; differences are relative to the largest expected value.
    pub(crate) figures: BTreeMap<String, f64>,
    /// What there is: versions and names.
    pub(crate) facts: BTreeMap<String, String>,
    /// Why the step was not run, if it was not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) skipped: Option<String>,
}

impl Findings {
    /// Notes a number.
    pub(crate) fn figure(&mut self, name: impl Into<String>, value: f64) {
        self.figures.insert(name.into(), value);
    }

    /// Notes what something is.
    pub(crate) fn fact(&mut self, name: impl Into<String>, value: impl ToString) {
        self.facts.insert(name.into(), value.to_string());
    }

    /// Notes something wrong, unless `holds`.
    pub(crate) fn require(&mut self, holds: bool, otherwise: impl FnOnce() -> String) {
        if !holds {
            self.wrong.push(otherwise());
        }
    }

    /// Notes a difference, and whether it is more than is allowed.
    pub(crate) fn difference(&mut self, name: &str, difference: f64, allowed: f64) {
        self.figure(name, difference);
        // A NaN is not allowed either.
        let holds = difference <= allowed;
        self.require(holds, || {
            format!("{name}: differs by {difference:.3e}, allowed are {allowed:.0e}")
        });
    }
}
