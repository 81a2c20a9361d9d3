//! The logger `tensorboard`: event files for TensorBoard.
//!
//! Implemented without TensorFlow: [`record`] frames, [`event`] builds messages, [`protobuf`]
//! encodes them.

mod event;
mod heat_map;
mod protobuf;
mod record;

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use fulgurite_error::{Error, Result};
use fulgurite_trainer::metric::MetricTable;
use fulgurite_trainer::trainer::{Histogram, Logger, LoggerConfig, RunStatus};
use serde::{Deserialize, Serialize};

use self::protobuf::Message;

/// `trainer.loggers = ["tensorboard"]`: an event file in the run's directory, with scalars, texts,
/// histograms, tables as pictures, and the configuration as hyper-parameters.
/// `tensorboard --logdir fulgurite_logs` shows every run below that directory, also while it runs:
/// each event is written at once and whole.
#[derive(Debug, Clone, Default, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct TensorboardConfig {
    /// The directory of the event file; by default the run's. A resumed run with the same directory
    /// continues the curves of the previous run: values logged after the checkpoint are void.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dir: Option<PathBuf>,
}

#[typetag::serde(name = "tensorboard")]
impl LoggerConfig for TensorboardConfig {
    fn build(&self, dir: &Path) -> Result<Box<dyn Logger>> {
        Ok(Box::new(TensorboardLogger::open(self.dir.as_deref().unwrap_or(dir))?))
    }
}

fulgurite_config::register_logger!(
    "tensorboard",
    TensorboardConfig,
    "event files for TensorBoard: scalars, texts, histograms, hyper-parameters",
    "{ type = \"tensorboard\", dir = \"tb/first\" }"
);

struct TensorboardLogger {
    path: PathBuf,
    file: File,
}

impl TensorboardLogger {
    /// Opens a new event file in `dir`; creates the directory if it does not exist.
    fn open(dir: &Path) -> Result<Self> {
        std::fs::create_dir_all(dir).map_err(Error::io("creating the directory", dir))?;
        let prefix = "events.out.tfevents.";
        // TensorBoard reads files in the order of their names, and a clock may have gone back.
        let time = now().max(newest(dir, prefix).map_or(0.0, |newest| newest as f64 + 1.0));
        let (host, pid) = (host_name(), std::process::id());
        let mut number = 0;
        loop {
            let path = dir.join(format!("{prefix}{:010}.{host}.{pid}.{number}", time as u64));
            match OpenOptions::new().append(true).create_new(true).open(&path) {
                Ok(file) => {
                    let mut logger = Self { path, file };
                    logger.write(&event::version(time))?;
                    return Ok(logger);
                }
                Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
                Err(error) => return Err(Error::io("opening the log", path)(error)),
            }
        }
    }

    /// Writes the values of a step.
    fn log(&mut self, step: u64, values: impl IntoIterator<Item = Message>) -> Result<()> {
        self.write(&event::summary(now(), step, values))
    }

    /// Writes an event in one call, so that readers see whole events.
    fn write(&mut self, event: &[u8]) -> Result<()> {
        self.file.write_all(&record::frame(event)).map_err(Error::io("writing the log", &self.path))
    }
}

/// The time in the name of a directory's newest event file.
fn newest(dir: &Path, prefix: &str) -> Option<u64> {
    let names = std::fs::read_dir(dir).ok()?.flatten().map(|entry| entry.file_name());
    let time = |name: std::ffi::OsString| {
        let rest = name.to_str()?.strip_prefix(prefix)?;
        rest.split('.').next()?.parse().ok()
    };
    names.filter_map(time).max()
}

impl Logger for TensorboardLogger {
    fn name(&self) -> &str {
        "tensorboard"
    }

    fn log_hyperparams(&mut self, params: &toml::Table) -> Result<()> {
        let time = now();
        self.write(&event::summary(time, 0, [event::session_start(time, params)]))
    }

    fn log_metrics(&mut self, metrics: &BTreeMap<String, f64>, step: u64) -> Result<()> {
        if metrics.is_empty() {
            return Ok(());
        }
        let values = metrics.iter().map(|(name, value)| event::scalar(name, *value));
        self.log(step, values)
    }

    fn writes_texts(&self) -> bool {
        true
    }

    fn writes_histograms(&self) -> bool {
        true
    }

    fn log_text(&mut self, name: &str, text: &str, step: u64) -> Result<()> {
        self.log(step, [event::text(name, text)])
    }

    fn log_histogram(&mut self, name: &str, histogram: &Histogram, step: u64) -> Result<()> {
        self.log(step, [event::histogram(name, histogram)])
    }

    /// Writes the table as a picture, with its numbers as the text `NAME/numbers`.
    fn log_table(&mut self, name: &str, table: &MetricTable, step: u64) -> Result<()> {
        let picture = heat_map::heat_map(table)?;
        let numbers = event::text(&format!("{name}/numbers"), &table.to_markdown());
        self.log(step, [event::picture(name, picture.size, &picture.png), numbers])
    }

    /// Writes a session start. TensorBoard then drops later steps in other files of the directory,
    /// unless this is the first session start there.
    fn begin_training(&mut self, step: u64) -> Result<()> {
        self.write(&event::session(now(), step + 1))
    }

    fn save(&mut self) -> Result<()> {
        self.file.flush().map_err(Error::io("writing the log", &self.path))
    }

    fn finalize(&mut self, status: RunStatus) -> Result<()> {
        let time = now();
        self.write(&event::summary(time, 0, [event::session_end(time, status)]))?;
        self.save()
    }
}

/// Seconds since 1970.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// The host's name, limited to 64 characters that are safe in a file name.
fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let fits = |c: &char| c.is_ascii_alphanumeric() || *c == '-';
    let name: String = name.trim().chars().filter(fits).take(64).collect();
    if name.is_empty() { "localhost".to_owned() } else { name }
}

#[cfg(test)]
mod tests;
