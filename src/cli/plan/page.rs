//! A plan as a page: memory over the parts of the steps.

use std::fmt::Write as _;
use std::path::Path;

use fulgurite_core::run_plan::{RankPlan, RunPlan};
use fulgurite_core::strategy::Bytes;
use fulgurite_core::{Error, Result};

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 260.0;

/// The kinds of memory in the order of their layers, with a colour each.
const KINDS: [(&str, &str); 7] = [
    ("parameters", "#355c7d"),
    ("optimizer state", "#6c5b7b"),
    ("weight averages", "#99809f"),
    ("gradients", "#c06c84"),
    ("gathered parameters", "#f67280"),
    ("activations", "#f8b195"),
    ("data", "#bbbbbb"),
];

/// Writes one HTML file that loads nothing.
///
/// # Errors
/// If the file cannot be written.
pub(super) fn write(plan: &RunPlan, path: &Path) -> Result<()> {
    let mut html = String::from(
        "<!doctype html><meta charset=\"utf-8\"><title>plan of a run</title>\n<style>\
         body{font:14px system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}\
         pre{overflow-x:auto;background:#f4f4f4;padding:1rem}\
         .key span{margin-right:1rem}.key i{display:inline-block;width:.8em;height:.8em;margin-right:.3em}\
         </style>\n<h1>Plan of a run</h1>\n",
    );
    let _ = writeln!(html, "<pre>{}</pre>", escaped(&super::text::of(plan)));
    let key = KINDS
        .iter()
        .map(|(kind, color)| format!("<span><i style=\"background:{color}\"></i>{kind}</span>"));
    let _ = writeln!(html, "<p class=\"key\">{}</p>", key.collect::<String>());
    for rank in plan.ranks.iter().filter(|rank| rank.peak_bytes.is_some()) {
        let _ =
            writeln!(html, "<h2>Rank {} ({} ranks)</h2>\n{}", rank.rank, rank.count, picture(rank));
    }
    std::fs::write(path, html).map_err(Error::io("writing the page", path))
}

/// The most bytes of each part of the steps, in layers.
fn picture(rank: &RankPlan) -> String {
    let top = rank.peak_bytes.unwrap_or(1).max(1) as f64;
    let width = WIDTH / rank.timeline.len().max(1) as f64;
    let mut svg = format!("<svg viewBox=\"0 0 {WIDTH} {}\" role=\"img\">", HEIGHT + 20.0);
    for (i, part) in rank.timeline.iter().enumerate() {
        let mut bottom = HEIGHT;
        for (kind, color) in KINDS {
            let bytes = part.most.get(kind).copied().unwrap_or(0);
            let height = bytes as f64 / top * HEIGHT;
            bottom -= height;
            let _ = write!(
                svg,
                "<rect x=\"{:.2}\" y=\"{bottom:.2}\" width=\"{:.2}\" height=\"{height:.2}\" fill=\"{color}\">\
                 <title>{}: {kind} {}</title></rect>",
                i as f64 * width,
                width.max(0.5) * 0.96,
                escaped(&part.part),
                Bytes(bytes)
            );
        }
        if part.part.starts_with("step") {
            let x = i as f64 * width;
            let _ = write!(
                svg,
                "<text x=\"{x:.2}\" y=\"{}\" font-size=\"12\">{}</text>",
                HEIGHT + 14.0,
                part.part
            );
        }
    }
    svg.push_str("</svg>");
    svg
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
