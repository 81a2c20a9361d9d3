//! MPI's own collectives, which the process group does not use: to measure it against them.
//!
//! ```no_run
//! use fulgurite_mpi::bare::BareMpi;
//!
//! // On every rank of a job that uses MPI.
//! if let Some(mpi) = BareMpi::current() {
//!     let mut sum = [0.0; 2];
//!     mpi.all_reduce(&[1.0, 2.0], &mut sum)?;
//! }
//! # Ok::<(), fulgurite_core::Error>(())
//! ```
#![allow(unsafe_code)] // Calls of MPI with memory.

use std::ffi::c_int;
use std::sync::Arc;

use fulgurite_error::{Error, Result};
use mpi_sys as ffi;

use crate::library::Fault;
use crate::process::MpiProcess;

/// MPI's own blocking collectives of f32, over all ranks of a job that uses MPI.
///
/// For measurements: all ranks must call the same with the same lengths, which nobody checks, and some MPI libraries write
/// behind memory that is too short. They are collective, and wait without end for a rank that does not come. Ranks are in the order in which MPI
/// numbers them, which may be another than that of the job.
pub struct BareMpi(Arc<MpiProcess>);

impl BareMpi {
    /// That of this process; `None` if no process group has started MPI.
    pub fn current() -> Option<Self> {
        MpiProcess::current().map(Self)
    }

    /// `MPI_Allreduce`: `sum` becomes the sum of all ranks' `values`.
    ///
    /// # Errors
    /// If the lengths differ here, and what MPI says.
    pub fn all_reduce(&self, values: &[f32], sum: &mut [f32]) -> Result<()> {
        let len = same("MPI_Allreduce", values.len(), sum.len())?;
        let (from, to) = (values.as_ptr().cast(), sum.as_mut_ptr().cast());
        // SAFETY: memory of `len` values each, borrowed until the call returns.
        self.call("MPI_Allreduce", |comm| unsafe {
            ffi::MPI_Allreduce(from, to, len, ffi::RSMPI_FLOAT, ffi::RSMPI_SUM, comm)
        })
    }

    /// `MPI_Allgather`: `all` becomes all ranks' `values`, one after the other.
    ///
    /// # Errors
    /// If `all` has not a place for each rank's, and what MPI says.
    pub fn all_gather(&self, values: &[f32], all: &mut [f32]) -> Result<()> {
        same("MPI_Allgather", values.len() * self.0.size(), all.len())?;
        let len = same("MPI_Allgather", values.len(), values.len())?;
        let (from, to) = (values.as_ptr().cast(), all.as_mut_ptr().cast());
        // SAFETY: memory of `len` values, and of `len` for each rank, borrowed until the call returns.
        self.call("MPI_Allgather", |comm| unsafe {
            ffi::MPI_Allgather(from, len, ffi::RSMPI_FLOAT, to, len, ffi::RSMPI_FLOAT, comm)
        })
    }

    /// `MPI_Reduce_scatter_block`: `sum` becomes this rank's part of the sum of all ranks' `values`.
    ///
    /// # Errors
    /// If `values` has not a part for each rank, and what MPI says.
    pub fn reduce_scatter(&self, values: &[f32], sum: &mut [f32]) -> Result<()> {
        same("MPI_Reduce_scatter_block", values.len(), sum.len() * self.0.size())?;
        let len = same("MPI_Reduce_scatter_block", sum.len(), sum.len())?;
        let (from, to) = (values.as_ptr().cast(), sum.as_mut_ptr().cast());
        // SAFETY: memory of `len` values for each rank, and of `len`, borrowed until the call returns.
        self.call("MPI_Reduce_scatter_block", |comm| unsafe {
            ffi::MPI_Reduce_scatter_block(from, to, len, ffi::RSMPI_FLOAT, ffi::RSMPI_SUM, comm)
        })
    }

    /// `MPI_Bcast`: `values` become those of the job's rank 0.
    ///
    /// # Errors
    /// What MPI says.
    pub fn broadcast(&self, values: &mut [f32]) -> Result<()> {
        let len = same("MPI_Bcast", values.len(), values.len())?;
        let (root, memory) = (self.0.mpi_rank(0) as c_int, values.as_mut_ptr().cast());
        // SAFETY: memory of `len` values, borrowed until the call returns.
        self.call("MPI_Bcast", |comm| unsafe {
            ffi::MPI_Bcast(memory, len, ffi::RSMPI_FLOAT, root, comm)
        })
    }

    /// `MPI_Barrier`.
    ///
    /// # Errors
    /// What MPI says.
    pub fn barrier(&self) -> Result<()> {
        // SAFETY: a communicator.
        self.call("MPI_Barrier", |comm| unsafe { ffi::MPI_Barrier(comm) })
    }

    fn call(&self, name: &str, call: impl FnOnce(ffi::MPI_Comm) -> c_int) -> Result<()> {
        let Some(_exchanging) = self.0.begin() else {
            return Err(Error::other(format!("{name}: this process has finalised MPI")));
        };
        let library = &self.0.library;
        let failed = |fault: Fault| Error::other(format!("{name}: {}", fault.text));
        library.call(|| call(library.comm)).map_err(failed)
    }
}

/// A number of values as MPI counts, if both are that many.
fn same(name: &str, one: usize, other: usize) -> Result<c_int> {
    if one != other {
        return Err(Error::other(format!("{name}: {one} values and {other} of the result")));
    }
    c_int::try_from(one).map_err(|_| {
        Error::other(format!("{name}: {one} values are more than MPI counts, {}", c_int::MAX))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_that_do_not_fit_are_refused() {
        assert_eq!(same("MPI_Allreduce", 3, 3).unwrap(), 3);
        let error = |one, other| same("MPI_Allreduce", one, other).unwrap_err().to_string();
        insta::assert_snapshot!(error(3, 4), @"MPI_Allreduce: 3 values and 4 of the result");
        insta::assert_snapshot!(error(1 << 31, 1 << 31), @"MPI_Allreduce: 2147483648 values are more than MPI counts, 2147483647");
    }
}
