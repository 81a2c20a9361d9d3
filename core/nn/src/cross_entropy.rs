//! Cross entropy.

use candle_core::{DType, Tensor};

use super::Loss;
use super::host::indices;
use super::kernels::cross_entropy::{self as kernel, Classes};
use super::loss_parallel;
use crate::{Error, Result};
use fulgurite_engine::parallel::ShardedLogits;
use fulgurite_engine::parameter::record;

/// The cross entropy of `logits` (`[.., classes]`) against `targets` (u32 or i64, the leading
/// shape), as the sum over the targets that are not ignored, and their count. Ignored are -100 and,
/// in a u32 tensor, `u32::MAX`.
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
/// ([`loss_parallel`](fulgurite_engine::parallel::Colwise::loss_parallel)) are taken as they are: targets count
/// over all classes, and every rank gets the loss over all classes, in the same bits. It is
/// **collective** over those ranks then, and carries two numbers a row in forward (with label
/// smoothing three) and one for their maximum; backward carries nothing.
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
    /// The target that is left out; `None` stands for -100, and `u32::MAX` in u32 targets.
    pub ignore_index: Option<i64>,
    /// How much of the target's probability is spread evenly over all classes; 0 to 1.
    pub label_smoothing: f64,
}

/// How the losses of the targets become one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    /// Their sum.
    Sum,
    /// Their mean over the targets that are not ignored, on this rank alone. NaN if all are.
    Mean,
}

impl CrossEntropy {
    /// Leaves out this target.
    #[must_use]
    pub fn ignore_index(mut self, index: i64) -> Self {
        self.ignore_index = Some(index);
        self
    }

    /// Spreads this much of the target's probability evenly over all classes.
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
        let parts = ShardedLogits::of(logits)?;
        let classes = match &parts {
            Some(parts) => Classes { first: parts.first_class, total: parts.classes },
            None => Classes { first: 0, total: columns },
        };
        let targets = self.targets(logits.dims(), targets, classes.total)?;
        let count = targets.iter().flatten().count();
        let saved = logits.detach().reshape((targets.len(), columns))?;
        let (sum, lse) = match &parts {
            Some(parts) => loss_parallel::forward(parts, &saved, &targets, smoothing)?,
            None => kernel::forward(&saved, &targets, smoothing)?,
        };
        let shape = logits.shape().clone();
        let sum = record(&[logits], &[], sum, move |_, grad| {
            let d = kernel::backward(&saved, &lse, &targets, classes, smoothing, grad)?;
            Ok(vec![Some(d.reshape(&shape)?)])
        })?;
        if let Some(parts) = &parts {
            parts.note_loss(&sum);
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

    /// The label smoothing.
    pub(super) fn smoothing(&self) -> Result<f64> {
        let smoothing = self.label_smoothing;
        if !(0.0..=1.0).contains(&smoothing) {
            return Err(Error::other(format!("label_smoothing {smoothing} is not in [0, 1]")));
        }
        Ok(smoothing)
    }

    /// The targets of logits of this shape, on the host.
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
