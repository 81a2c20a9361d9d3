//! The default progress display, and the data that sinks receive at the start of a run.

use std::path::PathBuf;

use crate::trainer::EventSink;
use crate::trainer::record::model_summary::ModelSummary;

/// Creates the sink that shows a run's progress on rank 0, if `trainer.enable_progress_bar` is set
/// (the default).
///
/// Used by the command line and by programs alike. A linked crate
/// [registers](crate::register_progress) it; otherwise nothing is shown.
pub struct ProgressDisplay {
    /// Creates the sink of one run. Where the display writes lines, `log_every_n_steps` is the
    /// number of steps per line.
    pub make: fn(log_every_n_steps: u64) -> Box<dyn EventSink>,
}

inventory::collect!(ProgressDisplay);

/// Creates the progress sink of one run; `None` if no linked crate registers one.
///
/// Of several, the linker's first is used.
pub(crate) fn default_progress(log_every_n_steps: u64) -> Option<Box<dyn EventSink>> {
    let display = inventory::iter::<ProgressDisplay>().next()?;
    Some((display.make)(log_every_n_steps))
}

/// Registers a [`ProgressDisplay`]:
/// `register_progress!(|log_every_n_steps| Box::new(MySink::new()))`.
#[macro_export]
macro_rules! register_progress {
    ($make:expr) => {
        $crate::__private::inventory::submit! {
            $crate::trainer::ProgressDisplay { make: $make }
        }
    };
}

/// A description of a training, which sinks receive before its first step.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RunStart {
    /// The number of the last step, if known.
    pub max_steps: Option<u64>,
    /// The items that losses count, in the plural:
    /// [`DataModule::items`](fulgurite_engine::data::DataModule::items).
    pub items: &'static str,
    /// The model's parameters.
    pub model: ModelSummary,
    /// The ranks, if there are several or they compute on a device other than the CPU.
    pub ranks: Option<RanksSummary>,
    /// The run's directory.
    pub run_dir: Option<PathBuf>,
}

/// The ranks of a training.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RanksSummary {
    /// Number of ranks.
    pub ranks: usize,
    /// The name of the strategy.
    pub strategy: String,
    /// The transport between ranks:
    /// [`ProcessGroup::transport`](fulgurite_engine::collective::ProcessGroup::transport).
    pub transport: String,
    /// Each rank's device, such as `NVIDIA H200`; empty for the CPU.
    pub device: String,
}

impl RanksSummary {
    /// Describes ranks of a strategy on the CPU.
    pub fn new(ranks: usize, strategy: impl Into<String>, transport: impl Into<String>) -> Self {
        let (strategy, transport) = (strategy.into(), transport.into());
        Self { ranks, strategy, transport, device: String::new() }
    }

    /// Sets the device.
    #[must_use]
    pub fn on(self, device: impl Into<String>) -> Self {
        Self { device: device.into(), ..self }
    }
}

impl std::fmt::Display for RanksSummary {
    /// Writes, for instance,
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
    /// Creates a description, for tests of a sink.
    pub fn new(max_steps: Option<u64>, items: &'static str, model: ModelSummary) -> Self {
        Self { max_steps, items, model, ranks: None, run_dir: None }
    }

    /// Sets the run's directory.
    pub fn with_run_dir(self, run_dir: impl Into<PathBuf>) -> Self {
        Self { run_dir: Some(run_dir.into()), ..self }
    }

    /// Sets the ranks.
    pub fn with_ranks(self, ranks: RanksSummary) -> Self {
        Self { ranks: Some(ranks), ..self }
    }
}

/// The progress of an evaluation or a prediction on rank 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct EvaluationProgress<'a> {
    /// The task: `validation`, `sanity check`, `test`, `predict`, or the name of a validation set.
    pub what: &'a str,
    /// Number of finished batches of this rank.
    pub done: u64,
    /// Number of batches of this rank.
    pub batches: u64,
}

impl<'a> EvaluationProgress<'a> {
    /// `done` of `batches` batches.
    pub fn new(what: &'a str, done: u64, batches: u64) -> Self {
        Self { what, done, batches }
    }
}
