//! The engine of all process groups of this crate: collectives through a shared region.

pub(crate) mod blame;
mod direct;
mod group;
mod p2p;
mod plan;
mod queue;
mod reduce;
mod rendezvous;
mod stream;
mod wait;
mod worker;

pub(crate) use blame::Board;
pub(crate) use group::{Group, Membership};
pub(crate) use plan::{Buffer, Collective, Fingerprint, bytes, dtype_code};
pub(crate) use queue::{CLOSING, Completion, Job, Queue, Task, Turn, wait_for, work};
pub(crate) use reduce::reduce;
pub(crate) use rendezvous::{MappedRegion, MemoryOwner, Rendezvous};
pub(crate) use stream::Stream;
pub(crate) use wait::Failure;
