//! MPI's own collectives, as a baseline for measurements. The process group does not use them.
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
/// They are for measurements only. All ranks must call the same collective with the same lengths.
/// Lengths are not compared between ranks, and some MPI libraries write past the end of memory that
/// is too short. The collectives wait for missing ranks without a timeout. Ranks are in MPI's
/// order, which may differ from the job's.
pub struct BareMpi(Arc<MpiProcess>);

impl BareMpi {
    /// Returns this process's MPI, or `None` if no process group has started MPI.
    pub fn current() -> Option<Self> {
        MpiProcess::current().map(Self)
    }

    /// `MPI_Allreduce`: `sum` becomes the sum of all ranks' `values`.
    ///
    /// # Errors
    /// If the two lengths differ, and errors of MPI.
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
    /// If the length of `all` does not match, and errors of MPI.
    pub fn all_gather(&self, values: &[f32], all: &mut [f32]) -> Result<()> {
        same("MPI_Allgather", values.len() * self.0.size(), all.len())?;
        let len = same("MPI_Allgather", values.len(), values.len())?;
        let (from, to) = (values.as_ptr().cast(), all.as_mut_ptr().cast());
        // SAFETY: memory of `len` values, and of `len` for each rank, borrowed until the call
        // returns.
        self.call("MPI_Allgather", |comm| unsafe {
            ffi::MPI_Allgather(from, len, ffi::RSMPI_FLOAT, to, len, ffi::RSMPI_FLOAT, comm)
        })
    }

    /// `MPI_Reduce_scatter_block`: `sum` becomes this rank's part of the sum of all ranks'
    /// `values`.
    ///
    /// # Errors
    /// If the length of `values` does not match, and errors of MPI.
    pub fn reduce_scatter(&self, values: &[f32], sum: &mut [f32]) -> Result<()> {
        same("MPI_Reduce_scatter_block", values.len(), sum.len() * self.0.size())?;
        let len = same("MPI_Reduce_scatter_block", sum.len(), sum.len())?;
        let (from, to) = (values.as_ptr().cast(), sum.as_mut_ptr().cast());
        // SAFETY: memory of `len` values for each rank, and of `len`, borrowed until the call
        // returns.
        self.call("MPI_Reduce_scatter_block", |comm| unsafe {
            ffi::MPI_Reduce_scatter_block(from, to, len, ffi::RSMPI_FLOAT, ffi::RSMPI_SUM, comm)
        })
    }

    /// `MPI_Bcast`: copies the `values` of the job's rank 0 to all ranks.
    ///
    /// # Errors
    /// Errors of MPI.
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
    /// Errors of MPI.
    pub fn barrier(&self) -> Result<()> {
        // SAFETY: a valid communicator.
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

/// Converts a length to MPI's type, if both lengths are equal.
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
    use fulgurite_test_message::assert_says;

    use super::*;

    #[test]
    fn mismatched_lengths_are_refused() {
        assert_eq!(same("MPI_Allreduce", 3, 3).unwrap(), 3);
        let error = |one, other| same("MPI_Allreduce", one, other).unwrap_err().to_string();
        assert_says!(error(3, 4), "MPI_Allreduce: 3 values and 4 of the result");
        assert_says!(error(1 << 31, 1 << 31), "MPI_Allreduce: 2147483648 … more than … 2147483647");
    }
}
