//! Loggers, and the directory of a run.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use toml::Table;

use super::{Event, EventSink, Histogram, RunStatus};
use crate::{Error, Result};
use fulgurite_config::to_toml;

/// Writes a run's metrics. Exists on rank 0 only.
pub trait Logger: Send {
    /// The logger's name: its `type` in the configuration.
    fn name(&self) -> &str;

    /// Logs the resolved configuration. Called once, before the first metrics. The default leaves it
    /// out: `config.toml` in the run's directory has it.
    ///
    /// # Errors
    /// If it cannot be written.
    fn log_hyperparams(&mut self, params: &Table) -> Result<()> {
        let _ = params;
        Ok(())
    }

    /// Logs metrics of one optimizer step (counted from 1). Called once with the metrics of
    /// training, and once with those of validation if the step has one.
    ///
    /// # Errors
    /// If they cannot be written.
    fn log_metrics(&mut self, metrics: &BTreeMap<String, f64>, step: u64) -> Result<()>;

    /// Logs a text, such as a generated sample, which may be Markdown. The text `data` of step 0 is
    /// the data report. The default leaves texts out.
    ///
    /// # Errors
    /// If it cannot be written.
    fn log_text(&mut self, name: &str, text: &str, step: u64) -> Result<()> {
        let _ = (name, text, step);
        Ok(())
    }

    /// Logs how values are distributed. The default leaves it out.
    ///
    /// # Errors
    /// If it cannot be written.
    fn log_histogram(&mut self, name: &str, histogram: &Histogram, step: u64) -> Result<()> {
        let _ = (name, histogram, step);
        Ok(())
    }

    /// Called when a training begins after step `step`: 0, or that of the checkpoint it goes on from.
    /// Whatever an earlier training has logged of later steps is void. Not called for a validation or a
    /// test. The default does nothing, for each run writes to a directory of its own.
    ///
    /// # Errors
    /// If it cannot be written.
    fn begin_training(&mut self, step: u64) -> Result<()> {
        let _ = step;
        Ok(())
    }

    /// Called after a checkpoint of step `step` was committed at `path`, after
    /// [`save`](Self::save): all of it is there, and may be uploaded. The default does nothing.
    ///
    /// # Errors
    /// If it cannot be used; this ends the run.
    fn after_save_checkpoint(&mut self, path: &Path, step: u64) -> Result<()> {
        let _ = (path, step);
        Ok(())
    }

    /// Flushes buffers. Called after each checkpoint, and at the end.
    ///
    /// # Errors
    /// If it cannot be written.
    fn save(&mut self) -> Result<()>;

    /// Called once at the end of the run, also after an error.
    ///
    /// # Errors
    /// If what was buffered cannot be written.
    fn finalize(&mut self, status: RunStatus) -> Result<()> {
        let _ = status;
        self.save()
    }
}

/// A logger's configuration: `trainer.loggers = ["csv", { type = "jsonl" }]`.
#[typetag::serde(tag = "type")]
pub trait LoggerConfig: std::fmt::Debug + Send + Sync {
    /// Builds the logger. `dir` is the run's directory, which exists. Called on rank 0 only.
    ///
    /// # Errors
    /// If an option is wrong or a file cannot be created.
    fn build(&self, dir: &Path) -> Result<Box<dyn Logger>>;
}

fulgurite_config::plugin_kind!(
    dyn LoggerConfig,
    fulgurite_config::registry::kind::LOGGER,
    "trainer.loggers"
);

/// Sends events to loggers: every validation, and the steps 1, n, 2n, ….
pub(crate) struct LoggerSink {
    loggers: Vec<Box<dyn Logger>>,
    every_n_steps: u64,
    /// The step that the run goes on from.
    resumed: u64,
    /// What went wrong in a call that cannot return it.
    error: Option<Error>,
}

impl LoggerSink {
    /// A sink for these loggers, to which it logs `params`. `every_n_steps` is at least 1.
    ///
    /// # Errors
    /// If a logger cannot write.
    pub(super) fn new(
        mut loggers: Vec<Box<dyn Logger>>,
        every_n_steps: u64,
        params: &Table,
    ) -> Result<Self> {
        for logger in &mut loggers {
            logger.log_hyperparams(params)?;
        }
        Ok(Self { loggers, every_n_steps: every_n_steps.max(1), resumed: 0, error: None })
    }
}

impl EventSink for LoggerSink {
    fn start(&mut self, _max_steps: Option<u64>) {
        let step = self.resumed;
        self.error = self.loggers.iter_mut().find_map(|logger| logger.begin_training(step).err());
    }

