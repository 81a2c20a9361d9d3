//! A thread's gradient mode, as `torch.no_grad`.

use crate::execution::ContextGuard;
use crate::execution::GradMode;

/// Whether layers record a graph on this thread.
pub fn is_grad_enabled() -> bool {
    GradMode::current().records()
}

/// Turns gradients off on this thread until the guard is dropped. Another thread has its own mode;
/// see [`execution`](crate::execution).
#[must_use = "gradients are on again as soon as the guard is dropped"]
pub fn no_grad() -> ContextGuard {
    GradMode::Disabled.enter()
}
