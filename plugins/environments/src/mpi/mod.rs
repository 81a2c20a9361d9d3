//! The environment of `mpirun` and `mpiexec`. They set no variables that all of them agree on: [`launchers`] knows
//! those of each.

mod environment;
mod launchers;
mod meeting_point;

pub use environment::Mpi;
pub(crate) use launchers::has_started;
