//! Rotary position embedding.

use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Tensor};

use super::kernels::rope::{Angles, rotate};
use super::rope_scaling::RopeScaling;
use crate::{Error, Result};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::execution::dry_run::skips_pass;
use fulgurite_engine::module::ForwardScope;
use fulgurite_engine::parallel::record_function;
use fulgurite_engine::parameter::accumulation_dtype;

/// The shape of a [`Rope`].
///
/// ```
/// use fulgurite_core::nn::{Rope, RopeConfig, RopeScaling};
///
/// // Llama 3.2.
/// let scaling = RopeScaling::Llama3 {
///     factor: 32.0,
///     low_freq_factor: 1.0,
///     high_freq_factor: 4.0,
///     original_max_positions: 8192,
/// };
/// let rope = Rope::with_config(&RopeConfig { scaling, ..RopeConfig::new(64, 500_000.0) })?;
/// assert_eq!(rope.head_dim(), 64);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// Width of the heads.
    pub head_dim: usize,
    /// The base of the frequencies: 10000 in Llama, 500000 in Llama 3.
    pub theta: f64,
    /// Width of the rotated part, even: the first elements of a head. The others stay as they are.
    /// `transformers` has `partial_rotary_factor`, its ratio to `head_dim`.
    pub rotary_dim: usize,
    /// Changes of the frequencies for long sequences.
    pub scaling: RopeScaling,
}

impl RopeConfig {
    /// A rotation of whole heads, with unchanged frequencies.
    pub fn new(head_dim: usize, theta: f64) -> Self {
        Self { head_dim, theta, rotary_dim: head_dim, scaling: RopeScaling::None }
    }
}

/// Rotary position embedding in Hugging Face's convention: element i of a head is paired with
/// element i + rotary_dim / 2, where `rotary_dim` is usually the whole head.
///
/// Clones share the tables of cosines and sines, which are computed on first use. So all layers of
/// a model should use clones of one `Rope`.
#[derive(Debug, Clone)]
pub struct Rope(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    config: RopeConfig,
    tables: Mutex<Option<Tables>>,
}

/// Cosines and sines of the first positions, for sequences of some lengths.
#[derive(Debug)]
struct Tables {
    angles: Angles,
    regime: usize,
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
        Self::with_config(&RopeConfig::new(head_dim, theta))
    }

    /// A rotation of this shape. [`RopeScaling::Dynamic`] and [`RopeScaling::LongRope`] depend on
    /// the length of the sequence that is computed: with packed [documents](super::Documents), on
    /// the length of the whole sequence.
    ///
    /// # Errors
    /// If `rotary_dim` is odd, zero or above `head_dim`, `theta` is not positive, or a number of
    /// the scaling is out of its range.
    pub fn with_config(config: &RopeConfig) -> Result<Self> {
        let RopeConfig { head_dim, theta, rotary_dim, ref scaling } = *config;
        if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) || rotary_dim > head_dim {
            return Err(Error::other(format!(
                "rotary embedding needs an even rotary_dim of at most head_dim, {head_dim}, got \
                 {rotary_dim}"
            )));
        }
        if theta <= 0.0 || !theta.is_finite() {
            return Err(Error::other(format!("rope_theta must be positive, got {theta}")));
        }
        scaling.check(config)?;
        Ok(Self(Arc::new(Inner { config: config.clone(), tables: Mutex::new(None) })))
    }

    /// The width of the heads.
    pub fn head_dim(&self) -> usize {
        self.0.config.head_dim
    }

    /// The width of the rotated part of the heads.
    pub fn rotary_dim(&self) -> usize {
        self.0.config.rotary_dim
    }

    /// Rotates `x` (`[.., time, head_dim]`), with positions from `offset` on. The sequence ends
    /// with the last position.
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
        if dim != self.head_dim() {
            return Err(Error::other(format!(
                "rotary embedding for heads of {} elements got a tensor of shape {:?}",
                self.head_dim(),
                x.dims()
            )));
        }
        apply(x, self.angles(offset, time, x.dtype(), x.device())?)
    }

    /// Whether sequences of these two lengths have the same frequencies.
    pub fn is_alike(&self, length: usize, other: usize) -> bool {
        let scaling = &self.0.config.scaling;
        scaling.regime(length) == scaling.regime(other)
    }

    /// Returns the angles of `n` positions from `offset` on, at the end of their sequence.
    pub(super) fn angles(
        &self,
        offset: usize,
        n: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Angles> {
        self.angles_of(offset.saturating_add(n), [offset, n], dtype, device)
    }

    /// Returns the angles of the first `n` positions of a sequence of `length`.
    pub(super) fn angles_within(
        &self,
        length: usize,
        n: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Angles> {
        self.angles_of(length, [0, n], dtype, device)
    }

    /// Returns the angles of `n` positions from `offset` on, in a sequence of `length`.
    fn angles_of(
        &self,
        length: usize,
        [offset, n]: [usize; 2],
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
        let regime = self.0.config.scaling.regime(length);
        let mut tables = self.0.tables.lock().expect("no panic while making tables");
        let fits = |Tables { angles, regime: of }: &Tables| {
            angles.cos.dims()[0] >= end
                && *of == regime
                && angles.cos.dtype() == dtype
                && angles.cos.device().same_device(device)
        };
        let angles = match &*tables {
            Some(tables) if fits(tables) => &tables.angles,
            _ => {
                let angles = self.tables(end.next_power_of_two(), length, dtype, device)?;
                &tables.insert(Tables { angles, regime }).angles
            }
        };
        Ok(Angles { cos: angles.cos.narrow(0, offset, n)?, sin: angles.sin.narrow(0, offset, n)? })
    }

    /// Computes the angles of the first `positions` for sequences of `length`.
    fn tables(
        &self,
        positions: usize,
        length: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Angles> {
        let RopeConfig { scaling, .. } = &self.0.config;
        let frequencies = scaling.frequencies(&self.0.config, length);
        let (half, factor) = (frequencies.len(), scaling.attention_factor());
        let angle = |i: usize| {
            let (position, frequency) = ((i / half) as f64, frequencies[i % half]);
            match dtype {
                DType::F64 => position * frequency,
                // In f32, like other implementations: at far positions an f64 product differs
                // visibly.
                _ => f64::from(position as f32 * frequency as f32),
            }
        };
        let table = |f: fn(f64) -> f64| -> Result<Tensor> {
            if skips_pass(positions * half * dtype.size_in_bytes()) {
                return storage::zeros((positions, half), dtype, device);
            }
            let values: Vec<f64> = (0..positions * half).map(|i| factor * f(angle(i))).collect();
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
