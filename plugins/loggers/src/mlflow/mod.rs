//! The logger `mlflow`: a run on an MLflow server, over its REST interface.

mod client;

use std::collections::BTreeMap;
use std::path::Path;

use fulgurite_error::{Error, Result};
use fulgurite_trainer::trainer::{Logger, LoggerConfig, RunStatus};
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};
use toml::{Table, Value};

use self::client::{Client, Credentials};
use crate::remote::{Failure, OnError, Patience, Queue, Receiving, milliseconds, number};

/// `trainer.loggers = [{ type = "mlflow", tracking_uri = "http://127.0.0.1:5000" }]`: metrics, and
/// the configuration as parameters, on an MLflow server. The newest checkpoint is a tag. The
/// credentials come from the variables `MLFLOW_TRACKING_USERNAME` and `MLFLOW_TRACKING_PASSWORD`,
/// or `MLFLOW_TRACKING_TOKEN`.
#[derive(Debug, Clone, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct MlflowConfig {
    /// The server; by default the variable `MLFLOW_TRACKING_URI`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tracking_uri: Option<String>,
    /// The experiment; created if it does not exist.
    #[default("fulgurite_logs".to_owned())]
    pub experiment_name: String,
    /// The run's name; by default the name of its directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_name: Option<String>,
    /// An existing run to continue. It keeps its parameters and name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_id: Option<String>,
    /// Tags of the run.
    pub tags: BTreeMap<String, String>,
    /// The reaction to a server that cannot be reached during training. At the start of the run
    /// this is always an error.
    pub on_error: OnError,
}

#[typetag::serde(name = "mlflow")]
impl LoggerConfig for MlflowConfig {
    fn build(&self, dir: &Path) -> Result<Box<dyn Logger>> {
        Ok(Box::new(MlflowLogger::start(self, dir, Patience::default())?))
    }

    fn check(&self) -> Result<()> {
        let credentials = Credentials::from_environment();
        Client::new(&self.server()?, &credentials, Patience::default().request).map(drop)
    }
}

impl MlflowConfig {
    /// The server's address.
    fn server(&self) -> Result<String> {
        let from_environment = || std::env::var("MLFLOW_TRACKING_URI").ok();
        self.tracking_uri.clone().or_else(from_environment).ok_or_else(|| {
            Error::Config(
                "`trainer.loggers`: the logger `mlflow` needs the address of a server: \
                 `tracking_uri = \"http://127.0.0.1:5000\"`, or the variable MLFLOW_TRACKING_URI"
                    .to_owned(),
            )
        })
    }
}

fulgurite_config::register_logger!(
    "mlflow",
    MlflowConfig,
    "a run on an MLflow server: metrics, and the configuration as parameters",
    "{ type = \"mlflow\", tracking_uri = \"http://127.0.0.1:5000\", experiment_name = \"llama\" }"
);

/// MLflow's limits for one call.
const MAX_METRICS: usize = 1000;
const MAX_OTHERS: usize = 100;
/// Maximum length of a parameter's value in MLflow.
const MAX_VALUE: usize = 6000;

/// A value to be logged.
#[derive(Debug)]
enum Item {
    Metric { key: String, value: f64, timestamp: u64, step: u64 },
    Param { key: String, value: String },
    Tag { key: String, value: String },
}

/// A run on a server.
struct Run {
    client: Client,
    id: String,
}

/// The content of one call.
#[derive(Default)]
struct Batch {
    metrics: Vec<Json>,
    params: Vec<Json>,
    tags: Vec<Json>,
}

impl Batch {
    fn is_full(&self) -> bool {
        self.metrics.len() + self.params.len() + self.tags.len() >= MAX_METRICS
            || self.params.len() >= MAX_OTHERS
            || self.tags.len() >= MAX_OTHERS
    }

    fn add(&mut self, item: &Item) {
        match item {
            Item::Metric { key, value, timestamp, step } => self.metrics.push(json!({
                "key": key, "value": number(*value), "timestamp": timestamp, "step": step,
            })),
            Item::Param { key, value } => self.params.push(json!({ "key": key, "value": value })),
            Item::Tag { key, value } => self.tags.push(json!({ "key": key, "value": value })),
        }
    }
}

impl Receiving for Run {
    type Item = Item;

