//! The page: everything in one file, which loads no others.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use fulgurite_error::counted;
use serde_json::Value;

use super::chart::{Series, chart, short};
use super::checkpoints::{OnDisk, checkpoints, resumed_from};
use super::escape::Escaped;
use super::matrix;
use super::run::Run;
use super::settings::settings;

/// Marks a file as a report.
pub(super) const GENERATOR: &str = "<meta name=\"generator\" content=\"fulgurite report\">";

/// Maximum number of texts shown for each name.
const TEXTS: usize = 5;

/// The page about these runs.
pub(super) fn page(runs: &[Run]) -> String {
    let title = match runs {
        [run] => format!("{} – Fulgurite", run.name),
        runs => format!("{} runs – Fulgurite", runs.len()),
    };
    let mut html = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">{GENERATOR}\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src \
         'unsafe-inline'; script-src 'unsafe-inline'\">\
         <meta name=\"viewport\" content=\"width=device-width\"><title>{}</title>\n<style>\n{}</style>\
         </head>\n<body>\n<h1>{}</h1>\n",
        Escaped(&title),
        include_str!("report.css"),
        Escaped(&title)
    );
    overview(&mut html, runs);
    curves(&mut html, runs);
    tables(&mut html, runs);
    differences(&mut html, runs);
    memory_and_time(&mut html, runs);
    saved(&mut html, runs);
    texts(&mut html, runs);
    let _ = write!(html, "<script>\n{}</script>\n</body></html>\n", include_str!("report.js"));
    html
}

/// A run's name with its colour.
fn label(runs: &[Run], index: usize) -> String {
    format!("<span class=\"key c{}\"></span>{}", index % 10, Escaped(&runs[index].name))
}

/// A table with a row of headings; cells are HTML.
fn table(html: &mut String, headings: &[String], rows: impl IntoIterator<Item = Vec<String>>) {
    let cells = |cells: &[String], tag: &str| -> String {
        cells.iter().map(|cell| format!("<{tag}>{cell}</{tag}>")).collect()
    };
    let _ = writeln!(html, "<div class=\"wide\"><table><tr>{}</tr>", cells(headings, "th"));
    for row in rows {
        let _ = writeln!(html, "<tr>{}</tr>", cells(&row, "td"));
    }
    *html += "</table></div>\n";
}

fn headings(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// A number, or a dash.
fn number(value: Option<f64>) -> String {
    value.filter(|value| value.is_finite()).map_or("–".to_owned(), short)
}

fn overview(html: &mut String, runs: &[Run]) {
    *html += "<h2>Runs</h2>\n";
    let head = [
        "run",
        "state",
        "strategy",
        "ranks",
        "steps",
        "train_loss",
        "best val_loss",
        "items/s",
        "s a step",
    ];
    let row = |index: usize| {
        let run = &runs[index];
        let summary = run.event("summary");
        let of = |key: &str| summary.map_or(&Value::Null, |summary| &summary[key]);
        let steps = of("steps").as_f64().or_else(|| {
            let steps = run.curves.values().filter_map(|curve| curve.points.last());
            steps.map(|point| point.0).reduce(f64::max)
        });
        let best = run
            .curves
            .get("val_loss")
            .and_then(|curve| curve.points.iter().map(|point| point.1).reduce(f64::min));
        let strategy = match of("strategy").as_str() {
            Some(strategy) => strategy.to_owned(),
            None => setting(run, "trainer", "strategy"),
        };
        vec![
            label(runs, index),
            state(run).to_owned(),
            Escaped(strategy).to_string(),
            number(of("world_size").as_f64()),
            number(steps),
            number(run.last("train_loss")),
            number(best),
            number(summary.and_then(rate)),
            number(of("step_s_median").as_f64()),
        ]
    };
    let (trained, others): (Vec<usize>, Vec<usize>) =
        (0..runs.len()).partition(|&index| runs[index].has_trained());
    if !trained.is_empty() {
        table(html, &headings(&head), trained.into_iter().map(row));
    }
    if !others.is_empty() {
        let _ = writeln!(
            html,
            "<details{}><summary>{} without a step: evaluations, and starts that failed</summary>",
            if others.len() == runs.len() { " open" } else { "" },
            counted(others.len(), "run")
        );
        table(html, &headings(&head), others.into_iter().map(row));
        *html += "</details>\n";
    }
}

/// The summary's items per second, whatever the items are.
fn rate(summary: &Value) -> Option<f64> {
    let mut keys = summary.as_object()?.iter();
    keys.find(|(key, _)| key.ends_with("_per_s"))?.1.as_f64()
}

/// The end of a run, as far as its events show.
fn state(run: &Run) -> &'static str {
    match run.event("end").and_then(|event| event["status"].as_str()) {
        Some("success") => "completed",
        Some("interrupted") => "interrupted",
        Some("failed") => "failed",
        _ if run.events.is_empty() => "–",
        _ => "going on, or killed",
    }
}

