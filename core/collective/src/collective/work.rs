//! Running collectives.

use std::any::Any;
use std::sync::Arc;

use crate::Result;

/// The end of a collective, on which another can depend: [`ProcessGroup::start_after`].
///
/// [`ProcessGroup::start_after`]: super::ProcessGroup::start_after
pub trait End: Any + Send + Sync {
    /// Like [`Work::wait`], but callable any number of times and on any thread.
    ///
    /// # Errors
    /// As [`Work::wait`].
    fn wait(&self) -> Result<()>;
}

/// A started collective. Its tensors must not be read or changed before [`wait`](Work::wait)
/// returns.
///
/// Dropping it without waiting does not cancel the collective. Its error, if any, then surfaces at
/// the group's next call.
#[must_use = "a collective is complete only after `wait`"]
#[derive(Default)]
pub struct Work {
    wait: Option<Box<dyn FnOnce() -> Result<()> + Send>>,
    end: Option<Arc<dyn End>>,
}

impl Work {
    /// A completed collective.
    pub fn ready() -> Self {
        Self::default()
    }

    /// A collective that is complete when `wait` returns.
    pub fn pending(wait: impl FnOnce() -> Result<()> + Send + 'static) -> Self {
        Self { wait: Some(Box::new(wait)), end: None }
    }

    /// Several collectives, which are complete when all of them are. Keeps the end of a single one.
    pub fn all(mut works: Vec<Self>) -> Self {
        match works.len() {
            0 => Self::ready(),
            1 => works.remove(0),
            _ => Self::pending(move || works.into_iter().try_for_each(Self::wait)),
        }
    }

    /// Adds an end that others can wait for.
    pub fn with_end(self, end: Arc<dyn End>) -> Self {
        Self { end: Some(end), ..self }
    }

    /// The collective's end. `None` if it is complete, or if the transport has no such end.
    pub fn end(&self) -> Option<&Arc<dyn End>> {
        self.end.as_ref()
    }

    /// Whether a wait has nothing to wait for.
    pub(super) fn is_ready(&self) -> bool {
        self.wait.is_none()
    }

    /// Blocks until the collective is complete. For tensors on a device it need not block: work
    /// queued on the device from then on runs after the collective.
    ///
    /// # Errors
    /// If a peer failed, the wait timed out, or the group was aborted.
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
