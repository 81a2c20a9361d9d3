//! Losses as a sum and a count.

use candle_core::{DType, Tensor};

use crate::{Error, Result};
use fulgurite_module::module::ForwardScope;
use fulgurite_tensor::execution::read;

/// The sum of a loss over its items, and the number of items.
///
/// A step's loss is the mean over its whole global batch. Ranks and micro-batches may hold unequal
/// numbers of items (padded tokens, a short last batch), so the mean of their means would be wrong.
/// Sums and counts add up exactly. Backward runs from the sum, and gradients are divided once by
/// the global count.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fulgurite_core::nn::Loss;
///
/// let three_tokens = Loss::new(Tensor::new(6f32, &Device::Cpu)?, 3.0);
/// let one_token = Loss::new(Tensor::new(4f32, &Device::Cpu)?, 1.0);
/// assert_eq!((&three_tokens + &one_token)?.mean()?, 2.5);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Loss {
    sum: Tensor,
    count: f64,
    /// Number of ranks that share each sequence in the scope where it was computed.
    sequence_ranks: usize,
}

impl Loss {
    /// A loss of `count` items whose sum is the scalar `sum` (f32 or f64, in the graph).
    pub fn new(sum: Tensor, count: f64) -> Self {
        let sequence_ranks = ForwardScope::current().context.map_or(1, |context| context.size());
        Self { sum, count, sequence_ranks }
    }

    /// A loss that is already a mean (a scalar, in the graph). It counts as one item, so all
    /// batches have equal weight.
    pub fn from_mean(mean: Tensor) -> Self {
        Self::new(mean, 1.0)
    }

    /// The sum: a scalar, in the graph. Call `backward` on it.
    pub fn sum(&self) -> &Tensor {
        &self.sum
    }

    /// Number of items of the sum.
    pub fn count(&self) -> f64 {
        self.count
    }

    /// The sum as a number, read from its device.
    ///
    /// # Errors
    /// If the sum does not have exactly one element.
    pub fn sum_value(&self) -> Result<f64> {
        read::scalar(&self.sum_tensor()?, "loss")
    }

    /// The sum as an f64 scalar outside the graph. Stays on its device, without a read.
    ///
    /// # Errors
    /// If the sum does not have exactly one element.
    pub fn sum_tensor(&self) -> Result<Tensor> {
        if self.sum.elem_count() != 1 {
            return Err(Error::other(format!(
                "a loss is one number, got a tensor of shape {:?}; sum or average it first",
                self.sum.dims()
            )));
        }
        Ok(self.sum.detach().flatten_all()?.get(0)?.to_dtype(DType::F64)?)
    }

    /// The mean over the items, read from its device. NaN without items.
    ///
    /// # Errors
    /// If the sum does not have exactly one element.
    pub fn mean(&self) -> Result<f64> {
        Ok(self.sum_value()? / self.count)
    }

    /// This loss with zero items: its gradients are 0.
    ///
    /// # Errors
    /// If candle cannot multiply it.
    pub fn ignored(&self) -> Result<Self> {
        // Multiply by a zero *tensor*. candle prunes the backward at a constant 0, while other
        // ranks' backwards go on.
        let zero = self.sum.detach().zeros_like()?;
        Ok(Self { sum: self.sum.mul(&zero)?, count: 0.0, ..self.clone() })
    }

    /// This loss outside the graph.
    #[must_use]
    pub fn detach(&self) -> Self {
        Self { sum: self.sum.detach(), ..self.clone() }
    }

    /// Checks that the loss was computed in a scope where this many ranks share each sequence.
    ///
    /// # Errors
    /// If not: attention then saw only this rank's part of each sequence.
    pub fn check_sequence_ranks(&self, ranks: usize) -> Result<()> {
        if self.sequence_ranks == ranks {
            return Ok(());
        }
        Err(Error::other(format!(
            "{ranks} ranks share each sequence, and the loss was computed where a sequence is on {}, \
             so that attention saw a part of it: compute the model and its loss inside of \
             `TrainBatch::forward`, or while the guard of `Fabric::forward_scope` lives",
            match self.sequence_ranks {
                1 => "one rank (outside of any forward scope?)".to_owned(),
                n => format!("{n} ranks"),
            }
        )))
    }
}

/// As [`Loss::from_mean`].
impl From<Tensor> for Loss {
    fn from(mean: Tensor) -> Self {
        Self::from_mean(mean)
    }
}

/// The loss over both sets of items.
impl std::ops::Add for &Loss {
    type Output = Result<Loss>;

    fn add(self, other: Self) -> Self::Output {
        let (sum, count) = ((&self.sum + &other.sum)?, self.count + other.count);
        Ok(Loss { sum, count, sequence_ranks: self.sequence_ranks.min(other.sequence_ranks) })
    }
}

/// The loss of one optimizer step, over all ranks and micro-batches.
#[derive(Debug, Clone, PartialEq)]
pub struct StepTotals {
    /// Sum of the losses.
    pub loss_sum: f64,
    /// Number of items in the sum, such as tokens or samples.
    pub count: f64,
    /// The sums over the ranks of the flags given to `step_totals`.
    pub flags: Vec<f64>,
}

impl StepTotals {
    /// The mean over the whole global batch.
    pub fn mean(&self) -> f64 {
        self.loss_sum / self.count
    }

    /// The factor that turns gradients of the summed loss into gradients of the mean. 0 for a batch
    /// without items.
    pub fn grad_scale(&self) -> f64 {
        if self.count > 0.0 { 1.0 / self.count } else { 0.0 }
    }
}
