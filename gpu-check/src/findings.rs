//! Findings of a step.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Findings of a step. The step passes if `wrong` is empty.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Findings {
    /// Failed requirements.
    pub(crate) wrong: Vec<String>,
    /// Measurements. Names end in the unit; differences are relative to the largest expected value.
    pub(crate) figures: BTreeMap<String, f64>,
    /// Facts such as versions and names.
    pub(crate) facts: BTreeMap<String, String>,
    /// The reason for skipping the step, if it was skipped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) skipped: Option<String>,
}

impl Findings {
    /// Records a measurement.
    pub(crate) fn figure(&mut self, name: impl Into<String>, value: f64) {
        self.figures.insert(name.into(), value);
    }

    /// Records a fact.
    pub(crate) fn fact(&mut self, name: impl Into<String>, value: impl ToString) {
        self.facts.insert(name.into(), value.to_string());
    }

    /// Records a failure unless `holds`.
    pub(crate) fn require(&mut self, holds: bool, otherwise: impl FnOnce() -> String) {
        if !holds {
            self.wrong.push(otherwise());
        }
    }

    /// Records a difference, and a failure if it exceeds `allowed`.
    pub(crate) fn difference(&mut self, name: &str, difference: f64, allowed: f64) {
        self.figure(name, difference);
        // False for NaN, so NaN fails.
        let holds = difference <= allowed;
        self.require(holds, || {
            format!("{name}: differs by {difference:.3e}, allowed are {allowed:.0e}")
        });
    }
}
