//! The trainer: loop, events, loggers, callbacks.
//!
//! A user implements [`LightningModule`]; [`Trainer`] runs it on the data of its
//! [`DataModule`](fulgurite_engine::data::DataModule), by a [`RunConfig`](crate::run::RunConfig),
//! and reports [`Event`]s to [`EventSink`]s and metrics to [`Logger`]s.

mod callback;
mod context;
mod evaluation;
mod event;
mod event_log;
mod histogram;
mod hooks;
mod item_rate;
mod late;
mod lightning_module;
mod loaded;
mod log_table;
mod logged_tensor;
mod logger;
mod manual;
mod memory_check;
mod meter;
mod micro_batches;
mod model_summary;
mod optimizers;
mod predictions;
mod preflight;
mod progress;
mod restart;
mod resuming;
mod retention;
mod run_dir;
mod runner;
mod saved_state;
mod saving;
mod schedule_warning;
mod session;
mod train_step;
mod trained;
#[expect(clippy::module_inception, reason = "the type is the module's subject")]
mod trainer;
mod training_loop;

pub use callback::{Callback, CallbackConfig};
pub use context::{HookContext, SaveRequest, Stage, StepContext};
pub use evaluation::Evaluation;
pub use event::{Event, EventSink, RunStatus};
pub use histogram::{Bucket, Histogram};
pub use hooks::Hooks;
pub use item_rate::ItemRate;
pub use late::Metrics;
pub use lightning_module::{BatchOf, LightningModule, RunConfigOf};
pub use loaded::Loaded;
pub use log_table::{LogOptions, Logged, Reduce};
use logger::LoggerSink;
pub use logger::{Logger, LoggerConfig};
pub use manual::OptimizerStep;
pub use meter::peak_rss_mib;
pub use model_summary::{ModelSummary, ModuleParameters};
pub use optimizers::{OptimizerSetup, Optimizers};
pub use predictions::Predictions;
pub use preflight::{MakeParallelize, RunPurpose};
pub use progress::{EvaluationProgress, ProgressDisplay, RanksSummary, RunStart};
use run_dir::RunDir;
pub use saved_state::SavedState;
pub use trained::Trained;
pub use trainer::{FitOutcome, Trainer};
