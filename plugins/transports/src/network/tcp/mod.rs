//! Ranks of several hosts, over TCP.
//!
//! Each rank listens at one address, of the interface by which it reaches rank 0 or of the one that is named. Of
//! two members of a group the later one in the group connects to the earlier one, once for each group: so that
//! groups make progress at once and need no thread beside their own, at the price of a socket a peer and group.
//!
//! Addresses, and a token that a connection must begin with, are in the job's store, which only ranks of the job
//! can read. What goes over the connections is not encrypted (as with gloo, NCCL and MPI): whoever can read or
//! change what hosts send to each other can read or change a training.

mod address;
mod config;
mod contact;
mod listener;
mod network;
mod wire;

pub use config::Tcp;
