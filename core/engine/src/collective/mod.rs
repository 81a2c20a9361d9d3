//! Process groups and collectives.
//!
//! Transports implement [`ProcessGroup`], and a [`ProcessGroupConfig`] makes one from a
//! configuration. [`Solo`] is the group of one rank and communicates nothing. [`Counting`] wraps
//! any group and counts calls and bytes. [`Agreement`] checks that values are equal on all ranks.
//! [`Abandonment`] lets ranks abandon a step together. [`Timing`] records when collectives run on
//! the device. [`check`] has the argument checks that all transports share. Ranks find each other
//! over a job's [`Store`].

mod abandon;
mod agreement;
pub mod check;
#[expect(clippy::module_inception, reason = "the type is the module's subject")]
mod collective;
mod config;
mod counting;
mod label;
mod objects;
mod planned;
mod process_group;
mod solo;
mod timing;
mod work;

pub use abandon::Abandonment;
pub use agreement::Agreement;
pub use check::RANKS_DIFFER;
pub use collective::{AllGather, Collective, ReduceOp, ReduceScatter};
pub use config::{GroupContext, GroupMemory, ProcessGroupConfig};
pub use counting::{Counter, Counting, Record};
pub use fulgurite_store::Store;
pub use label::Label;
pub use objects::{Difference, all_gather_object, broadcast_object, first_difference};
pub use planned::Planned;
pub use process_group::ProcessGroup;
pub use solo::Solo;
pub use timing::Timing;
pub use work::{End, Work};
