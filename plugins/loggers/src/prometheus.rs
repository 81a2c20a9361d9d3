//! The logger `prometheus`: the latest metrics in Prometheus's text format, in `metrics.prom`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use fulgurite_error::{Error, Result};
use fulgurite_trainer::trainer::{Logger, LoggerConfig};
use serde::{Deserialize, Serialize};

/// `trainer.loggers = ["prometheus"]`: the latest value of every metric, as gauges such as
/// `fulgurite_train_loss{run="version_3"} 1.25`, in a file that a textfile collector
/// (node_exporter's `--collector.textfile.directory`) reads. The file is replaced as a whole.
///
/// Characters that Prometheus does not allow in a name become `_`, and the label `metric` then has
/// the name as logged. `fulgurite_step` is the step, `fulgurite_updated_seconds` the time of the
/// last values, and `fulgurite_running` 1 until the run ends.
#[derive(Debug, Clone, Default, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct PrometheusConfig {
    /// The file, whose name ends in `.prom` for node_exporter; by default `metrics.prom` in the
    /// run's directory.
    path: Option<PathBuf>,
}

#[typetag::serde(name = "prometheus")]
impl LoggerConfig for PrometheusConfig {
    fn build(&self, dir: &Path) -> Result<Box<dyn Logger>> {
        let path = self.path.clone().unwrap_or_else(|| dir.join("metrics.prom"));
        let run = dir.file_name().map_or_else(String::new, |name| name.to_string_lossy().into());
        let mut logger = PrometheusLogger { path, run, latest: BTreeMap::new(), step: 0 };
        // A path that cannot be written shows before the first step.
        logger.write(true)?;
        Ok(Box::new(logger))
    }
}

fulgurite_config::register_logger!(
    "prometheus",
    PrometheusConfig,
    "the latest metrics for Prometheus's textfile collector, in metrics.prom",
    "{ type = \"prometheus\", path = \"/var/lib/node_exporter/train.prom\" }"
);

struct PrometheusLogger {
    path: PathBuf,
    /// The name of the run's directory.
    run: String,
    latest: BTreeMap<String, f64>,
    step: u64,
}

impl PrometheusLogger {
    fn write(&mut self, running: bool) -> Result<()> {
        let mut text = String::new();
        // Prometheus wants the series of a name together.
        let mut by_name: BTreeMap<String, Vec<(&str, f64)>> = BTreeMap::new();
        for (metric, value) in &self.latest {
            by_name.entry(allowed(metric)).or_default().push((metric, *value));
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64());
        let own = [
            ("step", self.step as f64),
            ("updated_seconds", now),
            ("running", f64::from(u8::from(running))),
        ];
        for (name, value) in own {
            by_name.insert(name.to_owned(), vec![(name, value)]);
        }
        let run = escaped(&self.run);
        for (name, series) in by_name {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "# TYPE fulgurite_{name} gauge");
            for (metric, value) in series {
                let metric = match metric == name {
                    true => String::new(),
                    false => format!(",metric=\"{}\"", escaped(metric)),
                };
                let value = number(value);
                let _ = writeln!(text, "fulgurite_{name}{{run=\"{run}\"{metric}}} {value}");
            }
        }
        let name = self.path.file_name().map_or_else(Default::default, |name| name.to_owned());
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        // A collector ignores hidden files.
        let temporary = self.path.with_file_name(hidden);
        std::fs::write(&temporary, text).map_err(Error::io("writing the metrics", &temporary))?;
        std::fs::rename(&temporary, &self.path)
            .map_err(Error::io("replacing the metrics", &self.path))
    }
}

/// A metric's name with the characters that Prometheus allows after the first.
fn allowed(name: &str) -> String {
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '_';
    name.chars().map(|c| if allowed(c) { c } else { '_' }).collect()
}

fn escaped(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn number(value: f64) -> String {
    match value {
        f64::INFINITY => "+Inf".to_owned(),
        f64::NEG_INFINITY => "-Inf".to_owned(),
        value => value.to_string(),
    }
}

impl Logger for PrometheusLogger {
    fn name(&self) -> &str {
        "prometheus"
    }

    fn log_metrics(&mut self, metrics: &BTreeMap<String, f64>, step: u64) -> Result<()> {
        self.latest.extend(metrics.iter().map(|(name, value)| (name.clone(), *value)));
        self.step = step;
        self.write(true)
    }

    fn save(&mut self) -> Result<()> {
        Ok(())
    }

    fn finalize(&mut self, _status: fulgurite_trainer::trainer::RunStatus) -> Result<()> {
        self.write(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulgurite_trainer::trainer::RunStatus;

    #[test]
    fn latest_metrics_are_gauges() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("version_\"3\"");
        std::fs::create_dir(&run).unwrap();
        let mut logger = PrometheusConfig::default().build(&run).unwrap();
        let metrics = [("val/loss", f64::INFINITY), ("val_loss", 0.5), ("step", 9.0)];
        let metrics = metrics.map(|(name, value)| (name.to_owned(), value)).into();
        logger.log_metrics(&metrics, 1).unwrap();
        logger.log_metrics(&[("val_loss".to_owned(), f64::NAN)].into(), 2).unwrap();
        let read = || {
            let text = std::fs::read_to_string(run.join("metrics.prom")).unwrap();
            let lines = text.lines().filter(|line| !line.starts_with("fulgurite_updated"));
            lines.collect::<Vec<_>>().join("\n")
        };
        insta::assert_snapshot!(read(), @r#"
        # TYPE fulgurite_running gauge
        fulgurite_running{run="version_\"3\""} 1
        # TYPE fulgurite_step gauge
        fulgurite_step{run="version_\"3\""} 2
        # TYPE fulgurite_updated_seconds gauge
        # TYPE fulgurite_val_loss gauge
        fulgurite_val_loss{run="version_\"3\"",metric="val/loss"} +Inf
        fulgurite_val_loss{run="version_\"3\""} NaN
        "#);
        logger.finalize(RunStatus::Success).unwrap();
        assert!(read().contains("fulgurite_running{run=\"version_\\\"3\\\"\"} 0"));
        assert_eq!(std::fs::read_dir(&run).unwrap().count(), 1, "no temporary file stays");
    }

    #[test]
    fn absent_directory_is_named_at_the_start() {
        let dir = tempfile::tempdir().unwrap();
        let config = PrometheusConfig { path: Some(dir.path().join("absent/train.prom")) };
        let error = config.build(dir.path()).err().unwrap().to_string();
        assert!(error.contains("absent"), "{error}");
    }
}