fn setting(run: &Run, table: &str, key: &str) -> String {
    let value = run.config.get(table).and_then(|table| table.get(key));
    match value {
        Some(toml::Value::String(text)) => text.clone(),
        Some(toml::Value::Table(options)) => {
            options.get("type").and_then(toml::Value::as_str).unwrap_or("–").to_owned()
        }
        _ => "–".to_owned(),
    }
}

fn curves(html: &mut String, runs: &[Run]) {
    *html += "<h2>Curves</h2>\n";
    let names: BTreeSet<&str> =
        runs.iter().flat_map(|run| run.curves.keys().map(String::as_str)).collect();
    if names.is_empty() {
        *html += "<p>No run has metrics: <code>metrics.jsonl</code> and <code>metrics.csv</code> are not \
                  there, or empty. The loggers <code>jsonl</code> and <code>csv</code> write them \
                  (<code>trainer.loggers</code>).</p>\n";
        return;
    }
    let points = |run: &Run, name: &str| run.curves.get(name).map_or(0, |curve| curve.points.len());
    let is_curve = |name: &str| runs.iter().any(|run| points(run, name) > 1);
    let (mut curves, single): (Vec<&str>, Vec<&str>) =
        names.into_iter().partition(|name| is_curve(name));
    // Losses come first.
    curves.sort_by_key(|name| (!name.contains("loss"), *name));
    charts(html, runs, &curves);
    single_values(html, runs, &single);
}

/// The last tables of each run, such as confusion matrices.
fn tables(html: &mut String, runs: &[Run]) {
    let of_runs: Vec<_> = runs.iter().map(matrix::tables).collect();
    let names: BTreeSet<&String> = of_runs.iter().flatten().map(|(name, _)| name).collect();
    if names.is_empty() {
        return;
    }
    *html += "<h3>Tables</h3>\n<div class=\"charts\">\n";
    for name in names {
        for (index, tables) in of_runs.iter().enumerate() {
            if let Some(table) = tables.get(name) {
                *html += &matrix::html(name, &label(runs, index), table);
            }
        }
    }
    *html += "</div>\n";
}

/// A table of metrics with at most one value per run.
fn single_values(html: &mut String, runs: &[Run], names: &[&str]) {
    let curve = |run: usize, name: &str| runs[run].curves.get(name);
    let shown: Vec<usize> = (0..runs.len())
        .filter(|&run| names.iter().any(|name| curve(run, name).is_some()))
        .collect();
    if shown.is_empty() {
        return;
    }
    *html += "<h3>Metrics with one value</h3>\n";
    let mut head = vec!["metric".to_owned()];
    head.extend(shown.iter().map(|&run| label(runs, run)));
    let rows = names.iter().map(|name| {
        let mut row = vec![Escaped(name).to_string()];
        row.extend(shown.iter().map(|&run| match curve(run, name) {
            None => "–".to_owned(),
            Some(curve) => match (curve.points.first(), curve.non_finite.first()) {
                (Some((step, value)), _) => format!("{} (step {})", short(*value), short(*step)),
                (None, Some(step)) => format!("not finite (step {step})"),
                (None, None) => "–".to_owned(),
            },
        }));
        row
    });
    table(html, &head, rows);
}

