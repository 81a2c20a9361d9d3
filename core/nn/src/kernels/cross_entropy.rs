//! Cross entropy of rows of logits. Forward saves the log-sum-exp of each row. Backward recomputes
//! the probabilities and writes the gradient in one pass. If classes are sharded over ranks, the
//! forward is in [`super::cross_entropy_parallel`]; backward is the same.
#![allow(unsafe_code)] // the gradient's memory is not zeroed before it is written

use std::mem::MaybeUninit;

use candle_core::{D, Tensor, WithDType as _};
use rayon::prelude::*;

use crate::Result;
use crate::backend::{to_accumulation_dtype, uses_cpu_kernels};
use crate::host::{Float, host, max, rows_per_piece, sum1, tensor, with_float};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::execution::dry_run::skips_pass;
use fulgurite_engine::parameter::accumulation_dtype;
use fulgurite_engine::simd::vectorized;

/// Rows of the gradient that a thread computes at a time.
const ROWS_PER_PIECE: usize = 8;

/// Targets on the host: the class of each row; `None` marks ignored rows.
pub(crate) type Targets = [Option<u32>];

/// The classes of the logits' columns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClassRange {
    /// The class of column 0.
    pub(crate) first: usize,
    /// Number of classes on all ranks.
    pub(crate) total: usize,
}

/// Computes the loss, `lse - (1 - smoothing) z[target] - smoothing mean(z)` summed over the rows,
/// and each row's log-sum-exp. `logits` is `[rows, classes]`.
pub(crate) fn forward(
    logits: &Tensor,
    targets: &Targets,
    smoothing: f64,
) -> Result<(Tensor, Tensor)> {
    let (rows, classes) = logits.dims2()?;
    #[cfg(feature = "cuda")]
    if logits.device().is_cuda() {
        let targets = on_device(targets, logits.device())?;
        let result = fulgurite_kernels::cuda::cross_entropy(logits, &targets, smoothing)?;
        if let Some((total, lse)) = result {
            return Ok((total.to_dtype(accumulation_dtype(logits.dtype()))?, lse));
        }
    }
    let logits = to_accumulation_dtype(logits)?;
    if !uses_cpu_kernels(&logits) {
        let (losses, lse) = portable_rows(&logits, targets, smoothing)?;
        return Ok((losses.sum_all()?, lse));
    }
    with_float!(logits.dtype(), T => {
        let host_x = host(&logits)?;
        let values = host_x.slice::<T>()?;
        let mut lse = vec![T::ZERO; rows];
        if skips_pass(size_of_val(values)) {
            return Ok((tensor(vec![T::ZERO], ())?, tensor(lse, rows)?));
        }
        let piece = rows_per_piece(rows);
        let sums: Vec<f64> = lse
            .par_chunks_mut(piece)
            .zip(values.par_chunks((piece * classes).max(1)).zip(targets.par_chunks(piece)))
            .map(|(lse, (values, targets))| {
                let mut sum = 0.0;
                for (lse, (z, target)) in
                    lse.iter_mut().zip(values.chunks_exact(classes.max(1)).zip(targets))
                {
                    let Some(target) = target else { continue };
                    let of_row = row_loss(z, *target as usize, smoothing);
                    *lse = of_row.1;
                    sum += of_row.0;
                }
                sum
            })
            .collect();
        let sum: f64 = sums.into_iter().sum();
        Ok((tensor(vec![T::from_f64(sum)], ())?, tensor(lse, rows)?))
    })
}

/// Computes each row's loss, 0 for ignored rows, and each row's log-sum-exp, as [`forward`].
pub(crate) fn forward_rows(
    logits: &Tensor,
    targets: &Targets,
    smoothing: f64,
) -> Result<(Tensor, Tensor)> {
    let (rows, classes) = logits.dims2()?;
    let logits = to_accumulation_dtype(logits)?;
    if !uses_cpu_kernels(&logits) {
        return portable_rows(&logits, targets, smoothing);
    }
    with_float!(logits.dtype(), T => {
        let host_x = host(&logits)?;
        let values = host_x.slice::<T>()?;
        let (mut losses, mut lse) = (vec![T::ZERO; rows], vec![T::ZERO; rows]);
        if !skips_pass(size_of_val(values)) {
            losses
                .par_iter_mut()
                .zip(&mut lse)
                .zip(values.par_chunks_exact(classes.max(1)).zip(targets))
                .with_min_len(8)
                .for_each(|((loss, lse), (z, target))| {
                    if let Some(target) = target {
                        let of_row = row_loss(z, *target as usize, smoothing);
                        (*loss, *lse) = (T::from_f64(of_row.0), of_row.1);
                    }
                });
        }
        Ok((tensor(losses, rows)?, tensor(lse, rows)?))
    })
}

