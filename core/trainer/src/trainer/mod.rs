//! The trainer: loop, events, loggers, callbacks.
//!
//! A user implements [`LightningModule`]. [`Trainer`] runs it on the data of its
//! [`DataModule`](fulgurite_engine::data::DataModule), by a [`RunConfig`](crate::run::RunConfig),
//! and reports [`Event`]s to [`EventSink`]s and metrics to [`Logger`]s.

mod checkpoints;
mod elastic;
mod end;
mod evaluation;
mod fit;
mod module;
mod preflight;
mod progress;
mod record;
pub mod run_plan;
mod saving;
mod session;
mod trained;
#[expect(clippy::module_inception, reason = "the type is the module's subject")]
mod trainer;

pub use checkpoints::saved_state::SavedState;
pub use evaluation::evaluate::Evaluation;
pub use evaluation::predictions::{PredictionFormat, Predictions};
pub use module::callback::{Callback, CallbackConfig};
pub use module::context::{HookContext, SaveRequest, Stage, StepContext};
pub use module::hooks::Hooks;
pub use module::lightning_module::{BatchOf, LightningModule, RunConfigOf};
pub use module::loaded::Loaded;
pub use module::manual::OptimizerStep;
pub use module::optimizers::{OptimizerSetup, Optimizers};
pub use preflight::checks::{MakeParallelize, RunPurpose};
pub use record::display::{EvaluationProgress, ProgressDisplay, RanksSummary, RunStart};
pub use record::event::{Event, EventSink, RunStatus};
pub use record::histogram::{Bucket, Histogram};
pub use record::item_rate::ItemRate;
pub use record::log_table::{LogOptions, Logged, Reduce};
pub use record::logger::{Logger, LoggerConfig};
pub use record::meter::peak_rss_mib;
pub use record::model_summary::{ModelSummary, ModuleParameters};
pub use record::recorder::Metrics;
pub use trained::Trained;
pub use trainer::{FitOutcome, Trainer};
