//! The events of a run.
//!
//! ```
//! use fulgurite_core::trainer::Event;
//!
//! let event = Event::Checkpoint { step: 20, path: "run/step-20".into(), blocked_s: 0.5 };
//! let line = serde_json::to_string(&event).unwrap();
//! assert_eq!(line, r#"{"event":"checkpoint","step":20,"path":"run/step-20","blocked_s":0.5}"#);
//! ```

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Deserializer, Serialize};

use crate::metric::MetricTable;
use crate::profiler::Profile;
use crate::trainer::record::display::{EvaluationProgress, RunStart};
use crate::trainer::run_plan::PlanComparison;
use crate::trainer::{Histogram, ItemRate};
use crate::{Error, Result};
use fulgurite_engine::data::DataReport;

/// An event of a run. Steps are numbers of completed optimizer steps, so the first is 1.
///
/// As JSON, an event is an object with its kind under `event`. Numbers that are not finite are
/// `null`, which is read as NaN.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Event {
    /// An optimizer step was completed.
    Step {
        /// The step's number.
        step: u64,
        /// Passes over the training data so far, including the fraction of the current one.
        #[serde(deserialize_with = "number")]
        epoch: f64,
        /// The mean loss over the step's global batch; NaN if nothing in it counts, so that the
        /// step changed nothing.
        #[serde(deserialize_with = "number")]
        train_loss: f64,
        /// The norm of all gradients together, before clipping.
        #[serde(deserialize_with = "number")]
        grad_norm: f64,
        /// The learning rate of the step.
        #[serde(deserialize_with = "number")]
        lr: f64,
        /// Tokens per second, or other items that the module's loss counts.
        #[serde(flatten)]
        rate: ItemRate,
        /// Values that the module logged.
        #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "numbers")]
        metrics: BTreeMap<String, f64>,
    },
    /// The model was validated.
    Validation {
        /// The step after which it was validated.
        step: u64,
        /// The mean loss over the validation data.
        #[serde(deserialize_with = "number")]
        val_loss: f64,
        /// Number of validation batches on all ranks.
        batches: u64,
        /// Values that the module logged.
        #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "numbers")]
        metrics: BTreeMap<String, f64>,
    },
    /// The model was tested.
    Test {
        /// The step after which it was tested.
        step: u64,
        /// The mean loss over the test data.
        #[serde(deserialize_with = "number")]
        test_loss: f64,
        /// Number of test batches on all ranks.
        batches: u64,
        /// Values that the module logged.
        #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "numbers")]
        metrics: BTreeMap<String, f64>,
    },
    /// Hooks have logged values, or an epoch with values for the epoch has ended.
    Metrics {
        /// Number of completed steps.
        step: u64,
        /// The logged values by name.
        #[serde(deserialize_with = "numbers")]
        metrics: BTreeMap<String, f64>,
    },
    /// A step or a hook has logged a text.
    Text {
        /// Number of completed steps.
        step: u64,
        /// The text's name.
        name: String,
        /// The text, which loggers may show as Markdown.
        text: String,
    },
    /// A step or a hook has logged a histogram.
    Histogram {
        /// Number of completed steps.
        step: u64,
        /// The histogram's name.
        name: String,
        /// The histogram of the values of all ranks.
        histogram: Histogram,
    },
    /// A metric with a table as its value was logged.
    Table {
        /// Number of completed steps.
        step: u64,
        /// The metric's name.
        name: String,
        /// The table of the samples of all ranks.
        table: MetricTable,
    },
    /// The data was opened. The first event.
    Data(DataReport),
    /// The run has resumed from a checkpoint.
    Resume {
        /// The step after which the checkpoint was saved.
        step: u64,
        /// The checkpoint's path.
        path: PathBuf,
    },
    /// The run goes on in another generation, after it has lost a rank (`trainer.elastic`).
    Generation {
        /// The generation's number.
        generation: u64,
        /// The step after which it goes on.
        step: u64,
        /// Number of ranks.
        world_size: usize,
        /// Where the state was, such as `the memory of rank 1`.
        from: String,
        /// Steps after `step` that were done before, and are taken again.
        repeated_steps: u64,
        /// Seconds from this rank's error until all ranks have the state; 0 on a new process.
        #[serde(deserialize_with = "number")]
        lost_s: f64,
    },
    /// A checkpoint was committed. For a background save the event comes some steps later.
    Checkpoint {
        /// The step after which the checkpoint was saved.
        step: u64,
        /// The checkpoint's path.
        path: PathBuf,
        /// Number of seconds for which training waited.
        #[serde(default, deserialize_with = "number")]
        blocked_s: f64,
    },
    /// A checkpoint could not be saved, and the run goes on (`checkpoint.max_failed_saves`).
    SaveFailed {
        /// The step after which the failure was seen. A background save was of an earlier step.
        step: u64,
        /// The error's message.
        error: String,
    },
    /// The run's profile, with `trainer.profiler`. Comes before the summary.
    Profile(Profile),
    /// The run has ended.
    Summary {
        /// Number of optimizer steps, including those before a resume.
        steps: u64,
        /// Number of ranks.
        world_size: usize,
        /// The strategy's name.
        strategy: String,
        /// The loss of the first step of this process; NaN without a step.
        #[serde(deserialize_with = "number")]
        first_loss: f64,
        /// The loss of the last step.
        #[serde(deserialize_with = "number")]
        last_loss: f64,
        /// The median time of a step, in seconds.
        #[serde(deserialize_with = "number")]
        step_s_median: f64,
        /// Tokens per second over all steps, or other items that the module's loss counts.
        #[serde(flatten)]
        rate: ItemRate,
        /// Seconds from the program's start to the end of the first step.
        #[serde(deserialize_with = "number")]
        startup_s: f64,
        /// The share of the time since the program's start that steps took: without startup,
        /// validations, saves, and steps taken again after the loss of a rank.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        goodput: Option<f64>,
        /// Number of steps that changed nothing, because nothing counted on any rank.
        #[serde(default, skip_serializing_if = "is_zero")]
        skipped_steps: u64,
        /// The peak memory of each rank's process, in MiB, by rank.
        #[serde(deserialize_with = "list")]
        peak_rss_mib: Vec<f64>,
        /// The peak memory of each rank's tensors on its device, in MiB, by rank; empty if ranks
        /// compute on the CPU.
        #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "list")]
        peak_device_mib: Vec<f64>,
        /// The plan of the run beside what the engine counted.
        #[serde(default)]
        plan: PlanComparison,
    },
}

