//! Process groups and collectives.
//!
//! Transports implement [`ProcessGroup`]; a [`ProcessGroupConfig`] makes one from a configuration.
//! [`Solo`] is the group of one rank, which communicates nothing. An [`Interceptor`] sees a group's
//! calls first: [`Counter`] counts calls and bytes, a [`flight`] record has the last calls, and
//! with [`Abandonment`] ranks leave a step together. [`Agreement`] compares values that all ranks
//! must share. [`Timing`] asks for a device's times. [`check`] has the argument checks of all
//! transports. Ranks find each other over a job's [`Store`].

mod abandon;
mod agreement;
pub mod check;
#[expect(clippy::module_inception, reason = "the type is the module's subject")]
mod collective;
mod config;
mod counter;
mod dry_run;
pub mod flight;
mod intercept;
mod label;
mod objects;
mod planned;
mod process_group;
mod solo;
mod timing;
mod traffic_meter;
mod work;

pub use abandon::Abandonment;
pub use agreement::Agreement;
pub use check::{RANKS_DIFFER, TIMED_OUT};
pub use collective::{AllGather, AllToAll, Collective, ReduceOp, ReduceScatter};
pub use config::{GroupContext, GroupMemory, ProcessGroupConfig};
pub use counter::{Counter, Record};
pub use dry_run::{COPIED_BYTES, DryRunGroup};
pub use fulgurite_store::Store;
pub use intercept::{Intercepted, Interceptor};
pub use label::Label;
pub use objects::{Difference, all_gather_object, broadcast_object, first_difference};
pub use planned::Planned;
pub use process_group::ProcessGroup;
pub use solo::Solo;
pub use timing::Timing;
pub use traffic_meter::TrafficMeter;
pub use work::{End, Work};