/// The charts of these metrics.
fn charts(html: &mut String, runs: &[Run], names: &[&str]) {
    if names.is_empty() {
        return;
    }
    *html += "<p class=\"hint\">Drag over a part of a chart to enlarge it; a double click shows all of it \
              again.</p>\n<p>";
    for index in 0..runs.len() {
        if names.iter().all(|name| !runs[index].curves.contains_key(*name)) {
            continue;
        }
        let _ = write!(
            html,
            "<label class=\"run\"><input type=\"checkbox\" checked data-run=\"{}\">{}</label> ",
            Escaped(&runs[index].name),
            label(runs, index)
        );
    }
    *html += "</p>\n<div class=\"charts\">\n";
    for &name in names {
        let series: Vec<Series> = runs
            .iter()
            .enumerate()
            .filter_map(|(colour, run)| {
                let points = &run.curves.get(name)?.points;
                (!points.is_empty()).then_some(Series { name: &run.name, colour, points })
            })
            .collect();
        let left_out: Vec<String> = runs
            .iter()
            .filter_map(|run| {
                let steps = &run.curves.get(name)?.non_finite;
                let first = steps.first()?;
                Some(format!("{}: {} not finite, first at step {first}", run.name, steps.len()))
            })
            .collect();
        let note = left_out.join("; ");
        *html += &chart(name, &series, &note);
    }
    *html += "</div>\n";
}

fn differences(html: &mut String, runs: &[Run]) {
    *html += "<h2>Settings</h2>\n";
    // Evaluations and failed starts get no column if any run has trained.
    let mut shown: Vec<usize> =
        (0..runs.len()).filter(|&index| runs[index].has_trained()).collect();
    if shown.is_empty() {
        shown = (0..runs.len()).collect();
    }
    let configs: Vec<_> = shown.iter().map(|&index| &runs[index].config).collect();
    let all = settings(configs.into_iter());
    let mut head = vec!["key".to_owned()];
    head.extend(shown.iter().map(|&index| label(runs, index)));
    let row = |setting: &super::settings::Setting| {
        let mut row = vec![format!("<code>{}</code>", Escaped(&setting.key))];
        row.extend(setting.values.iter().map(|value| match value {
            Some(value) => format!("<code>{}</code>", Escaped(value)),
            None => "–".to_owned(),
        }));
        row
    };
    if shown.len() > 1 {
        let different: Vec<_> = all.iter().filter(|setting| setting.differs()).map(row).collect();
        if different.is_empty() {
            *html += "<p>The runs have the same settings.</p>\n";
        } else {
            *html += "<p>The runs differ in:</p>\n";
            table(html, &head, different);
        }
    }
    let _ = writeln!(html, "<details><summary>All {} settings</summary>", all.len());
    table(html, &head, all.iter().map(row));
    *html += "</details>\n";
}

fn memory_and_time(html: &mut String, runs: &[Run]) {
    *html += "<h2>Memory and time</h2>\n";
    let finished: Vec<usize> =
        (0..runs.len()).filter(|&index| runs[index].event("summary").is_some()).collect();
    if finished.is_empty() {
        *html += "<p>No run has come to its summary.</p>\n";
    } else {
        let head = [
            "run",
            "peak memory of each rank, MiB",
            "to start, s",
            "a step, s",
            "time in steps",
            "waited for checkpoints, s",
        ];
        let rows = finished.iter().map(|&index| {
            let run = &runs[index];
            let summary = run.event("summary").unwrap_or(&Value::Null);
            let peaks: Vec<String> = summary["peak_rss_mib"]
                .as_array()
                .into_iter()
                .flatten()
                .map(|peak| peak.as_f64().map_or("–".to_owned(), |mib| format!("{mib:.0}")))
                .collect();
            let waits = run.events_of("checkpoint").filter_map(|event| event["blocked_s"].as_f64());
            vec![
                label(runs, index),
                peaks.join(" "),
                number(summary["startup_s"].as_f64()),
                number(summary["step_s_median"].as_f64()),
                number(summary["goodput"].as_f64()),
                number(Some(waits.sum())),
            ]
        });
        table(html, &headings(&head), rows);
    }
    for index in 0..runs.len() {
        if let Some(profile) = runs[index].event("profile") {
            let _ = writeln!(html, "<h3>Time by phase: {}</h3>", label(runs, index));
            phases(html, profile);
        }
    }
    if !runs.iter().any(|run| run.event("profile").is_some()) {
        *html += "<p>With <code>trainer.profiler = \"simple\"</code> a run also measures where its time \
                  goes, phase by phase.</p>\n";
    }
}

