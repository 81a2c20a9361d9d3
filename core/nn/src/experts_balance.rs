//! The auxiliary loss that balances the experts of mixtures.

use candle_core::{DType, Device, Tensor};

use super::backend::to_accumulation_dtype;
use super::kernels::routing::counts_and_sums;
use super::kernels::softmax::{softmax, softmax_backward};
use crate::{Error, Result};
use fulgurite_engine::collective::{Collective, ReduceOp};
use fulgurite_engine::execution::read;
use fulgurite_engine::module::ForwardScope;
use fulgurite_engine::module::stage::StageTensors;
use fulgurite_engine::parallel::record_function;
use fulgurite_engine::parameter::accumulation_dtype;

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
    let add = |sums, logits: &Tensor| RouterSums::add(sums, logits, experts_per_row).map(Some);
    let (Some(sums), Some(first)) = (logits.iter().try_fold(None, add)?, logits.first()) else {
        return Err(Error::other(MISSING));
    };
    sums.loss(items, accumulation_dtype(first.dtype()))
}

const MISSING: &str = "the balance of experts follows from the logits [rows, experts] of at least one mixture of \
     experts";

/// Sums over the rows of the layers so far, from which the [loss that balances
/// experts](load_balancing_loss) follows. Each layer adds its rows to the sums of the layers
/// before, which may be in another stage of a pipeline.
#[derive(Debug, Clone)]
pub struct RouterSums {
    /// The sum of each expert's probabilities, f64 `[experts]`, in the graph.
    probabilities: Tensor,
    /// The rows of each expert, and at the end the number of all rows: i64 `[experts + 1]`.
    counts: Tensor,
}

impl RouterSums {
    /// Adds the rows of a layer. `logits` (`[rows, experts]`) are its router's, and a row uses the
    /// `experts_per_row` experts with the largest.
    ///
    /// # Errors
    /// If layers differ in their number of experts, or if there are fewer experts than
    /// `experts_per_row`.
    pub fn add(before: Option<Self>, logits: &Tensor, experts_per_row: usize) -> Result<Self> {
        let (rows, experts) = match logits.dims() {
            &[rows, experts] => (rows, experts),
            _ => return Err(Error::other(MISSING)),
        };
        if !(1..=experts).contains(&experts_per_row) {
            return Err(Error::other(format!(
                "rows cannot use {experts_per_row} of {experts} experts; expected from 1 to {experts}"
            )));
        }
        let other = before.as_ref().map(|before| before.probabilities.elem_count());
        if let Some(other) = other.filter(|other| *other != experts) {
            return Err(Error::other(format!(
                "a mixture has {experts} experts, and one before it {other}; they have no common balance"
            )));
        }
        let device = logits.device();
        let probabilities = softmax(&to_accumulation_dtype(logits)?)?;
        let [counts, sums] = counts_and_sums(&probabilities, experts_per_row)?;
        let mut counts: Vec<i64> = counts.into_iter().map(|count| count as i64).collect();
        counts.push(rows as i64);
        let counts = Tensor::from_vec(counts, experts + 1, device)?;
        let sums = Tensor::from_vec(sums, experts, device)?;
        let (counts, sums) = match &before {
            None => (counts, sums),
            Some(before) => ((&before.counts + counts)?, (before.probabilities.detach() + sums)?),
        };
        let inputs: Vec<&Tensor> = std::iter::once(logits)
            .chain(before.as_ref().map(|before| &before.probabilities))
            .collect();
        let (dtype, is_first) = (logits.dtype(), before.is_none());
        let probabilities = record_function(&inputs, sums, move |_, grad| {
            let slopes = grad.to_dtype(probabilities.dtype())?.reshape((1, experts))?;
            let slopes = slopes.broadcast_as(probabilities.shape())?.contiguous()?;
            let of_logits = softmax_backward(&probabilities, &slopes)?.to_dtype(dtype)?;
            let passed = (!is_first).then(|| Some(grad.clone()));
            Ok(std::iter::once(Some(of_logits)).chain(passed).collect())
        })?;
        Ok(Self { probabilities, counts })
    }

    /// The loss over all rows, as [`load_balancing_loss`] returns it, in `dtype`. Collective like
    /// it.
    ///
    /// # Errors
    /// If a peer fails.
    pub fn loss(&self, items: f64, dtype: DType) -> Result<Tensor> {
        let Self { probabilities, counts } = self;
        let mut counts: Vec<f64> = read::vec1::<i64>(counts, "the balance of experts")?
            .into_iter()
            .map(|count| count as f64)
            .collect();
        let rows = counts.pop().unwrap_or_default();
        let experts = counts.len();
        let all = Totals { counts, rows, items }.over_ranks(probabilities)?;
        let factor = all.items * experts as f64 / (all.rows * all.rows).max(1.0);
        let slopes: Vec<f64> = all.counts.iter().map(|count| factor * count).collect();
        let sums = read::vec1::<f64>(&probabilities.detach(), "the balance of experts")?;
        let value: f64 = sums.iter().zip(&slopes).map(|(sum, slope)| sum * slope).sum();
        let of = |values: &[f64], shape: &[usize]| -> Result<Tensor> {
            let values = Tensor::from_slice(values, shape, &Device::Cpu)?;
            Ok(values.to_dtype(dtype)?.to_device(probabilities.device())?)
        };
        let (value, slopes) = (of(&[value], &[])?, of(&slopes, &[experts])?);
        record_function(&[probabilities], value, move |_, grad| {
            let of_sums = slopes.broadcast_mul(&grad.reshape(1)?)?;
            Ok(vec![Some(of_sums.to_dtype(DType::F64)?)])
        })
    }
}

impl StageTensors for RouterSums {
    fn tensors(&self) -> Result<Vec<Tensor>> {
        Ok(vec![self.probabilities.clone(), self.counts.clone()])
    }

    fn of_tensors(tensors: Vec<Tensor>) -> Result<Self> {
        match <[Tensor; 2]>::try_from(tensors) {
            Ok([probabilities, counts]) => Ok(Self { probabilities, counts }),
            Err(_) => Err(Error::other("the sums of routers are two tensors")),
        }
    }
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
