//! How cross entropy learns that an output head left the logits cut, and what the ranks tell each
//! other then.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::{D, Tensor, TensorId};

use super::kernels::cross_entropy::{Classes, Targets};
use super::kernels::cross_entropy_parts::{self as kernel, Part};
use crate::collective::{ProcessGroup, ReduceOp, wait_for};
use crate::module::ForwardScope;
use crate::{Error, Result};

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
    /// What heads on this thread gave last, one for each way of cutting.
    static GIVEN: RefCell<Given> = const { RefCell::new(Given { generation: 0, heads: Vec::new() }) };
}

struct Given {
    /// [`ForwardScope::generation`] when they were given.
    generation: u64,
    heads: Vec<(TensorId, ShardedLogits)>,
}

/// Those of the scope in force.
fn with_given<R>(f: impl FnOnce(&mut Vec<(TensorId, ShardedLogits)>) -> R) -> R {
    GIVEN.with_borrow_mut(|given| {
        if given.generation != ForwardScope::generation() {
            *given = Given { generation: ForwardScope::generation(), heads: Vec::new() };
        }
        f(&mut given.heads)
    })
}

/// Notes the logits that a head on this thread gives.
pub(super) fn note(id: TensorId, logits: ShardedLogits) {
    with_given(|given| {
        given.retain(|(_, other)| {
            (other.local_classes, other.classes) != (logits.local_classes, logits.classes)
        });
        given.push((id, logits));
    });
}

/// How `logits` are cut, if they are: a head gave them, or something of their width.
///
/// # Errors
/// If heads of different numbers of classes gave parts of this width.
pub(super) fn find(logits: &Tensor) -> Result<Option<ShardedLogits>> {
    if !ForwardScope::current().loss_parallel {
        return Ok(None);
    }
    let width = logits.dim(D::Minus1)?;
    with_given(|given| {
        if let Some((_, exact)) = given.iter().find(|(id, _)| *id == logits.id()) {
            return Ok(Some(exact.clone()));
        }
        let mut fitting = given.iter().filter(|(_, known)| known.local_classes == width);
        match (fitting.next(), fitting.next()) {
            (first, None) => Ok(first.map(|(_, known)| known.clone())),
            (_, Some(_)) => Err(Error::other(format!(
                "two output heads gave parts of logits of {width} classes on this rank, and these \
                 logits are neither's as they came; give cross_entropy a head's output itself"
            ))),
        }
    })
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
        wait_for(|| self.group.all_reduce(&top, ReduceOp::Max))?;
        let sums = part.summands(&top)?;
        wait_for(|| self.group.all_reduce(&sums, ReduceOp::Sum))?;
        kernel::forward(&top, &sums, targets, self.range(), smoothing)
    }
}
