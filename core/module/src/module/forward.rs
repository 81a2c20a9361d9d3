//! The step and batch position that layers run in.

use std::ops::Range;
use std::sync::Arc;

use crate::parallel::{ContextParallel, LayerHandle};
use crate::{Error, Result};
use fulgurite_collective::collective::ProcessGroup;
use fulgurite_tensor::autograd::GradMode;
use fulgurite_tensor::execution;
use fulgurite_tensor::execution::ContextGuard;

/// The step and batch position that a forward computes. Dropout reads them: its mask is a function
/// of the seed, the layer, the step and the element's index in the global batch, and so is the same
/// on any mesh. Attention reads whether ranks share sequences. Output heads read whether the loss
/// can work on a part of the logits.
///
/// It is part of a thread's [execution context](fulgurite_tensor::execution). The default is
/// evaluation on whole sequences, without dropout.
///
/// ```
/// use fulgurite_core::module::ForwardScope;
///
/// let scope = ForwardScope { training: true, seed: 42, step: 1, ..ForwardScope::default() };
/// scope.run(|| assert!(ForwardScope::current().training));
/// assert!(!ForwardScope::current().training);
/// ```
#[derive(Debug, Clone, Default)]
pub struct ForwardScope {
    /// Whether this is training. Dropout is the identity otherwise.
    pub training: bool,
    /// The run's seed.
    pub seed: u64,
    /// The optimizer step being computed.
    pub step: u64,
    /// Index, in the step's global batch, of the first sample in this rank's forward.
    pub first_sample: u64,
    /// The ranks that share each sequence, if several do. Ids and activations (`[batch, time]`,
    /// `[batch, time, width]`) then hold this rank's part of the sequence in dimension 1.
    pub context: Option<ContextParallel>,
    /// Whether heads with [`loss_parallel`](crate::parallel::Colwise::loss_parallel) in their plan
    /// leave the logits sharded.
    pub loss_parallel: bool,
    /// Whether the batch only keeps ranks in step, and does not count.
    pub is_padding: bool,
    /// Whether linear layers and causal attention sum each row alone. A row then has the same bits
    /// in any batch, with a cache of keys and values or without one. Costs speed. Works on the CPU
    /// only. Otherwise the size of a product may decide the order of its sums.
    pub batch_invariant: bool,
    /// The ranks whose batches form the whole batch. Set if several ranks do and a layer of the
    /// model computes with the whole batch.
    pub batch_ranks: Option<BatchRanks>,
}

/// The data- and context-parallel ranks, for layers that compute with the whole batch, such as a
/// synchronised [batch norm][`ModuleBuilder::synchronise_batches`]. The process group serves only
/// this purpose. Every rank's forward and backward must communicate in it alike.
///
/// [`ModuleBuilder::synchronise_batches`]: super::ModuleBuilder::synchronise_batches
#[derive(Clone)]
pub struct BatchRanks(Arc<dyn ProcessGroup>);

impl BatchRanks {
    /// The ranks of `group`; `None` for a single rank.
    pub fn new(group: Arc<dyn ProcessGroup>) -> Option<Self> {
        (group.size() > 1).then_some(Self(group))
    }

    /// The process group.
    pub fn group(&self) -> &Arc<dyn ProcessGroup> {
        &self.0
    }
}

impl std::fmt::Debug for BatchRanks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("BatchRanks").field(&self.0.size()).finish()
    }
}

impl ForwardScope {
    /// This thread's scope, or the default outside of any scope.
    pub fn current() -> Self {
        execution::value::<Self>().map(|scope| (*scope).clone()).unwrap_or_default()
    }

    /// The scope for random numbers of the layer at `path`. `None` if the layer must not draw any:
    /// in evaluation, and under `no_grad` outside of any scope.
    ///
    /// # Errors
    /// With gradients enabled outside of any scope. The step is unknown there, and all steps would
    /// draw the same numbers.
    pub fn of_random_layer(path: &str) -> Result<Option<Self>> {
        match execution::value::<Self>() {
            Some(scope) => Ok(scope.training.then(|| (*scope).clone())),
            None if !GradMode::current().expects_backward() => Ok(None),
            None => Err(Error::Module {
                path: path.to_owned(),
                message: "is called outside of any forward scope with gradients on, where it cannot \
                          tell whether this is training, nor which step. In a loop of your own, call the \
                          model inside of `TrainBatch::forward`, or while the guard of \
                          `Fabric::forward_scope` lives; to evaluate, use `no_grad` or \
                          `ForwardScope::default().enter()`; on a thread of your own, enter the \
                          `ExecutionContext` of the thread that gives it work"
                    .to_owned(),
            }),
        }
    }

    /// The scope of a training forward, for a layer that computes otherwise in an evaluation, as
    /// [`of_random_layer`](Self::of_random_layer). Also `None` if the layer is
    /// [in evaluation mode](super::ModuleBuilder::eval).
    ///
    /// # Errors
    /// As [`of_random_layer`](Self::of_random_layer).
    pub fn of_layer(layer: &LayerHandle) -> Result<Option<Self>> {
        match layer.is_in_eval() {
            true => Ok(None),
            false => Self::of_random_layer(layer.path()),
        }
    }

    /// The positions, in their whole sequences, of this rank's `n` positions: two ranges under
    /// context parallelism, one otherwise. For position embeddings.
    pub fn positions(&self, n: usize) -> Vec<Range<usize>> {
        match &self.context {
            Some(context) => context.positions(n).to_vec(),
            None => std::iter::once(0..n).collect(),
        }
    }

    /// Makes this the thread's scope until the guard is dropped.
    pub fn enter(self) -> ContextGuard {
        execution::enter(self)
    }

    /// Calls `f` in this scope.
    pub fn run<R>(self, f: impl FnOnce() -> R) -> R {
        let _guard = self.enter();
        f()
    }
}
