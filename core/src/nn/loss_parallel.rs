//! How cross entropy learns that an output head left the logits cut, and what the ranks tell each
//! other then.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::Tensor;

use super::kernels::cross_entropy::{Classes, Targets};
use super::kernels::cross_entropy_parts::{self as kernel, Part};
use crate::Result;
use crate::collective::{ProcessGroup, ReduceOp};
use crate::module::ForwardScope;

/// Logits of which each rank has some classes.
#[derive(Clone)]
pub(super) struct ShardedLogits {
    /// The ranks that share the classes.
    pub(super) group: Arc<dyn ProcessGroup>,
    /// This rank's first class.
    pub(super) first_class: usize,
    /// Number of classes of this rank.
    pub(super) local_classes: usize,
    /// Number of classes.
    pub(super) classes: usize,
}

thread_local! {
    static LATEST: RefCell<Option<ShardedLogits>> = const { RefCell::new(None) };
}

/// Notes what the head that computes on this thread gives.
pub(super) fn note(logits: ShardedLogits) {
    LATEST.replace(Some(logits));
}

/// What is known of logits of this width: they are cut if the scope allows it and the latest head
/// on this thread gave logits of the width.
pub(super) fn find(width: usize) -> Option<ShardedLogits> {
    let latest = LATEST.with_borrow(Option::clone)?;
    (ForwardScope::current().loss_parallel && latest.local_classes == width).then_some(latest)
}

impl ShardedLogits {
    /// Which classes this rank has.
    pub(super) fn range(&self) -> Classes {
        Classes { first: self.first_class, total: self.classes }
    }

    /// The sum of the losses and the log-sum-exp of each row, the same bits on all ranks, from this
    /// rank's `logits` (`[rows, local_classes]`). Collective: an all-reduce of one number a row for
    /// the largest logit, and one of two, with smoothing three, for sums over the classes.
    pub(super) fn cross_entropy(
        &self,
        logits: &Tensor,
        targets: &Targets,
        smoothing: f64,
    ) -> Result<(Tensor, Tensor)> {
        let part = Part::new(logits, targets, self.range(), smoothing)?;
        let top = part.top()?;
        self.group.all_reduce(&top, ReduceOp::Max)?.wait()?;
        let sums = part.summands(&top)?;
        self.group.all_reduce(&sums, ReduceOp::Sum)?.wait()?;
        kernel::forward(&top, &sums, targets, self.range(), smoothing)
    }
}
