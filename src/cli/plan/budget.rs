//! Limits of a plan, for tests of a configuration.

use std::path::Path;

use fulgurite_core::run_plan::RunPlan;
use fulgurite_core::{Error, Result};
use serde::Deserialize;

/// The file of `--check`: the most that a run may take. Keys that are left out are not limited.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Budget {
    peak_bytes: Option<u64>,
    host_bytes: Option<u64>,
    traffic_bytes_per_step: Option<u64>,
    calls_per_step: Option<u64>,
    step_s: Option<f64>,
}

/// Compares a plan with the budget in a file.
///
/// # Errors
/// If the file cannot be read, or a limit is passed; the message names each.
pub(super) fn check(plan: &RunPlan, path: &Path) -> Result<()> {
    let text = std::fs::read_to_string(path).map_err(Error::io("reading the budget", path))?;
    let budget: Budget = toml::from_str(&text)
        .map_err(|error| Error::Config(format!("{}: {error}", path.display())))?;
    let of = |number: u64| Some(number as f64);
    let limits = [
        ("peak_bytes", budget.peak_bytes.and_then(of), plan.peak_bytes.and_then(of)),
        ("host_bytes", budget.host_bytes.and_then(of), plan.host_bytes.and_then(of)),
        (
            "traffic_bytes_per_step",
            budget.traffic_bytes_per_step.and_then(of),
            of(plan.traffic_bytes_per_step),
        ),
        ("calls_per_step", budget.calls_per_step.and_then(of), of(plan.calls_per_step)),
        ("step_s", budget.step_s, Some(plan.step_s)),
    ];
    let mut passed = Vec::new();
    for (key, limit, planned) in limits {
        match (limit, planned) {
            (Some(limit), Some(planned)) if planned > limit => {
                passed.push(format!("`{key}` is {planned}, at most {limit} is allowed"));
            }
            (Some(_), None) => passed.push(format!(
                "`{key}` is not known{}",
                match key {
                    "host_bytes" =>
                        "; it needs a table of hardware with `host`, and an allocator that counts",
                    _ => "",
                }
            )),
            _ => {}
        }
    }
    match passed.is_empty() {
        true => Ok(()),
        false => Err(Error::Config(format!("{}: {}", path.display(), passed.join("; ")))),
    }
}
