//! A collective that is under way.

use crate::Result;

/// A collective that was started. The tensors it was given must not be read or changed before
/// [`wait`](Work::wait) returns.
///
/// Dropping it without waiting does not cancel the collective; its error, if any, then surfaces at
/// the next call on the group.
#[must_use = "a collective is complete only after `wait`"]
pub struct Work(Option<Box<dyn FnOnce() -> Result<()> + Send>>);

impl Work {
    /// A collective that is complete already.
    pub fn ready() -> Self {
        Self(None)
    }

    /// A collective that is complete when `wait` returns.
    pub fn pending(wait: impl FnOnce() -> Result<()> + Send + 'static) -> Self {
        Self(Some(Box::new(wait)))
    }

    /// Blocks until the collective is complete. Of tensors on a device it need not block: what is queued on the
    /// device from then on comes after the collective.
    ///
    /// # Errors
    /// Whatever went wrong: a peer that failed, a timeout, an aborted group.
    pub fn wait(self) -> Result<()> {
        match self.0 {
            Some(wait) => wait(),
            None => Ok(()),
        }
    }
}

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Work").field("pending", &self.0.is_some()).finish()
    }
}
