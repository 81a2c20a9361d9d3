//! The result of a search as text.

use std::fmt::Write as _;

use fulgurite_core::Result;
use fulgurite_core::strategy::Bytes;
use serde_json::json;

use super::super::args::Output;
use super::print;
use super::search::{Candidate, Found};
use super::text::secs;

/// Names the three fastest changes with which the run fits.
pub(super) fn advise(found: &Found, items: f64) -> Result<()> {
    let mut text = match found.fitting.is_empty() {
        true => {
            "no change that `plan` knows makes it fit: plan for more ranks (--world)\n".to_owned()
        }
        false => "it fits with\n".to_owned(),
    };
    for candidate in &found.fitting {
        line(&mut text, candidate, items);
    }
    print(&text)
}

fn line(text: &mut String, candidate: &Candidate, items: f64) {
    let (plan, outlook) = (&candidate.plan, &candidate.plan.outlook);
    let changes = match candidate.changes.is_empty() {
        true => "as it is".to_owned(),
        false => candidate.changes.join(", "),
    };
    let _ = write!(
        text,
        "  {changes}: {}, {:.0} items/s, a step {}",
        Bytes(candidate.peak()),
        outlook.items_per_s,
        secs(outlook.step_s)
    );
    if (plan.items - items).abs() > 0.01 * items {
        let _ = write!(text, " of {:.0} items, where the run has {items:.0}", plan.items);
    }
    text.push('\n');
    for set in &candidate.settings {
        let _ = writeln!(text, "      --set '{set}'");
    }
}

/// Prints the configurations that no other beats in both memory and time.
///
/// # Errors
/// If the result cannot be printed.
pub(super) fn print_front(found: &Found, items: f64, output: Output) -> Result<()> {
    if output == Output::Json {
        let row = |one: &Candidate| {
            let plan = &one.plan;
            json!({ "changes": one.changes.join(", "), "set": one.settings, "step_s": plan.step_s,
                "items_per_step": plan.items, "items_per_s": plan.outlook.items_per_s,
                "peak_bytes": plan.peak_bytes, "host_bytes": plan.host_bytes, "fits": one.fits() })
        };
        let front: Vec<_> = found.front.iter().map(row).collect();
        return print(&format!("{}\n", json!({ "planned": found.planned, "front": front })));
    }
    let mut text = format!(
        "{} configurations planned; none is both faster and smaller than these, the fastest first\n",
        found.planned
    );
    for candidate in &found.front {
        line(&mut text, candidate, items);
        if !candidate.fits() {
            text.push_str("      does not fit\n");
        }
    }
    print(&text)
}
