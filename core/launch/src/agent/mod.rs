//! Agents, one per node, that start and end the ranks of a job, as `torchrun` does:
//! `fulgurite run`.
//!
//! # How agents work together
//! Agents meet in their own key-value store at the rendezvous endpoint. The agent whose host has
//! the endpoint's address hosts the store; it is the *coordinator*. With several endpoints each of
//! their agents hosts a store, and one of them is the coordinator. If it is lost, another one goes
//! on from its last decision (`quorum`). A job is a sequence of *attempts*:
//!
//! 1. The coordinator publishes the agents of the attempt and the ranks of each (`plan::Attempt`).
//! 2. The first agent publishes the address at which the ranks meet. Every agent starts its ranks
//!    and passes them `torchrun`'s variables.
//! 3. Every agent publishes the end of its ranks (`plan::End`). If one rank fails, all ranks end:
//!    they are told by the job's own store, or their agents end them.
//! 4. If all ranks ended well or were asked to end, the job is over. After a failure the
//!    coordinator starts the next attempt with the agents present, up to the allowed number of
//!    restarts.
//!
//! An agent that joins with a node rank already in use is refused if the other agent still sends
//! heartbeats. Otherwise it takes the other agent's place, and the attempt with the other agent has
//! failed.
//!
//! In an elastic job (`trainer.elastic`), the coordinator answers a loss with another attempt that
//! is a *generation*: it keeps the ranks that are left (`generation::next`). Ranks hear of it from
//! their agent's own store, since the job's store may be on a lost host; agents that have come
//! later are taken in the same way. If the job cannot go on, the loss is a failure as above.
//!
//! An agent that is silent for `keep_alive` counts as lost, and so does a coordinator. If the
//! connection of either has ended, it is lost unless it connects again within two seconds. Without
//! a coordinator, agents end their ranks after twice `keep_alive`.
//!
//! # Invariants
//! - The thread that watches ranks and signals makes no request to the store, so an unreachable
//!   store never blocks it.
//! - The agents hear of an attempt only after it is decided, so no other coordinator can decide on
//!   another one in its place.
//! - An agent that ends leaves no rank behind: ranks are process groups, which get SIGTERM and then
//!   SIGKILL.

mod board;
mod coordinator;
mod endpoint;
mod generation;
mod logs;
mod members;
#[cfg(test)]
mod model;
mod options;
mod plan;
mod quorum;
#[cfg(test)]
mod quorum_model;
mod ranks;
mod run;
mod seats;
mod stores;

pub use options::{AgentOptions, Endpoint, Nodes};
pub use run::run;
