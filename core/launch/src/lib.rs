//! Launching: starting a job's ranks, connecting them, and ending them.
//!
//! A program's `main` needs two calls around its own work:
//!
//! ```no_run
//! use std::process::ExitCode;
//! use fulgurite_launch::{LaunchOptions, launch, report_and_exit_code};
//!
//! fn main() -> ExitCode {
//!     report_and_exit_code(run())
//! }
//!
//! fn run() -> fulgurite_launch::Result<()> {
//!     let launched = launch(LaunchOptions { devices: Some(2), ..Default::default() })?;
//!     // From here on there are two processes.
//!     println!("rank {} of {}", launched.rank, launched.world_size);
//!     Ok(())
//! }
//! ```
//!
//! [`launch`] asks the [`environment`] which rank this process is. There are three cases:
//!
//! - **One rank.** Starts nothing and opens no socket; the store is a [`LocalStore`].
//! - **Several ranks, started by a launcher** (`torchrun`, `srun`). This process is one of them.
//!   Rank 0 hosts the [`StoreServer`] at the main address, and all ranks connect to it.
//! - **Several ranks, not started yet.** This process becomes the *supervisor*. It hosts the store,
//!   runs its own executable once for each rank, and never returns from [`launch`]. User code after
//!   the call runs in ranks only.
//!
//! On several nodes, or with restarts, [`agent`]s start the ranks: `fulgurite run`.
//!
//! # How a job ends
//! The store keeps the job's *first failure*. A rank that fails reports its error to the store
//! ([`report_and_exit_code`]; the panic hook does so for a panic on any thread). If a rank is
//! killed, its closed connection or its parent reveals it. Every other rank then finds
//! [`Store::failure`] set, stops with [`Error::PeerFailed`] and prints nothing, so that the first
//! message on the terminal is the cause. The supervisor prints the failure, gives the other ranks
//! two seconds to stop, and then ends them. If the supervisor is killed, the kernel kills its ranks
//! (on Linux).
//!
//! Under an [`Elastic`] supervisor, the loss of a rank ends only a *generation* of the job. A lost
//! process is replaced, or its rank left out, and the other ranks go on in the next generation
//! ([`join_next_generation`]).
//!
//! Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP ask all ranks to finish their step ([`interruption`]). A
//! second signal ends them at once, with two exceptions: SIGUSR1 only announces another signal, and
//! SIGHUP comes twice when a terminal closes. While the job starts ([`Starting`]) there is no step
//! to finish: a waiting rank that is asked to end does so at once, and the job ends with it.
//!
//! The exit code of every rank and of the supervisor is 128 + the signal that they
//! [agreed on](agree_on). It is 0 if the environment
//! [requeues](environment::ClusterEnvironment::requeue) the job for the signal.

pub mod agent;
mod attempt;
mod elastic;
pub mod environment;
mod failure;
mod job_memory;
mod job_secret;
mod launcher;
mod link;
mod memory;
mod orphans;
mod panics;
mod process;
mod rank;
mod rank_env;
mod rank_process;
mod signals;
mod supervisor;
mod threads;

pub use attempt::{Attempt, attempt};
pub use elastic::{Elastic, first_world_size, generation, join_next_generation};
pub use failure::{
    FailureWatch, JobFailure, PANIC_EXIT_CODE, PEER_FAILED_EXIT_CODE, report_and_exit_code,
};
pub use fulgurite_store::{
    ClientIdentity, JobKey, LocalStore, LostRankPolicy, Patience, Store, StoreServer, TcpStore,
};
pub use job_memory::{is_first_on_host, job_memories, job_memory, job_memory_id};
pub use launcher::{LaunchOptions, launch, launch_checked};
pub use link::{note_work, noted_work};
pub use memory::HostMemory;
pub use panics::{catch_panic, print_panics};
pub use rank::LaunchedRank;
pub use rank_env::is_running;
pub use signals::{
    Interruption, Starting, agree_on, interrupt_requested, interruption, notice_signals,
    take_interruption,
};
pub use threads::{RANK_STACK_BYTES, on_own_threads};

pub use fulgurite_error::{Error, Result};
