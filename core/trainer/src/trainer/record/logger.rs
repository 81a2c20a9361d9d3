//! Loggers, and the sink that passes events to them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use toml::Table;

use crate::metric::MetricTable;
use crate::trainer::{Event, EventSink, Histogram, RunStatus};
use crate::{Error, Result};

/// Writes a run's metrics. Exists only on rank 0.
pub trait Logger: Send {
    /// The logger's name: its `type` in the configuration.
    fn name(&self) -> &str;

    /// Logs the resolved configuration. Called once, before the first metrics.
    ///
    /// The default does nothing: the run's directory contains `config.toml`.
    ///
    /// # Errors
    /// If it cannot be written.
    fn log_hyperparams(&mut self, params: &Table) -> Result<()> {
        let _ = params;
        Ok(())
    }

    /// Logs metrics of one optimizer step (counted from 1).
    ///
    /// Called once with the metrics of training, and once with those of validation if the step has
    /// one.
    ///
    /// # Errors
    /// If they cannot be written.
    fn log_metrics(&mut self, metrics: &BTreeMap<String, f64>, step: u64) -> Result<()>;

    /// Returns whether [`log_text`](Self::log_text) writes texts. The default is false.
    ///
    /// If no logger of a run writes texts, a warning says that they are dropped.
    fn writes_texts(&self) -> bool {
        false
    }

    /// Returns whether [`log_histogram`](Self::log_histogram) writes histograms, as
    /// [`writes_texts`](Self::writes_texts).
    fn writes_histograms(&self) -> bool {
        false
    }

    /// Logs a text, such as a generated sample, which may be Markdown.
    ///
    /// The text `data` of step 0 is the data report. The default drops texts.
    ///
    /// # Errors
    /// If it cannot be written.
    fn log_text(&mut self, name: &str, text: &str, step: u64) -> Result<()> {
        let _ = (name, text, step);
        Ok(())
    }

    /// Logs a histogram. The default drops it.
    ///
    /// # Errors
    /// If it cannot be written.
    fn log_histogram(&mut self, name: &str, histogram: &Histogram, step: u64) -> Result<()> {
        let _ = (name, histogram, step);
        Ok(())
    }

    /// Logs a table, such as a confusion matrix.
    ///
    /// The default drops it: `events.jsonl` in the run's directory has every table.
    ///
    /// # Errors
    /// If it cannot be written.
    fn log_table(&mut self, name: &str, table: &MetricTable, step: u64) -> Result<()> {
        let _ = (name, table, step);
        Ok(())
    }

    /// Called when a training begins after step `step`: 0, or the step of the resumed checkpoint.
    ///
    /// Values of later steps from an earlier training are void. Not called for a validation or a
    /// test. The default does nothing, because each run writes to its own directory.
    ///
    /// # Errors
    /// If it cannot be written.
    fn begin_training(&mut self, step: u64) -> Result<()> {
        let _ = step;
        Ok(())
    }

    /// Called after a checkpoint of step `step` was committed at `path`, after
    /// [`save`](Self::save).
    ///
    /// The checkpoint is complete and may be uploaded. The default does nothing.
    ///
    /// # Errors
    /// If the checkpoint cannot be used; this ends the run.
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
    /// If buffered data cannot be written.
    fn finalize(&mut self, status: RunStatus) -> Result<()> {
        let _ = status;
        self.save()
    }
}

/// A logger's configuration: `trainer.loggers = ["csv", { type = "jsonl" }]`.
#[typetag::serde(tag = "type")]
pub trait LoggerConfig: std::fmt::Debug + Send + Sync {
    /// Builds the logger. `dir` is the run's directory, which exists. Called only on rank 0.
    ///
    /// # Errors
    /// If an option is wrong or a file cannot be created.
    fn build(&self, dir: &Path) -> Result<Box<dyn Logger>>;

    /// Checks the options without writing or connecting, before any rank is started.
    ///
    /// The default accepts all options.
    ///
    /// # Errors
    /// If an option is wrong.
    fn check(&self) -> Result<()> {
        Ok(())
    }
}

fulgurite_config::plugin_kind!(
    dyn LoggerConfig,
    fulgurite_config::registry::kind::LOGGER,
    "trainer.loggers"
);

/// Sends events to loggers: every validation, the steps 1, n, 2n, …, and the last step, however the
/// run ends.
pub(crate) struct LoggerSink {
    loggers: Vec<Box<dyn Logger>>,
    every_n_steps: u64,
    /// The number of the last step, if known.
    max_steps: Option<u64>,
    /// The last step, if it was skipped.
    left_out: Option<Event>,
    /// The step that the run resumed from.
    resumed: u64,
    /// Whether the loggers know that the training has begun.
    has_begun: bool,
    /// The first error of a call that cannot return it.
    error: Option<Error>,
    /// The kinds of data that were reported as not written by any logger.
    told: BTreeSet<&'static str>,
}

impl LoggerSink {
    /// Creates a sink for these loggers, and logs `params`. `every_n_steps` is at least 1.
    ///
    /// # Errors
    /// If a logger cannot write.
    pub(crate) fn new(
        mut loggers: Vec<Box<dyn Logger>>,
        every_n_steps: u64,
        params: &Table,
    ) -> Result<Self> {
        for logger in &mut loggers {
            logger.log_hyperparams(params)?;
        }
        Ok(Self {
            loggers,
            every_n_steps: every_n_steps.max(1),
            max_steps: None,
            left_out: None,
            resumed: 0,
            has_begun: false,
            error: None,
            told: BTreeSet::new(),
        })
    }

