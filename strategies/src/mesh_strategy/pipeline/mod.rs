//! Pipeline parallelism: stages of the model on ranks of their own.
//!
//! - [`settings`]: the schedule and the number of units of each stage.
//! - [`balance`]: stages of about equal work.
//! - [`assignment`]: the ranks that hold each parameter.
//! - [`links`]: tensors between ranks.
//! - [`executor`]: a rank's list of actions, run.

mod assignment;
mod balance;
mod executor;
mod links;
mod settings;

pub(super) use assignment::Assignment;
pub(super) use executor::{Executor, empty_gradient};
pub use settings::PipelineUnits;
pub(crate) use settings::{PipelineSettings, ScheduleSource};
