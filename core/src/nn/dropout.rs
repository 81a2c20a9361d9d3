//! Dropout that is the same on any mesh.

use candle_core::Tensor;
use rayon::prelude::*;

use super::arm::wide_dtype;
use super::host::{host, tensor, with_float};
use super::{arm, record::record};
use crate::module::{ForwardScope, Module, ModuleBuilder};
use crate::random::{Purpose, Stream};
use crate::{Error, Result};

/// Zeroes each element with probability `p` in training and scales the others by `1 / (1 - p)`.
///
/// The mask is a function of the run's seed, the layer's path, the step and the element's place in
/// the global batch (dimension 0 is the batch), so it does not depend on how the batch is cut over
/// ranks and micro-batches; see [`ForwardScope`]. Nothing is kept for backward. A layer that is used twice
/// in a forward uses the same mask twice: give each place a layer of its own.
#[derive(Debug, Clone)]
pub struct Dropout {
    path: String,
    p: f64,
}

impl Dropout {
    /// A layer that drops with probability `p`.
    ///
    /// # Errors
    /// If `p` is not in `[0, 1)`, or if there is a layer at the builder's path already.
    pub fn new(b: &ModuleBuilder, p: f64) -> Result<Self> {
        let path = b.path().to_owned();
        if !(0.0..1.0).contains(&p) {
            let message = format!("dropout probability {p} is not in [0, 1)");
            return Err(Error::Module { path, message });
        }
        b.declare("Dropout")?;
        Ok(Self { path, p })
    }
}

/// The elements of `x` times 0 or `1 / (1 - p)`.
fn masked(x: &Tensor, stream: &Stream, first: u64, p: f64) -> Result<Tensor> {
    const PIECE: usize = 4096;
    let scale = 1.0 / (1.0 - p);
    let numbers = |piece: usize, numbers: &mut [f64]| {
        stream.fill_uniform(first + (piece * PIECE) as u64, numbers);
    };
    let (dtype, wide) = (x.dtype(), arm::wide(x)?);
    if arm::on_host(&wide) {
        let y = with_float!(wide.dtype(), T => {
            let mut y = host(&wide)?.slice::<T>()?.to_vec();
            y.par_chunks_mut(PIECE).enumerate().for_each(|(i, y)| {
                let mut u = [0f64; PIECE];
                numbers(i, &mut u[..y.len()]);
                for (y, u) in y.iter_mut().zip(u) {
                    *y = if u < p { 0.0 as T } else { *y * scale as T };
                }
            });
            tensor(y, wide.shape())
        })?;
        return Ok(y.to_dtype(dtype)?);
    }
    let mut mask = vec![0f64; x.elem_count()];
    mask.par_chunks_mut(PIECE).enumerate().for_each(|(i, mask)| {
        numbers(i, mask);
        mask.iter_mut().for_each(|u| *u = if *u < p { 0.0 } else { scale });
    });
    let mask = tensor(mask, x.shape())?.to_dtype(wide_dtype(dtype))?.to_device(x.device())?;
    Ok((wide * mask)?.to_dtype(dtype)?)
}

impl Module for Dropout {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let scope = ForwardScope::current();
        if !scope.training || self.p == 0.0 || x.elem_count() == 0 {
            return Ok(x.clone());
        }
        let stream = Stream::new(scope.seed, Purpose::Dropout, &self.path).child(scope.step);
        let elements_per_sample = (x.elem_count() / x.dims().first().unwrap_or(&1)) as u64;
        let (first, p) = (scope.first_sample * elements_per_sample, self.p);
        let y = masked(&x.detach(), &stream, first, p)?;
        record(&[x], &[], y, move |_, grad| Ok(vec![Some(masked(grad, &stream, first, p)?)]))
    }
}
