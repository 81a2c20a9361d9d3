//! The environment of `mpirun` and `mpiexec`. Launchers name their variables differently;
//! [`launchers`] knows the names.

mod environment;
mod launchers;
mod meeting_point;

pub use environment::Mpi;
pub(crate) use launchers::has_started;
