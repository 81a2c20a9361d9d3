//! [`LossScale`].

use std::collections::BTreeMap;

use crate::{Error, Result};

/// Number of skipped steps in a row that is an error: at 2⁻³² of the first scale no finite gradient
/// overflows.
const MOST_SKIPPED_IN_A_ROW: u64 = 32;

/// The factor of the loss in an f16 backward, which keeps gradients in f16's range, 6e-8 to 65504.
///
/// Optimizers divide gradients by the factor. As in PyTorch's `GradScaler`, a step whose gradients
/// overflow is skipped and makes the factor smaller; after many steps without an overflow it grows.
///
/// The loss here is a sum, but PyTorch's is a mean. So the first factor is 65536 divided by the
/// count of a micro-batch's loss, rounded up to a power of two. A power of two changes no bit of a
/// gradient that f16 can hold.
///
/// ```
/// use fulgurite_core::optim::LossScale;
///
/// let mut scale = LossScale::default();
/// scale.begin(1000.0);
/// assert_eq!(scale.factor(), 64.0); // 65536 / 1024
/// scale.end_step(true)?; // overflowed
/// assert_eq!((scale.factor(), scale.skipped()), (32.0, 1));
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScale {
    init_scale: f64,
    growth_factor: f64,
    backoff_factor: f64,
    growth_interval: u64,
    /// `None` before the first backward.
    factor: Option<f64>,
    /// Steps without an overflow since the factor last changed.
    good_steps: u64,
    skipped: u64,
    skipped_in_a_row: u64,
}

impl Default for LossScale {
    /// The defaults of PyTorch's `GradScaler`.
    fn default() -> Self {
        Self {
            init_scale: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
            factor: None,
            good_steps: 0,
            skipped: 0,
            skipped_in_a_row: 0,
        }
    }
}

impl LossScale {
    /// Sets the first factor, for the mean of a micro-batch (default 65536).
    #[must_use]
    pub fn with_init_scale(self, init_scale: f64) -> Self {
        Self { init_scale, ..self }
    }

    /// Sets after how many steps in a row without an overflow the factor grows (default 2000).
    #[must_use]
    pub fn with_growth_interval(self, growth_interval: u64) -> Self {
        Self { growth_interval, ..self }
    }

    /// Sets the multipliers for growth and after an overflow (default 2 and 0.5).
    #[must_use]
    pub fn with_factors(self, growth_factor: f64, backoff_factor: f64) -> Self {
        Self { growth_factor, backoff_factor, ..self }
    }

    /// Returns whether the factor is known.
    pub fn has_begun(&self) -> bool {
        self.factor.is_some()
    }

    /// Sets the first factor, for micro-batches whose losses count at most `count`, the same on all
    /// ranks.
    pub fn begin(&mut self, count: f64) {
        let parts = (count.max(1.0) as u64).next_power_of_two() as f64;
        self.factor = Some(self.init_scale / parts);
    }

    /// Returns the factor of the next backward; 1 before [`begin`](Self::begin).
    pub fn factor(&self) -> f64 {
        self.factor.unwrap_or(1.0)
    }

    /// Returns the number of skipped steps.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Sets the next factor, after a step whose gradients did or did not overflow on any rank.
    ///
    /// # Errors
    /// If gradients overflow in too many steps in a row: they are not finite at any factor.
    pub fn end_step(&mut self, overflowed: bool) -> Result<()> {
        let Some(factor) = self.factor else { return Ok(()) };
        if overflowed {
            (self.good_steps, self.factor) = (0, Some(factor * self.backoff_factor));
            self.skipped += 1;
            self.skipped_in_a_row += 1;
            if self.skipped_in_a_row >= MOST_SKIPPED_IN_A_ROW {
                return Err(Error::other(format!(
                    "the gradients of {MOST_SKIPPED_IN_A_ROW} steps in a row overflowed in f16, the last with a loss \
                     scale of {factor:e}: they are infinite or NaN whatever it is. `trainer.detect_anomaly = true` names \
                     the layer; bf16 (`trainer.precision = \"bf16-mixed\"`) has the range of f32"
                )));
            }
            return Ok(());
        }
        (self.good_steps, self.skipped_in_a_row) = (self.good_steps + 1, 0);
        if self.good_steps >= self.growth_interval {
            (self.good_steps, self.factor) = (0, Some(factor * self.growth_factor));
        }
        Ok(())
    }

    /// Returns the state for checkpoints.
    pub fn scalars(&self) -> BTreeMap<String, f64> {
        let Some(factor) = self.factor else { return BTreeMap::new() };
        let counts = [
            ("good_steps", self.good_steps),
            ("skipped", self.skipped),
            ("skipped_in_a_row", self.skipped_in_a_row),
        ];
        let counts = counts.map(|(name, count)| (name.to_owned(), count as f64));
        counts.into_iter().chain([("factor".to_owned(), factor)]).collect()
    }

    /// Restores the state that [`scalars`](Self::scalars) returned.
    pub fn load_scalars(&mut self, scalars: &BTreeMap<String, f64>) {
        let count = |name: &str| scalars.get(name).map_or(0, |&count| count as u64);
        self.factor = scalars.get("factor").copied();
        self.good_steps = count("good_steps");
        self.skipped = count("skipped");
        self.skipped_in_a_row = count("skipped_in_a_row");
    }
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    #[test]
    fn halves_on_overflow_and_grows_later() {
        let mut scale = LossScale::default().with_growth_interval(3);
        scale.begin(1.0);
        let mut factors = Vec::new();
        for overflowed in [true, false, false, true, false, false, false, false] {
            scale.end_step(overflowed).unwrap();
            factors.push(scale.factor() / 65536.0);
        }
        assert_eq!(factors, [0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.5, 0.5]);
        assert_eq!(scale.skipped(), 2);
        let mut restored = LossScale::default().with_growth_interval(3);
        restored.load_scalars(&scale.scalars());
        assert_eq!(restored, scale);
    }

    #[test]
    fn persistent_overflow_is_an_error() {
        let mut scale = LossScale::default();
        scale.begin(3.0);
        assert_eq!(scale.factor(), 16384.0);
        for _ in 1..MOST_SKIPPED_IN_A_ROW {
            scale.end_step(true).unwrap();
        }
        assert_says!(scale.end_step(true).unwrap_err(), "the gradients of 32 … overflowed …");
    }
}
