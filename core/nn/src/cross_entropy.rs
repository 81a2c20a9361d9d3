//! Cross entropy.

use candle_core::{DType, Tensor};

use super::Loss;
use super::host::indices;
use super::kernels::cross_entropy::{self as kernel, ClassRange, Targets};
use super::kernels::cross_entropy_parallel::{self as parallel, LocalStatistics};
use crate::{Error, Result};
use fulgurite_engine::collective::{Collective, ReduceOp};
use fulgurite_engine::parallel::ShardedLogits;
use fulgurite_engine::parameter::record;

/// Computes the cross entropy of `logits` (`[.., classes]`) and `targets` (u32 or i64, with the
/// shape of `logits` without the last dimension). The [`Loss`] has the sum over the targets that
/// are not ignored, and their number. Targets of -100 are ignored, and `u32::MAX` in a u32 tensor.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fulgurite_core::nn::cross_entropy;
///
/// let logits = Tensor::zeros((2, 3, 8), candle_core::DType::F32, &Device::Cpu)?;
/// let targets = Tensor::new(&[[1i64, 2, -100], [0, 7, -100]], &Device::Cpu)?;
/// let loss = cross_entropy(&logits, &targets)?;
/// assert_eq!(loss.count(), 4.0);
/// assert!((loss.mean()? - 8f64.ln()).abs() < 1e-6);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
///
/// # Loss parallel
/// If the output head leaves logits sharded over tensor-parallel ranks
/// ([`loss_parallel`](fulgurite_engine::parallel::Colwise::loss_parallel)), they are not gathered.
/// Targets are class numbers out of all classes, and every rank gets the loss over all classes,
/// equal to the bit. Forward is then **collective** over those ranks: it all-reduces each row's
/// largest logit and two sums per row (three with label smoothing). Backward does not communicate.
///
/// # Errors
/// If the shapes do not fit, or a target is not a class (the message names it). With sharded
/// logits, also if a peer fails.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Loss> {
    CrossEntropy::default().loss(logits, targets)
}

/// Cross entropy, with options.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CrossEntropy {
    /// The target that is ignored; `None` ignores -100, and `u32::MAX` in u32 targets.
    pub ignore_index: Option<i64>,
    /// The share of the target's probability that is spread evenly over all classes; 0 to 1.
    pub label_smoothing: f64,
}

/// Returns the log-probability of a class under the softmax of `logits`, with the bits of
/// [`CrossEntropy::losses`] on the CPU.
///
/// # Panics
/// If `class` is not below the number of logits.
pub fn log_probability(logits: &[f32], class: usize) -> f32 {
    kernel::log_probability(logits, class)
}

/// The reduction of the targets' losses to one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    /// The sum.
    Sum,
    /// The mean over this rank's targets that are not ignored. NaN if all are ignored.
    Mean,
}

impl CrossEntropy {
    /// Sets the ignored target.
    #[must_use]
    pub fn ignore_index(mut self, index: i64) -> Self {
        self.ignore_index = Some(index);
        self
    }

    /// Sets the share of the target's probability that is spread evenly over all classes.
    #[must_use]
    pub fn label_smoothing(mut self, smoothing: f64) -> Self {
        self.label_smoothing = smoothing;
        self
    }

    /// Computes the loss; see [`cross_entropy`]. The sum is in f32, or in f64 for f64 logits.
    ///
    /// # Errors
    /// As [`cross_entropy`], and if the smoothing is not in `[0, 1]`.
    pub fn loss(&self, logits: &Tensor, targets: &Tensor) -> Result<Loss> {
        let smoothing = self.smoothing()?;
        let columns = logits.dims().last().copied().unwrap_or(0);
        let sharded = ShardedLogits::of(logits)?;
        let classes = match &sharded {
            Some(sharded) => ClassRange { first: sharded.first_class, total: sharded.classes },
            None => ClassRange { first: 0, total: columns },
        };
        let targets = self.targets(logits.dims(), targets, classes.total)?;
        let count = targets.iter().flatten().count();
        let saved = logits.detach().reshape((targets.len(), columns))?;
        let (sum, lse) = match &sharded {
            Some(sharded) => forward_loss_parallel(sharded, &saved, &targets, smoothing)?,
            None => kernel::forward(&saved, &targets, smoothing)?,
        };
        let shape = logits.shape().clone();
        let sum = record(&[logits], &[], sum, move |_, grad| {
            let d = kernel::backward(&saved, &lse, &targets, classes, smoothing, grad)?;
            Ok(vec![Some(d.reshape(&shape)?)])
        })?;
        if let Some(sharded) = &sharded {
            sharded.note_loss(&sum);
        }
        Ok(Loss::new(sum, count as f64))
    }

