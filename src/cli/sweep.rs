//! `fit --sweep optimizer.lr=1e-3,3e-3`: one run per value, one after the other, and a table of
//! them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Instant;

use fulgurite_core::launch::{Interruption, agree_on, notice_signals};
use fulgurite_core::{Error, Result};
use fulgurite_error::{print_message, printable};
use serde_json::{Value, json};
use toml::Table;

use super::args::{Output, RunRequest};
use super::{child_run, say, say_json};

/// Trains once for each combination and prints a table. A signal that asks this process to end is
/// passed on to the run, and ends the sweep.
///
/// # Errors
/// Before any run, if a sweep is malformed or a combination cannot be run; after all runs, if one
/// failed; [`Error::Interrupted`].
pub(super) fn run(
    request: &RunRequest,
    defaults: &Table,
    check: &dyn Fn(&RunRequest, Table) -> Result<()>,
) -> Result<()> {
    child_run::refuse_in_job("--sweep")?;
    let combinations = combinations(&request.sweep)?;
    let mut runs = Vec::new();
    for (combination, name) in combinations.iter().zip(names(&combinations)) {
        let run = with_values(request, defaults, combination, &name)?;
        check(&run, defaults.clone()).map_err(|error| {
            Error::Config(format!("--sweep, {}: {error}", combination.join(" ")))
        })?;
        runs.push(run);
    }
    notice_signals()?;
    let (mut rows, mut interrupted) = (Vec::new(), None);
    for (i, (combination, run)) in combinations.iter().zip(&runs).enumerate() {
        print_message(&format!("run {} of {}: {}", i + 1, runs.len(), combination.join(" ")));
        rows.push(one_run(run, request.output, &mut interrupted)?);
        if interrupted.is_some() {
            break;
        }
    }
    if request.output == Output::Json {
        let runs: Vec<Value> = combinations.iter().zip(&rows).map(Row::to_json).collect();
        say_json(json!({ "event": "sweep", "runs": runs }));
    } else {
        say(&printable(&table(&combinations, &rows)));
    }
    if let Some(why) = interrupted {
        print_message(&format!("interrupted in run {} of {}", rows.len(), runs.len()));
        agree_on(why);
        return Err(Error::Interrupted);
    }
    match rows.iter().filter(|row| row.status != "success").count() {
        0 => Ok(()),
        failed => Err(Error::other(format!("{failed} of {} runs of the sweep failed", rows.len()))),
    }
}

/// The assignments of each run.
fn combinations(sweeps: &[String]) -> Result<Vec<Vec<String>>> {
    let mut combinations: Vec<Vec<String>> = vec![Vec::new()];
    for sweep in sweeps {
        let wrong = |why: &str| {
            Err(Error::Config(format!(
                "--sweep {sweep}: {why}; expected KEY=VALUE,VALUE, such as optimizer.lr=1e-3,3e-3"
            )))
        };
        let Some((key, values)) = sweep.split_once('=') else { return wrong("there is no `=`") };
        if combinations[0].iter().any(|other| assigns(other, key)) {
            return wrong("the key is swept twice; give all its values in one `--sweep`");
        }
        let Some(values) = split(values) else {
            return wrong("a quote or bracket is not closed");
        };
        if values.contains(&"") {
            return wrong("a value is missing");
        }
        combinations = combinations
            .into_iter()
            .flat_map(|before| {
                values.iter().map(move |value| {
                    let mut with = before.clone();
                    with.push(format!("{key}={value}"));
                    with
                })
            })
            .collect();
    }
    Ok(combinations)
}

/// Whether `key=value` assigns to this key.
fn assigns(assignment: &str, key: &str) -> bool {
    assignment.split_once('=').is_some_and(|(other, _)| other.trim() == key.trim())
}

