//! What layers do about a graph.

use std::sync::atomic::{AtomicU64, Ordering};

use super::context::{self, Change, ContextGuard};

/// What layers do about a graph.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum GradMode {
    /// They record one, and count uses of parameters.
    #[default]
    Enabled,
    /// They record none: there is no backward.
    Disabled,
    /// They record none now and count uses: a backward will compute this forward again.
    Deferred,
    /// They record one for a deferred forward, which has counted the uses. The number tells one
    /// recomputation of this process from another.
    Recomputing(u64),
}

impl GradMode {
    /// The mode in force on this thread.
    pub(crate) fn current() -> Self {
        context::grad_mode()
    }

    /// Puts this mode in force on this thread until the guard is dropped.
    pub(crate) fn enter(self) -> ContextGuard {
        context::push(Change::GradMode(self))
    }

    /// A recomputation with a number of its own.
    pub(crate) fn recomputing() -> Self {
        static RECOMPUTATIONS: AtomicU64 = AtomicU64::new(0);
        Self::Recomputing(RECOMPUTATIONS.fetch_add(1, Ordering::Relaxed))
    }

    /// The number of the recomputation that is going on, if one is.
    pub(crate) fn recomputation(self) -> Option<u64> {
        match self {
            Self::Recomputing(number) => Some(number),
            _ => None,
        }
    }

    /// Whether layers record a graph.
    pub(crate) fn records(self) -> bool {
        matches!(self, Self::Enabled | Self::Recomputing(_))
    }

    /// Whether a backward will come of what is computed now.
    pub(crate) fn expects_backward(self) -> bool {
        self != Self::Disabled
    }
}
