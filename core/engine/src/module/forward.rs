//! What layers need to know of the step they run in.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;

use crate::parallel::ContextParallel;

/// The surroundings of a forward on this thread. Dropout reads it: its mask is a function of the
/// seed, the layer, the step and the element's place in the global batch, so it is the same on any
/// mesh. Attention reads whether sequences are shared by ranks, and output heads whether the loss
/// can work on a part of the logits.
#[derive(Debug, Clone)]
pub struct ForwardScope {
    /// Whether this is training; dropout passes everything otherwise.
    pub training: bool,
    /// The run's seed.
    pub seed: u64,
    /// The optimizer step that is being computed.
    pub step: u64,
    /// Index, in the step's global batch, of the first sample that this rank is forwarding.
    pub first_sample: u64,
    /// The ranks that share each sequence, if several do: ids and activations (`[batch, time]`,
    /// `[batch, time, width]`) then have this rank's part of the sequence in dimension 1.
    pub context: Option<ContextParallel>,
    /// Whether heads that a plan made [`loss_parallel`](crate::parallel::Colwise::loss_parallel)
    /// leave the logits cut.
    pub loss_parallel: bool,
}

impl Default for ForwardScope {
    fn default() -> Self {
        Self {
            training: true,
            seed: 0,
            step: 0,
            first_sample: 0,
            context: None,
            loss_parallel: false,
        }
    }
}

thread_local! {
    static CURRENT: RefCell<Option<ForwardScope>> = const { RefCell::new(None) };
}

impl ForwardScope {
    /// The scope in force on this thread: training, seed 0, step 0 unless one was entered.
    pub fn current() -> Self {
        CURRENT.with_borrow(Option::clone).unwrap_or_default()
    }

    /// The positions, in their whole sequences, of the `n` positions that this rank computes: two
    /// ranges under context parallelism, one otherwise. For embeddings of positions.
    pub fn positions(&self, n: usize) -> Vec<Range<usize>> {
        match &self.context {
            Some(context) => context.positions(n).to_vec(),
            None => std::iter::once(0..n).collect(),
        }
    }

    /// Puts this scope in force on this thread from now on.
    pub fn set(self) {
        CURRENT.replace(Some(self));
    }

    /// Puts the scope of an earlier forward in force again, until the guard is dropped, to compute
    /// a part of it anew. What heads gave meanwhile is not forgotten.
    pub(super) fn resume(self) -> ResumedScope {
        ResumedScope { previous: CURRENT.replace(Some(self)), _thread_bound: PhantomData }
    }

    /// Puts this scope in force until the guard is dropped.
    #[must_use = "the scope ends as soon as the guard is dropped"]
    pub fn enter(self) -> ForwardScopeGuard {
        ForwardScopeGuard { previous: CURRENT.replace(Some(self)), _thread_bound: PhantomData }
    }
}

/// Restores the scope that was in force before a part of an earlier forward was computed anew.
pub(super) struct ResumedScope {
    previous: Option<ForwardScope>,
    _thread_bound: PhantomData<*const ()>,
}

impl Drop for ResumedScope {
    fn drop(&mut self) {
        CURRENT.replace(self.previous.take());
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
        CURRENT.replace(self.previous.take());
    }
}
