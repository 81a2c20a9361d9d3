//! Tests with ranks that an MPI launcher starts.
//!
//! They need the feature `mpi`. `.ci/mpi` runs them under both families. By hand:
//! `MPICC=mpicc.mpich FULGURITE_MPIRUN=mpirun.mpich cargo test -p fulgurite-mpi --features mpi`.
#![cfg(feature = "mpi")]

mod group;
mod job;
mod start;
mod wire;
