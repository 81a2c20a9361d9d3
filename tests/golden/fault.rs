//! Faults injected into losses.

use fulgurite_core::Result;
use fulgurite_core::nn::Loss;
use serde::{Deserialize, Serialize};

/// A fault in the losses of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Fault {
    /// All ranks ignore every target.
    Ignored,
    /// The loss of the last rank is NaN.
    Loss,
    /// The last rank's gradient is not finite, although its loss is.
    Gradient,
    /// The last rank's loss is so large that its gradients overflow in f16.
    Overflow,
}

/// A fault and its step, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FaultAt {
    pub(crate) step: u64,
    pub(crate) fault: Fault,
}

impl FaultAt {
    /// Applies the fault to a micro-batch's loss, if the fault affects this step and rank.
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
                // The derivative of the root is infinite at 0.
                let zero = (loss.sum() - loss.sum().detach())?;
                (loss.sum() + zero.sqr()?.sqrt()?)?
            }
            Fault::Overflow => (loss.sum() * 1e6)?,
        };
        Ok(Loss::new(sum, loss.count()))
    }
}
