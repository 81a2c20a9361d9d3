//! The frequencies of rotary position embeddings beyond the trained length.

use std::f64::consts::PI;

use super::rope::RopeConfig;
use crate::{Error, Result};

/// How the frequencies of a rotary position embedding are changed for sequences longer than the
/// model was first trained on: `rope_type` in the `rope_parameters` of `transformers`.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// The frequencies `theta^(-2i / rotary_dim)`: `default`.
    None,
    /// All frequencies divided by a factor.
    Linear {
        /// The divisor, at least 1.
        factor: f64,
    },
    /// A larger base for sequences longer than `max_positions`, by the length of the sequence.
    /// Earlier sequences have no influence.
    Dynamic {
        /// Factor of the length; at least 1.
        factor: f64,
        /// The longest sequence with unchanged frequencies: `max_position_embeddings`.
        max_positions: usize,
    },
    /// YaRN: low frequencies are divided by a factor, high ones kept, with a ramp between.
    Yarn {
        /// Divisor of low frequencies, at least 1. `transformers` takes `max_position_embeddings /
        /// original_max_position_embeddings` if the configuration has none.
        factor: f64,
        /// The length of the first training: `original_max_position_embeddings`.
        original_max_positions: usize,
        /// Rotations over the original length above which a frequency is kept (32 by default).
        beta_fast: f64,
        /// Rotations below which a frequency is divided (1 by default).
        beta_slow: f64,
        /// Factor of cosines and sines. `None` computes it from the factor.
        attention_factor: Option<f64>,
        /// Numerator's weight in the computed factor of cosines and sines; takes effect together
        /// with `mscale_all_dim`.
        mscale: Option<f64>,
        /// Denominator's weight in the computed factor of cosines and sines.
        mscale_all_dim: Option<f64>,
        /// Whether the ends of the ramp are rounded to whole dimensions (true by default).
        truncate: bool,
    },
    /// Llama 3.1: like YaRN, with a ramp by wavelength, and cosines and sines unchanged.
    Llama3 {
        /// Divisor of low frequencies, at least 1.
        factor: f64,
        /// Rotations over the original length below which a frequency is divided.
        low_freq_factor: f64,
        /// Rotations above which a frequency is kept; more than `low_freq_factor`.
        high_freq_factor: f64,
        /// The length of the first training: `original_max_position_embeddings`.
        original_max_positions: usize,
    },
    /// LongRoPE (Phi 3): a divisor for each frequency, by the length of the sequence.
    LongRope {
        /// Divisors for sequences up to `original_max_positions`, `rotary_dim / 2` numbers.
        short_factor: Vec<f64>,
        /// Divisors for longer sequences, `rotary_dim / 2` numbers.
        long_factor: Vec<f64>,
        /// Growth of the length, from which the factor of cosines and sines is computed. `None`
        /// is `max_positions / original_max_positions`.
        factor: Option<f64>,
        /// The longest sequence: `max_position_embeddings`.
        max_positions: usize,
        /// The length of the first training: `original_max_position_embeddings`.
        original_max_positions: usize,
        /// Factor of cosines and sines. `None` computes it from the growth of the length.
        attention_factor: Option<f64>,
    },
}

