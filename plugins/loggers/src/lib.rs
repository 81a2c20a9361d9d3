//! Loggers and event sinks: the loggers `csv`, `jsonl`, `tensorboard`, `mlflow`, `prometheus` and
//! `otlp`, and the sinks [`ProgressBar`] (for people) and [`JsonLines`] (for programs).
//!
//! ```
//! use fulgurite_core::config::PluginValue;
//! use fulgurite_core::registry::kind;
//! use fulgurite_core::trainer::LoggerConfig;
//! use fulgurite_loggers as _; // links the loggers, so that they can be named
//!
//! let config: Box<dyn LoggerConfig> =
//!     PluginValue::new("csv").build(kind::LOGGER, "trainer.loggers[0]")?;
//! let dir = tempfile::tempdir().unwrap();
//! let mut logger = config.build(dir.path())?;
//! logger.log_metrics(&[("train_loss".to_owned(), 3.5)].into(), 1)?;
//! let text = std::fs::read_to_string(dir.path().join("metrics.csv")).unwrap();
//! assert_eq!(text, "step,train_loss\n1,3.5\n");
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

mod csv;
mod json_lines;
mod jsonl;
mod mlflow;
mod otlp;
mod progress;
mod prometheus;
mod remote;
mod tensorboard;
#[cfg(test)]
mod test_server;

pub use crate::csv::CsvConfig;
pub use json_lines::JsonLines;
pub use jsonl::JsonlConfig;
pub use mlflow::MlflowConfig;
pub use otlp::OtlpConfig;
pub use progress::ProgressBar;
pub use prometheus::PrometheusConfig;
pub use remote::OnError;
pub use tensorboard::TensorboardConfig;
