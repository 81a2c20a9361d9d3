//! Schedules of several phases.
//!
//! ```
//! use fulgurite_core::optim::{SchedulerConfig, WarmupStableDecay};
//!
//! let schedule = WarmupStableDecay { warmup_steps: 9, decay_steps: 20, ..Default::default() };
//! assert_eq!(schedule.factor(4, Some(100))?, 0.5);
//! assert_eq!(schedule.factor(50, Some(100))?, 1.0);
//! assert_eq!(schedule.factor(90, Some(100))?, 0.5); // half-way through the decay
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

use super::optimizer::{Interval, SchedulerConfig};
use super::schedule::warmup;
use crate::{Error, Result};

fn config_error<T>(key: &str, message: impl std::fmt::Display) -> Result<T> {
    Err(Error::Config(format!("scheduler.{key} {message}")))
}

fn length(name: &str, own: Option<u64>, max_steps: Option<u64>) -> Result<u64> {
    own.or(max_steps).ok_or_else(|| {
        Error::Config(format!(
            "the {name} schedule has to know when it ends: set scheduler.total_steps or \
             trainer.max_steps"
        ))
    })
}

/// Falls from 1 to 0 in half a cosine wave, for `progress` from 0 to 1.
fn half_wave(progress: f64) -> f64 {
    0.5 * (1.0 + (PI * progress.clamp(0.0, 1.0)).cos())
}

/// One cycle up and down, each in half a cosine wave: `scheduler.type = "one_cycle"`. The factor
/// rises from `1 / div_factor` to 1 over `pct_start` of the run, then falls to
/// `1 / (div_factor * final_div_factor)`. As PyTorch's `OneCycleLR` without momentum, with
/// `optimizer.lr` as its `max_lr`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct OneCycle {
    /// The fraction of the cycle in which the rate rises, between 0 and 1.
    #[default(0.3)]
    pub pct_start: f64,
    /// The first rate is the largest divided by this.
    #[default(25.0)]
    pub div_factor: f64,
    /// The last rate is the first divided by this.
    #[default(1e4)]
    pub final_div_factor: f64,
    /// The cycle's length in steps; by default the run's length.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_steps: Option<u64>,
}

#[typetag::serde(name = "one_cycle")]
impl SchedulerConfig for OneCycle {
    fn factor(&self, step: u64, max_steps: Option<u64>) -> Result<f64> {
        if !(0.0..1.0).contains(&self.pct_start) {
            return config_error(
                "pct_start",
                format!("must be at least 0 and below 1, got {}", self.pct_start),
            );
        }
        for (key, value) in
            [("div_factor", self.div_factor), ("final_div_factor", self.final_div_factor)]
        {
            if !(value.is_finite() && value > 0.0) {
                return config_error(key, format!("must be above 0, got {value}"));
            }
        }
        let last = length("one_cycle", self.total_steps, max_steps)?.saturating_sub(1) as f64;
        let first = 1.0 / self.div_factor;
        let end = first / self.final_div_factor;
        // PyTorch's position of the peak.
        let peak = self.pct_start * (last + 1.0) - 1.0;
        let at = step as f64;
        Ok(if at <= peak {
            first + (1.0 - first) * (1.0 - half_wave(at / peak.max(f64::MIN_POSITIVE)))
        } else {
            let peak = peak.max(0.0);
            end + (1.0 - end) * half_wave((at - peak) / (last - peak).max(f64::MIN_POSITIVE))
        })
    }
}

/// Repeated cosine decays, each from the full rate: `scheduler.type = "cosine_warm_restarts"`. As
/// PyTorch's `CosineAnnealingWarmRestarts`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct CosineWarmRestarts {
    /// Number of steps of the first decay.
    #[default(1000)]
    pub first_steps: u64,
    /// The length of each decay over the length of the one before.
    #[default(1)]
    pub multiplier: u64,
    /// The factor at the end of each decay, in `[0, 1]`.
    pub min_factor: f64,
    /// Number of steps over which the rate rises before the first decay.
    pub warmup_steps: u64,
}

#[typetag::serde(name = "cosine_warm_restarts")]
impl SchedulerConfig for CosineWarmRestarts {
    fn factor(&self, step: u64, _: Option<u64>) -> Result<f64> {
        for (key, value) in [("first_steps", self.first_steps), ("multiplier", self.multiplier)] {
            if value == 0 {
                return config_error(key, "must be at least 1, got 0");
            }
        }
        check_part("min_factor", self.min_factor)?;
        if step < self.warmup_steps {
            return Ok(warmup(step, self.warmup_steps));
        }
        let (mut at, mut period) = (step - self.warmup_steps, self.first_steps);
        if self.multiplier == 1 {
            at %= period;
        }
        while at >= period {
            at -= period;
            period = period.saturating_mul(self.multiplier);
        }
        let decayed = half_wave(at as f64 / period as f64);
        Ok(self.min_factor + (1.0 - self.min_factor) * decayed)
    }
}

