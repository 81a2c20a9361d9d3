//! A collective that is under way.

use std::any::Any;
use std::sync::Arc;

use crate::Result;

/// The end of a collective, for another one that comes after it: [`ProcessGroup::start_after`].
///
/// [`ProcessGroup::start_after`]: super::ProcessGroup::start_after
pub trait End: Any + Send + Sync {
    /// As [`Work::wait`], any number of times and on any thread.
    ///
    /// # Errors
    /// As [`Work::wait`].
    fn wait(&self) -> Result<()>;
}

/// A collective that was started. The tensors it was given must not be read or changed before
/// [`wait`](Work::wait) returns.
///
/// Dropping it without waiting does not cancel the collective; its error, if any, then surfaces at
/// the next call on the group.
#[must_use = "a collective is complete only after `wait`"]
#[derive(Default)]
pub struct Work {
    wait: Option<Box<dyn FnOnce() -> Result<()> + Send>>,
    end: Option<Arc<dyn End>>,
}

impl Work {
    /// A collective that is complete already.
    pub fn ready() -> Self {
        Self::default()
    }

    /// A collective that is complete when `wait` returns.
    pub fn pending(wait: impl FnOnce() -> Result<()> + Send + 'static) -> Self {
        Self { wait: Some(Box::new(wait)), end: None }
    }

    /// The same, whose end others can wait for too.
    pub fn with_end(self, end: Arc<dyn End>) -> Self {
        Self { end: Some(end), ..self }
    }

    /// Its end; `None` if it is complete already, or the transport knows of no end before somebody waits.
    pub fn end(&self) -> Option<&Arc<dyn End>> {
        self.end.as_ref()
    }

    /// Blocks until the collective is complete. Of tensors on a device it need not block: what is queued on the
    /// device from then on comes after the collective.
    ///
    /// # Errors
    /// Whatever went wrong: a peer that failed, a timeout, an aborted group.
    pub fn wait(self) -> Result<()> {
        match self.wait {
            Some(wait) => wait(),
            None => Ok(()),
        }
    }
}

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Work").field("pending", &self.wait.is_some()).finish()
    }
}
