//! Initial values, a pure function of (seed, FQN, element index).

use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

use crate::Result;
use fulgurite_collective::shard::Region;
use fulgurite_tensor::autograd::storage;
use fulgurite_tensor::execution::dry_run::skips_pass;
use fulgurite_tensor::random::{Purpose, Stream};

/// A parameter's initial values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// Every element has this value.
    Const(f64),
    /// Normally distributed.
    Normal {
        /// The mean.
        mean: f64,
        /// The standard deviation.
        std: f64,
    },
    /// Uniformly distributed in `[low, high)`.
    Uniform {
        /// The lower bound.
        low: f64,
        /// The upper bound.
        high: f64,
    },
}

impl Init {
    /// All zeros.
    pub const ZEROS: Self = Self::Const(0.0);
    /// All ones.
    pub const ONES: Self = Self::Const(1.0);

    /// Checks that all values are finite and fit in f32.
    ///
    /// # Errors
    /// A message, if a value is invalid.
    pub(crate) fn check(self) -> std::result::Result<(), String> {
        let (numbers, fits) = match self {
            Self::Const(value) => (vec![value], true),
            Self::Normal { mean, std } => (vec![mean, std], std >= 0.0),
            Self::Uniform { low, high } => (vec![low, high], low <= high),
        };
        // Values are computed in f32 for every dtype.
        if fits && numbers.iter().all(|x| x.abs() <= f64::from(f32::MAX)) {
            return Ok(());
        }
        Err(format!(
            "cannot start as {self:?}: all must be numbers of at most {:e}, a standard deviation 0 or \
             more, and a lower bound at most the upper one",
            f32::MAX
        ))
    }

    /// The initial values of `torch.nn.Linear`: uniform within `1 / sqrt(fan_in)`.
    pub fn kaiming_uniform(fan_in: usize) -> Self {
        let bound = 1.0 / (fan_in.max(1) as f64).sqrt();
        Self::Uniform { low: -bound, high: bound }
    }

    /// The values of `region` of the parameter `fqn` with global shape `shape`, flat in the
    /// region's row-major order. They do not depend on how the parameter is cut.
    pub fn values(
        self,
        seed: u64,
        fqn: &str,
        shape: &[usize],
        region: &Region,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let n = region.elem_count();
        let stream = Stream::new(seed, Purpose::Init, fqn);
        let mut values = vec![0f32; n];
        if skips_pass(n * size_of::<f32>()) {
            return storage::cast(&Tensor::from_vec(values, n, device)?, dtype);
        }
        if let Self::Const(value) = self {
            values.fill(value as f32);
        } else {
            for run in region.runs(shape) {
                let out = &mut values[run.inner..run.inner + run.len];
                const BLOCK: usize = 4096;
                out.par_chunks_mut(BLOCK).enumerate().for_each(|(i, out)| {
                    let mut numbers = [0f64; BLOCK];
                    let numbers = &mut numbers[..out.len()];
                    let start = (run.outer + i * BLOCK) as u64;
                    match self {
                        Self::Normal { mean, std } => {
                            stream.fill_normal(start, numbers);
                            numbers.iter_mut().for_each(|x| *x = mean + std * *x);
                        }
                        Self::Uniform { low, high } => {
                            stream.fill_uniform(start, numbers);
                            numbers.iter_mut().for_each(|x| *x = low + (high - low) * *x);
                        }
                        Self::Const(_) => unreachable!("constants are filled above"),
                    }
                    out.iter_mut().zip(numbers).for_each(|(out, x)| *out = *x as f32);
                });
            }
        }
        storage::cast(&Tensor::from_vec(values, n, device)?, dtype)
    }
}

/// Converts candle_nn's initialiser for a parameter of this shape.
pub(crate) fn from_candle(init: candle_nn::Init, shape: &candle_core::Shape) -> Init {
    match init {
        candle_nn::Init::Kaiming { dist, fan, non_linearity } => {
            let std = non_linearity.gain() / (fan.for_shape(shape) as f64).sqrt();
            match dist {
                candle_nn::init::NormalOrUniform::Uniform => {
                    let bound = 3f64.sqrt() * std;
                    Init::Uniform { low: -bound, high: bound }
                }
                candle_nn::init::NormalOrUniform::Normal => Init::Normal { mean: 0.0, std },
            }
        }
        candle_nn::Init::Const(value) => Init::Const(value),
        candle_nn::Init::Randn { mean, stdev } => Init::Normal { mean, std: stdev },
        candle_nn::Init::Uniform { lo, up } => Init::Uniform { low: lo, high: up },
    }
}
