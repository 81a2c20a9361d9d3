//! An output head and the cross entropy of its logits, as one operation.

use std::ops::Range;
use std::sync::Mutex;

use candle_core::{D, Tensor};

use super::Loss;
use super::cross_entropy::CrossEntropy;
use super::kernels::cross_entropy::{self as kernel, Classes};
use super::kernels::matmul::InputGrad;
use super::linear::Linear;
use crate::{Error, Result};
use fulgurite_engine::autograd::is_grad_enabled;
use fulgurite_engine::module::Module;

/// As [`cross_entropy`](super::cross_entropy) of `head`'s logits of `hidden` (`[.., inputs]`), with
/// no more than one copy of the logits, whose memory their gradient takes over, where the two apart
/// need several. See [`LinearCrossEntropy`].
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fulgurite_core::autograd::storage;
/// use fulgurite_core::module::{ModuleBuilder, ModuleInit};
/// use fulgurite_core::nn::{Linear, linear_cross_entropy};
///
/// let b = ModuleBuilder::new(ModuleInit::default());
/// let head = Linear::new(&b.pp("lm_head"), 4, 8)?;
/// storage::allocate(head.weight().compute()?)?; // zeros; a strategy does this
/// let hidden = Tensor::ones((2, 3, 4), DType::F32, &Device::Cpu)?;
/// let targets = Tensor::new(&[[1i64, 2, -100], [0, 7, -100]], &Device::Cpu)?;
/// let loss = linear_cross_entropy(&head, &hidden, &targets)?;
/// assert!((loss.mean()? - 8f64.ln()).abs() < 1e-6);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
///
/// # Errors
/// Those of the head's forward and of [`cross_entropy`](super::cross_entropy).
pub fn linear_cross_entropy(head: &Linear, hidden: &Tensor, targets: &Tensor) -> Result<Loss> {
    LinearCrossEntropy::default().loss(head, hidden, targets)
}

/// [`linear_cross_entropy`] with options.
///
/// Up to [`logits_bytes`](Self::logits_bytes) of logits are kept for backward. Where there are more,
/// they are computed that many at a time and again in backward: a third more products of the head
/// for a bound on the memory that does not grow with the batch or the vocabulary (long sequences
/// over 128 thousand classes have gigabytes of logits).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinearCrossEntropy {
    /// What is left out, and label smoothing.
    pub cross_entropy: CrossEntropy,
    /// The most bytes of logits that there are at a time (one row at least). By default 64 MiB. In
    /// f32 and f64 on the CPU their gradient takes over their memory; in bf16 and f16, and on GPUs,
    /// copies in f32 come on top of it. Each piece is added to the head's gradient, and rounded where
    /// that is kept in bf16 or f16 (`reduce_dtype`), and on the CPU each makes an f32 copy of a bf16
    /// or f16 head: there, take few pieces.
    pub logits_bytes: usize,
}

impl Default for LinearCrossEntropy {
    fn default() -> Self {
        Self { cross_entropy: CrossEntropy::default(), logits_bytes: 64 << 20 }
    }
}

impl LinearCrossEntropy {
    /// With these options of the cross entropy.
    #[must_use]
    pub fn cross_entropy(mut self, options: CrossEntropy) -> Self {
        self.cross_entropy = options;
        self
    }

    /// With at most so many bytes of logits at a time.
    #[must_use]
    pub fn logits_bytes(mut self, bytes: usize) -> Self {
        self.logits_bytes = bytes;
        self
    }

    /// The loss; see [`linear_cross_entropy`]. A head that a plan has cut over tensor-parallel ranks
    /// computes its (part of the) logits at once, as if the two were called apart.
    ///
    /// # Errors
    /// As [`linear_cross_entropy`].
    pub fn loss(&self, head: &Linear, hidden: &Tensor, targets: &Tensor) -> Result<Loss> {
        if head.layer().is_in_plan() {
            return self.cross_entropy.loss(&head.forward(hidden)?, targets);
        }
        head.layer().check_input(hidden)?;
        let smoothing = self.cross_entropy.smoothing()?;
        let classes = head.outputs();
        let mut dims = hidden.dims().to_vec();
        let Some(inputs) = dims.last_mut().map(|last| std::mem::replace(last, classes)) else {
            return Err(Error::other("the head's input is a scalar; it takes [.., inputs]"));
        };
        head.check_width(hidden)?;
        let targets = self.cross_entropy.targets(&dims, targets, classes)?;
        let count = targets.iter().flatten().count();
        let saved = hidden.detach().reshape((targets.len(), inputs))?;
        let most = (self.logits_bytes / (classes * saved.dtype().size_in_bytes())).max(1);
        // Pieces alike: the last may otherwise be a single row, for which all of the head is read.
        let rows = targets.len().div_ceil(targets.len().div_ceil(most).max(1)).max(1);
        let pieces: Vec<Range<usize>> = (0..targets.len().max(1))
            .step_by(rows)
            .map(|start| start..targets.len().min(start + rows))
            .collect();

        let (mut sum, mut lse, mut kept) = (None, Vec::with_capacity(pieces.len()), None);
        for piece in &pieces {
            let logits = head.compute(&saved.narrow(0, piece.start, piece.len())?)?;
            let (part, piece_lse) = kernel::forward(&logits, &targets[piece.clone()], smoothing)?;
            lse.push(piece_lse);
            sum = Some(match sum {
                None => part,
                Some(sum) => (sum + part)?,
            });
            if pieces.len() == 1 && is_grad_enabled() {
                kept = Some(logits);
            }
        }
        let sum = sum.ok_or_else(|| Error::other("a loss of no piece"))?;

        // A second backward over the graph finds nothing kept, and computes it again.
        let (kept, layer, shape) = (Mutex::new(kept), head.clone(), hidden.shape().clone());
        let tracked = hidden.track_op();
        let parameters: Vec<_> = head.parameters().collect();
        let sum = head.layer().record(&[hidden], &parameters, sum, move |_, grad| {
            let mut dx = Vec::with_capacity(pieces.len());
            for (piece, lse) in pieces.iter().zip(&lse) {
                let x = saved.narrow(0, piece.start, piece.len())?;
                let kept = kept.lock().expect("no panic while taking").take();
                let logits = kept.map_or_else(|| layer.compute(&x), Ok)?;
                let classes = Classes { first: 0, total: logits.dim(D::Minus1)? };
                let targets = &targets[piece.clone()];
                let d = kernel::backward_into(logits, lse, targets, classes, smoothing, grad)?;
                dx.extend(layer.gradients(&x, &d, InputGrad::new(tracked))?);
            }
            layer.end_uses()?;
            let dx = match dx.len() {
                0 => None,
                1 => dx.pop(),
                _ => Some(Tensor::cat(&dx, 0)?),
            };
            Ok(vec![dx.map(|dx| dx.reshape(&shape)).transpose()?])
        })?;
        Ok(Loss::new(sum, count as f64))
    }
}
