//! Logits whose classes are sharded over ranks.

use std::sync::Arc;

use candle_core::{D, Tensor};

use super::edges::sharded_loss;
use super::{Layout, activations};
use crate::{Error, Result};
use fulgurite_collective::collective::ProcessGroup;

/// Logits whose classes are sharded: the output of a head with
/// [`loss_parallel`](super::Colwise::loss_parallel) in its plan, or results of candle's operations
/// on it.
#[derive(Clone)]
pub struct ShardedLogits {
    /// The ranks that share the classes.
    pub group: Arc<dyn ProcessGroup>,
    /// This rank's first class.
    pub first_class: usize,
    /// Number of classes.
    pub classes: usize,
}

impl ShardedLogits {
    /// The sharding of the classes of `logits`; `None` if they are whole. It comes from the layer
    /// that computed them, not from their shape. For losses.
    ///
    /// # Errors
    /// If the logits are sharded along another dimension than the classes, or have another number
    /// of classes than the head's output.
    pub fn of(logits: &Tensor) -> Result<Option<Self>> {
        let Some(record) = activations::lookup(logits, "the loss")? else { return Ok(None) };
        let activation = record.activation;
        if activation.is_whole() {
            return Ok(None);
        }
        let (Some((first_class, local)), Some(plan)) =
            (activation.classes, activation.plan.upgrade())
        else {
            return Err(Error::other(sharded_loss(&activation.describe())));
        };
        let columns = logits.dim(D::Minus1)?;
        if columns != local {
            return Err(Error::other(format!(
                "the loss gets logits of {columns} classes made from {}, of which this rank has \
                 {local} classes; the classes of a head with `loss_parallel` cannot be put together or \
                 taken apart before the loss: leave `loss_parallel` out",
                activation.describe()
            )));
        }
        let (group, classes) = (plan.group.clone(), activation.width);
        Ok(Some(Self { group, first_class, classes }))
    }

    /// Records that `loss`, computed from these logits, is whole on every rank. For losses where
    /// each rank computes the gradient of its own classes.
    pub fn note_loss(&self, loss: &Tensor) {
        if let Some(plan) = activations::plan_of(&self.group) {
            activations::note_result(loss, plan.activation(Some(Layout::Replicate), "the loss"));
        }
    }
}
