//! The logger `jsonl`: one JSON object per line, in `metrics.jsonl`.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use fulgurite_error::{Error, Result};
use fulgurite_trainer::trainer::{Logger, LoggerConfig};
use serde::{Deserialize, Serialize};

/// `trainer.loggers = ["jsonl"]`: `metrics.jsonl` in the run's directory, with lines such as
/// `{"step":1,"lr":0.001,"train_loss":3.5}`. Non-finite numbers are `null`. A logged text has its
/// own line.
#[derive(Debug, Clone, Default, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields)]
pub struct JsonlConfig {}

#[typetag::serde(name = "jsonl")]
impl LoggerConfig for JsonlConfig {
    fn build(&self, dir: &Path) -> Result<Box<dyn Logger>> {
        let path = dir.join("metrics.jsonl");
        let file = OpenOptions::new()
            .append(true)
            .create(true)
            .open(&path)
            .map_err(Error::io("opening the log", &path))?;
        Ok(Box::new(JsonlLogger { path, file }))
    }
}

fulgurite_config::register_logger!(
    "jsonl",
    JsonlConfig,
    "metrics.jsonl in the run's directory, a JSON object a line",
    "\"jsonl\""
);

struct JsonlLogger {
    path: PathBuf,
    file: File,
}

impl Logger for JsonlLogger {
    fn name(&self) -> &str {
        "jsonl"
    }

    fn log_metrics(&mut self, metrics: &BTreeMap<String, f64>, step: u64) -> Result<()> {
        let mut line = format!("{{\"step\":{step}");
        for (name, value) in metrics.iter().filter(|(name, _)| *name != "step") {
            let name = serde_json::to_string(name).map_err(Error::other)?;
            let value = serde_json::to_string(value).map_err(Error::other)?;
            line += &format!(",{name}:{value}");
        }
        line += "}\n";
        // One write per line, so that readers see whole lines.
        self.file.write_all(line.as_bytes()).map_err(Error::io("writing the log", &self.path))
    }

    fn writes_texts(&self) -> bool {
        true
    }

    /// Writes a line with the text under its name.
    fn log_text(&mut self, name: &str, text: &str, step: u64) -> Result<()> {
        let encode = |text| serde_json::to_string(text).map_err(Error::other);
        let line = format!("{{\"step\":{step},{}:{}}}\n", encode(name)?, encode(text)?);
        self.file.write_all(line.as_bytes()).map_err(Error::io("writing the log", &self.path))
    }

    fn save(&mut self) -> Result<()> {
        self.file.flush().map_err(Error::io("writing the log", &self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_is_a_line_of_valid_json() {
        let dir = tempfile::tempdir().unwrap();
        let mut logger = JsonlConfig {}.build(dir.path()).unwrap();
        let metrics = [("train_loss", f64::INFINITY), ("a\"b", 0.5)];
        let metrics = metrics.map(|(name, value)| (name.to_owned(), value)).into();
        logger.log_metrics(&metrics, 1).unwrap();
        logger.log_metrics(&BTreeMap::new(), 2).unwrap();
        logger.log_text("sample", "\"Once\"\nupon", 2).unwrap();
        let text = std::fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap();
        insta::assert_snapshot!(text, @r#"
{"step":1,"a\"b":0.5,"train_loss":null}
{"step":2}
{"step":2,"sample":"\"Once\"\nupon"}
"#);
        for line in text.lines() {
            assert!(serde_json::from_str::<serde_json::Value>(line).unwrap().is_object());
        }
    }
}
