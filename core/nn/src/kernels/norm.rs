//! RMS norm and layer norm over the last dimension: `y = xhat * weight + bias`, with
//! `xhat = (x - mean) * rstd`; in RMS norm the mean is 0.

use candle_core::{D, Tensor};
use rayon::prelude::*;

use crate::Result;
use crate::backend::{to_accumulation_dtype, uses_cpu_kernels};
use crate::gradients::add_to;
use crate::host::{Float, add_rows, dot, host, rows_per_piece, sum1, tensor, with_float};
use fulgurite_engine::autograd::{self, storage};
use fulgurite_engine::execution::dry_run::skips_pass;
use fulgurite_engine::parameter::{Init, accumulation_dtype};
use fulgurite_engine::simd::vectorized;

/// RMS norm or layer norm.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Norm {
    /// Whether the mean is subtracted.
    pub(crate) center: bool,
    /// Added to the variance.
    pub(crate) eps: f64,
    /// Whether the factor of an element is `1 + weight`, and not `weight`.
    pub(crate) unit_offset: bool,
}

/// The gradients of a norm.
pub(crate) struct NormGrads {
    pub(crate) x: Tensor,
    pub(crate) weight: Tensor,
    pub(crate) bias: Option<Tensor>,
}

/// Statistics of each row that a GPU kernel keeps for backward. The other implementations recompute
/// them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stats(#[cfg(feature = "cuda")] Vec<Tensor>);

/// The norm of a sum, and the sum.
pub(crate) struct NormOfSum {
    pub(crate) y: Tensor,
    pub(crate) sum: Tensor,
    pub(crate) stats: Stats,
}

impl Norm {
    /// Returns the initial weight, for which the factor is 1.
    pub(crate) fn initial_weight(self) -> Init {
        if self.unit_offset { Init::ZEROS } else { Init::ONES }
    }

    /// Returns the factors of the elements: the weight or, in the accumulation dtype, 1 + weight.
    pub(crate) fn factors(self, weight: &Tensor) -> Result<Tensor> {
        match self.unit_offset {
            true => Ok((to_accumulation_dtype(weight)? + 1.0)?),
            false => Ok(weight.clone()),
        }
    }

