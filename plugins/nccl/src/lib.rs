//! Process groups over NCCL: tensors on GPUs of NVIDIA go over NCCL, those of the host over another process group.
//!
//! ```
//! use fulgurite_core::collective::ProcessGroupConfig;
//! # use fulgurite_nccl::Nccl;
//! let json = r#"{ "type": "nccl", "host": "shm" }"#;
//! let config: Box<dyn ProcessGroupConfig> = serde_json::from_str(json).unwrap();
//! # let _ = config;
//! ```
//!
//! **It was never run on a GPU.** Its tests run all of it but `cuda` with a library that has NCCL's interface and streams that
//! run in random order (`plugins/nccl/fake`); with that library and `cuda` trainings run on emulated GPUs (`.ci/gpu`).
//!
//! NCCL is loaded when a group is made, so that one program runs with and without it. The cargo feature `cuda` has the
//! device; without it the crate builds everywhere, and says so at the start of a run.
//!
//! # How it works
//! | file | subject |
//! |---|---|
//! | `library` | NCCL's functions, with errors as values |
//! | [`streams`] | what is needed of a device; `cuda`, the one for GPUs |
//! | `group`, `routes` | the process group; what goes over NCCL, and what over the host's group |
//! | `communicator` | a communicator and its stream; calling it and ending it |
//! | `plan`, `flat` | a collective as calls of NCCL; flat buffers for uneven parts |
//! | `messages` | `send` and `recv`, begun together |
//! | `flight`, `pending` | what is under way, for the watchdog and for whoever waits for it |
//! | `watchdog`, `records` | how every wait ends, and what is said then |
//! | `shared`, `world`, `failure` | what the parts of a group share, what all groups of a rank do, and why one is over |
//!
//! **Two groups in one.** Each has a group of the host of the same ranks, which carries objects, votes and barriers, the
//! ids by which ranks find each other in NCCL, and the news of a failure. A group of one rank is the host's alone.
//! Communicators are made when a strategy
//! [connects](fulgurite_engine::collective::ProcessGroup::connect) the groups that it will use, else at the first
//! collective; those of messages, of two ranks each, at their first message.
//!
//! **Order.** A communicator has a stream of its own. It waits, on the device, for what the rank has queued so far;
//! [`Work::wait`](fulgurite_engine::collective::Work::wait) makes the rank's stream wait for it. The host never does. A
//! work's tensors are held until then, or, if nobody waits, until it has run. A barrier runs on the host's group. It also makes
//! the rank's stream wait for all earlier collectives, so that memory of dropped works can be freed.
//!
//! **Uneven parts**, of which NCCL knows nothing, go through a flat buffer with a slot of one length for each rank.
//!
//! **Reductions** are in an order that NCCL chooses, so that
//! [`exact_reductions`](fulgurite_engine::collective::ProcessGroup::exact_reductions) is false: sums of floating-point
//! numbers are rounded to their dtype after each addition, and minima and maxima may pass over NaN.
//!
//! # How waits end
//! Communicators do not block, so that the caller waits for connections itself, and can stop. A thread looks at each
//! group about every 100 ms: at NCCL's errors, at what has not run within the timeout, and at failures that others have
//! told of. Then the group is over: the others are told by the host's group, the communicators are aborted, which ends
//! their kernels, and they and the memory of what was under way are never freed. A wait that lasts a second says in the
//! job's store which collective it is in, and reads there what the others wait in; so a rank that is late, or in another
//! collective, is named.

mod communicator;
mod config;
#[cfg(feature = "cuda")]
mod cuda;
mod failure;
mod flat;
mod flight;
mod group;
mod library;
mod messages;
mod pending;
mod plan;
mod records;
mod routes;
mod shared;
pub mod streams;
mod timed;
mod watchdog;
mod world;

pub use config::Nccl;
#[cfg(feature = "cuda")]
pub use cuda::Cuda;
pub use group::{Parts, connect, connect_even_alone};
