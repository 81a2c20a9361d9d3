//! Losses as a sum and a count.

use candle_core::{DType, Tensor};

use crate::execution::read;
use crate::module::ForwardScope;
use crate::{Error, Result};

/// The sum of a loss over its items, and their number.
///
/// A step's loss is the mean over its whole global batch. Ranks and micro-batches may hold unequal
/// numbers of items (padded tokens, a short last batch), and a mean of their means is not that
/// mean: sums and counts add up. Backward runs from the sum; gradients are divided by the global
/// count once.
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

    /// A loss that is a mean already (a scalar, in the graph); it counts as one item, so batches
    /// are weighted alike.
    pub fn from_mean(mean: Tensor) -> Self {
        Self::new(mean, 1.0)
    }

    /// The sum: a scalar, in the graph. Call `backward` on it.
    pub fn sum(&self) -> &Tensor {
        &self.sum
    }

    /// How many items the sum is over.
    pub fn count(&self) -> f64 {
        self.count
    }

    /// The sum as a number, read from its device.
    ///
    /// # Errors
    /// If it is not one number.
    pub fn sum_value(&self) -> Result<f64> {
        read::scalar(&self.sum_tensor()?, "loss")
    }

    /// The sum as a scalar of f64 outside the graph, on its device: nothing is read.
    ///
    /// # Errors
    /// If it is not one number.
    pub fn sum_tensor(&self) -> Result<Tensor> {
        if self.sum.elem_count() != 1 {
            return Err(Error::other(format!(
                "a loss is one number, got a tensor of shape {:?}; sum or average it first",
                self.sum.dims()
            )));
        }
        Ok(self.sum.detach().flatten_all()?.get(0)?.to_dtype(DType::F64)?)
    }

    /// The mean over the items, read from its device; NaN if there are none.
    ///
    /// # Errors
    /// If the sum is not one number.
    pub fn mean(&self) -> Result<f64> {
        Ok(self.sum_value()? / self.count)
    }

    /// This loss as one of no items: its gradients are 0.
    ///
    /// # Errors
    /// If candle cannot multiply it.
    pub fn ignored(&self) -> Result<Self> {
        // Not times a number: candle's backward ends at a factor of 0, and other ranks' goes on.
        let zero = self.sum.detach().zeros_like()?;
        Ok(Self { sum: self.sum.mul(&zero)?, count: 0.0, ..self.clone() })
    }

    /// This loss outside the graph.
    #[must_use]
    pub fn detach(&self) -> Self {
        Self { sum: self.sum.detach(), ..self.clone() }
    }

    /// Checks that the loss was computed in the scope of a run whose sequences are each shared by this
    /// many ranks.
    ///
    /// # Errors
    /// If it was not: attention took this rank's part of a sequence for the whole.
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

/// The loss of both sets of items together.
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
    /// Number of items that the sum is over: tokens, samples.
    pub count: f64,
    /// The sums over the ranks of the flags given to `step_totals`.
    pub flags: Vec<f64>,
}

impl StepTotals {
    /// The mean over the whole global batch.
    pub fn mean(&self) -> f64 {
        self.loss_sum / self.count
    }

    /// The factor that makes gradients of the summed loss those of the mean. A batch with nothing to
    /// count has a gradient of zero.
    pub fn grad_scale(&self) -> f64 {
        if self.count > 0.0 { 1.0 / self.count } else { 0.0 }
    }
}