/// [`forward_rows`] by tensor operations.
fn portable_rows(logits: &Tensor, targets: &Targets, smoothing: f64) -> Result<(Tensor, Tensor)> {
    let classes = logits.dim(1)?;
    let target = TargetMasks::new(targets, ClassRange { first: 0, total: classes }, logits)?;
    let row_max = logits.max_keepdim(1)?;
    let sum = logits.broadcast_sub(&row_max)?.exp()?.sum_keepdim(1)?;
    let lse = (row_max + sum.log()?)?;
    let mut loss = (&lse - (logits.gather(&target.index, 1)? * (1.0 - smoothing))?)?;
    if smoothing != 0.0 {
        loss = (loss - (logits.mean_keepdim(D::Minus1)? * smoothing)?)?;
    }
    let loss = target.not_ignored.where_cond(&loss, &loss.zeros_like()?)?;
    Ok((loss.flatten_all()?, lse.flatten_all()?))
}

/// The loss of a row of logits, and its log-sum-exp.
fn row_loss<T: Float>(z: &[T], target: usize, smoothing: f64) -> (f64, T) {
    let (row_max, exp) = max_and_sum_exp(z);
    let lse = row_max + exp.ln();
    let mut loss = lse.to_f64() - (1.0 - smoothing) * z[target].to_f64();
    if smoothing != 0.0 {
        loss -= smoothing * sum1(z, |z| z).to_f64() / z.len() as f64;
    }
    (loss, lse)
}

/// The log-probability of a class, with the bits of [`forward_rows`].
pub(crate) fn log_probability(logits: &[f32], class: usize) -> f32 {
    -(row_loss(logits, class, 0.0).0 as f32)
}

/// Computes the gradient of the logits. `grad` is the gradient of the loss, or of each row's loss,
/// and `lse` the log-sum-exp over all classes.
pub(crate) fn backward(
    logits: &Tensor,
    lse: &Tensor,
    targets: &Targets,
    classes: ClassRange,
    smoothing: f64,
    grad: &Tensor,
) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if logits.device().is_cuda() {
        let own = logits.force_contiguous()?;
        if replace_on_cuda(&own, lse, targets, classes, smoothing, grad)? {
            return Ok(own);
        }
    }
    let (dtype, (rows, columns)) = (logits.dtype(), logits.dims2()?);
    let logits = to_accumulation_dtype(logits)?;
    let grad = grad.to_dtype(logits.dtype())?;
    let uniform = smoothing / classes.total as f64;
    if !uses_cpu_kernels(&logits) {
        let target = TargetMasks::new(targets, classes, &logits)?;
        let p = (logits.broadcast_sub(&lse.reshape((rows, 1))?)?.exp()? - uniform)?;
        let hit = (target.is_local.to_dtype(p.dtype())? * (smoothing - 1.0))?;
        let d = p.scatter_add(&target.index, &hit, 1)?.broadcast_mul(&grad.reshape(((), 1))?)?;
        let keep = target.not_ignored.broadcast_as(d.shape())?;
        return Ok(keep.where_cond(&d, &d.zeros_like()?)?.to_dtype(dtype)?);
    }
    let d = with_float!(logits.dtype(), T => {
        let (host_x, lse) = (host(&logits)?, host(lse)?);
        let (values, lse) = (host_x.slice::<T>()?, lse.slice::<T>()?);
        if skips_pass(2 * size_of_val(values)) {
            let d = tensor(vec![T::ZERO; values.len()], (rows, columns))?;
            return storage::cast(&d, dtype);
        }
        let grads = host(&grad)?;
        let grads = RowGrads(grads.slice::<T>()?);
        let (uniform, hit) = (T::from_f64(uniform), T::from_f64(1.0 - smoothing));
        let write = |first: usize, d: &mut [MaybeUninit<T>]| {
            for (row, d) in (first..).zip(d.chunks_exact_mut(columns)) {
                let z = &values[row * columns..][..columns];
                let Some(target) = targets[row] else {
                    d.fill(MaybeUninit::new(T::ZERO));
                    continue;
                };
                let grad = grads.of(row);
                softmax_grad(d, z, lse[row], uniform, grad);
                let column = classes.column(target).filter(|&column| column < columns);
                if let Some(column) = column {
                    let p = (z[column] - lse[row]).fast_exp() - uniform;
                    d[column].write(p * grad - hit * grad);
                }
            }
        };
        let mut d = Vec::with_capacity(rows * columns);
        let room = &mut d.spare_capacity_mut()[..rows * columns];
        let pieces = room.par_chunks_mut((ROWS_PER_PIECE * columns).max(1)).enumerate();
        pieces.for_each(|(i, d)| write(i * ROWS_PER_PIECE, d));
        // SAFETY: the pieces are whole rows that cover `room`, and `write` writes every element of
        // its rows.
        unsafe { d.set_len(rows * columns) };
        tensor(d, (rows, columns))
    })?;
    storage::cast(&d, dtype)
}

