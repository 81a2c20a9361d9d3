//! The plan of a run: memory, traffic and time on ranks that are not there.
//!
//! [`RunPlan::of`] runs the trainer itself, with the run's own strategy, data and module, as one
//! rank of each [class](RankPlan) among ranks that do not answer
//! ([`DryRunGroup`](fulgurite_engine::collective::DryRunGroup)). Kernels skip their arithmetic
//! ([`dry_run`](fulgurite_engine::execution::dry_run)), and large blocks of memory are address
//! space only. A second description of the engine, which could differ from it, is not needed: calls
//! and bytes are the run's, and memory is what the engine asks for.

mod brief;
mod classes;
mod comparison;
mod copies;
mod failures;
mod hardware;
mod outlook;
mod plan;
mod rank_run;
mod timing;

pub(crate) use brief::{check_time, open_data};
pub use comparison::PlanComparison;
pub(crate) use comparison::Planned;
pub use copies::PlannedCopies;
pub use failures::Goodput;
pub use hardware::{Flops, Hardware, Host, Link};
pub use outlook::Outlook;
pub use plan::{MemoryPart, PlannedCollective, RankPlan, RunPlan};
pub use rank_run::PlannedGroup;
