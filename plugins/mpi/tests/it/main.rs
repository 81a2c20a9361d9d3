//! Ranks that an MPI launcher starts. Built with the feature `mpi`, run by `.ci/mpi` under both families; by hand:
//! `MPICC=mpicc.mpich FULGURITE_MPIRUN=mpirun.mpich cargo test -p fulgurite-mpi --features mpi`.
#![cfg(feature = "mpi")]

mod group;
mod job;
mod start;
mod wire;
