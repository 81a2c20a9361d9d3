//! Progress that is shown without being asked for, and what it is told.

use std::path::PathBuf;

use crate::trainer::EventSink;
use crate::trainer::record::model_summary::ModelSummary;

/// Makes the sink that shows a run's progress on rank 0 while `trainer.enable_progress_bar` is set (it is by
/// default), for trainers of the command line and of programs alike. A crate that is linked
/// [registers](crate::register_progress) it; without one nothing is shown.
pub struct ProgressDisplay {
    /// Makes it for one run. The number says how many steps there are between two lines where lines are
    /// written.
    pub make: fn(log_every_n_steps: u64) -> Box<dyn EventSink>,
}

inventory::collect!(ProgressDisplay);

/// The sink of one run; `None` if no crate that shows progress is linked. If several are, the first that the
/// linker put there is used.
pub(crate) fn default_progress(log_every_n_steps: u64) -> Option<Box<dyn EventSink>> {
    let display = inventory::iter::<ProgressDisplay>().next()?;
    Some((display.make)(log_every_n_steps))
}

/// Registers a [`ProgressDisplay`]: `register_progress!(|log_every_n_steps| Box::new(MySink::new()))`.
#[macro_export]
macro_rules! register_progress {
    ($make:expr) => {
        $crate::__private::inventory::submit! {
            $crate::trainer::ProgressDisplay { make: $make }
        }
    };
}

/// What a training is, told to sinks before its first step.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RunStart {
    /// The number of the last step, if it is known.
    pub max_steps: Option<u64>,
    /// What the counts of losses count, in the plural:
    /// [`DataModule::items`](fulgurite_engine::data::DataModule::items).
    pub items: &'static str,
    /// The model's parameters.
    pub model: ModelSummary,
    /// Its ranks, if they are several, or compute on another device than the CPU.
    pub ranks: Option<RanksSummary>,
    /// The run's directory.
    pub run_dir: Option<PathBuf>,
}

/// How many ranks train, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RanksSummary {
    /// How many.
    pub ranks: usize,
    /// The name of the strategy.
    pub strategy: String,
    /// How they reach each other: [`ProcessGroup::transport`](fulgurite_engine::collective::ProcessGroup::transport).
    pub transport: String,
    /// What each computes on, such as `NVIDIA H200`; empty for the CPU.
    pub device: String,
}

impl RanksSummary {
    /// Several ranks of a strategy.
    pub fn new(ranks: usize, strategy: impl Into<String>, transport: impl Into<String>) -> Self {
        let (strategy, transport) = (strategy.into(), transport.into());
        Self { ranks, strategy, transport, device: String::new() }
    }

    /// That compute on this device.
    #[must_use]
    pub fn on(self, device: impl Into<String>) -> Self {
        Self { device: device.into(), ..self }
    }
}

impl std::fmt::Display for RanksSummary {
    /// `4 ranks, strategy fsdp, process group shm within hosts, tcp between them`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let plural = if self.ranks == 1 { "" } else { "s" };
        write!(f, "{} rank{plural}", self.ranks)?;
        if !self.device.is_empty() {
            write!(f, " on {}", self.device)?;
        }
        write!(f, ", strategy {}", self.strategy)?;
        match self.transport.as_str() {
            "" => Ok(()),
            transport => write!(f, ", process group {transport}"),
        }
    }
}

impl RunStart {
    /// What the trainer tells its sinks; for tests of a sink.
    pub fn new(max_steps: Option<u64>, items: &'static str, model: ModelSummary) -> Self {
        Self { max_steps, items, model, ranks: None, run_dir: None }
    }

    /// The same of a run with this directory.
    pub fn with_run_dir(self, run_dir: impl Into<PathBuf>) -> Self {
        Self { run_dir: Some(run_dir.into()), ..self }
    }

    /// The same of several ranks.
    pub fn with_ranks(self, ranks: RanksSummary) -> Self {
        Self { ranks: Some(ranks), ..self }
    }
}

/// How far an evaluation or a prediction is, on rank 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct EvaluationProgress<'a> {
    /// What is done: `validation`, `sanity check`, `test`, `predict`, or the name of a validation set.
    pub what: &'a str,
    /// Batches of this rank that are done.
    pub done: u64,
    /// Batches of this rank.
    pub batches: u64,
}

impl<'a> EvaluationProgress<'a> {
    /// `done` of `batches` batches.
    pub fn new(what: &'a str, done: u64, batches: u64) -> Self {
        Self { what, done, batches }
    }
}
