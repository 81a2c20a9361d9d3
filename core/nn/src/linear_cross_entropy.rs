//! An output head and the cross entropy of its logits, as one operation.

use std::ops::Range;
use std::sync::Mutex;

use candle_core::{D, Device, Tensor};

use super::Loss;
use super::cross_entropy::CrossEntropy;
use super::kernels::cross_entropy::{self as kernel, ClassRange};
use super::kernels::matmul::InputGrad;
use super::linear::Linear;
use crate::{Error, Result};
use fulgurite_engine::autograd::is_grad_enabled;
use fulgurite_engine::module::Module;
use fulgurite_engine::parameter::leaving_none;

/// Computes the [`cross_entropy`](super::cross_entropy) of the logits `head(hidden)`, with `hidden`
/// of `[.., inputs]`. At most one copy of the logits exists, and their gradient reuses its memory.
/// Head and loss as two operations need several copies. See [`LinearCrossEntropy`].
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
/// As the head's forward and [`cross_entropy`](super::cross_entropy).
pub fn linear_cross_entropy(head: &Linear, hidden: &Tensor, targets: &Tensor) -> Result<Loss> {
    LinearCrossEntropy::default().loss(head, hidden, targets)
}

/// [`linear_cross_entropy`] with options.
///
/// Up to [`logits_bytes`](Self::logits_bytes) of logits are saved for backward. More logits are
/// computed in pieces of that size, and recomputed in backward. This costs a third more matrix
/// products of the head, but memory no longer grows with batch and vocabulary (the logits of long
/// sequences over 128 thousand classes take gigabytes).
///
/// The number of pieces changes roundings. The loss and the gradients of the head's parameters are
/// sums over the pieces, and a GPU's library may sum pieces of other sizes in another order. The
/// number depends only on the sizes and the kind of device, so the same configuration on the same
/// kind of GPU gives the same bits. Ranks may have different numbers of pieces, because no
/// collective depends on pieces.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LinearCrossEntropy {
    /// Ignored targets and label smoothing.
    pub cross_entropy: CrossEntropy,
    /// The largest size of a piece of logits, in bytes (at least one row). By default (`None`) it
    /// is 64 MiB, and on an NVIDIA GPU 1/32 of the total memory, from 256 MiB to 4 GiB. (Free
    /// memory differs from run to run.) In bf16 and f16, and on GPUs without hand-written
    /// kernels, f32 copies of the piece add to that. Few pieces are better in bf16 and f16: each
    /// piece rounds the head's gradient if the gradient has such a dtype (`reduce_dtype`). On the
    /// CPU each piece also makes a copy of the head, in f32 or in the layout of
    /// [`bf16_products`](super::bf16_products).
    pub logits_bytes: Option<usize>,
}

/// Returns the default size of a piece of logits on this device, in bytes.
fn default_logits_bytes(device: &Device) -> Result<usize> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        let total = fulgurite_kernels::cuda::total_memory(device)?;
        return Ok(share_of_memory(total));
    }
    let _ = device;
    Ok(64 << 20)
}

/// Returns the size of a piece of logits on a GPU with `total` bytes of memory.
#[cfg(any(feature = "cuda", test))]
fn share_of_memory(total: usize) -> usize {
    (total / 32).clamp(256 << 20, 4 << 30)
}

/// Rows of products that a GPU computes without waste: a multiple of its kernels' tiles.
const GPU_ROWS: usize = 256;

