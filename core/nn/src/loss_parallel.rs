//! What the ranks that share the classes of logits tell each other for their cross entropy.

use candle_core::Tensor;

use super::kernels::cross_entropy::{Classes, Targets};
use super::kernels::cross_entropy_parts::{self as kernel, Part};
use crate::Result;
use fulgurite_engine::collective::{Collective, ReduceOp};
use fulgurite_engine::parallel::ShardedLogits;

/// The sum of the losses and the log-sum-exp of each row, the same bits on all ranks, from this rank's
/// `logits` (`[rows, local classes]`). Collective: an all-reduce of one number a row for the largest
/// logit, and one of two, with smoothing three, for sums over the classes.
pub(super) fn forward(
    parts: &ShardedLogits,
    logits: &Tensor,
    targets: &Targets,
    smoothing: f64,
) -> Result<(Tensor, Tensor)> {
    let classes = Classes { first: parts.first_class, total: parts.classes };
    let part = Part::new(logits, targets, classes, smoothing)?;
    let top = part.top()?;
    parts.group.run(Collective::all_reduce(&top, ReduceOp::Max))?;
    let sums = part.partial_sums(&top)?;
    parts.group.run(Collective::all_reduce(&sums, ReduceOp::Sum))?;
    kernel::forward(&top, &sums, targets, classes, smoothing)
}
