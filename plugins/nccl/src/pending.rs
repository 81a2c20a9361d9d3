//! Launched collectives and messages that can be waited for.

use std::sync::Arc;

use fulgurite_core::Result;
use fulgurite_core::collective::End;

use crate::failure::Failure;
use crate::shared::Shared;
use crate::streams::{Event, Memory};

/// A launched collective or message, and its memory.
pub(crate) struct Pending {
    pub(crate) shared: Arc<Shared>,
    pub(crate) ticket: u64,
    pub(crate) event: Arc<dyn Event>,
    pub(crate) memory: Vec<Memory>,
}

impl Pending {
    /// Makes later work of the compute stream run after this collective or message.
    pub(crate) fn wait(mut self) -> Result<(), Failure> {
        let memory = std::mem::take(&mut self.memory);
        let waited = match self.shared.failure() {
            Some(failure) => Err(failure),
            None => self.shared.world.streams.wait(&*self.event, &memory).map_err(Failure::from),
        };
        // An aborted communicator releases its streams with arbitrary values in memory.
        match self.shared.failure().map_or(waited, Err) {
            Ok(()) => {
                drop(memory);
                Ok(())
            }
            Err(failure) => {
                self.shared.fail(failure.clone());
                std::mem::forget(memory);
                Err(failure)
            }
        }
    }
}

/// The end of a launched collective, which other streams can wait for.
pub(crate) struct Ended {
    pub(crate) shared: Arc<Shared>,
    pub(crate) op: &'static str,
    pub(crate) event: Arc<dyn Event>,
}

impl End for Ended {
    fn wait(&self) -> Result<()> {
        match self.shared.failure() {
            Some(failure) => Err(self.shared.error(self.op, failure)),
            None => self.shared.world.streams.wait(&*self.event, &[]),
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.shared.hold(self.ticket, std::mem::take(&mut self.memory));
    }
}
