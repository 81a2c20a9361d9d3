//! Tests against the real TensorBoard. Needs a Python with TensorBoard:
//!
//! ```sh
//! python3 -m venv /tmp/tb && /tmp/tb/bin/pip install tensorboard
//! FULGURITE_PYTHON=/tmp/tb/bin/python cargo test -p fulgurite-loggers \
//!     --test it tensorboard:: -- --ignored
//! ```

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use fulgurite_core::metric::MetricTable;
use fulgurite_core::trainer::{Histogram, LoggerConfig as _, RunStatus};
use fulgurite_loggers::TensorboardConfig;

/// Writes a run with everything in it: 20 steps, the last 10 repeated by a resumed run.
fn write(root: &Path) {
    let config = TensorboardConfig { dir: Some(root.join("resumed")) };
    let log = |from: u64, to: u64, offset: f64| {
        let mut logger = config.build(root).unwrap();
        logger
            .log_hyperparams(&toml::toml! { seed = 7
            optimizer = { lr = 0.5, name = "sgd" } })
            .unwrap();
        logger.begin_training(from).unwrap();
        for step in from + 1..=to {
            let metrics: BTreeMap<String, f64> = [
                ("train_loss".to_owned(), offset + 1.0 / step as f64),
                ("nan".to_owned(), f64::NAN),
            ]
            .into();
            logger.log_metrics(&metrics, step).unwrap();
        }
        logger
    };
    // Killed: nothing is finalized. Step 20 is logged, and will be logged again.
    drop(log(0, 20, 0.0));
    // A validation in between invalidates nothing.
    let mut validation = config.build(root).unwrap();
    validation.log_metrics(&[("val_loss".to_owned(), 0.5)].into(), 3).unwrap();
    validation.finalize(RunStatus::Success).unwrap();
    let mut logger = log(10, 20, 100.0);
    logger.log_text("sample", "*Once* upon ü", 20).unwrap();
    let values = (0..1000).map(|i| f64::from(i) / 100.0 - 5.0);
    logger.log_histogram("weights", &Histogram::of_values(values), 20).unwrap();
    let names = ["cat".to_owned(), "dog".to_owned()];
    let table = MetricTable::new(["target", "prediction"], &names, &names, &[3.0, 1.0, 0.0, 2.0]);
    logger.log_table("val_confusion", &table.unwrap(), 20).unwrap();
    logger.finalize(RunStatus::Success).unwrap();
}

#[test]
#[ignore = "needs a Python with tensorboard"]
fn tensorboard_shows_what_was_logged() {
    let root = tempfile::tempdir().unwrap();
    write(root.path());
    let program = std::env::var("FULGURITE_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/it/read_tensorboard.py");
    let status = Command::new(&program)
        .arg(script)
        .arg(root.path())
        .status()
        .unwrap_or_else(|e| panic!("{program}: {e}; see this file's beginning"));
    assert!(status.success());
}
