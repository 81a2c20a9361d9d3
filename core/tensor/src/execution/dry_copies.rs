//! Copies between host and device in a dry run that tells their memory apart.

use candle_core::Tensor;

use super::dry_run::{self, DryRun, Happening, SKIPPED_BYTES};
use super::transfer::{HostCopies, HostCopy, is_on_host};
use crate::memory::{self, Place};
use crate::{Result, zeros};

/// Makes copies in the memory of the other place. Both are the host's in truth.
pub(super) struct DryCopies(DryRun);

impl DryCopies {
    /// The copies of this thread's dry run; `None` if its device computes in the host's memory.
    pub(super) fn current() -> Option<Self> {
        dry_run::current().filter(DryRun::has_host).map(Self)
    }

    /// Records that a copy begins. Returns its number and the copy, whose large values are zero.
    fn begin(&self, tensor: &Tensor, to: Place) -> Result<(u64, Tensor)> {
        let bytes = tensor.elem_count() * tensor.dtype().size_in_bytes();
        let id = self.0.number();
        self.0.record(Happening::Copy { id, bytes: bytes as u64, to });
        let _place = memory::at(to);
        let copy = match bytes < SKIPPED_BYTES || tensor.dtype().is_int() {
            true => tensor.force_contiguous()?,
            false => zeros::on_host(tensor.shape(), tensor.dtype())?,
        };
        Ok((id, copy))
    }
}

impl HostCopies for DryCopies {
    fn to_device(&self, tensor: &Tensor) -> Result<Tensor> {
        // Batches are made where they are used.
        if !is_on_host(tensor) {
            return Ok(tensor.clone());
        }
        let (id, copy) = self.begin(tensor, Place::Device)?;
        self.0.record(Happening::Wait { id });
        Ok(copy)
    }

    fn to_host(&self, tensor: &Tensor) -> Result<Tensor> {
        self.begin_to_host(tensor)?.wait()
    }

    fn begin_to_host(&self, tensor: &Tensor) -> Result<HostCopy> {
        if is_on_host(tensor) {
            return Ok(HostCopy::done(tensor.clone()));
        }
        let (id, copy) = self.begin(tensor, Place::Host)?;
        // The device's memory is free when the copy was waited for.
        let (run, source) = (self.0.clone(), tensor.detach());
        Ok(HostCopy::new(move || {
            drop(source);
            run.record(Happening::Wait { id });
            Ok(copy)
        }))
    }
}