impl RopeScaling {
    /// Checks the numbers for a rotation of this shape.
    pub(super) fn check(&self, config: &RopeConfig) -> Result<()> {
        let wrong = |message: String| Err(Error::other(message));
        let at_least_1 = |name: &str, value: f64| match value >= 1.0 && value.is_finite() {
            true => Ok(()),
            false => wrong(format!("rope scaling: {name} must be at least 1, got {value}")),
        };
        let positive = |name: &str, value: f64| match value > 0.0 && value.is_finite() {
            true => Ok(()),
            false => wrong(format!("rope scaling: {name} must be positive, got {value}")),
        };
        let positions = |name: &str, value: usize, least: usize| match value >= least {
            true => Ok(()),
            false => wrong(format!("rope scaling: {name} must be at least {least}, got {value}")),
        };
        match self {
            Self::None => Ok(()),
            Self::Linear { factor } => at_least_1("factor", *factor),
            Self::Dynamic { factor, max_positions } => {
                at_least_1("factor", *factor)?;
                positions("max_positions", *max_positions, 1)?;
                match config.rotary_dim {
                    2 => wrong("rope scaling: dynamic needs a rotary_dim above 2".to_owned()),
                    _ => Ok(()),
                }
            }
            Self::Yarn {
                factor,
                original_max_positions,
                beta_fast,
                beta_slow,
                attention_factor,
                mscale,
                mscale_all_dim,
                truncate: _,
            } => {
                at_least_1("factor", *factor)?;
                positions("original_max_positions", *original_max_positions, 1)?;
                positive("beta_fast", *beta_fast)?;
                positive("beta_slow", *beta_slow)?;
                positive("attention_factor", attention_factor.unwrap_or(1.0))?;
                for (name, value) in [("mscale", mscale), ("mscale_all_dim", mscale_all_dim)] {
                    // 0 is like `None`, as in `transformers`.
                    match value {
                        Some(value) if *value != 0.0 => positive(name, *value)?,
                        _ => {}
                    }
                }
                if beta_slow > beta_fast {
                    return wrong(format!(
                        "rope scaling: beta_fast must be at least beta_slow, got {beta_fast} and \
                         {beta_slow}"
                    ));
                }
                match config.theta > 1.0 {
                    true => Ok(()),
                    false => wrong(format!(
                        "rope scaling: yarn needs a rope_theta above 1, got {}",
                        config.theta
                    )),
                }
            }
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
                at_least_1("factor", *factor)?;
                positive("low_freq_factor", *low_freq_factor)?;
                positive("high_freq_factor", *high_freq_factor)?;
                positions("original_max_positions", *original_max_positions, 1)?;
                match high_freq_factor > low_freq_factor {
                    true => Ok(()),
                    false => wrong(format!(
                        "rope scaling: high_freq_factor must be above low_freq_factor, got \
                         {high_freq_factor} and {low_freq_factor}"
                    )),
                }
            }
            Self::LongRope {
                short_factor,
                long_factor,
                factor,
                max_positions,
                original_max_positions,
                attention_factor,
            } => {
                let pairs = config.rotary_dim / 2;
                for (name, factors) in
                    [("short_factor", short_factor), ("long_factor", long_factor)]
                {
                    if factors.len() != pairs {
                        return wrong(format!(
                            "rope scaling: {name} must have {pairs} numbers, one for each pair of \
                             rotated elements, got {}",
                            factors.len()
                        ));
                    }
                    factors.iter().try_for_each(|value| positive(name, *value))?;
                }
                positive("factor", factor.unwrap_or(1.0))?;
                positive("attention_factor", attention_factor.unwrap_or(1.0))?;
                positions("max_positions", *max_positions, 1)?;
                // Its logarithm is a divisor.
                positions("original_max_positions", *original_max_positions, 2)
            }
        }
    }

    /// Returns a number that is equal for lengths of sequences with equal frequencies.
    pub(super) fn regime(&self, length: usize) -> usize {
        match self {
            Self::Dynamic { max_positions, .. } => length.max(*max_positions),
            Self::LongRope { original_max_positions, .. } => {
                usize::from(length > *original_max_positions)
            }
            _ => 0,
        }
    }

    /// Returns the angle per position of each of the `rotary_dim / 2` pairs, in radians, for
    /// sequences of `length` tokens.
    pub fn frequencies(&self, config: &RopeConfig, length: usize) -> Vec<f64> {
        let (half, theta) = (config.rotary_dim / 2, config.theta);
        let dim = config.rotary_dim as f64;
        let plain = |theta: f64| -> Vec<f64> {
            (0..half).map(|pair| theta.powf(-(pair as f64) / half as f64)).collect()
        };
        match self {
            Self::None => plain(theta),
            Self::Linear { factor } => plain(theta).iter().map(|f| f / factor).collect(),
            Self::Dynamic { factor, max_positions } => {
                if length <= *max_positions {
                    return plain(theta);
                }
                let growth = factor * length as f64 / *max_positions as f64 - (factor - 1.0);
                plain(theta * growth.powf(dim / (dim - 2.0)))
            }
            Self::Yarn {
                factor, original_max_positions, beta_fast, beta_slow, truncate, ..
            } => {
                // The dimension whose pair makes this many rotations over the original length.
                let corner = |rotations: f64| {
                    let length = *original_max_positions as f64;
                    dim * (length / (rotations * 2.0 * PI)).ln() / (2.0 * theta.ln())
                };
                let (mut low, mut high) = (corner(*beta_fast), corner(*beta_slow));
                if *truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let (low, mut high) = (low.max(0.0), high.min(dim - 1.0));
                if low == high {
                    high += 0.001; // as transformers, against a division by zero
                }
                let pairs = plain(theta).into_iter().enumerate();
                pairs
                    .map(|(pair, f)| {
                        let divided = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
                        f / factor * divided + f * (1.0 - divided)
                    })
                    .collect()
            }
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
                let scaled = |f: f64| {
                    let rotations = *original_max_positions as f64 * f / (2.0 * PI);
                    let kept = (rotations - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    let kept = kept.clamp(0.0, 1.0);
                    f / factor * (1.0 - kept) + f * kept
                };
                plain(theta).into_iter().map(scaled).collect()
            }
            Self::LongRope { short_factor, long_factor, original_max_positions, .. } => {
                let factors = match length > *original_max_positions {
                    true => long_factor,
                    false => short_factor,
                };
                plain(theta).iter().zip(factors).map(|(f, factor)| f / factor).collect()
            }
        }
    }

    /// Returns the factor of cosines and sines: above 1 for some scalings of long sequences.
    pub fn attention_factor(&self) -> f64 {
        match self {
            Self::Yarn { attention_factor: Some(factor), .. }
            | Self::LongRope { attention_factor: Some(factor), .. } => *factor,
            Self::Yarn { factor, mscale, mscale_all_dim, .. } => {
                let of = |weight: f64| match *factor <= 1.0 {
                    true => 1.0,
                    false => 0.1 * weight * factor.ln() + 1.0,
                };
                match (mscale.unwrap_or(0.0), mscale_all_dim.unwrap_or(0.0)) {
                    (0.0, _) | (_, 0.0) => of(1.0),
                    (weight, all) => of(weight) / of(all),
                }
            }
            Self::LongRope { factor, max_positions, original_max_positions, .. } => {
                let original = *original_max_positions as f64;
                let factor = factor.unwrap_or(*max_positions as f64 / original);
                match factor <= 1.0 {
                    true => 1.0,
                    false => (1.0 + factor.ln() / original.ln()).sqrt(),
                }
            }
            _ => 1.0,
        }
    }
}
