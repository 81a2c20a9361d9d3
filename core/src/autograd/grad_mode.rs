//! A thread's gradient mode, as `torch.no_grad`.

use std::cell::Cell;
use std::marker::PhantomData;

thread_local! {
    static ENABLED: Cell<bool> = const { Cell::new(true) };
}

/// Whether layers record a graph on this thread.
pub fn is_grad_enabled() -> bool {
    ENABLED.get()
}

/// Turns gradients off on this thread until the guard is dropped, which restores what was before.
#[must_use = "gradients are on again as soon as the guard is dropped"]
pub fn no_grad() -> NoGradGuard {
    NoGradGuard { previous: ENABLED.replace(false), _thread_bound: PhantomData }
}

/// Restores the gradient mode that was in force when [`no_grad`] was called.
#[derive(Debug)]
pub struct NoGradGuard {
    previous: bool,
    _thread_bound: PhantomData<*const ()>,
}

impl Drop for NoGradGuard {
    fn drop(&mut self) {
        ENABLED.set(self.previous);
    }
}
