//! Whether layers record a graph and count uses of parameters.

use std::sync::atomic::{AtomicU64, Ordering};

use super::context::{self, Change, ContextGuard};

/// Whether layers record a graph and count uses of parameters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum GradMode {
    /// Layers record a graph and count uses.
    #[default]
    Enabled,
    /// Layers record no graph and count nothing: there will be no backward.
    Disabled,
    /// The forward of a checkpointed unit: layers count uses and record no graph, because backward
    /// computes the unit again.
    Deferred,
    /// Backward computes a checkpointed unit again: layers record a graph. Its deferred forward has
    /// already counted the uses. The number identifies the recomputation in this process.
    Recomputing(u64),
    /// The forward or backward of a unit with activation offload: layers count uses and record a
    /// graph of the unit's own. The number identifies the graph, as in a recomputation.
    Offloading(u64),
}

impl GradMode {
    /// This thread's mode.
    pub fn current() -> Self {
        context::grad_mode()
    }

    /// Makes this the thread's mode until the guard is dropped.
    pub fn enter(self) -> ContextGuard {
        context::push(Change::GradMode(self))
    }

    /// A mode for a new recomputation.
    pub fn recomputing() -> Self {
        Self::Recomputing(new_graph())
    }

    /// A mode for a new graph of a unit with activation offload.
    pub fn offloading() -> Self {
        Self::Offloading(new_graph())
    }

    /// The id of the unit's own graph being recorded or run backward, if any.
    pub fn own_graph(self) -> Option<u64> {
        match self {
            Self::Recomputing(number) | Self::Offloading(number) => Some(number),
            _ => None,
        }
    }

    /// Whether a unit is being recomputed.
    pub fn recomputes(self) -> bool {
        matches!(self, Self::Recomputing(_))
    }

    /// Whether uses in a unit are collected, for its own backward to end.
    pub fn collects_uses(self) -> bool {
        matches!(self, Self::Deferred | Self::Offloading(_))
    }

    /// Whether layers record a graph.
    pub(crate) fn records(self) -> bool {
        matches!(self, Self::Enabled | Self::Recomputing(_) | Self::Offloading(_))
    }

    /// Whether values computed now will have a backward.
    pub fn expects_backward(self) -> bool {
        self != Self::Disabled
    }
}

/// A new id, unique in this process, for a unit's own graph.
fn new_graph() -> u64 {
    static GRAPHS: AtomicU64 = AtomicU64::new(0);
    GRAPHS.fetch_add(1, Ordering::Relaxed)
}
