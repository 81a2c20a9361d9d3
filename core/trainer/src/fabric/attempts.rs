//! Steps that start again because a rank has run out of memory.

use std::sync::{Arc, Mutex};

use super::Fabric;
use crate::{Error, Result};
use candle_core::Tensor;
use fulgurite_engine::accelerator::Accelerator;
use fulgurite_engine::collective::{Abandonment, ProcessGroup};

/// State with which ranks abandon a step together.
pub(super) struct Attempts {
    abandonment: Abandonment,
    /// Recognises an out-of-memory error of the device.
    accelerator: Arc<dyn Accelerator>,
    /// The buffers' values when the attempt began.
    buffers: Mutex<Vec<Tensor>>,
}

impl Attempts {
    /// Creates the state, and a group to use instead of `world`: its ranks can abandon a step.
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
    /// Begins an attempt: forwards and backwards, before any update.
    ///
    /// [`abandon_step`](Self::abandon_step) can abandon it. Collective if steps can be abandoned.
    pub(crate) fn begin_attempt(&self) -> Result<()> {
        let Some(attempts) = &self.attempts else { return Ok(()) };
        // While a rank still logs the previous step, another rank's lack of memory would be an
        // error there.
        self.barrier()?;
        *attempts.buffers.lock().expect("no panic while it is held") = self.copy_buffers()?;
        Ok(())
    }

    /// Returns whether the model has buffers.
    pub(crate) fn has_buffers(&self) -> Result<bool> {
        Ok(!self.runtime.tree()?.buffers().is_empty())
    }

    /// Returns copies of the model's buffers.
    pub(crate) fn copy_buffers(&self) -> Result<Vec<Tensor>> {
        let buffers = self.runtime.tree()?.buffers().iter();
        buffers.map(|buffer| Ok(buffer.value()?.copy()?)).collect()
    }

    /// Sets the buffers to copied values; does nothing without any.
    pub(crate) fn set_buffers(&self, copies: &[Tensor]) -> Result<()> {
        let buffers = self.runtime.tree()?.buffers().iter();
        buffers.zip(copies).try_for_each(|(buffer, values)| buffer.overwrite(values))
    }

    /// Ends the attempt, on all ranks or on none. Collective if steps can be abandoned.
    ///
    /// # Errors
    /// If another rank has abandoned the step.
    pub(crate) fn end_attempt(&self) -> Result<()> {
        if self.attempts.is_some() { self.barrier() } else { Ok(()) }
    }

    /// Abandons an attempt that failed with `error`, if this or another rank has run out of memory.
    ///
    /// Returns that rank, and the model is then as before the attempt, without gradients;
    /// collective in this case. Returns `None` for other errors, or if steps cannot be abandoned.
    ///
    /// # Errors
    /// If a peer fails, or the strategy cannot abandon a step.
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
        self.set_buffers(&saved)?;
        self.runtime.abandon_step()?;
        Ok(Some(rank))
    }
}
