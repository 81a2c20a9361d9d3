//! Process groups over a network: one engine over any [`Wire`].
//!
//! A transport brings a [`Network`], which connects the members of a group, and gets all of
//! [`ProcessGroup`](fulgurite_engine::collective::ProcessGroup) from [`connect_world`]. [`Tcp`] is one; the crate
//! `fulgurite-mpi` has another.
//!
//! # How it works
//! A collective is a few *rounds*. In a round a member sends to and receives from the others directly, out of
//! and into the tensors, all at once ([`Wire::exchange`]). The first message to each member is the collective's
//! fingerprint (number, kind, dtype, bytes, a hash of the arguments), by which ranks that are in different
//! collectives find out.
//!
//! | collective | rounds |
//! |---|---|
//! | all-gather, all-to-all, barrier | one |
//! | reduce-scatter | one for each chunk: every member gets the others' values of its part, and reduces them in rank order |
//! | all-reduce | the same, and in the next round each sends its reduced chunk to all; few bytes go to all at once, and everybody reduces them |
//! | broadcast | one; of many bytes each member gets a part, which it sends on in a second one |
//!
//! So what a member sends and receives of `n` bytes is as little as in a ring (an all-reduce of `m` members:
//! `2 n (m - 1) / m`), and the order of additions does not depend on who came first, nor on the network.
//!
//! Messages ([`ProcessGroup::send`](fulgurite_engine::collective::ProcessGroup::send)) go over connections of
//! their own, one for each pair and direction that is used, each with a thread.
//!
//! # Invariants
//! - What is sent or received lies in tensors and buffers that the worker holds; if an exchange fails they are
//!   never freed.
//! - No lock on a tensor is held while waiting for a peer.
//! - Every wait asks for the group's abort, the job's first failure, the timeout (since the last byte that moved)
//!   and, while the job starts, whether this rank was asked to end.
//! - A group that has failed says so in the job's store, where the others' waits find it.

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