impl Event {
    /// Returns whether loggers write the event.
    pub(crate) fn is_logged(&self) -> bool {
        matches!(self, Self::Text { .. } | Self::Histogram { .. } | Self::Table { .. })
            || self.scalars().is_some()
    }

    /// Returns the step and the metrics by name, for loggers; `None` for events without metrics.
    ///
    /// A step in which nothing counts has no loss.
    pub fn scalars(&self) -> Option<(u64, BTreeMap<String, f64>)> {
        let (step, own, logged): (_, &[(&str, f64)], _) = match self {
            Self::Step { step, epoch, train_loss, grad_norm, lr, rate, metrics } => (
                *step,
                &[
                    ("epoch", *epoch),
                    ("train_loss", *train_loss),
                    ("grad_norm", *grad_norm),
                    ("lr", *lr),
                    (&rate.name(), rate.per_s),
                ],
                metrics,
            ),
            Self::Validation { step, val_loss, metrics, .. } => {
                (*step, &[("val_loss", *val_loss)], metrics)
            }
            Self::Test { step, test_loss, metrics, .. } => {
                (*step, &[("test_loss", *test_loss)], metrics)
            }
            Self::Metrics { step, metrics } => (*step, &[], metrics),
            Self::Text { .. }
            | Self::Histogram { .. }
            | Self::Table { .. }
            | Self::Data(_)
            | Self::Resume { .. }
            | Self::Generation { .. }
            | Self::Profile(_)
            | Self::Checkpoint { .. }
            | Self::SaveFailed { .. }
            | Self::Summary { .. } => return None,
        };
        let mut scalars = logged.clone();
        let own = own.iter().filter(|(name, value)| *name != "train_loss" || !value.is_nan());
        scalars.extend(own.map(|&(name, value)| (name.to_owned(), value)));
        Some((step, scalars))
    }
}

/// The outcome of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunStatus {
    /// The run was completed.
    Success,
    /// The run was stopped (Ctrl-C, SIGTERM, SIGUSR1).
    Interrupted,
    /// An error ended the run.
    Failed,
}

impl RunStatus {
    /// Returns the outcome of a run with this result.
    pub(crate) fn of<T>(result: &Result<T>) -> Self {
        match result {
            Ok(_) => Self::Success,
            Err(Error::Interrupted) => Self::Interrupted,
            Err(_) => Self::Failed,
        }
    }
}

/// Receives the events of a run. Exists only on rank 0.
///
/// If a trainer is used several times, its sinks get the events of one run after the other.
pub trait EventSink: Send {
    /// Called when training begins, before the first event of a step. `max_steps` is the number of
    /// the last step, if known.
    fn start(&mut self, max_steps: Option<u64>) {
        let _ = max_steps;
    }

