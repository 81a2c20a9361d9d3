//! Whether layers record a graph and count uses of parameters.

use std::sync::atomic::{AtomicU64, Ordering};

use super::context::{self, Change, ContextGuard};

/// Whether layers record a graph and count uses of parameters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum GradMode {
    /// Layers record a graph and count uses.
    #[default]
    Enabled,
    /// Layers record no graph and count nothing: there will be no backward.
    Disabled,
    /// The forward of a checkpointed unit: layers count uses and record no graph, for backward computes
    /// the unit again.
    Deferred,
    /// A checkpointed unit is computed again in backward: layers record a graph, and its deferred
    /// forward has counted the uses. The number identifies the recomputation in this process.
    Recomputing(u64),
}

impl GradMode {
    /// This thread's mode.
    pub(crate) fn current() -> Self {
        context::grad_mode()
    }

    /// Makes this the thread's mode until the guard is dropped.
    pub(crate) fn enter(self) -> ContextGuard {
        context::push(Change::GradMode(self))
    }

    /// A new recomputation.
    pub(crate) fn recomputing() -> Self {
        static RECOMPUTATIONS: AtomicU64 = AtomicU64::new(0);
        Self::Recomputing(RECOMPUTATIONS.fetch_add(1, Ordering::Relaxed))
    }

    /// The number of the current recomputation, if there is one.
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

    /// Whether what is computed now will have a backward.
    pub(crate) fn expects_backward(self) -> bool {
        self != Self::Disabled
    }
}
