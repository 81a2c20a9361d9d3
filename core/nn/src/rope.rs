//! Rotary position embedding.

use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Tensor};

use super::kernels::rope::{Angles, rotate};
use crate::{Error, Result};
use fulgurite_engine::module::ForwardScope;
use fulgurite_engine::parallel::record_function;
use fulgurite_engine::parameter::accumulation_dtype;

/// Rotary position embedding in Hugging Face's convention: element i of a head is paired with
/// element i + head_dim / 2.
///
/// Clones share the tables of cosines and sines, which are computed on first use. So all layers of
/// a model should use clones of one `Rope`.
#[derive(Debug, Clone)]
pub struct Rope(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    head_dim: usize,
    theta: f64,
    tables: Mutex<Option<Angles>>,
}

impl Rope {
    /// A rotation for heads of width `head_dim`, with the base `theta` (10000 in Llama, 500000 in
    /// Llama 3).
    ///
    /// # Errors
    /// If `head_dim` is odd or zero, or `theta` is not positive.
    pub fn new(head_dim: usize, theta: f64) -> Result<Self> {
        if head_dim == 0 || !head_dim.is_multiple_of(2) {
            return Err(Error::other(format!(
                "rotary embedding needs an even head_dim, got {head_dim}"
            )));
        }
        if theta <= 0.0 || !theta.is_finite() {
            return Err(Error::other(format!("rope_theta must be positive, got {theta}")));
        }
        Ok(Self(Arc::new(Inner { head_dim, theta, tables: Mutex::new(None) })))
    }

    /// The width of the rotated heads.
    pub fn head_dim(&self) -> usize {
        self.0.head_dim
    }

    /// Rotates `x` (`[.., time, head_dim]`), with positions from `offset` on.
    ///
    /// # Errors
    /// If the last dimension is not `head_dim`. Also under context parallelism, where a rank's
    /// positions are not consecutive.
    pub fn forward(&self, x: &Tensor, offset: usize) -> Result<Tensor> {
        if ForwardScope::current().context.is_some() {
            return Err(Error::other(
                "`Rope::forward` takes positions that follow each other, and \
                 context_parallel_size is above 1; use `CausalSelfAttention`",
            ));
        }
        let [.., time, dim] = *x.dims() else {
            return Err(Error::other("rotary embedding takes a tensor [.., time, head_dim]"));
        };
        if dim != self.0.head_dim {
            return Err(Error::other(format!(
                "rotary embedding for heads of {} elements got a tensor of shape {:?}",
                self.0.head_dim,
                x.dims()
            )));
        }
        apply(x, self.angles(offset, time, x.dtype(), x.device())?)
    }

    /// Returns the angles of `n` positions from `offset` on.
    pub(super) fn angles(
        &self,
        offset: usize,
        n: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Angles> {
        let dtype = accumulation_dtype(dtype);
        // f32 counts exactly up to this position.
        const MAX_POSITIONS: usize = 1 << 24;
        let end = offset.checked_add(n).filter(|end| *end <= MAX_POSITIONS).ok_or_else(|| {
            Error::other(format!(
                "rotary embedding takes positions below {MAX_POSITIONS}, got {n} from position {offset} on"
            ))
        })?;
        let mut tables = self.0.tables.lock().expect("no panic while making tables");
        let fits = tables.as_ref().is_some_and(|t| {
            t.cos.dims()[0] >= end && t.cos.dtype() == dtype && t.cos.device().same_device(device)
        });
        if !fits {
            *tables = Some(self.tables(end.next_power_of_two(), dtype, device)?);
        }
        match &*tables {
            Some(t) => {
                Ok(Angles { cos: t.cos.narrow(0, offset, n)?, sin: t.sin.narrow(0, offset, n)? })
            }
            None => Err(Error::other("rotary embedding has no tables")),
        }
    }

    fn tables(&self, positions: usize, dtype: DType, device: &Device) -> Result<Angles> {
        let half = self.0.head_dim / 2;
        let angle = |i: usize| {
            let (position, pair) = ((i / half) as f64, (i % half) as f64);
            let frequency = self.0.theta.powf(-pair / half as f64);
            match dtype {
                DType::F64 => position * frequency,
                // In f32, like other implementations: at far positions an f64 product differs
                // visibly.
                _ => f64::from(position as f32 * frequency as f32),
            }
        };
        let table = |f: fn(f64) -> f64| -> Result<Tensor> {
            let values: Vec<f64> = (0..positions * half).map(|i| f(angle(i))).collect();
            Ok(Tensor::from_vec(values, (positions, half), &Device::Cpu)?
                .to_dtype(dtype)?
                .to_device(device)?)
        };
        Ok(Angles { cos: table(f64::cos)?, sin: table(f64::sin)? })
    }
}

/// Applies the rotation as an operation of the graph.
pub(super) fn apply(x: &Tensor, angles: Angles) -> Result<Tensor> {
    let y = rotate(x, &angles, false)?;
    record_function(&[x], y, move |_, grad| Ok(vec![Some(rotate(grad, &angles, true)?)]))
}
