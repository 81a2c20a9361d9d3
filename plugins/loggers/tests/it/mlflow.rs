//! Tests against a real MLflow server. Needs a Python with MLflow:
//!
//! ```sh
//! python3 -m venv /tmp/mlflow && /tmp/mlflow/bin/pip install mlflow
//! FULGURITE_PYTHON=/tmp/mlflow/bin/python cargo test -p fulgurite-loggers \
//!     --test it mlflow:: -- --ignored
//! ```

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use fulgurite_core::trainer::{LoggerConfig as _, RunStatus};
use fulgurite_loggers::{MlflowConfig, OnError};

/// A server; ends with its processes on drop.
struct Server {
    process: Child,
    uri: String,
}

fn python() -> String {
    std::env::var("FULGURITE_PYTHON").unwrap_or_else(|_| "python3".to_owned())
}

impl Server {
    fn start(dir: &Path) -> Self {
        use std::os::unix::process::CommandExt as _;
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let program = python();
        let mut process = Command::new(&program)
            .args(["-m", "mlflow", "server", "--host", "127.0.0.1", "--workers", "1"])
            .args(["--port", &port.to_string(), "--backend-store-uri", "sqlite:///mlflow.db"])
            .current_dir(dir)
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap_or_else(|e| panic!("{program}: {e}; see this file's beginning"));
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
        let ready =
            lines.by_ref().map_while(Result::ok).any(|line| line.contains("startup complete"));
        assert!(ready, "the server has not started");
        std::thread::spawn(move || lines.for_each(drop));
        Self { process, uri: format!("http://127.0.0.1:{port}") }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let group = self.process.id().to_string();
        let _ = Command::new("kill").args(["-KILL", "--", &format!("-{group}")]).status();
        let _ = self.process.wait();
    }
}

#[test]
#[ignore = "needs a Python with mlflow"]
fn mlflow_shows_what_was_logged() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path());
    let config = MlflowConfig {
        tracking_uri: Some(server.uri.clone()),
        experiment_name: "llama ü".to_owned(),
        tags: [("who".to_owned(), "me".to_owned())].into(),
        on_error: OnError::Error,
        ..MlflowConfig::default()
    };
    // The second run finds the first run's experiment.
    for status in [RunStatus::Failed, RunStatus::Success] {
        let mut logger = config.build(&dir.path().join("version_4")).unwrap();
        let params = toml::toml! { seed = 7
        optimizer = { lr = 0.5, name = "sgd" } };
        logger.log_hyperparams(&params).unwrap();
        for step in 1..=1500 {
            let metrics: BTreeMap<String, f64> = [
                ("train_loss".to_owned(), 1.0 / step as f64),
                ("nan".to_owned(), f64::NAN),
                ("inf".to_owned(), f64::INFINITY),
            ]
            .into();
            logger.log_metrics(&metrics, step).unwrap();
        }
        logger.after_save_checkpoint(Path::new("logs/step-9"), 9).unwrap();
        logger.finalize(status).unwrap();
    }
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/it/read_mlflow.py");
    let read = Command::new(python()).arg(script).arg(&server.uri).status().unwrap();
    assert!(read.success());
}
