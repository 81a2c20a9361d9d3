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

/// The cross entropy of `logits` (`[.., classes]`) and `targets` (u32 or i64, of the same shape
/// without the last dimension): the sum over the targets that are not ignored, and their number.
/// Targets of -100 are ignored, and of `u32::MAX` in a u32 tensor.
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
/// Logits that an output head left cut over tensor-parallel ranks
/// ([`loss_parallel`](fulgurite_engine::parallel::Colwise::loss_parallel)) are not gathered.
/// Targets are numbers of all classes, and every rank gets the loss over all classes, equal to the
/// bit. Forward is **collective** over those ranks then: it all-reduces each row's largest logit
/// and two sums a row (three with label smoothing). Backward communicates nothing.
///
/// # Errors
/// If the shapes do not fit, or a target is not a class (the message names it); if logits are cut
/// and a peer fails.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Loss> {
    CrossEntropy::default().loss(logits, targets)
}

/// Cross entropy with options.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CrossEntropy {
    /// The target that is ignored; `None` ignores -100, and `u32::MAX` in u32 targets.
    pub ignore_index: Option<i64>,
    /// How much of the target's probability is spread evenly over all classes; 0 to 1.
    pub label_smoothing: f64,
}

/// How the losses of the targets are reduced to one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    /// Their sum.
    Sum,
    /// Their mean over the targets that are not ignored, on this rank alone. NaN if all are.
    Mean,
}

impl CrossEntropy {
    /// Sets the target that is ignored.
    #[must_use]
    pub fn ignore_index(mut self, index: i64) -> Self {
        self.ignore_index = Some(index);
        self
    }

    /// Sets how much of the target's probability is spread evenly over all classes.
    #[must_use]
    pub fn label_smoothing(mut self, smoothing: f64) -> Self {
        self.label_smoothing = smoothing;
        self
    }

    /// The loss; see [`cross_entropy`]. The sum is in f32, for f64 logits in f64.
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

    /// The loss as a plain scalar in the graph.
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

    /// The label smoothing, checked.
    pub(super) fn smoothing(&self) -> Result<f64> {
        let smoothing = self.label_smoothing;
        if !(0.0..=1.0).contains(&smoothing) {
            return Err(Error::other(format!("label_smoothing {smoothing} is not in [0, 1]")));
        }
        Ok(smoothing)
    }

    /// The targets of logits of this shape, on the host: `None` where ignored.
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

    /// The targets on the host, in order: `None` where ignored.
    ///
    /// # Errors
    /// If they are neither u32 nor i64, or one is not a class.
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

/// The sum of the losses and the log-sum-exp of each row, equal to the bit on all ranks, from this
/// rank's `logits` (`[rows, local classes]`). Collective: an all-reduce of each row's largest
/// logit, and one of two sums over the classes of each row, three with smoothing.
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
