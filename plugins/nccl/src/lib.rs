//! NCCL process groups: NVIDIA GPU tensors use NCCL, host tensors use another process group.
//!
//! ```
//! use fulgurite_core::collective::ProcessGroupConfig;
//! # use fulgurite_nccl::Nccl;
//! let json = r#"{ "type": "nccl", "host": "shm" }"#;
//! let config: Box<dyn ProcessGroupConfig> = serde_json::from_str(json).unwrap();
//! # let _ = config;
//! ```
//!
//! **It has never run between GPUs**, only with one rank. The tests replace NCCL with a library of
//! the same interface, and CUDA streams with streams that run in random order
//! (`plugins/nccl/fake`). They cover everything except `cuda`. Training runs with that library and
//! `cuda` on emulated GPUs (`.ci/gpu`).
//!
//! NCCL is loaded when a group is made, so one program runs with and without it. The cargo feature
//! `cuda` adds the device. Without the feature the crate builds everywhere, and a run with `nccl`
//! is refused at its start.
//!
//! # How it works
//! | file | subject |
//! |---|---|
//! | `library` | NCCL's functions, with errors as values |
//! | [`streams`] | the device interface; `cuda` implements it for GPUs |
//! | `group`, `routes` | the process group; the split between NCCL and the host's group |
//! | `communicator` | a communicator and its stream: calls and shutdown |
//! | `plan`, `flat` | a collective as calls of NCCL; flat buffers for uneven parts |
//! | `messages` | `send` and `recv`, begun together |
//! | `flight`, `pending` | collectives under way, for the watchdog and for their waiters |
//! | `watchdog`, `records` | how every wait ends, and with which message |
//! | `shared`, `world`, `failure` | state of a group, state of all groups of a rank, and failures |
//!
//! **Two groups in one.** Each group contains a host group of the same ranks. The host group
//! carries objects, votes, barriers, the NCCL ids of new communicators, and the news of a failure.
//! A group of one rank is only its host group. A strategy makes the communicators of its groups
//! when it [connects](fulgurite_engine::collective::ProcessGroup::connect) them; otherwise the
//! first collective does. Messages use communicators of two ranks each, made at the first message.
//!
//! **Order.** A communicator has its own stream. On the device, that stream waits for the work that
//! the rank has queued so far. [`Work::wait`](fulgurite_engine::collective::Work::wait) makes the
//! rank's compute stream wait for the collective; the host never waits for the device. A work holds
//! its tensors until `wait`, or until it has run if it is dropped. A barrier runs on the host's
//! group. It also makes the rank's compute stream wait for all earlier collectives, so that memory
//! of dropped works can be freed.
//!
//! **Uneven parts** do not exist in NCCL. They go through a flat buffer with slots of equal length,
//! one for each rank.
//!
//! **Reductions** run in an order that NCCL chooses, so
//! [`exact_reductions`](fulgurite_engine::collective::ProcessGroup::exact_reductions) is false.
//! Floating-point sums are rounded to their dtype after each addition. Minima and maxima may ignore
//! NaN.
//!
//! # How waits end
//! Communicators are non-blocking: the caller polls while they connect or launch, and can stop. A
//! watchdog thread checks each group about every 100 ms for errors of NCCL, for collectives that
//! exceed the timeout, and for failures reported by other ranks. On any of them the group fails:
//! the host's group tells the other ranks, and the communicators are aborted, which ends their
//! kernels. Neither the communicators nor the memory of unfinished collectives are freed.
//!
//! A rank whose wait lasts a second writes its collective to the job's store, and reads the
//! collectives of the other ranks. So the error names a rank that is late or in another collective.

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