/// The spans of a profile: a bar of its phases, and a table for each kind.
fn phases(html: &mut String, profile: &Value) {
    let wall = profile["wall_s"].as_f64().unwrap_or(f64::NAN);
    let spans = || profile["spans"].as_array().into_iter().flatten();
    let of = |kind: &'static str| spans().filter(move |span| span["kind"] == kind);
    let seconds = |span: &Value| span["mean_s"].as_f64().unwrap_or(0.0);
    *html += "<div class=\"bar\">";
    for (index, span) in of("phase").enumerate() {
        let share = (seconds(span) / wall * 100.0).clamp(0.0, 100.0);
        let name = span["name"].as_str().unwrap_or_default();
        let _ = write!(
            html,
            "<div class=\"c{}\" style=\"width:{share:.2}%\" title=\"{} {share:.1} %\">{}</div>",
            index % 10,
            Escaped(name),
            if share > 8.0 { Escaped(name).to_string() } else { String::new() }
        );
    }
    *html += "</div>\n";
    let head = [
        "",
        "calls a rank",
        "mean over ranks, s",
        "most of a rank, s",
        "of all, %",
        "memory at its end, MiB",
    ];
    for (kind, title) in [("phase", "phase"), ("unit", "unit"), ("collective", "collective")] {
        let rows: Vec<Vec<String>> = of(kind)
            .map(|span| {
                vec![
                    Escaped(span["name"].as_str().unwrap_or_default()).to_string(),
                    number(span["calls"].as_f64()),
                    number(span["mean_s"].as_f64()),
                    number(span["max_s"].as_f64()),
                    format!("{:.1}", seconds(span) / wall * 100.0),
                    span["resident_mib"].as_f64().map_or(String::new(), |mib| format!("{mib:.0}")),
                ]
            })
            .collect();
        let mut head = headings(&head);
        head[0] = title.to_owned();
        if kind == "phase" {
            table(html, &head, rows);
        } else if !rows.is_empty() {
            let _ = writeln!(html, "<details><summary>By {title}</summary>");
            table(html, &head, rows);
            *html += "</details>\n";
        }
    }
}

fn saved(html: &mut String, runs: &[Run]) {
    *html += "<h2>Checkpoints</h2>\n";
    let mut any = false;
    for index in 0..runs.len() {
        let run = &runs[index];
        if let Some((step, path)) = resumed_from(run) {
            let _ = writeln!(
                html,
                "<p>{} went on after step {step}, from <code>{}</code>.</p>",
                label(runs, index),
                Escaped(path)
            );
        }
        let all = checkpoints(run);
        if all.is_empty() {
            continue;
        }
        any = true;
        let _ = writeln!(html, "<h3>{}</h3>", label(runs, index));
        let rows = all.into_iter().map(|checkpoint| {
            let val_loss = checkpoint.step.and_then(|step| {
                let points = &run.curves.get("val_loss")?.points;
                points.iter().rev().find(|point| point.0 == step as f64).map(|point| point.1)
            });
            vec![
                checkpoint.step.map_or("–".to_owned(), |step| step.to_string()),
                format!("<code>{}</code>", Escaped(checkpoint.path.display())),
                match checkpoint.on_disk {
                    OnDisk::Bytes(bytes) => indicatif::HumanBytes(bytes).to_string(),
                    OnDisk::Elsewhere => "not in the run's directory".to_owned(),
                    OnDisk::Gone => "not there any more".to_owned(),
                },
                number(val_loss),
                number(checkpoint.blocked_s),
            ]
        });
        table(html, &headings(&["step", "path", "size", "val_loss", "training waited, s"]), rows);
    }
    if !any {
        *html += "<p>None.</p>\n";
    }
}

fn texts(html: &mut String, runs: &[Run]) {
    if runs.iter().all(|run| run.texts.is_empty()) {
        return;
    }
    *html += "<h2>Texts</h2>\n";
    for index in 0..runs.len() {
        let run = &runs[index];
        let names: BTreeSet<&str> = run.texts.iter().map(|(name, ..)| name.as_str()).collect();
        for name in names {
            let _ = writeln!(html, "<h3>{}: {}</h3>", label(runs, index), Escaped(name));
            let all: Vec<_> = run.texts.iter().filter(|(other, ..)| other == name).collect();
            for (_, step, text) in &all[all.len().saturating_sub(TEXTS)..] {
                let _ = writeln!(html, "<p>After step {step}:</p><pre>{}</pre>", Escaped(text));
            }
        }
    }
}