/// Splits at commas outside brackets, braces and quotes, and trims the values. `None` if a bracket
/// or quote is not closed. A quote within a word belongs to the word.
fn split(text: &str) -> Option<Vec<&str>> {
    let (mut values, mut start, mut depth, mut quote) = (Vec::new(), 0, 0_i32, None);
    for (at, c) in text.char_indices() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') if depth > 0 || text[start..at].trim().is_empty() => quote = Some(c),
            (None, '[' | '{') => depth += 1,
            (None, ']' | '}') => depth -= 1,
            (None, ',') if depth == 0 => {
                values.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    values.push(text[start..].trim());
    (quote.is_none() && depth == 0).then_some(values)
}

/// A directory name for each combination: its assignments, with `_` for characters that are special
/// to shells or file systems. Equal names get a number appended.
fn names(combinations: &[Vec<String>]) -> Vec<String> {
    const LONGEST: usize = 150;
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._=+-".contains(c);
    let mut names: Vec<String> = Vec::new();
    for combination in combinations {
        let parts = combination.iter().map(|assignment| {
            let parts = assignment.split(|c| !is_plain(c)).filter(|part| !part.is_empty());
            parts.collect::<Vec<_>>().join("_").replace("=_", "=")
        });
        let name: String = parts.collect::<Vec<_>>().join(",").chars().take(LONGEST).collect();
        let numbered = (2..).map(|n| format!("{name}-{n}"));
        let free = std::iter::once(name.clone()).chain(numbered).find(|name| !names.contains(name));
        names.extend(free);
    }
    names
}

/// The request of one run.
fn with_values(
    request: &RunRequest,
    defaults: &Table,
    combination: &[String],
    name: &str,
) -> Result<RunRequest> {
    let mut run = RunRequest { sweep: Vec::new(), ..request.clone() };
    run.set.extend(combination.iter().cloned());
    // Each run has its own checkpoints.
    let resolved = run.layers(defaults.clone())?.resolve();
    let dir = resolved.get("checkpoint").and_then(|checkpoint| checkpoint.get("dir")?.as_str());
    if let Some(dir) = dir {
        let dir = toml::Value::String(format!("{}/{name}", dir.trim_end_matches('/')));
        run.set.push(format!("checkpoint.dir={dir}"));
    }
    Ok(run)
}

/// The end of a run, and its figures.
#[derive(Debug, Default)]
struct Row {
    status: String,
    steps: Option<u64>,
    /// Sorted like the table's columns.
    numbers: BTreeMap<String, f64>,
    seconds: f64,
}

impl Row {
    fn to_json((combination, row): (&Vec<String>, &Self)) -> Value {
        json!({
            "set": combination, "status": row.status, "steps": row.steps, "metrics": row.numbers,
            "seconds": row.seconds,
        })
    }

    /// Reads the figures of a run's event.
    fn read(&mut self, event: &Value) {
        let number = |value: &Value| value.as_f64();
        match event["event"].as_str() {
            Some("summary") => {
                self.steps = event["steps"].as_u64();
                if let Some(loss) = number(&event["last_loss"]) {
                    self.numbers.insert("train_loss".to_owned(), loss);
                }
            }
            Some("validation") => {
                let loss = number(&event["val_loss"]).map(|loss| ("val_loss".to_owned(), loss));
                let metrics = event["metrics"].as_object().into_iter().flatten();
                let metrics =
                    metrics.filter_map(|(name, value)| Some((name.clone(), number(value)?)));
                self.numbers.extend(loss.into_iter().chain(metrics));
            }
            _ => {}
        }
    }
}

fn one_run(
    run: &RunRequest,
    output: Output,
    interrupted: &mut Option<Interruption>,
) -> Result<Row> {
    let started = Instant::now();
    let mut row = Row::default();
    let status = child_run::run(run, interrupted, &mut |line, event| {
        row.read(event);
        if output == Output::Json {
            say_json(line);
        }
    })?;
    row.status = match interrupted {
        Some(_) if !status.success() => "interrupted".to_owned(),
        _ => child_run::status_text(status),
    };
    row.seconds = started.elapsed().as_secs_f64();
    Ok(row)
}

/// The runs as a table for a terminal.
fn table(combinations: &[Vec<String>], rows: &[Row]) -> String {
    let mut header: Vec<String> = Vec::new();
    for assignment in combinations.first().into_iter().flatten() {
        header.push(assignment.split('=').next().unwrap_or_default().to_owned());
    }
    let mut metrics: Vec<&str> =
        rows.iter().flat_map(|row| row.numbers.keys().map(String::as_str)).collect();
    metrics.sort_unstable();
    metrics.dedup();
    header.extend(["status", "steps"].map(str::to_owned));
    header.extend(metrics.iter().map(|&name| name.to_owned()));
    header.push("seconds".to_owned());
    let mut cells = vec![header];
    for (combination, row) in combinations.iter().zip(rows) {
        let mut line: Vec<String> = combination
            .iter()
            .map(|assignment| assignment.split_once('=').map_or("", |(_, value)| value).to_owned())
            .collect();
        line.push(row.status.clone());
        line.push(row.steps.map_or_else(|| "–".to_owned(), |steps| steps.to_string()));
        line.extend(metrics.iter().map(|&name| {
            row.numbers.get(name).map_or_else(|| "–".to_owned(), |number| format!("{number:.4}"))
        }));
        line.push(format!("{:.1}", row.seconds));
        cells.push(line);
    }
    let columns = cells[0].len();
    let widths: Vec<usize> = (0..columns)
        .map(|i| cells.iter().map(|line| line[i].chars().count()).max().unwrap_or(0))
        .collect();
    cells.iter().fold(String::new(), |mut text, line| {
        let padded: Vec<String> = line
            .iter()
            .zip(&widths)
            .map(|(cell, &width)| format!("{cell}{}", " ".repeat(width - cell.chars().count())))
            .collect();
        let _ = writeln!(text, "{}", padded.join("  ").trim_end());
        text
    })
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    #[test]
    fn each_combination_is_a_run() {
        let runs = |sweeps: &[&str]| {
            let sweeps: Vec<_> = sweeps.iter().map(|&sweep| sweep.to_owned()).collect();
            let runs = combinations(&sweeps).map_err(|error| error.to_string());
            runs.map_or_else(|e| e, |runs| runs.iter().map(|run| run.join(" ") + "\n").collect())
        };
        insta::assert_snapshot!(runs(&["a=1,2", "b.c=['x', 'y'],\"p,q\",{ type = 'z', n = [1, 2] }"]), @r#"
    a=1 b.c=['x', 'y']
    a=1 b.c="p,q"
    a=1 b.c={ type = 'z', n = [1, 2] }
    a=2 b.c=['x', 'y']
    a=2 b.c="p,q"
    a=2 b.c={ type = 'z', n = [1, 2] }
    "#);
        assert_says!(runs(&["a"]), "--sweep a: there is no `=` … KEY=VALUE,VALUE …");
        insta::assert_snapshot!(runs(&["a=don't, 2"]), @r"
    a=don't
    a=2
    ");
        assert_says!(runs(&["a=[1,2"]), "--sweep a=[1,2 … not closed … KEY=VALUE,VALUE …");
        assert_says!(runs(&["a='x,y"]), "--sweep a='x,y … not closed … KEY=VALUE,VALUE …");
        assert_says!(runs(&["a=1", "a=2"]), "--sweep a=2 … swept twice … one `--sweep` …");
        assert_says!(runs(&["a=1,,2"]), "--sweep a=1,,2: a value is missing … KEY=VALUE,VALUE …");
    }

    #[test]
    fn run_directories_have_safe_names() {
        let sweeps = ["o.lr=1e-3,+2", "d.path='a b/c',\"a b:c\",[\"x\", 'é']"].map(str::to_owned);
        insta::assert_snapshot!(names(&combinations(&sweeps).unwrap()).join("\n"), @r"
    o.lr=1e-3,d.path=a_b_c
    o.lr=1e-3,d.path=a_b_c-2
    o.lr=1e-3,d.path=x
    o.lr=+2,d.path=a_b_c
    o.lr=+2,d.path=a_b_c-2
    o.lr=+2,d.path=x
    ");
        let long =
            vec![vec![format!("a={}", "x".repeat(400))], vec![format!("a={}", "x".repeat(500))]];
        let names = names(&long);
        assert!(names.iter().all(|name| name.len() <= 152) && names[0] != names[1], "{names:?}");
    }

    #[test]
    fn runs_are_compared_in_a_table() {
        let mut good = Row { status: "success".to_owned(), seconds: 1.25, ..Row::default() };
        good.read(&json!({
            "event": "validation", "step": 8, "val_loss": 2.5, "batches": 3,
            "metrics": { "val_accuracy": 0.5 },
        }));
        good.read(&json!({ "event": "summary", "steps": 8, "last_loss": 2.25 }));
        let bad = Row { status: "failed (1)".to_owned(), seconds: 0.04, ..Row::default() };
        let runs = [vec!["optimizer.lr=0.1".to_owned()], vec!["optimizer.lr=1e3".to_owned()]];
        insta::assert_snapshot!(table(&runs, &[good, bad]), @r#"
    optimizer.lr  status      steps  train_loss  val_accuracy  val_loss  seconds
    0.1           success     8      2.2500      0.5000        2.5000    1.2
    1e3           failed (1)  –      –           –             –         0.0
    "#);
    }
}