/// Returns the rows of a piece, for `rows` rows with at most `most` in a piece.
fn rows_of_piece(rows: usize, most: usize, on_gpu: bool) -> usize {
    let most = match on_gpu && most >= GPU_ROWS && most < rows {
        true => most - most % GPU_ROWS,
        false => most.max(1),
    };
    // Pieces of equal size, because a last piece of one row would read the whole head.
    let pieces = rows.div_ceil(most).max(1);
    let equal = rows.div_ceil(pieces).max(1);
    match on_gpu && pieces > 1 && most >= GPU_ROWS {
        true => equal.next_multiple_of(GPU_ROWS),
        false => equal,
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
        self.logits_bytes = Some(bytes);
        self
    }

    /// Computes the loss; see [`linear_cross_entropy`]. A head that a plan shards over
    /// tensor-parallel ranks computes all its logits at once, like a separate head and loss.
    ///
    /// # Errors
    /// As [`linear_cross_entropy`].
    pub fn loss(&self, head: &Linear, hidden: &Tensor, targets: &Tensor) -> Result<Loss> {
        if head.layer().is_in_plan() || !head.computes_rows_apart() {
            return self.cross_entropy.loss(&head.forward(hidden)?, targets);
        }
        let (sum, count) = self.compute(head, hidden, targets, false)?;
        Ok(Loss::new(sum, count as f64))
    }

    /// Computes the loss of each target in the shape of `targets`, 0 where it is ignored; see
    /// [`CrossEntropy::losses`].
    ///
    /// # Errors
    /// As [`loss`](Self::loss), and as [`CrossEntropy::losses`].
    pub fn losses(&self, head: &Linear, hidden: &Tensor, targets: &Tensor) -> Result<Tensor> {
        if head.layer().is_in_plan() || !head.computes_rows_apart() {
            return self.cross_entropy.losses(&head.forward(hidden)?, targets);
        }
        Ok(self.compute(head, hidden, targets, true)?.0)
    }

    /// Computes the sum of the losses, or each loss, and the number of targets that are not
    /// ignored.
    fn compute(
        &self,
        head: &Linear,
        hidden: &Tensor,
        targets: &Tensor,
        each: bool,
    ) -> Result<(Tensor, usize)> {
        head.layer().check_input(hidden)?;
        let hidden = &head.cast_input(hidden)?;
        let smoothing = self.cross_entropy.smoothing()?;
        let classes = head.outputs();
        let mut dims = hidden.dims().to_vec();
        let Some(inputs) = dims.last_mut().map(|last| std::mem::replace(last, classes)) else {
            return Err(Error::other("the head's input is a scalar; it takes [.., inputs]"));
        };
        head.check_width(hidden)?;
        let of_targets = targets.shape();
        let targets = self.cross_entropy.targets(&dims, targets, classes)?;
        let count = targets.iter().flatten().count();
        let saved = hidden.detach().reshape((targets.len(), inputs))?;
        let logits_bytes = match self.logits_bytes {
            Some(bytes) => bytes,
            None => default_logits_bytes(saved.device())?,
        };
        let most = logits_bytes / (classes * saved.dtype().size_in_bytes()).max(1);
        let rows = rows_of_piece(targets.len(), most, !saved.device().is_cpu());
        let pieces: Vec<Range<usize>> = (0..targets.len().max(1))
            .step_by(rows)
            .map(|start| start..targets.len().min(start + rows))
            .collect();

        let (mut parts, mut lse, mut computed) =
            (Vec::new(), Vec::with_capacity(pieces.len()), None);
        for piece in &pieces {
            let (logits, product) = head.compute(&saved.narrow(0, piece.start, piece.len())?)?;
            let of_piece = &targets[piece.clone()];
            let (part, piece_lse) = match each {
                true => kernel::forward_rows(&logits, of_piece, smoothing)?,
                false => kernel::forward(&logits, of_piece, smoothing)?,
            };
            lse.push(piece_lse);
            parts.push(part);
            if pieces.len() == 1 && is_grad_enabled() {
                computed = Some((logits, product));
            }
        }
        let output = match each {
            true => Tensor::cat(&parts, 0)?.reshape(of_targets)?,
            false => {
                let mut parts = parts.into_iter();
                let first = parts.next().ok_or_else(|| Error::other("a loss of no piece"))?;
                parts.try_fold(first, |sum, part| sum + part)?
            }
        };

        // A second backward over the graph finds no computed logits and recomputes them.
        let (computed, layer, shape) = (Mutex::new(computed), head.clone(), hidden.shape().clone());
        let tracked = head.layer().takes_gradient(hidden);
        let parameters: Vec<_> = head.parameters().collect();
        let output = head.layer().record(&[hidden], &parameters, output, move |_, grad| {
            let grad = if each { grad.flatten_all()? } else { grad.clone() };
            let mut dx = Vec::with_capacity(pieces.len());
            for (piece, lse) in pieces.iter().zip(&lse) {
                let x = saved.narrow(0, piece.start, piece.len())?;
                let computed = computed.lock().expect("no panic while taking").take();
                let (logits, product) = computed.map_or_else(|| layer.compute(&x), Ok)?;
                let classes = ClassRange { first: 0, total: logits.dim(D::Minus1)? };
                let targets = &targets[piece.clone()];
                let of_piece = match each {
                    true => grad.narrow(0, piece.start, piece.len())?,
                    false => grad.clone(),
                };
                let d = kernel::backward_into(logits, lse, targets, classes, smoothing, &of_piece)?;
                // Gradients of all pieces' logits are too large to be kept.
                let into = InputGrad::new(tracked);
                dx.extend(leaving_none(|| layer.backward_rows(&product, &x, &d, into))?);
            }
            layer.end_uses()?;
            let dx = match dx.len() {
                0 => None,
                1 => dx.pop(),
                _ => Some(Tensor::cat(&dx, 0)?),
            };
            Ok(vec![dx.map(|dx| dx.reshape(&shape)).transpose()?])
        })?;
        Ok((output, count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_equal_on_cpus() {
        for (rows, most, expected) in
            [(10, 4, 4), (9, 4, 3), (10, 0, 1), (0, 5, 1), (3, 100, 3), (1000, 999, 500)]
        {
            assert_eq!(rows_of_piece(rows, most, false), expected, "{rows} {most}");
        }
    }

    #[test]
    fn gpu_pieces_are_multiples_of_tiles() {
        // One piece if all rows fit; pieces with fewer rows than a tile stay equal.
        assert_eq!(rows_of_piece(16_000, 16_000, true), 16_000);
        assert_eq!(rows_of_piece(1000, 100, true), 100);
        // Llama 3's vocabulary, in bf16; 64 MiB allow 261 rows per piece.
        let row = 2 * 128_256;
        assert_eq!(rows_of_piece(16_384, (64 << 20) / row, true), 256);
        assert_eq!(rows_of_piece(16_384, share_of_memory(80 << 30) / row, true), 8192);
        for rows in [257, 1000, 4097, 16_384] {
            for most in [256, 300, 511, 513, 4000] {
                let piece = rows_of_piece(rows, most, true);
                assert!(piece <= most.max(1), "{rows} {most}: {piece}");
                assert!(piece == rows || piece.is_multiple_of(GPU_ROWS), "{rows} {most}: {piece}");
            }
        }
    }

    #[test]
    fn share_of_memory_has_bounds() {
        let of = |gib: usize| share_of_memory(gib << 30) >> 20;
        assert_eq!([of(4), of(24), of(80), of(192)], [256, 768, 2560, 4096]);
    }
}
