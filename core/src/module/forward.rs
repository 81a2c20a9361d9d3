//! What layers need to know of the step they run in.

use std::cell::Cell;
use std::marker::PhantomData;

/// The surroundings of a forward on this thread. Dropout reads it: its mask is a function of the
/// seed, the layer, the step and the sample's place in the global batch, so it is the same on any
/// mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForwardScope {
    /// Whether this is training; dropout passes everything otherwise.
    pub training: bool,
    /// The run's seed.
    pub seed: u64,
    /// The optimizer step that is being computed.
    pub step: u64,
    /// Index, in the step's global batch, of the first sample that this rank is forwarding.
    pub first_sample: u64,
}

impl Default for ForwardScope {
    fn default() -> Self {
        Self { training: true, seed: 0, step: 0, first_sample: 0 }
    }
}

thread_local! {
    static CURRENT: Cell<Option<ForwardScope>> = const { Cell::new(None) };
}

impl ForwardScope {
    /// The scope in force on this thread: training, seed 0, step 0 unless one was entered.
    pub fn current() -> Self {
        CURRENT.get().unwrap_or_default()
    }

    /// Puts this scope in force on this thread from now on.
    pub fn set(self) {
        CURRENT.set(Some(self));
    }

    /// Puts this scope in force until the guard is dropped.
    #[must_use = "the scope ends as soon as the guard is dropped"]
    pub fn enter(self) -> ForwardScopeGuard {
        ForwardScopeGuard { previous: CURRENT.replace(Some(self)), _thread_bound: PhantomData }
    }
}

/// Restores the scope that was in force before.
#[derive(Debug)]
pub struct ForwardScopeGuard {
    previous: Option<ForwardScope>,
    _thread_bound: PhantomData<*const ()>,
}

impl Drop for ForwardScopeGuard {
    fn drop(&mut self) {
        CURRENT.set(self.previous);
    }
}