    fn event(&mut self, event: &Event) -> Result<()> {
        self.error.take().map_or(Ok(()), Err)?;
        if let Event::Resume { step, .. } = event {
            self.resumed = *step;
        }
        if let Event::Step { step, .. } = event
            && *step != 1
            && !step.is_multiple_of(self.every_n_steps)
        {
            return Ok(());
        }
        if let Some((step, scalars)) = event.scalars() {
            for logger in &mut self.loggers {
                logger.log_metrics(&scalars, step)?;
            }
        }
        let mut each = |act: &dyn Fn(&mut dyn Logger) -> Result<()>| {
            self.loggers.iter_mut().try_for_each(|logger| act(&mut **logger))
        };
        match event {
            Event::Data(report) => {
                let text = report.to_string();
                each(&|logger| logger.log_text("data", &text, 0))
            }
            Event::Text { step, name, text } => each(&|logger| logger.log_text(name, text, *step)),
            Event::Histogram { step, name, histogram } => {
                each(&|logger| logger.log_histogram(name, histogram, *step))
            }
            Event::Checkpoint { step, path, .. } => each(&|logger| {
                logger.save()?;
                logger.after_save_checkpoint(path, *step)
            }),
            _ => Ok(()),
        }
    }

    fn finish(&mut self, status: RunStatus) -> Result<()> {
        // Every logger is finalized, even if an earlier one fails.
        let results: Vec<_> = self.loggers.iter_mut().map(|l| l.finalize(status)).collect();
        results.into_iter().collect()
    }
}

/// The directory of one run: `version_N` under `trainer.default_root_dir`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RunDir {
    path: PathBuf,
    version: u64,
}

impl RunDir {
    /// Makes the next free version under `root`, with the resolved configuration in `config.toml`.
    /// Called on rank 0 only. Programs that call it at the same time get different versions.
    ///
    /// # Errors
    /// [`Error::Io`] if something cannot be created.
    pub(super) fn create(root: &Path, config: &Table) -> Result<Self> {
        std::fs::create_dir_all(root).map_err(Error::io("creating the directory", root))?;
        let mut version = Self::next_version(root)?;
        loop {
            let path = root.join(format!("version_{version}"));
            match std::fs::create_dir(&path) {
                Ok(()) => {
                    let file = path.join("config.toml");
                    std::fs::write(&file, to_toml(config)?)
                        .map_err(Error::io("writing the configuration", file))?;
                    return Ok(Self { path, version });
                }
                Err(error) if error.kind() == ErrorKind::AlreadyExists => version += 1,
                Err(error) => return Err(Error::io("creating the run's directory", path)(error)),
            }
        }
    }

    /// The name of the file with the id of the job that a run belongs to.
    const JOB_FILE: &'static str = "job";

    /// Notes that the run in this directory trains as a part of a job that a launcher has started. Called on
    /// rank 0 only.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be written.
    pub(super) fn set_job(path: &Path, job_id: &str) -> Result<()> {
        let file = path.join(Self::JOB_FILE);
        std::fs::write(&file, job_id).map_err(Error::io("writing the id of the job", file))
    }

    /// The id of the job that this run [is a part of](Self::set_job).
    pub(super) fn job(&self) -> Option<String> {
        std::fs::read_to_string(self.path.join(Self::JOB_FILE)).ok()
    }

    fn next_version(root: &Path) -> Result<u64> {
        let newest = Self::all(root)?.first().map(|run| run.version.saturating_add(1));
        Ok(newest.unwrap_or(0))
    }

    /// The runs under `root`, the newest first.
    ///
    /// # Errors
    /// [`Error::Io`] if `root` cannot be listed.
    pub(super) fn all(root: &Path) -> Result<Vec<Self>> {
        let entries = std::fs::read_dir(root).map_err(Error::io("listing", root))?;
        let mut runs = Vec::new();
        for entry in entries {
            let entry = entry.map_err(Error::io("listing", root))?;
            let name = entry.file_name();
            let version = name.to_str().and_then(|name| name.strip_prefix("version_"));
            if let Some(version) = version.and_then(|version| version.parse().ok()) {
                runs.push(Self { path: entry.path(), version });
            }
        }
        runs.sort_unstable_by_key(|run| std::cmp::Reverse(run.version));
        Ok(runs)
    }

    /// The default directory of its checkpoints.
    pub(super) fn checkpoints(&self) -> PathBuf {
        Self::checkpoints_in(&self.path)
    }

    /// As [`checkpoints`](Self::checkpoints), of the run with this directory.
    pub(super) fn checkpoints_in(path: &Path) -> PathBuf {
        path.join("checkpoints")
    }