/// A warm-up, the full rate, and a linear decay over the last steps:
/// `scheduler.type = "warmup_stable_decay"`. A checkpoint from before the decay can continue as a
/// longer run.
#[derive(
    Debug, Clone, Default, PartialEq, Serialize, Deserialize, fulgurite_config::Documented,
)]
#[serde(deny_unknown_fields, default)]
pub struct WarmupStableDecay {
    /// Number of steps over which the rate rises.
    pub warmup_steps: u64,
    /// Number of steps at the end over which the rate falls.
    pub decay_steps: u64,
    /// The factor at the end, in `[0, 1]`.
    pub min_factor: f64,
    /// Number of steps of all phases; by default the run's length.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_steps: Option<u64>,
}

#[typetag::serde(name = "warmup_stable_decay")]
impl SchedulerConfig for WarmupStableDecay {
    fn factor(&self, step: u64, max_steps: Option<u64>) -> Result<f64> {
        check_part("min_factor", self.min_factor)?;
        let end = length("warmup_stable_decay", self.total_steps, max_steps)?;
        let risen = warmup(step, self.warmup_steps);
        let decay_start = end.saturating_sub(self.decay_steps);
        if step < decay_start || self.decay_steps == 0 {
            return Ok(risen);
        }
        let done = ((step - decay_start) as f64 / self.decay_steps as f64).min(1.0);
        Ok(risen.min(self.min_factor + (1.0 - self.min_factor) * (1.0 - done)))
    }
}

/// A polynomial decay to zero after the warm-up: `scheduler.type = "polynomial"`. The factor is the
/// remaining fraction of the run to the power `power`. As PyTorch's `PolynomialLR`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct Polynomial {
    /// The exponent.
    #[default(1.0)]
    pub power: f64,
    /// Number of steps over which the rate rises.
    pub warmup_steps: u64,
    /// The step at which the rate is 0, warm-up included; by default the run's length.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_steps: Option<u64>,
}

#[typetag::serde(name = "polynomial")]
impl SchedulerConfig for Polynomial {
    fn factor(&self, step: u64, max_steps: Option<u64>) -> Result<f64> {
        super::groups::at_least_zero("scheduler.power", self.power)?;
        let end = length("polynomial", self.total_steps, max_steps)?;
        if step < self.warmup_steps {
            return Ok(warmup(step, self.warmup_steps));
        }
        let whole = end.saturating_sub(self.warmup_steps).max(1) as f64;
        let left = end.saturating_sub(step) as f64 / whole;
        Ok(left.powf(self.power))
    }
}

/// A rate that is multiplied by `gamma` after each step that follows the warm-up:
/// `scheduler.type = "exponential"`. As PyTorch's `ExponentialLR`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct Exponential {
    /// The factor of each decay; zero or more.
    #[default(0.999)]
    pub gamma: f64,
    /// Number of steps over which the rate rises.
    pub warmup_steps: u64,
}

#[typetag::serde(name = "exponential")]
impl SchedulerConfig for Exponential {
    fn factor(&self, step: u64, _: Option<u64>) -> Result<f64> {
        super::groups::at_least_zero("scheduler.gamma", self.gamma)?;
        let decays = step.saturating_sub(self.warmup_steps) as f64;
        Ok(warmup(step, self.warmup_steps) * self.gamma.powf(decays))
    }
}

/// Several schedules in sequence:
/// `scheduler = { type = "sequential", milestones = [100], schedules = [{ type = "constant",
/// warmup_steps = 100 }, { type = "cosine" }] }`.
/// Each counts its steps from its milestone, and its length ends at the next milestone. As
/// PyTorch's `SequentialLR`.
#[derive(Debug, Serialize, Deserialize, fulgurite_config::Documented)]
#[serde(deny_unknown_fields)]
pub struct Sequential {
    /// The schedules.
    pub schedules: Vec<Box<dyn SchedulerConfig>>,
    /// The steps at which the second, third, … begin.
    pub milestones: Vec<u64>,
}

#[typetag::serde(name = "sequential")]
impl SchedulerConfig for Sequential {
    fn factor(&self, step: u64, max_steps: Option<u64>) -> Result<f64> {
        if self.schedules.is_empty() || self.milestones.len() + 1 != self.schedules.len() {
            return config_error(
                "milestones",
                format!(
                    "must be one less than the schedules, of which there are {}; got {}",
                    self.schedules.len(),
                    self.milestones.len()
                ),
            );
        }
        if self.schedules.iter().any(|schedule| schedule.interval() == Interval::Epoch) {
            return config_error(
                "schedules",
                "has one by epoch among others; put the whole sequence into `by_epoch`",
            );
        }
        if !self.milestones.is_sorted() {
            return config_error("milestones", "must rise");
        }
        let index = self.milestones.partition_point(|milestone| *milestone <= step);
        let start = index.checked_sub(1).map_or(0, |before| self.milestones[before]);
        let end = self.milestones.get(index).copied().or(max_steps);
        self.schedules[index].factor(step - start, end.map(|end| end.saturating_sub(start)))
    }
}

fn check_part(key: &str, value: f64) -> Result<()> {
    if (0.0..=1.0).contains(&value) {
        return Ok(());
    }
    config_error(key, format!("must be from 0 to 1, got {value}"))
}

