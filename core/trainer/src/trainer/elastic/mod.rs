//! Trainings that go on after they have lost a rank (`trainer.elastic`).
//!
//! The launch divides such a job into [generations](fulgurite_launch::Elastic). When a collective
//! fails because a rank is lost, the other ranks join the next generation, and agree on the newest
//! state that they have together ([`agree`]):
//!
//! - what they hold: with replicas, the ranks that are left may have everything. They write it to
//!   the memory of their hosts first;
//! - the copies of their shards ([`Copies`]) in the memory of the hosts;
//! - else the run's last checkpoint.
//!
//! States in memory ([`states`]) are twice there if there are several hosts, on neighbours in a
//! ring of the hosts.
//!
//! They then set the run up again in this process, and resume from that state. A rank that joins
//! does the same, and has nothing to offer.

mod agreement;
mod copies;
mod kept;
mod states;

pub(super) use agreement::{Recovered, agree, leave_if_invited, lose, number};
pub(super) use copies::{Copies, copy_if_due};
pub(super) use kept::{Kept, RunSoFar, place_in_replica};
pub(super) use states::{MemoryState, remove_states};
