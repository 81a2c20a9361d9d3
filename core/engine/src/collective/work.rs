//! A collective that is under way.

use std::cell::Cell;

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

    /// Blocks until the collective is complete.
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

thread_local! {
    static WAITS: Cell<bool> = const { Cell::new(false) };
}

/// Starts a collective and waits for it. A transport may carry it out on this thread, which saves
/// waking another: the way for small collectives that nothing overlaps.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fulgurite_core::collective::{ProcessGroup, ReduceOp, Solo, wait_for};
///
/// let (group, sum) = (Solo::new("world", 0), Tensor::new(&[1f32], &Device::Cpu)?);
/// wait_for(|| group.all_reduce(&sum, ReduceOp::Sum))?;
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
///
/// # Errors
/// Those of the collective.
pub fn wait_for(start: impl FnOnce() -> Result<Work>) -> Result<()> {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            WAITS.set(self.0);
        }
    }
    let work = {
        let _restore = Restore(WAITS.replace(true));
        start()?
    };
    work.wait()
}

/// Whether the collective that is being started on this thread is waited for at once
/// ([`wait_for`]): it need not go on before [`Work::wait`], or before a later collective of the group
/// does. For transports.
pub fn caller_waits() -> bool {
    WAITS.get()
}

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Work").field("pending", &self.0.is_some()).finish()
    }
}
