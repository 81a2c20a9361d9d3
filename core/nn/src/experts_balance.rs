//! The auxiliary loss that balances the experts of mixtures.

use candle_core::{DType, Device, Tensor};

use super::kernels::routing::{Routing, Scores, with_scores};
use super::kernels::softmax::{softmax, softmax_backward};
use crate::host::Float;
use crate::{Error, Result};
use fulgurite_engine::collective::{Collective, ReduceOp};
use fulgurite_engine::execution::read;
use fulgurite_engine::module::ForwardScope;
use fulgurite_engine::parallel::record_function;

/// Computes the loss that balances the experts of a model, by the logits that each of its
/// [mixtures](super::MixtureOfExperts::forward_with_logits) gave (`[rows, experts]`), as
/// `load_balancing_loss_func` of `transformers`: `experts * sum_e f_e p_e`. The sum is over
/// experts; `f_e` is the number of rows of all layers that use expert `e`, and `p_e` the sum of its
/// probabilities, both divided by the number of rows of all layers. The loss is `experts_per_row`
/// if all experts are equally likely, and at most `experts`.
///
/// Returns this rank's term of the loss times the sum of all ranks' `items`, a scalar in the graph
/// and in the logits' dtype. Added to a sum of losses over `items`, it adds the loss to their mean.
///
/// In a forward scope with [`batch_ranks`](ForwardScope::batch_ranks), rows are those of all these
/// ranks, as on one device, and the call is collective over them.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fulgurite_core::nn::load_balancing_loss;
///
/// let logits = Tensor::zeros((5, 4), DType::F32, &Device::Cpu)?; // 4 experts, equally likely
/// let loss = load_balancing_loss(&[logits], 2, 1.0)?;
/// assert_eq!(loss.to_scalar::<f32>()?, 2.0);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
///
/// # Errors
/// If there are no logits, if they differ in their number of experts, if there are fewer experts
/// than `experts_per_row`, or if a peer fails.
pub fn load_balancing_loss(
    logits: &[Tensor],
    experts_per_row: usize,
    items: f64,
) -> Result<Tensor> {
    let experts = match logits {
        [first, ..] if first.rank() == 2 => first.dim(1)?,
        _ => {
            return Err(Error::other(
                "the balance of experts follows from the logits [rows, experts] of at least one mixture of experts",
            ));
        }
    };
    if !(1..=experts).contains(&experts_per_row) {
        return Err(Error::other(format!(
            "rows cannot use {experts_per_row} of {experts} experts; expected from 1 to {experts}"
        )));
    }
    // Units may cast what they give.
    let widened = |logits: &Tensor| match logits.dtype() {
        DType::BF16 | DType::F16 => logits.to_dtype(DType::F32),
        _ => Ok(logits.clone()),
    };
    let logits = logits.iter().map(widened).collect::<candle_core::Result<Vec<_>>>()?;
    let logits = Tensor::cat(&logits, 0)?;
    let probabilities = softmax(&logits.detach())?;
    let routing = Routing::of(&probabilities, experts_per_row, None)?;
    let counts: Vec<f64> = routing.ranges.iter().map(|range| range.len() as f64).collect();
    let all = Totals { counts, rows: probabilities.dim(0)? as f64, items }.over_ranks(&logits)?;
    let factor = all.items * experts as f64 / (all.rows * all.rows).max(1.0);
    let slopes: Vec<f64> = all.counts.iter().map(|count| factor * count).collect();
    let sums = with_scores(&probabilities, ColumnSums(experts))?;
    let value: f64 = sums.iter().zip(&slopes).map(|(sum, slope)| sum * slope).sum();
    let of = |values: &[f64], shape: &[usize]| -> Result<Tensor> {
        let values = Tensor::from_slice(values, shape, &Device::Cpu)?;
        Ok(values.to_dtype(probabilities.dtype())?.to_device(probabilities.device())?)
    };
    let (value, slopes) = (of(&[value], &[])?, of(&slopes, &[1, experts])?);
    record_function(&[&logits], value, move |_, grad| {
        let slopes = slopes.broadcast_mul(&grad.reshape((1, 1))?)?;
        let d = slopes.broadcast_as(probabilities.shape())?.contiguous()?;
        Ok(vec![Some(softmax_backward(&probabilities, &d)?)])
    })
}

/// The numbers of a batch that a balance needs.
struct Totals {
    /// The number of rows that use each expert.
    counts: Vec<f64>,
    rows: f64,
    items: f64,
}

impl Totals {
    /// The numbers of all ranks whose batches form the whole batch. Padding does not count.
    fn over_ranks(self, like: &Tensor) -> Result<Self> {
        let scope = ForwardScope::current();
        let Some(ranks) = scope.batch_ranks else { return Ok(self) };
        let Self { counts, rows, items } = self;
        let mut numbers = counts;
        numbers.extend([rows, items]);
        if scope.is_padding {
            numbers.fill(0.0);
        }
        let numbers = Tensor::from_slice(&numbers, numbers.len(), &Device::Cpu)?;
        let numbers = numbers.to_device(like.device())?;
        ranks.group().run(Collective::all_reduce(&numbers, ReduceOp::Sum))?;
        let mut counts = read::vec1::<f64>(&numbers, "the balance of experts")?;
        let items = counts.pop().unwrap_or_default();
        let rows = counts.pop().unwrap_or_default();
        Ok(Self { counts, rows, items })
    }
}

/// The sum of each of so many columns, in f64.
struct ColumnSums(usize);

impl Scores<Vec<f64>> for ColumnSums {
    fn call<T: Float>(self, probabilities: &[T]) -> Vec<f64> {
        let mut sums = vec![0.0; self.0];
        for row in probabilities.chunks_exact(self.0) {
            sums.iter_mut().zip(row).for_each(|(sum, p)| *sum += p.to_f64());
        }
        sums
    }
}
