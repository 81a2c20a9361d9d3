//! The files of a run: `config.toml`, its metrics, `events.jsonl`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use fulgurite_error::{Error, Result, files};
use serde_json::Value;
use toml::Table;

/// Maximum file size: far above the metrics of a long run.
const MAX_FILE: u64 = 4 << 30;

/// A run.
#[derive(Debug, Default)]
pub(super) struct Run {
    pub(super) name: String,
    pub(super) path: PathBuf,
    pub(super) config: Table,
    pub(super) curves: BTreeMap<String, Curve>,
    /// Name, step and text, in the order of logging.
    pub(super) texts: Vec<(String, u64, String)>,
    /// The lines of `events.jsonl`.
    pub(super) events: Vec<Value>,
}

/// The values of a metric.
#[derive(Debug, Default, Clone, PartialEq)]
pub(super) struct Curve {
    /// Steps and finite values.
    pub(super) points: Vec<(f64, f64)>,
    /// Steps with values that are not finite.
    pub(super) non_finite: Vec<u64>,
}

impl Run {
    /// The last event of a kind.
    pub(super) fn event<'a>(&'a self, kind: &'a str) -> Option<&'a Value> {
        self.events_of(kind).last()
    }

    /// The events of a kind.
    pub(super) fn events_of<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = &'a Value> {
        self.events.iter().filter(move |event| event["event"] == kind)
    }

    /// The last value of a metric.
    pub(super) fn last(&self, metric: &str) -> Option<f64> {
        self.curves.get(metric)?.points.last().map(|point| point.1)
    }

    /// Whether the run has trained: it has logged `train_loss`, saved a checkpoint, or its summary
    /// has a step time.
    pub(super) fn has_trained(&self) -> bool {
        let stepped = self.event("summary").is_some_and(|end| end["step_s_median"].is_number());
        stepped || self.curves.contains_key("train_loss") || self.event("checkpoint").is_some()
    }

    fn add(&mut self, name: &str, step: u64, value: f64) {
        let curve = self.curves.entry(name.to_owned()).or_default();
        if value.is_finite() {
            curve.points.push((step as f64, value));
        } else {
            curve.non_finite.push(step);
        }
    }
}

/// The runs at these paths: run directories, or directories that contain some.
///
/// # Errors
/// If a path is neither, or a file of a run cannot be read.
pub(super) fn open_all(paths: &[PathBuf]) -> Result<Vec<Run>> {
    let mut dirs = Vec::new();
    for path in paths {
        let found = run_dirs(path)?;
        for dir in found {
            let same = |other: &PathBuf| other.canonicalize().ok() == dir.canonicalize().ok();
            if !dirs.iter().any(same) {
                dirs.push(dir);
            }
        }
    }
    let names = names(&dirs);
    dirs.iter().zip(names).map(|(dir, name)| open(dir, name)).collect()
}

/// The run directories at a path, oldest first.
fn run_dirs(path: &Path) -> Result<Vec<PathBuf>> {
    let refused = |what: &str| {
        Err(Error::other(format!(
            "{}: {what}. Name the directory of a run (`version_N`, with its config.toml), or the one \
             that several are in (`trainer.default_root_dir`)",
            path.display()
        )))
    };
    if !path.exists() {
        return refused("there is no such directory");
    }
    if !path.is_dir() {
        return refused("this is no directory");
    }
    if path.join("config.toml").is_file() {
        return Ok(vec![path.to_owned()]);
    }
    let mut versions = Vec::new();
    for entry in std::fs::read_dir(path).map_err(Error::io("listing", path))? {
        let entry = entry.map_err(Error::io("listing", path))?;
        let name = entry.file_name();
        let version = name.to_str().and_then(|name| name.strip_prefix("version_")?.parse().ok());
        if let Some(version) = version
            && entry.path().join("config.toml").is_file()
        {
            versions.push((version, entry.path()));
        }
    }
    if versions.is_empty() {
        return refused("this is no run, and no run is in it");
    }
    versions.sort_by_key(|(version, _): &(u64, _)| *version);
    Ok(versions.into_iter().map(|(_, dir)| dir).collect())
}

/// A name for each run: the shortest end of its path that is unique.
fn names(dirs: &[PathBuf]) -> Vec<String> {
    let parts: Vec<Vec<String>> = dirs
        .iter()
        .map(|dir| {
            let whole = dir.canonicalize().unwrap_or_else(|_| dir.clone());
            let parts = whole.components().map(|part| part.as_os_str().to_string_lossy());
            parts.map(std::borrow::Cow::into_owned).collect()
        })
        .collect();
    let longest = parts.iter().map(Vec::len).max().unwrap_or(1);
    let end = |parts: &[String], n: usize| parts[parts.len().saturating_sub(n)..].join("/");
    (1..=longest)
        .map(|n| parts.iter().map(|parts| end(parts, n)).collect::<Vec<_>>())
        .find(|names| names.iter().collect::<BTreeSet<_>>().len() == names.len())
        .unwrap_or_else(|| dirs.iter().map(|dir| dir.display().to_string()).collect())
}

fn open(dir: &Path, name: String) -> Result<Run> {
    let file = dir.join("config.toml");
    let config = files::read_regular_text(&file, MAX_FILE)?
        .parse()
        .map_err(|error| Error::other(format!("{}: {error}", file.display())))?;
    let mut run = Run { name, path: dir.to_owned(), config, ..Run::default() };
    let (json, csv) = (dir.join("metrics.jsonl"), dir.join("metrics.csv"));
    if json.exists() {
        for (line, value) in json_lines(&json)? {
            add_line(&mut run, &value)
                .map_err(|what| Error::other(format!("{}:{line}: {what}", json.display())))?;
        }
    } else if csv.exists() {
        read_csv(&mut run, &csv)?;
    }
    let events = dir.join("events.jsonl");
    if events.exists() {
        run.events = json_lines(&events)?.into_iter().map(|(_, event)| event).collect();
    }
    Ok(run)
}