    /// Computes the output, and the statistics for backward.
    pub(crate) fn forward(
        self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<(Tensor, Stats)> {
        let weight = &self.factors(weight)?;
        self.forward_by(x, weight, bias)
    }

    /// [`forward`](Self::forward) with these factors of the elements.
    fn forward_by(
        self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<(Tensor, Stats)> {
        #[cfg(feature = "cuda")]
        if let Some((y, _, stats)) = self.forward_on_gpu(x, None, weight, bias)? {
            return Ok((y, stats));
        }
        let dtype = x.dtype();
        let (x, weight) = (to_accumulation_dtype(x)?, to_accumulation_dtype(weight)?);
        let bias = bias.map(to_accumulation_dtype).transpose()?;
        if !uses_cpu_kernels(&x) {
            let (xhat, _) = self.normalize(&x)?;
            let y = xhat.broadcast_mul(&weight)?;
            let y = match &bias {
                Some(bias) => y.broadcast_add(bias)?,
                None => y,
            };
            return Ok((storage::cast(&y, dtype)?, Stats::default()));
        }
        let y = with_float!(x.dtype(), T => {
            let (host_x, weight) = (host(&x)?, host(&weight)?);
            let bias = bias.as_ref().map(host).transpose()?;
            let bias = bias.as_ref().map(|b| b.slice::<T>()).transpose()?;
            let y = self.forward_host(host_x.slice()?, weight.slice()?, bias);
            tensor(y, x.shape())
        })?;
        Ok((storage::cast(&y, dtype)?, Stats::default()))
    }

    /// Computes the norm of `x + residual`, of one shape and dtype, and the sum in new memory. One
    /// pass on GPUs, and on the CPU if nothing is cast.
    pub(crate) fn forward_residual(
        self,
        x: &Tensor,
        residual: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<NormOfSum> {
        let weight = &self.factors(weight)?;
        #[cfg(feature = "cuda")]
        if let Some((y, Some(sum), stats)) = self.forward_on_gpu(x, Some(residual), weight, bias)? {
            return Ok(NormOfSum { y, sum, stats });
        }
        if !uses_cpu_kernels(x) || accumulation_dtype(x.dtype()) != x.dtype() {
            let sum = autograd::sum(x, residual)?;
            let (y, stats) = self.forward_by(&sum, weight, bias)?;
            return Ok(NormOfSum { y, sum, stats });
        }
        let (x, residual) = (to_accumulation_dtype(x)?, to_accumulation_dtype(residual)?);
        let weight = to_accumulation_dtype(weight)?;
        let bias = bias.map(to_accumulation_dtype).transpose()?;
        with_float!(x.dtype(), T => {
            let (host_x, residual, weight) = (host(&x)?, host(&residual)?, host(&weight)?);
            let bias = bias.as_ref().map(host).transpose()?;
            let bias = bias.as_ref().map(|b| b.slice::<T>()).transpose()?;
            let inputs = [host_x.slice()?, residual.slice()?];
            let (y, sum) = self.forward_residual_host(inputs, weight.slice()?, bias);
            let (y, sum) = (tensor(y, x.shape())?, tensor(sum, x.shape())?);
            Ok(NormOfSum { y, sum, stats: Stats::default() })
        })
    }

    /// Returns the output, the sum with the residual, if any, and the statistics; `None` if no
    /// kernel supports the tensors.
    #[cfg(feature = "cuda")]
    fn forward_on_gpu(
        self,
        x: &Tensor,
        residual: Option<&Tensor>,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Option<(Tensor, Option<Tensor>, Stats)>> {
        use fulgurite_kernels::cuda;
        Ok(match (self.center, bias) {
            (true, bias) => cuda::layer_norm(x, residual, weight, bias, self.eps)?
                .map(|of| (of.y, of.sum, Stats(of.stats.into()))),
            (false, None) => cuda::rms_norm(x, residual, weight, self.eps)?
                .map(|of| (of.y, of.sum, Stats(of.stats.into()))),
            (false, Some(_)) => None,
        })
    }

    /// Computes the gradients. `stats` are the forward's, and `more` is another gradient of `x`, in
    /// its shape and dtype, which is added to the norm's.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "GPUs alone keep stats"))]
    pub(crate) fn backward(
        self,
        x: &Tensor,
        weight: &Tensor,
        with_bias: bool,
        stats: &Stats,
        grad: &Tensor,
        more: Option<&Tensor>,
    ) -> Result<NormGrads> {
        let weight = &self.factors(weight)?;
        #[cfg(feature = "cuda")]
        {
            use fulgurite_kernels::cuda;
            let of_kernel = match &stats.0[..] {
                [rstd] => {
                    let grad = grad.to_dtype(x.dtype())?;
                    let grads = cuda::rms_norm_backward(x, weight, rstd, &grad, more)?;
                    grads.map(|(x, weight)| NormGrads { x, weight, bias: None })
                }
                [mean, rstd] => {
                    let (stats, grad) = ([mean, rstd], grad.to_dtype(x.dtype())?);
                    cuda::layer_norm_backward(x, weight, with_bias, stats, &grad, more)?
                        .map(|(x, weight, bias)| NormGrads { x, weight, bias })
                }
                _ => None,
            };
            if let Some(grads) = of_kernel {
                return Ok(grads);
            }
        }
        let dtype = x.dtype();
        let (x, weight, grad) = (
            to_accumulation_dtype(x)?,
            to_accumulation_dtype(weight)?,
            to_accumulation_dtype(grad)?,
        );
        let mut grads = if uses_cpu_kernels(&x) {
            with_float!(x.dtype(), T => {
                let (host_x, weight, grad) = (host(&x)?, host(&weight)?, host(&grad)?);
                let weight = weight.slice::<T>()?;
                let (dx, dw, db) =
                    self.backward_host(host_x.slice()?, weight, grad.slice()?, with_bias);
                let bias = with_bias.then(|| tensor(db, weight.len())).transpose()?;
                Ok(NormGrads {
                    x: tensor(dx, x.shape())?,
                    weight: tensor(dw, weight.len())?,
                    bias,
                })
            })?
        } else {
            self.backward_portable(&x, &weight, with_bias, &grad)?
        };
        grads.x = storage::cast(&grads.x, dtype)?;
        if let Some(more) = more {
            grads.x = add_to(grads.x, more)?;
        }
        Ok(grads)
    }

    #[inline(always)]
    fn stats<T: Float>(self, x: &[T]) -> (T, T) {
        let n = T::from_f64(x.len() as f64);
        let mean = if self.center { sum1(x, |x| x) / n } else { T::ZERO };
        let variance = sum1(x, |x| (x - mean) * (x - mean)) / n;
        (mean, T::ONE / (variance + T::from_f64(self.eps)).sqrt())
    }

    fn forward_host<T: Float>(self, x: &[T], weight: &[T], bias: Option<&[T]>) -> Vec<T> {
        let n = weight.len().max(1);
        let mut y = vec![T::ZERO; x.len()];
        if skips_pass(2 * size_of_val(x)) {
            return y;
        }
        let piece = rows_per_piece(x.len() / n) * n;
        y.par_chunks_mut(piece).zip(x.par_chunks(piece)).for_each(|(y, x)| {
            forward_rows(self, y, x, weight, bias);
        });
        y
    }

    fn forward_residual_host<T: Float>(
        self,
        [x, residual]: [&[T]; 2],
        weight: &[T],
        bias: Option<&[T]>,
    ) -> (Vec<T>, Vec<T>) {
        let n = weight.len().max(1);
        let (mut y, mut sum) = (vec![T::ZERO; x.len()], vec![T::ZERO; x.len()]);
        if skips_pass(4 * size_of_val(x)) {
            return (y, sum);
        }
        let piece = rows_per_piece(x.len() / n) * n;
        let inputs = x.par_chunks(piece).zip(residual.par_chunks(piece));
        let outputs = y.par_chunks_mut(piece).zip(sum.par_chunks_mut(piece));
        outputs.zip(inputs).for_each(|((y, sum), (x, residual))| {
            for (sum, (&x, &residual)) in sum.iter_mut().zip(x.iter().zip(residual)) {
                *sum = x + residual;
            }
            forward_rows(self, y, sum, weight, bias);
        });
        (y, sum)
    }

    fn backward_host<T: Float>(
        self,
        x: &[T],
        weight: &[T],
        grad: &[T],
        with_bias: bool,
    ) -> (Vec<T>, Vec<T>, Vec<T>) {
        let n = weight.len().max(1);
        let mut dx = vec![T::ZERO; x.len()];
        if skips_pass(3 * size_of_val(x)) {
            let db = vec![T::ZERO; if with_bias { n } else { 0 }];
            return (dx, vec![T::ZERO; n], db);
        }
        let piece = rows_per_piece(x.len() / n) * n;
        let inputs = x.par_chunks(piece).zip(grad.par_chunks(piece));
        let partial: Vec<(Vec<T>, Vec<T>)> = dx
            .par_chunks_mut(piece)
            .zip(inputs)
            .map(|(dx, (x, grad))| {
                let mut dw = vec![T::ZERO; n];
                let mut db = vec![T::ZERO; if with_bias { n } else { 0 }];
                backward_rows(self, dx, &mut dw, &mut db, x, weight, grad);
                (dw, db)
            })
            .collect();
        let mut dw = vec![T::ZERO; n];
        let mut db = vec![T::ZERO; if with_bias { n } else { 0 }];
        for (w, b) in &partial {
            add_rows(&mut dw, w);
            add_rows(&mut db, b);
        }
        (dx, dw, db)
    }

    /// Returns `xhat` and `rstd`.
    fn normalize(self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let x = if self.center { x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)? } else { x.clone() };
        let rstd = (x.sqr()?.mean_keepdim(D::Minus1)? + self.eps)?.sqrt()?.recip()?;
        Ok((x.broadcast_mul(&rstd)?, rstd))
    }

    fn backward_portable(
        self,
        x: &Tensor,
        weight: &Tensor,
        with_bias: bool,
        grad: &Tensor,
    ) -> Result<NormGrads> {
        let n = x.dim(D::Minus1)?;
        let (xhat, rstd) = self.normalize(x)?;
        let g = grad.broadcast_mul(weight)?;
        let along = (&g * &xhat)?.mean_keepdim(D::Minus1)?;
        let mut dx = (&g - xhat.broadcast_mul(&along)?)?;
        if self.center {
            dx = dx.broadcast_sub(&g.mean_keepdim(D::Minus1)?)?;
        }
        let over_rows = |t: &Tensor| t.reshape(((), n))?.sum(0);
        Ok(NormGrads {
            x: dx.broadcast_mul(&rstd)?,
            weight: over_rows(&(grad * &xhat)?)?,
            bias: with_bias.then(|| over_rows(grad)).transpose()?,
        })
    }
}

vectorized! {
    fn forward_rows[T: Float](norm: Norm, y: &mut [T], x: &[T], weight: &[T], bias: Option<&[T]>) {
        let n = weight.len().max(1);
        for (y, x) in y.chunks_exact_mut(n).zip(x.chunks_exact(n)) {
            let (mean, rstd) = norm.stats(x);
            for ((y, &x), &weight) in y.iter_mut().zip(x).zip(weight) {
                *y = (x - mean) * rstd * weight;
            }
            if let Some(bias) = bias {
                y.iter_mut().zip(bias).for_each(|(y, &b)| *y += b);
            }
        }
    }

    /// Writes `dx`, and adds to `dw`, and to `db` unless empty.
    fn backward_rows[T: Float](
        norm: Norm,
        dx: &mut [T],
        dw: &mut [T],
        db: &mut [T],
        x: &[T],
        weight: &[T],
        grad: &[T],
    ) {
        let n = weight.len().max(1);
        let mut g = vec![T::ZERO; n];
        let rows = x.chunks_exact(n).zip(grad.chunks_exact(n));
        for (dx, (x, grad)) in dx.chunks_exact_mut(n).zip(rows) {
            let (mean, rstd) = norm.stats(x);
            for (dx, &x) in dx.iter_mut().zip(x) {
                *dx = (x - mean) * rstd; // xhat; replaced by the gradient below
            }
            for ((g, &grad), &weight) in g.iter_mut().zip(grad).zip(weight) {
                *g = grad * weight;
            }
            for ((dw, &grad), &xhat) in dw.iter_mut().zip(grad).zip(&*dx) {
                *dw += grad * xhat;
            }
            db.iter_mut().zip(grad).for_each(|(db, &g)| *db += g);
            let count = T::from_f64(n as f64);
            let along = dot(&g, dx) / count;
            let level = if norm.center { sum1(&g, |g| g) / count } else { T::ZERO };
            for (dx, &g) in dx.iter_mut().zip(&g) {
                *dx = rstd * (g - level - *dx * along);
            }
        }
    }
}