    const NAME: &'static str = "MLflow";
    const MAX_ITEMS: usize = MAX_METRICS;

    fn send(&self, items: &[Item]) -> Result<(), Failure> {
        let mut taken = 0;
        while taken < items.len() {
            let (mut batch, mut end) = (Batch::default(), taken);
            while !batch.is_full()
                && let Some(item) = items.get(end)
            {
                batch.add(item);
                end += 1;
            }
            let body = json!({
                "run_id": self.id,
                "metrics": batch.metrics, "params": batch.params, "tags": batch.tags,
            });
            self.client.log_batch(&body).map_err(|failure| Failure { taken, ..failure })?;
            taken = end;
        }
        Ok(())
    }

    fn end(&self, status: RunStatus, time: u64) -> Result<(), Failure> {
        let status = match status {
            RunStatus::Success => "FINISHED",
            RunStatus::Interrupted => "KILLED",
            RunStatus::Failed => "FAILED",
        };
        self.client.end_run(&self.id, status, time)
    }
}

struct MlflowLogger {
    queue: Queue<Run>,
    /// Whether the run existed before; its parameters cannot be changed.
    continues: bool,
}

impl MlflowLogger {
    /// Creates or resumes the run on the server.
    fn start(config: &MlflowConfig, dir: &Path, patience: Patience) -> Result<Self> {
        let uri = config.server()?;
        let client = Client::new(&uri, &Credentials::from_environment(), patience.request)?;
        let run_id = match &config.run_id {
            Some(id) => {
                client.resume_run(id)?;
                id.clone()
            }
            None => {
                let experiment = client.experiment(&config.experiment_name)?;
                let of_dir = dir.file_name().map(|name| name.to_string_lossy().into_owned());
                let name = config.run_name.clone().or(of_dir).unwrap_or_default();
                client.create_run(&experiment, &name, milliseconds())?
            }
        };
        let queue = Queue::start(Run { client, id: run_id }, config.on_error, patience)?;
        for (key, value) in &config.tags {
            queue.put(Item::Tag { key: key.clone(), value: value.clone() })?;
        }
        Ok(Self { queue, continues: config.run_id.is_some() })
    }
}

impl Logger for MlflowLogger {
    fn name(&self) -> &str {
        "mlflow"
    }

    fn log_hyperparams(&mut self, params: &Table) -> Result<()> {
        if self.continues {
            return Ok(());
        }
        let mut flat = Vec::new();
        flatten("", params, &mut flat);
        flat.into_iter().try_for_each(|(key, value)| self.queue.put(Item::Param { key, value }))
    }

    fn log_metrics(&mut self, metrics: &BTreeMap<String, f64>, step: u64) -> Result<()> {
        let timestamp = milliseconds();
        metrics.iter().try_for_each(|(name, &value)| {
            self.queue.put(Item::Metric { key: key(name), value, timestamp, step })
        })
    }

    fn after_save_checkpoint(&mut self, path: &Path, step: u64) -> Result<()> {
        let value = format!("step {step}: {}", path.display());
        self.queue.put(Item::Tag { key: "fulgurite.checkpoint".to_owned(), value })
    }

    /// Does nothing: the queue's thread sends the logged values.
    fn save(&mut self) -> Result<()> {
        Ok(())
    }

    fn finalize(&mut self, status: RunStatus) -> Result<()> {
        self.queue.finish(status)
    }
}

/// Replaces characters that MLflow does not allow in names, and shortens the name.
fn key(name: &str) -> String {
    let fits = |c: char| c.is_alphanumeric() || "_-. :/".contains(c);
    name.chars().map(|c| if fits(c) { c } else { '_' }).take(250).collect()
}

/// Flattens a table into parameters with dotted names.
fn flatten(prefix: &str, table: &Table, flat: &mut Vec<(String, String)>) {
    for (name, value) in table {
        let name = format!("{prefix}{name}");
        let mut value = match value {
            Value::Table(inner) => {
                flatten(&format!("{name}."), inner, flat);
                continue;
            }
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let end = (0..=value.len().min(MAX_VALUE)).rev().find(|&end| value.is_char_boundary(end));
        value.truncate(end.unwrap_or(0));
        flat.push((key(&name), value));
    }
}

#[cfg(test)]
mod tests;
