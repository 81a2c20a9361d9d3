//! A thread's gradient mode, as `torch.no_grad`, and the modes of activation checkpointing.

use std::cell::Cell;
use std::marker::PhantomData;

/// What layers on a thread do about a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GradMode {
    /// They record one, and count uses of parameters.
    Enabled,
    /// They record none: there is no backward.
    Disabled,
    /// They record none now and count uses: a backward will compute this forward again.
    Deferred,
    /// They record one for a deferred forward, whose uses were counted then. The number tells one
    /// recomputation of this thread from another.
    Recomputing(u64),
}

thread_local! {
    static MODE: Cell<GradMode> = const { Cell::new(GradMode::Enabled) };
    static RECOMPUTATIONS: Cell<u64> = const { Cell::new(0) };
}

impl GradMode {
    /// The mode of this thread.
    pub(crate) fn current() -> Self {
        MODE.get()
    }

    /// Puts this mode in force on this thread until the guard is dropped.
    pub(crate) fn enter(self) -> NoGradGuard {
        NoGradGuard { previous: MODE.replace(self), _thread_bound: PhantomData }
    }

    /// A recomputation with a number of its own.
    pub(crate) fn recomputing() -> Self {
        RECOMPUTATIONS.set(RECOMPUTATIONS.get() + 1);
        Self::Recomputing(RECOMPUTATIONS.get())
    }

    /// The number of the recomputation that is going on, if one is.
    pub(crate) fn recomputation(self) -> Option<u64> {
        match self {
            Self::Recomputing(number) => Some(number),
            _ => None,
        }
    }

    /// Whether a backward will come of what is computed now.
    pub(crate) fn expects_backward(self) -> bool {
        self != Self::Disabled
    }
}

/// Whether layers record a graph on this thread.
pub fn is_grad_enabled() -> bool {
    matches!(MODE.get(), GradMode::Enabled | GradMode::Recomputing(_))
}

/// Turns gradients off on this thread until the guard is dropped, which restores what was before.
#[must_use = "gradients are on again as soon as the guard is dropped"]
pub fn no_grad() -> NoGradGuard {
    GradMode::Disabled.enter()
}

/// Restores the gradient mode that was in force when [`no_grad`] was called.
#[must_use = "the mode ends as soon as the guard is dropped"]
#[derive(Debug)]
pub struct NoGradGuard {
    previous: GradMode,
    _thread_bound: PhantomData<*const ()>,
}

impl Drop for NoGradGuard {
    fn drop(&mut self) {
        MODE.set(self.previous);
    }
}