    /// Computes the loss of each target in the shape of `targets`, 0 where it is ignored; as
    /// PyTorch's `reduction="none"`. f32, or f64 for f64 logits. Sharded logits are refused.
    ///
    /// # Errors
    /// As [`loss`](Self::loss), and if the logits are sharded over tensor-parallel ranks.
    pub fn losses(&self, logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
        if ShardedLogits::of(logits)?.is_some() {
            return Err(Error::other(
                "losses of single targets need whole logits; leave out `loss_parallel` of the head's plan, or \
                 compute in a `ForwardScope` without it",
            ));
        }
        let smoothing = self.smoothing()?;
        let classes = logits.dims().last().copied().unwrap_or(0);
        let shape = targets.shape().clone();
        let targets = self.targets(logits.dims(), targets, classes)?;
        let saved = logits.detach().reshape((targets.len(), classes))?;
        let (losses, lse) = kernel::forward_rows(&saved, &targets, smoothing)?;
        let of_input = logits.shape().clone();
        record(&[logits], &[], losses.reshape(shape)?, move |_, grad| {
            let range = ClassRange { first: 0, total: classes };
            let grad = grad.flatten_all()?;
            let d = kernel::backward(&saved, &lse, &targets, range, smoothing, &grad)?;
            Ok(vec![Some(d.reshape(&of_input)?)])
        })
    }

    /// Computes the loss as a plain scalar in the graph.
    ///
    /// # Errors
    /// As [`loss`](Self::loss).
    pub fn reduce(
        &self,
        logits: &Tensor,
        targets: &Tensor,
        reduction: Reduction,
    ) -> Result<Tensor> {
        let loss = self.loss(logits, targets)?;
        Ok(match reduction {
            Reduction::Sum => loss.sum().clone(),
            Reduction::Mean => (loss.sum() / loss.count())?,
        })
    }

    /// Returns the label smoothing, after a check.
    pub(super) fn smoothing(&self) -> Result<f64> {
        let smoothing = self.label_smoothing;
        if !(0.0..=1.0).contains(&smoothing) {
            return Err(Error::other(format!("label_smoothing {smoothing} is not in [0, 1]")));
        }
        Ok(smoothing)
    }

    /// Returns the targets of logits of this shape, on the host; `None` marks ignored targets.
    pub(super) fn targets(
        &self,
        logits: &[usize],
        targets: &Tensor,
        classes: usize,
    ) -> Result<Vec<Option<u32>>> {
        let wrong_shape = || {
            Error::other(format!(
                "cross entropy takes logits of shape [.., classes] and targets of the same shape \
                 without the last dimension, got {logits:?} and {:?}",
                targets.dims()
            ))
        };
        let (columns, leading) = logits.split_last().ok_or_else(wrong_shape)?;
        if leading != targets.dims() || *columns == 0 {
            return Err(wrong_shape());
        }
        self.known_targets(targets, classes)
    }

    /// Returns the targets on the host, in order; `None` marks ignored targets.
    ///
    /// # Errors
    /// If the targets are neither u32 nor i64, or one is not a class.
    pub fn known_targets(&self, targets: &Tensor, classes: usize) -> Result<Vec<Option<u32>>> {
        let unsigned = targets.dtype() == DType::U32;
        let ignored = |target: i64| match self.ignore_index {
            Some(index) => target == index,
            None => target == -100 || (unsigned && target == i64::from(u32::MAX)),
        };
        let class = |target: i64| match u32::try_from(target) {
            _ if ignored(target) => Ok(None),
            Ok(class) if (class as usize) < classes => Ok(Some(class)),
            _ => Err(Error::other(format!(
                "target {target} is not one of the {classes} classes; a target to leave out has \
                 the value of `ignore_index` ({})",
                self.ignore_index.unwrap_or(-100)
            ))),
        };
        indices(targets, "targets")?.into_iter().map(class).collect()
    }
}

/// Returns the sum of the losses and each row's log-sum-exp, equal to the bit on all ranks, from
/// this rank's `logits` (`[rows, local classes]`). Collective: it all-reduces each row's largest
/// logit, then two sums over the classes of each row, three with smoothing.
fn forward_loss_parallel(
    sharded: &ShardedLogits,
    logits: &Tensor,
    targets: &Targets,
    smoothing: f64,
) -> Result<(Tensor, Tensor)> {
    let classes = ClassRange { first: sharded.first_class, total: sharded.classes };
    let local = LocalStatistics::new(logits, targets, classes, smoothing)?;
    let row_max = local.row_max()?;
    sharded.group.run(Collective::all_reduce(&row_max, ReduceOp::Max))?;
    let sums = local.partial_sums(&row_max)?;
    sharded.group.run(Collective::all_reduce(&sums, ReduceOp::Sum))?;
    parallel::forward(&row_max, &sums, targets, classes, smoothing)
}