/// [`backward`], equal to the bit, reusing the memory of the logits if possible. The logits must
/// have no other user. The memory is reused on the CPU if the logits have their accumulation dtype,
/// and on a GPU if a kernel supports them.
pub(crate) fn backward_into(
    logits: Tensor,
    lse: &Tensor,
    targets: &Targets,
    classes: ClassRange,
    smoothing: f64,
    grad: &Tensor,
) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if logits.is_contiguous() && replace_on_cuda(&logits, lse, targets, classes, smoothing, grad)? {
        return Ok(logits);
    }
    let in_place = uses_cpu_kernels(&logits)
        && accumulation_dtype(logits.dtype()) == logits.dtype()
        && logits.elem_count() > 0;
    if !in_place {
        return backward(&logits, lse, targets, classes, smoothing, grad);
    }
    let columns = logits.dim(1)?;
    let uniform = smoothing / classes.total as f64;
    with_float!(logits.dtype(), T => {
        let lse = host(lse)?;
        let lse = lse.slice::<T>()?;
        let grads = grad.to_dtype(logits.dtype())?;
        let grads = host(&grads)?;
        let grads = RowGrads(grads.slice::<T>()?);
        let (uniform, hit) = (T::from_f64(uniform), T::from_f64(1.0 - smoothing));
        storage::with_host_mut(&logits, |z: &mut [T]| {
            if skips_pass(2 * size_of_val(z)) {
                return;
            }
            let rows = z.par_chunks_exact_mut(columns.max(1)).zip(lse.par_iter().zip(targets));
            rows.with_min_len(8).enumerate().for_each(|(row, (z, (&lse, target)))| {
                let Some(target) = target else { return z.fill(T::ZERO) };
                let grad = grads.of(row);
                softmax_grad_in_place(z, lse, uniform, grad);
                if let Some(hit_class) = classes.column(*target).and_then(|i| z.get_mut(i)) {
                    *hit_class -= hit * grad;
                }
            });
        })?;
        Result::Ok(())
    })?;
    Ok(logits)
}

/// The gradient of the loss of all rows, or one for each row.
struct RowGrads<'a, T>(&'a [T]);

impl<T: Float> RowGrads<'_, T> {
    fn of(&self, row: usize) -> T {
        match self.0 {
            [of_all] => *of_all,
            of_rows => of_rows[row],
        }
    }
}

/// Returns the targets in the kernels' format.
#[cfg(feature = "cuda")]
fn on_device(targets: &Targets, device: &candle_core::Device) -> Result<Tensor> {
    let ignored = fulgurite_kernels::plans::IGNORED;
    let targets: Vec<u32> = targets.iter().map(|target| target.unwrap_or(ignored)).collect();
    let targets = Tensor::new(targets, &candle_core::Device::Cpu)?;
    fulgurite_engine::execution::transfer::to_device(&targets, device, "targets")
}

