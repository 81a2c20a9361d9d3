//! An output head and the cross entropy of its logits, as one operation.

use std::ops::Range;
use std::sync::Mutex;

use candle_core::{D, Tensor};

use super::Loss;
use super::cross_entropy::CrossEntropy;
use super::kernels::cross_entropy::{self as kernel, ClassRange};
use super::kernels::matmul::InputGrad;
use super::linear::Linear;
use super::lora::LoraCall;
use crate::{Error, Result};
use fulgurite_engine::autograd::is_grad_enabled;
use fulgurite_engine::module::Module;

/// The [`cross_entropy`](super::cross_entropy) of the logits that `head` computes of `hidden`
/// (`[.., inputs]`). There is one copy of the logits at most, and their gradient is computed in its
/// memory; head and loss as two operations need several copies. See [`LinearCrossEntropy`].
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fulgurite_core::autograd::storage;
/// use fulgurite_core::module::{ModuleBuilder, ModuleInit};
/// use fulgurite_core::nn::{Linear, linear_cross_entropy};
///
/// let b = ModuleBuilder::new(ModuleInit::default());
/// let head = Linear::new(&b.pp("lm_head"), 4, 8)?;
/// storage::allocate(b.finish()?.slots()[0].compute()?)?; // zeros; a strategy does this
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
/// Up to [`logits_bytes`](Self::logits_bytes) of logits are saved for backward. More logits than
/// that are computed in pieces of that size, and once more in backward. This costs a third more
/// matrix products of the head, and the memory no longer grows with batch and vocabulary (the
/// logits of long sequences over 128 thousand classes take gigabytes).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinearCrossEntropy {
    /// Ignored targets and label smoothing.
    pub cross_entropy: CrossEntropy,
    /// The largest size of a piece of logits, in bytes (at least one row). By default 64 MiB. In
    /// bf16 and f16, and on GPUs, copies of the piece in f32 add to that. Few pieces are better in
    /// bf16 and f16: each piece rounds the head's gradient if that is kept in such a dtype
    /// (`reduce_dtype`), and on the CPU makes a copy of the head, in f32 or as
    /// [`bf16_products`](super::bf16_products) read it.
    pub logits_bytes: usize,
}

impl Default for LinearCrossEntropy {
    fn default() -> Self {
        Self { cross_entropy: CrossEntropy::default(), logits_bytes: 64 << 20 }
    }
}

impl LinearCrossEntropy {
    /// Sets the options of the cross entropy.
    #[must_use]
    pub fn cross_entropy(mut self, options: CrossEntropy) -> Self {
        self.cross_entropy = options;
        self
    }

    /// Sets the largest size of a piece of logits, in bytes.
    #[must_use]
    pub fn logits_bytes(mut self, bytes: usize) -> Self {
        self.logits_bytes = bytes;
        self
    }

    /// The loss; see [`linear_cross_entropy`]. A head that a plan has cut over tensor-parallel
    /// ranks computes all its logits at once, as head and loss apart do.
    ///
    /// # Errors
    /// As [`linear_cross_entropy`].
    pub fn loss(&self, head: &Linear, hidden: &Tensor, targets: &Tensor) -> Result<Loss> {
        if head.layer().is_in_plan() || !head.computes_rows_apart() {
            return self.cross_entropy.loss(&head.forward(hidden)?, targets);
        }
        head.layer().check_input(hidden)?;
        let hidden = &head.cast_input(hidden)?;
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
        let max_rows =
            (self.logits_bytes / (classes * saved.dtype().size_in_bytes()).max(1)).max(1);
        // Pieces of equal size: a last piece of a single row would read the whole head for it.
        let rows = targets.len().div_ceil(targets.len().div_ceil(max_rows).max(1)).max(1);
        let pieces: Vec<Range<usize>> = (0..targets.len().max(1))
            .step_by(rows)
            .map(|start| start..targets.len().min(start + rows))
            .collect();

        let (mut sum, mut lse, mut saved_logits) = (None, Vec::with_capacity(pieces.len()), None);
        for piece in &pieces {
            let (logits, _) = head.compute(&saved.narrow(0, piece.start, piece.len())?)?;
            let (part, piece_lse) = kernel::forward(&logits, &targets[piece.clone()], smoothing)?;
            lse.push(piece_lse);
            sum = Some(match sum {
                None => part,
                Some(sum) => (sum + part)?,
            });
            if pieces.len() == 1 && is_grad_enabled() {
                saved_logits = Some(logits);
            }
        }
        let sum = sum.ok_or_else(|| Error::other("a loss of no piece"))?;

        // A second backward over the graph finds no saved logits and computes them again.
        let (saved_logits, layer, shape) =
            (Mutex::new(saved_logits), head.clone(), hidden.shape().clone());
        let tracked = hidden.track_op();
        let parameters: Vec<_> = head.parameters().collect();
        let sum = head.layer().record(&[hidden], &parameters, sum, move |_, grad| {
            let mut dx = Vec::with_capacity(pieces.len());
            for (piece, lse) in pieces.iter().zip(&lse) {
                let x = saved.narrow(0, piece.start, piece.len())?;
                let saved_logits = saved_logits.lock().expect("no panic while taking").take();
                let logits = saved_logits.map_or_else(|| layer.compute(&x).map(|(y, _)| y), Ok)?;
                let classes = ClassRange { first: 0, total: logits.dim(D::Minus1)? };
                let targets = &targets[piece.clone()];
                let d = kernel::backward_into(logits, lse, targets, classes, smoothing, grad)?;
                dx.extend(layer.backward_rows(
                    &LoraCall::default(),
                    &x,
                    &d,
                    InputGrad::new(tracked),
                )?);
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
