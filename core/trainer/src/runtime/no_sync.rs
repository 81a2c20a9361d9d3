//! [`NoSyncGuard`]: how long backwards leave gradients unreduced.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Restores the setting before
/// [`Fabric::no_backward_sync`](crate::fabric::Fabric::no_backward_sync) when dropped.
#[must_use = "gradients are synchronised again as soon as the guard is dropped"]
#[derive(Debug)]
pub struct NoSyncGuard {
    synchronise: Arc<AtomicBool>,
    previous: bool,
}

impl NoSyncGuard {
    /// Sets the flag that says whether backwards reduce gradients.
    pub(super) fn set(synchronise: &Arc<AtomicBool>, value: bool) -> Self {
        let previous = synchronise.swap(value, Ordering::Relaxed);
        Self { synchronise: synchronise.clone(), previous }
    }
}

impl Drop for NoSyncGuard {
    fn drop(&mut self) {
        self.synchronise.store(self.previous, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // checklist: Lightning: no_backward_sync, whose exit set the wrong value
    #[test]
    fn guards_restore_what_they_found() {
        let synchronise = Arc::new(AtomicBool::new(true));
        let sync = || synchronise.load(Ordering::Relaxed);
        let outer = NoSyncGuard::set(&synchronise, false);
        assert!(!sync());
        let inner = NoSyncGuard::set(&synchronise, true);
        assert!(sync());
        drop(inner);
        assert!(!sync());
        drop(outer);
        assert!(sync());
    }
}