    /// The directory.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[test]
    fn versions_follow_one_another_and_hold_the_configuration() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().join("logs");
        let config = toml::toml! { seed = 7 };
        assert_eq!(RunDir::create(&root, &config).unwrap().version, 0);
        std::fs::create_dir(root.join("version_10")).unwrap();
        std::fs::create_dir(root.join("version_x")).unwrap();
        let run = RunDir::create(&root, &config).unwrap();
        assert_eq!(run.path(), root.join("version_11"));
        let versions: Vec<_> = RunDir::all(&root).unwrap().iter().map(|run| run.version).collect();
        assert_eq!(versions, [11, 10, 0]);
        let written = std::fs::read_to_string(run.path().join("config.toml")).unwrap();
        assert_eq!(written, "seed = 7\n");
    }

    #[test]
    fn a_root_that_is_a_file_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = RunDir::create(file.path(), &Table::new()).unwrap_err().to_string();
        assert!(error.contains(&file.path().display().to_string()), "{error}");
    }

    #[derive(Clone, Default)]
    struct Recorder(Arc<Mutex<Vec<String>>>);

    impl Logger for Recorder {
        fn name(&self) -> &str {
            "recorder"
        }

        fn log_hyperparams(&mut self, params: &Table) -> Result<()> {
            self.0.lock().unwrap().push(format!("params {params:?}"));
            Ok(())
        }

        fn log_metrics(&mut self, metrics: &BTreeMap<String, f64>, step: u64) -> Result<()> {
            let names: Vec<_> = metrics.keys().cloned().collect();
            self.0.lock().unwrap().push(format!("{step}: {}", names.join(" ")));
            Ok(())
        }

        fn begin_training(&mut self, step: u64) -> Result<()> {
            self.0.lock().unwrap().push(format!("after {step}"));
            Ok(())
        }

        fn log_text(&mut self, name: &str, text: &str, step: u64) -> Result<()> {
            self.0.lock().unwrap().push(format!("{step}: {name} = {text}"));
            Ok(())
        }

        fn log_histogram(&mut self, name: &str, histogram: &Histogram, step: u64) -> Result<()> {
            self.0.lock().unwrap().push(format!("{step}: {name} of {}", histogram.count()));
            Ok(())
        }

        fn after_save_checkpoint(&mut self, path: &Path, step: u64) -> Result<()> {
            self.0.lock().unwrap().push(format!("{step}: saved {}", path.display()));
            Ok(())
        }

        fn save(&mut self) -> Result<()> {
            self.0.lock().unwrap().push("save".to_owned());
            match self.0.lock().unwrap().iter().filter(|call| *call == "save").count() {
                1 => Ok(()),
                _ => Err(Error::other("disk full")),
            }
        }
    }

    #[test]
    fn the_sink_thins_out_steps_and_finishes_all_loggers() {
        let (first, second) = (Recorder::default(), Recorder::default());
        let loggers: Vec<Box<dyn Logger>> = vec![Box::new(first.clone()), Box::new(second.clone())];
        let mut sink = LoggerSink::new(loggers, 3, &Table::new()).unwrap();
        sink.event(&Event::Resume { step: 2, path: PathBuf::from("step-2") }).unwrap();
        sink.start(Some(6));
        for step in 1..=6 {
            let metrics = BTreeMap::from([("acc".to_owned(), 0.5)]);
            sink.event(&Event::Step {
                step,
                epoch: 0.0,
                train_loss: 1.0,
                grad_norm: 1.0,
                lr: 0.1,
                tokens_per_s: 1.0,
                metrics,
            })
            .unwrap();
        }
        sink.event(&Event::Validation {
            step: 6,
            val_loss: 1.0,
            batches: 1,
            metrics: BTreeMap::new(),
        })
        .unwrap();
        let name = "sample".to_owned();
        sink.event(&Event::Text { step: 6, name, text: "*once*".to_owned() }).unwrap();
        let histogram = Histogram::of_values([1.0, 2.0]);
        sink.event(&Event::Histogram { step: 6, name: "grads".to_owned(), histogram }).unwrap();
        let path = PathBuf::from("step-6");
        sink.event(&Event::Checkpoint { step: 6, path, blocked_s: 0.0 }).unwrap();
        assert_eq!(sink.finish(RunStatus::Failed).unwrap_err().to_string(), "disk full");
        let all = "acc epoch grad_norm lr tokens_per_s train_loss";
        let expected = vec![
            "params {}".to_owned(),
            "after 2".to_owned(),
            format!("1: {all}"),
            format!("3: {all}"),
            format!("6: {all}"),
            "6: val_loss".to_owned(),
            "6: sample = *once*".to_owned(),
            "6: grads of 2".to_owned(),
            "save".to_owned(),
            "6: saved step-6".to_owned(),
            "save".to_owned(),
        ];
        assert_eq!(*first.0.lock().unwrap(), expected);
        assert_eq!(*second.0.lock().unwrap(), expected);
    }
}