/// The values in a file of JSON lines, with line numbers. The last line may be incomplete, because
/// runs may be killed.
fn json_lines(path: &Path) -> Result<Vec<(usize, Value)>> {
    let bytes = files::read_regular(path, MAX_FILE)?;
    let text = String::from_utf8_lossy(&bytes);
    let mut values = Vec::new();
    let mut lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).peekable();
    while let Some((index, line)) = lines.next() {
        match serde_json::from_str(line) {
            Ok(value) => values.push((index + 1, value)),
            Err(_) if lines.peek().is_none() && !text.ends_with('\n') => {}
            Err(error) => {
                let what = format!("{}:{}: no JSON: {error}", path.display(), index + 1);
                return Err(Error::other(what));
            }
        }
    }
    Ok(values)
}

/// Adds a line of `metrics.jsonl`.
fn add_line(run: &mut Run, line: &Value) -> Result<(), String> {
    let step = line["step"].as_u64().ok_or("expected an object with a `step`")?;
    for (name, value) in line.as_object().into_iter().flatten().filter(|(name, _)| *name != "step")
    {
        match value {
            Value::Number(number) => run.add(name, step, number.as_f64().unwrap_or(f64::NAN)),
            Value::Null => run.add(name, step, f64::NAN),
            Value::String(text) => run.texts.push((name.clone(), step, text.clone())),
            other => return Err(format!("`{name}`: expected a number or a text, found {other}")),
        }
    }
    Ok(())
}

fn read_csv(run: &mut Run, path: &Path) -> Result<()> {
    let bytes = files::read_regular(path, MAX_FILE)?;
    let failed = |what: String| Error::other(format!("{}: {what}", path.display()));
    let mut reader = csv::ReaderBuilder::new().flexible(true).from_reader(bytes.as_slice());
    let header = reader.headers().map_err(|error| failed(error.to_string()))?.clone();
    if header.is_empty() {
        return Ok(());
    }
    let Some(step_column) = header.iter().position(|name| name == "step") else {
        return Err(failed("there is no column `step`".to_owned()));
    };
    let rows: Vec<_> = reader.records().collect();
    let last = rows.len().saturating_sub(1);
    // A killed run may have written part of a row.
    let torn = !bytes.ends_with(b"\n");
    for (index, row) in rows.into_iter().enumerate() {
        if index == last && torn {
            break;
        }
        let row = row.map_err(|error| failed(error.to_string()))?;
        let line = row.position().map_or(0, csv::Position::line);
        let wrong = |name: &str, text: &str| {
            failed(format!("line {line}: `{name}`: expected a number, found {text:?}"))
        };
        let step = row.get(step_column).unwrap_or_default();
        let step = step.parse().map_err(|_| wrong("step", step))?;
        for (name, text) in
            header.iter().zip(&row).filter(|(name, text)| *name != "step" && !text.is_empty())
        {
            run.add(name, step, text.parse().map_err(|_| wrong(name, text))?);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    fn run_of(files: &[(&str, &str)]) -> Result<Run> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.toml"), "seed = 1").unwrap();
        for (name, text) in files {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        open(dir.path(), "run".to_owned())
    }

    #[test]
    fn both_loggers_give_the_same_curves() {
        let csv = "step,a,b\n1,0.5,\n2,,NaN\n3,inf,4\n4,0.";
        let json = "{\"step\":1,\"a\":0.5}\n{\"step\":2,\"b\":null}\n{\"step\":3,\"a\":null,\"b\":4}\n{\"st";
        let csv = run_of(&[("metrics.csv", csv)]).unwrap();
        let json = run_of(&[("metrics.jsonl", json)]).unwrap();
        assert_eq!(csv.curves, json.curves);
        assert_eq!(csv.curves["a"], Curve { points: vec![(1.0, 0.5)], non_finite: vec![3] });
        assert_eq!(csv.curves["b"], Curve { points: vec![(3.0, 4.0)], non_finite: vec![2] });
    }

    #[test]
    fn bad_metric_line_is_named() {
        let error = |name, text| {
            let error = run_of(&[(name, text)]).unwrap_err().to_string();
            error.rsplit_once('/').unwrap().1.to_owned()
        };
        assert_says!(
            error("metrics.jsonl", "{\"step\":1}\nnonsense\n"),
            "metrics.jsonl:2: no JSON … line 1 column 2"
        );
        assert_says!(error("metrics.jsonl", "{\"loss\":1}\n"), "metrics.jsonl:1 … object … `step`");
        assert_says!(
            error("metrics.csv", "step,loss\n1,high\n"),
            r#"metrics.csv: line 2: `loss` … a number, found "high""#
        );
        assert_says!(error("metrics.csv", "loss\n1\n"), "metrics.csv: there is no column `step`");
    }

    #[test]
    fn runs_of_several_roots_have_different_names() {
        let paths = ["/x/a/version_0", "/x/b/version_0", "/x/b/version_1"].map(PathBuf::from);
        assert_eq!(names(&paths[1..]), ["version_0", "version_1"]);
        assert_eq!(names(&paths), ["a/version_0", "b/version_0", "b/version_1"]);
    }
}