fulgurite_config::register_scheduler!(
    "one_cycle",
    OneCycle,
    "Up to the full rate and down far below the first, in half waves",
    "{ type = \"one_cycle\", pct_start = 0.3 }"
);
fulgurite_config::register_scheduler!(
    "cosine_warm_restarts",
    CosineWarmRestarts,
    "Cosine decays one after the other, each from the full rate",
    "{ type = \"cosine_warm_restarts\", first_steps = 1000, multiplier = 2 }"
);
fulgurite_config::register_scheduler!(
    "warmup_stable_decay",
    WarmupStableDecay,
    "A warm-up, the full rate, and a linear decay over the last steps",
    "{ type = \"warmup_stable_decay\", warmup_steps = 100, decay_steps = 200 }"
);
fulgurite_config::register_scheduler!(
    "polynomial",
    Polynomial,
    "Decay as a power of what is left of the run",
    "{ type = \"polynomial\", power = 2.0 }"
);
fulgurite_config::register_scheduler!(
    "exponential",
    Exponential,
    "Decay by gamma every step",
    "{ type = \"exponential\", gamma = 0.999 }"
);
fulgurite_config::register_scheduler!(
    "sequential",
    Sequential,
    "One schedule after the other",
    "{ type = \"sequential\", milestones = [100], schedules = [{ type = \"constant\", warmup_steps = 100 }, { type = \"cosine\" }] }"
);

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    /// The factors of the first steps, rounded.
    fn factors(schedule: &dyn SchedulerConfig, steps: u64, max_steps: Option<u64>) -> Vec<f64> {
        let factor = |step| schedule.factor(step, max_steps).unwrap();
        (0..steps).map(|step| (factor(step) * 1e6).round() / 1e6).collect()
    }

    /// The factors by PyTorch's formulas for a rate of 1: `OneCycleLR(total_steps=10)`,
    /// `CosineAnnealingWarmRestarts(T_0=3, T_mult=2)`, `PolynomialLR(total_iters=4, power=2)`.
    #[test]
    fn rates_follow_the_formulas_of_pytorch() {
        let one_cycle =
            [0.04, 0.52, 1.0, 0.950485, 0.811746, 0.611262, 0.388742, 0.188258, 0.049519, 0.000004];
        assert_eq!(factors(&OneCycle::default(), 10, Some(10)), one_cycle);
        let restarts =
            CosineWarmRestarts { first_steps: 3, multiplier: 2, ..CosineWarmRestarts::default() };
        let table =
            [1.0, 0.75, 0.25, 1.0, 0.933013, 0.75, 0.5, 0.25, 0.066987, 1.0, 0.982963, 0.933013];
        assert_eq!(factors(&restarts, 12, None), table);
        let squared = Polynomial { power: 2.0, ..Polynomial::default() };
        assert_eq!(factors(&squared, 6, Some(4)), [1.0, 0.5625, 0.25, 0.0625, 0.0, 0.0]);
        let halves = Exponential { gamma: 0.5, warmup_steps: 1 };
        assert_eq!(factors(&halves, 4, None), [0.5, 1.0, 0.5, 0.25]);
    }

    #[test]
    fn rate_is_stable_between_warmup_and_decay() {
        let schedule = WarmupStableDecay {
            warmup_steps: 1,
            decay_steps: 4,
            min_factor: 0.2,
            ..Default::default()
        };
        let table = [0.5, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2];
        assert_eq!(factors(&schedule, 9, Some(7)), table);
    }

    #[test]
    fn schedules_follow_one_another() {
        let schedule: Box<dyn SchedulerConfig> = toml::from_str(
            "type = 'sequential'\nmilestones = [2, 4]\nschedules = [{ type = 'constant', \
             warmup_steps = 1 }, { type = 'linear' }, { type = 'step', step_size = 1, gamma = 0.5 }]",
        )
        .unwrap();
        // The linear decay ends where the next schedule begins.
        assert_eq!(factors(&*schedule, 7, None), [0.5, 1.0, 1.0, 0.5, 1.0, 0.5, 0.25]);
    }

    #[test]
    fn mistakes_are_explained() {
        let message = |s: &dyn SchedulerConfig| s.factor(0, None).unwrap_err().to_string();
        assert_says!(message(&OneCycle::default()), "the one_cycle … it ends … trainer.max_steps");
        assert_says!(
            message(&OneCycle { pct_start: 1.0, ..Default::default() }),
            "scheduler.pct_start must be at least 0 and below 1, got 1"
        );
        assert_says!(
            message(&OneCycle { div_factor: 0.0, ..Default::default() }),
            "scheduler.div_factor must be above 0, got 0"
        );
        assert_says!(
            message(&CosineWarmRestarts { first_steps: 0, ..Default::default() }),
            "scheduler.first_steps must be at least 1, got 0"
        );
        assert_says!(
            message(&WarmupStableDecay { min_factor: 2.0, ..Default::default() }),
            "scheduler.min_factor must be from 0 to 1, got 2"
        );
        assert_says!(
            message(&Sequential { schedules: vec![], milestones: vec![] }),
            "scheduler.milestones … one less than the schedules … there are 0; got 0"
        );
    }
}
