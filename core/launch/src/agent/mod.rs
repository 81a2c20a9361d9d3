//! One agent on each node starts the ranks of a job and ends them, as `torchrun` does: `fulgurite run`.
//!
//! # How agents work together
//! Agents meet in a key-value store of their own, at the rendezvous endpoint, which the agent hosts whose host has
//! that address (the *coordinator*). A job is a sequence of *attempts*:
//!
//! 1. The coordinator says which agents are in the attempt, and which ranks each has (`plan::Attempt`).
//! 2. The first agent says at which address the ranks meet; every agent starts its ranks, which are told by
//!    `torchrun`'s variables.
//! 3. Every agent says how its ranks ended (`plan::End`). A failure of one ends the ranks of all: they hear of it over
//!    the job's own store, or are ended by their agents.
//! 4. If all have ended well, or were asked to end, the job is over. After a failure the coordinator begins the next
//!    attempt, as often as it may, with the agents that are there.
//!
//! An agent that comes with the node rank of another one is refused if that one still gives signs of life; else it takes
//! its place, and the attempt that the other was in has failed.
//!
//! An agent that has not been heard of for the time of `keep_alive` is lost, and so is a coordinator.
//!
//! # Invariants
//! - No request to the store is made on the thread that watches ranks and signals: a store that cannot be reached
//!   holds up nothing.
//! - An agent that ends leaves no rank behind: ranks are groups of processes, which get SIGTERM and then SIGKILL.

mod board;
mod coordinator;
mod endpoint;
mod logs;
mod options;
mod plan;
mod ranks;
mod run;

pub use options::{AgentOptions, Endpoint, Nodes};
pub use run::run;
