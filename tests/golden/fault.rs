//! Losses that go wrong.

use fulgurite_core::Result;
use fulgurite_core::nn::Loss;
use serde::{Deserialize, Serialize};

/// What goes wrong with the losses of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Fault {
    /// Every target is ignored, on all ranks.
    Ignored,
    /// The loss of the last rank is NaN.
    Loss,
    /// The loss is finite, the gradient of the last rank's is not.
    Gradient,
    /// The loss of the last rank is so large that its gradients overflow in f16.
    Overflow,
}

/// A fault, and the step that it is in, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FaultAt {
    pub(crate) step: u64,
    pub(crate) fault: Fault,
}

impl FaultAt {
    /// The loss of a micro-batch of this step on this rank.
    pub(crate) fn apply(
        self,
        loss: Loss,
        step: u64,
        (rank, ranks): (usize, usize),
    ) -> Result<Loss> {
        if step != self.step {
            return Ok(loss);
        }
        let sum = match self.fault {
            Fault::Ignored => return loss.ignored(),
            _ if rank + 1 < ranks => return Ok(loss),
            Fault::Loss => (loss.sum() * f64::NAN)?,
            Fault::Gradient => {
                // The root of 0 has no derivative.
                let zero = (loss.sum() - loss.sum().detach())?;
                (loss.sum() + zero.sqr()?.sqrt()?)?
            }
            Fault::Overflow => (loss.sum() * 1e6)?,
        };
        Ok(Loss::new(sum, loss.count()))
    }
}