    /// Called before [`start`](Self::start), with a description of the training.
    fn begin(&mut self, run: &RunStart) {
        let _ = run;
    }

    /// Called before the first batch of an evaluation or a prediction and after each of its
    /// batches.
    fn evaluating(&mut self, progress: EvaluationProgress<'_>) {
        let _ = progress;
    }

    /// Receives one event.
    ///
    /// # Errors
    /// If the event cannot be written; this ends the run.
    fn event(&mut self, event: &Event) -> Result<()>;

    /// Called once at the end of the run, also after an error.
    ///
    /// # Errors
    /// If buffered data cannot be written.
    fn finish(&mut self, status: RunStatus) -> Result<()>;
}

/// A sink that a trainer shares with its runs.
#[derive(Clone)]
pub(crate) struct SharedSink(Arc<Mutex<Box<dyn EventSink>>>);

impl SharedSink {
    pub(crate) fn new(sink: Box<dyn EventSink>) -> Self {
        Self(Arc::new(Mutex::new(sink)))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Box<dyn EventSink>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

fn list<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f64>, D::Error> {
    let values = Vec::<Option<f64>>::deserialize(deserializer)?;
    Ok(values.into_iter().map(|value| value.unwrap_or(f64::NAN)).collect())
}

fn numbers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, f64>, D::Error> {
    let values = BTreeMap::<String, Option<f64>>::deserialize(deserializer)?;
    Ok(values.into_iter().map(|(name, value)| (name, value.unwrap_or(f64::NAN))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_flat_json_objects() {
        let step = Event::Step {
            step: 1,
            epoch: 0.25,
            train_loss: 3.5,
            grad_norm: 1.0,
            lr: 1e-3,
            rate: ItemRate::new("tokens", 1024.0),
            metrics: BTreeMap::new(),
        };
        insta::assert_snapshot!(serde_json::to_string(&step).unwrap(), @r#"{"event":"step","step":1,"epoch":0.25,"train_loss":3.5,"grad_norm":1.0,"lr":0.001,"tokens_per_s":1024.0}"#);
        let summary = Event::Summary {
            steps: 2,
            world_size: 2,
            strategy: "fsdp".to_owned(),
            first_loss: 3.5,
            last_loss: 3.25,
            step_s_median: 0.5,
            rate: ItemRate::new("images", 2048.0),
            startup_s: 0.125,
            goodput: Some(0.75),
            skipped_steps: 0,
            peak_rss_mib: vec![100.5, 99.5],
            peak_device_mib: Vec::new(),
            plan: PlanComparison::default(),
        };
        insta::assert_snapshot!(serde_json::to_string(&summary).unwrap(), @r#"{"event":"summary","steps":2,"world_size":2,"strategy":"fsdp","first_loss":3.5,"last_loss":3.25,"step_s_median":0.5,"images_per_s":2048.0,"startup_s":0.125,"goodput":0.75,"peak_rss_mib":[100.5,99.5],"plan":{"peak_bytes":null,"measured_peak_bytes":null,"traffic_bytes_per_step":null,"measured_traffic_bytes_per_step":null,"step_s":null,"measured_step_s":null}}"#);
        for event in [step, summary] {
            let line = serde_json::to_string(&event).unwrap();
            assert_eq!(serde_json::from_str::<Event>(&line).unwrap(), event);
        }
    }

    #[test]
    fn non_finite_numbers_are_null() {
        let event = Event::Validation {
            step: 3,
            val_loss: f64::INFINITY,
            batches: 4,
            metrics: BTreeMap::from([("perplexity".to_owned(), f64::NAN)]),
        };
        let line = serde_json::to_string(&event).unwrap();
        insta::assert_snapshot!(line, @r#"{"event":"validation","step":3,"val_loss":null,"batches":4,"metrics":{"perplexity":null}}"#);
        let Event::Validation { val_loss, metrics, .. } = serde_json::from_str(&line).unwrap()
        else {
            panic!("{line} is no validation event");
        };
        assert!(val_loss.is_nan() && metrics["perplexity"].is_nan());
    }

    #[test]
    fn step_without_counts_has_no_loss() {
        let event = Event::Step {
            step: 3,
            epoch: 0.5,
            train_loss: f64::NAN,
            grad_norm: 0.0,
            lr: 1e-3,
            rate: ItemRate::new("rows", 0.0),
            metrics: BTreeMap::from([("skipped_steps".to_owned(), 1.0)]),
        };
        let (_, scalars) = event.scalars().unwrap();
        let names: Vec<&str> = scalars.keys().map(String::as_str).collect();
        assert_eq!(names, ["epoch", "grad_norm", "lr", "rows_per_s", "skipped_steps"]);
    }
}
