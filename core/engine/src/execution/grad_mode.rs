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
    /// The forward or the backward of a unit whose activations are offloaded: layers record a graph that is
    /// the unit's own, and count uses. The number identifies it, as that of a recomputation.
    Offloading(u64),
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
        Self::Recomputing(new_graph())
    }

    /// A new graph of a unit whose activations are offloaded.
    pub(crate) fn offloading() -> Self {
        Self::Offloading(new_graph())
    }

    /// The number of the unit's own graph that is recorded or run backward, if there is one.
    pub(crate) fn own_graph(self) -> Option<u64> {
        match self {
            Self::Recomputing(number) | Self::Offloading(number) => Some(number),
            _ => None,
        }
    }

    /// Whether a unit is computed again.
    pub(crate) fn recomputes(self) -> bool {
        matches!(self, Self::Recomputing(_))
    }

    /// Whether uses in a unit are collected, for its backward ends them itself.
    pub(crate) fn collects_uses(self) -> bool {
        matches!(self, Self::Deferred | Self::Offloading(_))
    }

    /// Whether layers record a graph.
    pub(crate) fn records(self) -> bool {
        matches!(self, Self::Enabled | Self::Recomputing(_) | Self::Offloading(_))
    }

    /// Whether what is computed now will have a backward.
    pub(crate) fn expects_backward(self) -> bool {
        self != Self::Disabled
    }
}

/// A number for a unit's own graph in this process.
fn new_graph() -> u64 {
    static GRAPHS: AtomicU64 = AtomicU64::new(0);
    GRAPHS.fetch_add(1, Ordering::Relaxed)
}
