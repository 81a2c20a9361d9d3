//! Steps that are begun again because a rank has no memory left.

use std::sync::{Arc, Mutex};

use super::Fabric;
use crate::{Error, Result};
use candle_core::Tensor;
use fulgurite_engine::accelerator::Accelerator;
use fulgurite_engine::collective::{Abandonment, ProcessGroup};

/// What ranks need to leave a step together.
pub(super) struct Attempts {
    abandonment: Abandonment,
    /// Knows what an error of its device is.
    accelerator: Arc<dyn Accelerator>,
    /// The buffers as they were when the attempt began.
    buffers: Mutex<Vec<Tensor>>,
}

impl Attempts {
    /// For the ranks of `world`, and the group of these in whose steps ranks can be left.
    pub(super) fn new(
        world: Arc<dyn ProcessGroup>,
        accelerator: Arc<dyn Accelerator>,
    ) -> Result<(Self, Arc<dyn ProcessGroup>)> {
        let abandonment = Abandonment::new(world.global_ranks()[world.rank()]);
        let world = abandonment.watch(world)?;
        Ok((Self { abandonment, accelerator, buffers: Mutex::default() }, world))
    }
}

impl Fabric {
    /// Begins what [`abandon_step`](Self::abandon_step) can leave: forwards and backwards, before any update. Collective
    /// if steps can be left.
    pub(crate) fn begin_attempt(&self) -> Result<()> {
        let Some(attempts) = &self.attempts else { return Ok(()) };
        // A rank that still logs the step before would take another one's want of memory for an error.
        self.barrier()?;
        let copies =
            self.runtime.tree()?.buffers().iter().map(|buffer| Ok(buffer.value()?.copy()?));
        *attempts.buffers.lock().expect("no panic while it is held") =
            copies.collect::<Result<_>>()?;
        Ok(())
    }

    /// Ends it, on all ranks or on none. Collective if steps can be left.
    ///
    /// # Errors
    /// If another rank has abandoned the step.
    pub(crate) fn end_attempt(&self) -> Result<()> {
        if self.attempts.is_some() { self.barrier() } else { Ok(()) }
    }

    /// Leaves the attempt of a step that failed with `error` on this rank, if steps can be left and this or another
    /// rank has no memory left: the model is as before the attempt, without gradients. Returns the rank without memory.
    /// Collective in that case.
    ///
    /// # Errors
    /// If a peer fails, or the strategy cannot leave a step.
    pub(crate) fn abandon_step(&self, error: &Error) -> Result<Option<usize>> {
        let Some(attempts) = &self.attempts else { return Ok(None) };
        if attempts.accelerator.is_out_of_memory(error) {
            tracing::info!("no memory left: {error}");
            attempts.abandonment.abandon();
        } else if !attempts.abandonment.is_abandoned() {
            return Ok(None);
        }
        let rank = attempts.abandonment.resume()?;
        let saved =
            std::mem::take(&mut *attempts.buffers.lock().expect("no panic while it is held"));
        for (buffer, values) in self.runtime.tree()?.buffers().iter().zip(&saved) {
            buffer.set(values)?;
        }
        self.runtime.abandon_step()?;
        Ok(Some(rank))
    }
}
