//! Process groups over a network: one engine over any [`Wire`].
//!
//! A transport implements [`Network`], which connects the members of a group. [`connect_world`]
//! then provides all of [`ProcessGroup`](fulgurite_engine::collective::ProcessGroup). [`Tcp`] is
//! one network; the crate `fulgurite-mpi` has another.
//!
//! # How it works
//! A collective is a few *rounds*. In a round a member sends to and receives from the others
//! directly, out of and into the tensors, all at once ([`Wire::exchange`]). The first message to
//! each member is the collective's fingerprint (number, kind, dtype, bytes, a hash of the
//! arguments). It reveals ranks in different collectives.
//!
//! | collective | rounds |
//! |---|---|
//! | all-gather, all-to-all, barrier | one |
//! | reduce-scatter | one per chunk: each gets others' values of its part, reduced in rank order |
//! | all-reduce | the same, and in the next round each sends its reduced chunk to all |
//! | small all-reduce | one: each sends its values to all, and every member reduces them |
//! | broadcast | one; if large, each member gets a part, and sends it on in a second round |
//!
//! So a member sends and receives as few bytes of `n` as in a ring (`2 n (m - 1) / m` for an
//! all-reduce of `m` members). The order of additions depends neither on arrival order nor on the
//! network.
//!
//! Messages ([`ProcessGroup::send`](fulgurite_engine::collective::ProcessGroup::send)) use their
//! own connections, one for each used pair and direction, each with a thread.
//!
//! # Invariants
//! - Sent and received memory lies in tensors and buffers that the worker holds. After a failed
//!   exchange they are never freed.
//! - No lock on a tensor is held while waiting for a peer.
//! - Every wait checks the group's abort, the job's first failure, and the timeout since the last
//!   transferred byte. While the job starts, it checks whether this rank was asked to end.
//! - A failed group writes its failure to the job's store, where the other ranks' waits find it.

mod collectives;
mod group;
mod lanes;
mod memory;
mod messenger;
mod shared;
mod tcp;
mod wire;
mod worker;

pub use group::connect_world;
pub use messenger::Messenger;
pub use tcp::Tcp;
pub use wire::{Incoming, Network, Outgoing, POLL_INTERVAL, Watch, Wire, WireError};
