//! Process groups over MPI: the ranks of a job on one host or on many, connected by the MPI library of the site.
//!
//! ```
//! use fulgurite_core::collective::ProcessGroupConfig;
//! # use fulgurite_mpi::Mpi;
//! let json = r#"{ "type": "mpi" }"#;
//! let config: Box<dyn ProcessGroupConfig> = serde_json::from_str(json).unwrap();
//! # let _ = config;
//! ```
//!
//! The cargo feature `mpi` links the library. Without it all of the crate but [`Mpi`] is left out, and building a
//! group says so.
//!
//! # How it works
//! Of MPI, messages alone are used: nonblocking sends and receives of bytes, which the
//! [engine](fulgurite_transports::network) of all networks makes into collectives. Reductions are our own code, in
//! rank order, so that results have the bits of `shm` with any MPI library, and so for bf16 and f16, which MPI
//! does not know.
//!
//! | file | subject |
//! |---|---|
//! | `launcher` | whether something started this process as one of MPI |
//! | `meeting` | meeting in the job's store before MPI may block, and agreeing on what one member decides |
//! | `library` | the calls of MPI that are used, with errors as values |
//! | `process` | this process's MPI: its thread, its start and its end |
//! | `network`, `wire` | connecting the members of a group; exchanging messages |
//! | `pause` | how a wait spends its time |
//! | `bare` | MPI's own collectives, to measure the process group against |
//!
//! **Groups are told apart by tags**, a number for each group that its first member takes from a counter in the
//! job's store. All use one communicator, a duplicate of the world's. A communicator for each group would be made
//! by a collective of MPI, which waits without end for a member that does not come, or that has failed.
//!
//! **Waits are ours.** MPI is initialised on a thread of its own, after all ranks have met in the store; the
//! communicator is duplicated by `MPI_Comm_idup`; messages and the barrier at the end are tested. So each wait has
//! a timeout and ends with the job's first failure. Errors of MPI are values too: the communicator has the handler
//! `MPI_ERRORS_RETURN`.
//!
//! **Long messages** are sent in pieces of [`Mpi::piece_bytes`], which arrive in order as they have one tag. So MPI 3
//! is enough for messages of any length, and the progress of a long one shows.
//!
//! **Messages move while the rank computes**: exchanges run on the groups' communication threads, which test them
//! until they are done. Between exchanges the thread of MPI tests it, since some libraries send what they have
//! taken in later calls only.
//!
//! **Threads**: `MPI_THREAD_MULTIPLE` is asked for. A library that gives `MPI_THREAD_SERIALIZED` is called behind
//! one lock, held for a call and never during a wait; one that gives less is refused.
//!
//! # The end
//! When the process ends with status 0, no exchange has failed and no rank has reported a failure, the ranks meet
//! in a barrier (`MPI_Ibarrier`, tested), and then call `MPI_Finalize`. That is at the end of the process, not of
//! the last group, for MPI cannot be initialised again. Otherwise MPI is left as it is: `MPI_Finalize` could wait
//! for a rank that is gone. `mpirun` and `srun` take a process that ends so for failed, and end the others, which
//! is what should happen; their message comes after the error of the rank.
//!
//! # Why mpi-sys
//! Of the two bindings that are kept, `mpi` (rsmpi) ends the process when MPI has an error, and its requests borrow
//! from a scope; those of `ferrompi` return errors, but a scope ends only when all of its requests have, so that a
//! wait for a dead rank has no end. Both are right for programs that trust their peers. `mpi-sys` is the plain
//! interface below rsmpi, generated from the headers of the MPI library at hand.

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