    /// Returns a warning the first time that all loggers drop an event.
    fn left_out_by_all(&mut self, event: &Event) -> Option<String> {
        let (what, name, is_written) = match event {
            Event::Text { name, .. } => {
                ("texts", name, self.loggers.iter().any(|logger| logger.writes_texts()))
            }
            Event::Histogram { name, .. } => {
                ("histograms", name, self.loggers.iter().any(|logger| logger.writes_histograms()))
            }
            _ => return None,
        };
        if is_written || self.loggers.is_empty() || !self.told.insert(what) {
            return None;
        }
        let loggers: Vec<&str> = self.loggers.iter().map(|logger| logger.name()).collect();
        Some(format!(
            "`{name}` is left out: none of the loggers {} writes {what}; tensorboard does (`trainer.loggers`)",
            loggers.join(", ")
        ))
    }

    fn is_due(&self, step: u64) -> bool {
        step == 1 || step.is_multiple_of(self.every_n_steps) || Some(step) == self.max_steps
    }

    fn log(&mut self, event: &Event) -> Result<()> {
        let Some((step, scalars)) = event.scalars() else { return Ok(()) };
        self.loggers.iter_mut().try_for_each(|logger| logger.log_metrics(&scalars, step))
    }
}

impl EventSink for LoggerSink {
    fn start(&mut self, max_steps: Option<u64>) {
        self.max_steps = max_steps;
        let step = self.resumed;
        self.has_begun = true;
        self.error = self.loggers.iter_mut().find_map(|logger| logger.begin_training(step).err());
    }

    fn event(&mut self, event: &Event) -> Result<()> {
        self.error.take().map_or(Ok(()), Err)?;
        if let Some(message) = self.left_out_by_all(event) {
            tracing::warn!("{message}");
        }
        match event {
            Event::Resume { step, .. } => self.resumed = *step,
            Event::Generation { step, .. } if self.has_begun => {
                self.loggers.iter_mut().try_for_each(|logger| logger.begin_training(*step))?;
            }
            Event::Generation { step, .. } => self.resumed = *step,
            _ => {}
        }
        match event {
            Event::Step { step, .. } => {
                self.left_out = (!self.is_due(*step)).then(|| event.clone());
                if self.left_out.is_some() {
                    return Ok(());
                }
            }
            // The run has ended before the expected last step.
            Event::Summary { .. } => {
                if let Some(last) = self.left_out.take() {
                    self.log(&last)?;
                }
            }
            _ => {}
        }
        self.log(event)?;
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
            Event::Table { step, name, table } => {
                each(&|logger| logger.log_table(name, table, *step))
            }
            Event::Checkpoint { step, path, .. } => each(&|logger| {
                logger.save()?;
                logger.after_save_checkpoint(path, *step)
            }),
            _ => Ok(()),
        }
    }

    fn finish(&mut self, status: RunStatus) -> Result<()> {
        // After an error there was no summary.
        let last = self.left_out.take().map_or(Ok(()), |last| self.log(&last));
        // Every logger is finalized, even if an earlier one fails.
        let results: Vec<_> = self.loggers.iter_mut().map(|l| l.finalize(status)).collect();
        std::iter::once(last).chain(results).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::{Arc, Mutex};

    use fulgurite_test_message::assert_says;

    use super::*;

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

    fn step(step: u64) -> Event {
        Event::Step {
            step,
            epoch: 0.0,
            train_loss: 1.0,
            grad_norm: 1.0,
            lr: 0.1,
            rate: crate::trainer::ItemRate::new("images", 1.0),
            metrics: BTreeMap::new(),
        }
    }

    /// However the run ends, the last step is logged once.
    #[test]
    fn the_last_step_is_logged() {
        let logged = |max_steps, steps: u64, end: &dyn Fn(&mut LoggerSink)| {
            let recorder = Recorder::default();
            let loggers: Vec<Box<dyn Logger>> = vec![Box::new(recorder.clone())];
            let mut sink = LoggerSink::new(loggers, 10, &Table::new()).unwrap();
            sink.start(max_steps);
            (1..=steps).for_each(|number| sink.event(&step(number)).unwrap());
            end(&mut sink);
            let calls = recorder.0.lock().unwrap().clone();
            let steps = calls.iter().filter_map(|call| call.split_once(": ")?.0.parse().ok());
            steps.collect::<Vec<u64>>()
        };
        let finish = |sink: &mut LoggerSink| sink.finish(RunStatus::Failed).unwrap();
        assert_eq!(logged(Some(25), 25, &|_| {}), [1, 10, 20, 25]);
        assert_eq!(logged(Some(25), 13, &finish), [1, 10, 13]);
        assert_eq!(logged(None, 20, &finish), [1, 10, 20]);
    }

    #[test]
    fn dropped_data_is_reported_once() {
        let text = Event::Text { step: 1, name: "sample".to_owned(), text: "once".to_owned() };
        let recorders = || -> Vec<Box<dyn Logger>> { vec![Box::new(Recorder::default())] };
        let mut sink = LoggerSink::new(recorders(), 1, &Table::new()).unwrap();
        assert_says!(sink.left_out_by_all(&text).unwrap(), "`sample` is left out … writes texts …");
        assert_eq!(sink.left_out_by_all(&text), None);
        assert_eq!(sink.left_out_by_all(&step(1)), None);
        let mut without = LoggerSink::new(Vec::new(), 1, &Table::new()).unwrap();
        assert_eq!(without.left_out_by_all(&text), None);
    }

    #[test]
    fn sink_skips_steps_and_finishes_all_loggers() {
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
                rate: crate::trainer::ItemRate::new("images", 1.0),
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
        let all = "acc epoch grad_norm images_per_s lr train_loss";
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