/// Replaces the logits by their gradient, if a kernel supports them.
#[cfg(feature = "cuda")]
fn replace_on_cuda(
    logits: &Tensor,
    lse: &Tensor,
    targets: &Targets,
    classes: ClassRange,
    smoothing: f64,
    grad: &Tensor,
) -> Result<bool> {
    if !logits.device().is_cuda() || grad.elem_count() != 1 {
        return Ok(false);
    }
    let (targets, lse) = (on_device(targets, logits.device())?, lse.flatten_all()?.contiguous()?);
    fulgurite_kernels::cuda::cross_entropy_backward(
        logits,
        [&targets, &lse],
        [classes.first, classes.total],
        smoothing,
        grad,
    )
}

vectorized! {
    /// `z = (exp(z - lse) - uniform) * grad`.
    fn softmax_grad_in_place[T: Float](z: &mut [T], lse: T, uniform: T, grad: T) {
        for z in z.iter_mut() {
            *z = ((*z - lse).fast_exp() - uniform) * grad;
        }
    }

    /// Returns the largest logit `m`, and the sum of `exp(z - m)`. If all logits are minus infinity
    /// or NaN (which `max` ignores), the sum is of `exp(z)`.
    pub(super) fn max_and_sum_exp[T: Float](z: &[T]) -> (T, T) {
        let row_max = max(z);
        let shift = if row_max == T::ZERO - T::INFINITY { T::ZERO } else { row_max };
        (row_max, sum1(z, |z| (z - shift).fast_exp()))
    }

    /// `d = (exp(z - lse) - uniform) * grad`.
    fn softmax_grad[T: Float](d: &mut [MaybeUninit<T>], z: &[T], lse: T, uniform: T, grad: T) {
        for (d, &z) in d.iter_mut().zip(z) {
            d.write(((z - lse).fast_exp() - uniform) * grad);
        }
    }
}

impl ClassRange {
    /// Returns the column of a class, possibly past the last column, or `None` before the first.
    pub(super) fn column(&self, class: u32) -> Option<usize> {
        (class as usize).checked_sub(self.first)
    }
}

/// Targets as tensors of shape `[rows, 1]`. They use masks (u8) rather than factors, because an
/// ignored row may have infinities, and zero times infinity is NaN.
pub(super) struct TargetMasks {
    /// The target's column, or 0 if this rank does not have it.
    pub(super) index: Tensor,
    /// Whether this rank has the target's column.
    pub(super) is_local: Tensor,
    /// Whether the row is not ignored.
    pub(super) not_ignored: Tensor,
}

impl TargetMasks {
    pub(super) fn new(targets: &Targets, classes: ClassRange, logits: &Tensor) -> Result<Self> {
        let columns = logits.dim(D::Minus1)?;
        let column = |target: &Option<u32>| {
            target.and_then(|class| classes.column(class)).filter(|&column| column < columns)
        };
        let mask = |f: &dyn Fn(&Option<u32>) -> bool| {
            let mask: Vec<u8> = targets.iter().map(|target| u8::from(f(target))).collect();
            Tensor::from_vec(mask, (targets.len(), 1), logits.device())
        };
        let index: Vec<u32> = targets.iter().map(|t| column(t).unwrap_or(0) as u32).collect();
        Ok(Self {
            index: Tensor::from_vec(index, (targets.len(), 1), logits.device())?,
            is_local: mask(&|target| column(target).is_some())?,
            not_ignored: mask(&Option::is_some)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    #[test]
    fn rows_without_classes_have_no_loss() {
        let device = Device::Cpu;
        let logits = Tensor::zeros((2, 0), DType::F32, &device).unwrap();
        let (sum, lse) = forward(&logits, &[None, None], 0.0).unwrap();
        assert_eq!((sum.to_scalar::<f32>().unwrap(), lse.dims1().unwrap()), (0.0, 2));
        let classes = ClassRange { first: 0, total: 0 };
        let one = Tensor::ones((), DType::F32, &device).unwrap();
        for f in
            [backward, |logits: &Tensor, lse: &_, targets: &_, classes, smoothing, grad: &_| {
                backward_into(logits.clone(), lse, targets, classes, smoothing, grad)
            }]
        {
            let grad = f(&logits, &lse, &[None, None], classes, 0.0, &one).unwrap();
            assert_eq!(grad.dims(), [2, 0]);
        }
    }
}
