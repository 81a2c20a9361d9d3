//! Gradients of weights, computed after the gradients of inputs.
//!
//! Under some schedules of a pipeline, a backward computes the gradient of a stage's input first,
//! for which another rank waits, and those of its weights later.

use std::sync::{Arc, Mutex};

use crate::Result;
use fulgurite_tensor::execution;

type Compute = Box<dyn FnOnce() -> Result<()> + Send>;

/// Gradients of weights that a backward has left for later. They are computed in the order in which
/// they were left.
#[derive(Default)]
pub struct LaterGradients(Vec<Compute>);

/// A value of the execution context. `None`: nothing may be left.
struct Queue(Option<Arc<Mutex<Vec<Compute>>>>);

impl LaterGradients {
    /// Runs a backward in which layers may leave gradients.
    pub fn collect<R>(backward: impl FnOnce() -> R) -> (R, Self) {
        let queue = Arc::<Mutex<Vec<Compute>>>::default();
        let result = {
            let _leaving = execution::enter(Queue(Some(queue.clone())));
            backward()
        };
        let left = std::mem::take(&mut *queue.lock().expect("no panic while it is held"));
        (result, Self(left))
    }

    /// Computes them.
    ///
    /// # Errors
    /// If one fails.
    pub fn compute(self) -> Result<()> {
        self.0.into_iter().try_for_each(|compute| compute())
    }
}

impl std::fmt::Debug for LaterGradients {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("LaterGradients").field(&self.0.len()).finish()
    }
}

/// Adds a weight's gradient, at once or with the gradients that are left for later. `compute` must
/// not need the weight's value, which may be freed meanwhile. For layers with a hand-written
/// backward.
///
/// # Errors
/// As `compute`.
pub fn compute_or_leave(compute: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
    let queue = execution::value::<Queue>();
    match queue.as_deref() {
        Some(Queue(Some(queue))) => {
            queue.lock().expect("no panic while it is held").push(Box::new(compute));
            Ok(())
        }
        _ => compute(),
    }
}

/// Runs a part of a backward whose gradients are computed at once, because they would keep more
/// memory than they are worth.
pub fn leaving_none<R>(backward: impl FnOnce() -> R) -> R {
    let _at_once = execution::enter(Queue(None));
    backward()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn gradients_wait_in_order() {
        let done = Arc::<Mutex<Vec<usize>>>::default();
        let add = |number: usize| {
            let done = done.clone();
            compute_or_leave(move || {
                done.lock().unwrap().push(number);
                Ok(())
            })
            .unwrap();
        };
        add(0);
        let ((), left) = LaterGradients::collect(|| {
            add(2);
            leaving_none(|| add(1));
            add(3);
        });
        assert_eq!(*done.lock().unwrap(), [0, 1]);
        left.compute().unwrap();
        assert_eq!(*done.lock().unwrap(), [0, 1, 2, 3]);
    }

    #[test]
    fn the_first_failure_ends_them() {
        let calls = Arc::<AtomicUsize>::default();
        let ((), left) = LaterGradients::collect(|| {
            for _ in 0..2 {
                let calls = calls.clone();
                let fails = move || {
                    calls.fetch_add(1, Ordering::Relaxed);
                    Err(crate::Error::other("no memory"))
                };
                compute_or_leave(fails).unwrap();
            }
        });
        assert!(left.compute().is_err());
        assert_eq!(calls.load(Ordering::Relaxed), 1);
    }
}
