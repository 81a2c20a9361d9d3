//! Ranks of several hosts, over TCP.
//!
//! Each rank listens at one address, on the configured interface or the one through which it
//! reaches rank 0. Of two members of a group, the later one connects to the earlier one, once for
//! each group. So groups make progress at once and need no extra thread, at the price of one socket
//! for each peer and group.
//!
//! The job's store holds the addresses, and a token that a connection must begin with. Only ranks
//! of the job can read the store. Connections are not encrypted (as with gloo, NCCL and MPI).
//! Anyone who can read or change the traffic between hosts can read or change the training.

mod address;
mod config;
mod contact;
mod listener;
mod network;
mod wire;

pub use config::Tcp;
