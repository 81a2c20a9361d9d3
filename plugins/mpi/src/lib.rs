//! Process groups over MPI: the ranks of a job, on one or more hosts, use the site's MPI library.
//!
//! ```
//! use fulgurite_core::collective::ProcessGroupConfig;
//! # use fulgurite_mpi::Mpi;
//! let json = r#"{ "type": "mpi" }"#;
//! let config: Box<dyn ProcessGroupConfig> = serde_json::from_str(json).unwrap();
//! # let _ = config;
//! ```
//!
//! The cargo feature `mpi` links the library. Without it the crate contains only [`Mpi`], and
//! building a group is an error.
//!
//! # How it works
//! Fulgurite uses only MPI's messages: nonblocking sends and receives of bytes. The
//! [engine](fulgurite_transports::network) of all networks turns them into collectives. Reductions
//! are our own code, in rank order. So results are bitwise equal to those from `shm` with any MPI
//! library, even for bf16 and f16, which MPI lacks.
//!
//! | file | subject |
//! |---|---|
//! | `launcher` | detection of an MPI launcher |
//! | `meeting` | meetings in the job's store, before MPI may block and for decisions |
//! | `library` | the MPI calls in use, with errors as values |
//! | `process` | this process's MPI: its thread, its start and its end |
//! | `network`, `wire` | connecting the members of a group; exchanging messages |
//! | `pause` | pauses between tests in a wait |
//! | `bare` | MPI's own collectives, as a baseline for measurements |
//!
//! **Tags distinguish groups.** A group's tag is a number that its first member takes from a
//! counter in the job's store. All groups use one communicator, a duplicate of the world's. Making
//! a communicator for each group would need a collective of MPI, which waits without a timeout for
//! a late or failed member.
//!
//! **Waits are ours.** A separate thread initialises MPI after all ranks have met in the store.
//! `MPI_Comm_idup` duplicates the communicator. Messages and the final barrier are tested, never
//! waited for. So each wait has a timeout, and ends with the job's first failure. Errors of MPI are
//! values too: the communicator has the handler `MPI_ERRORS_RETURN`.
//!
//! **Long messages** are sent in pieces of [`Mpi::piece_bytes`]. Pieces arrive in order, as they
//! have one tag. So MPI 3 is enough for messages of any length, and a wait sees the progress of a
//! long message.
//!
//! **Messages move while the rank computes.** Exchanges run on the groups' communication threads,
//! which test them until they are done. Between exchanges the MPI thread calls the library, as some
//! libraries only send accepted data in later calls.
//!
//! **Threads.** We ask for `MPI_THREAD_MULTIPLE`. With `MPI_THREAD_SERIALIZED`, a lock guards each
//! call, but is never held during a wait. Lower levels are refused.
//!
//! # The end
//! MPI is finalised if the process ends with status 0, no exchange has failed, and no rank has
//! reported a failure. The ranks meet in a barrier (`MPI_Ibarrier`, tested), and then call
//! `MPI_Finalize`. This happens at the end of the process, not of the last group, because MPI
//! cannot be initialised again. Otherwise MPI is not finalised: `MPI_Finalize` could wait for a
//! dead rank. `mpirun` and `srun` then treat the process as failed and end the others, which is
//! correct. Their message comes after the rank's error.
//!
//! # Why mpi-sys
//! There are two maintained bindings. `mpi` (rsmpi) ends the process on an error of MPI, and its
//! requests borrow from a scope. `ferrompi` returns errors, but its scopes end only when all their
//! requests have, so a wait for a dead rank never ends. Both suit programs that trust their peers.
//! `mpi-sys` is the plain interface below rsmpi, generated from the headers of the installed MPI
//! library.

#[cfg(feature = "mpi")]
#[doc(hidden)]
pub mod bare;
mod config;
#[cfg(feature = "mpi")]
mod launcher;
#[cfg(feature = "mpi")]
mod library;
#[cfg(feature = "mpi")]
mod meeting;
#[cfg(feature = "mpi")]
mod network;
#[cfg(feature = "mpi")]
mod pause;
#[cfg(feature = "mpi")]
mod process;
#[cfg(feature = "mpi")]
mod wire;

pub use config::Mpi;
#[cfg(feature = "mpi")]
pub use network::MpiNetwork;
