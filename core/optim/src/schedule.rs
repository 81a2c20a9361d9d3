//! Learning-rate schedules.
//!
//! A schedule is a pure function of the step, so there is nothing to save. Every schedule can warm
//! up: the factor rises linearly, from above zero, over the first `warmup_steps` steps. Step
//! `warmup_steps`, counted from 0, is the first with the full rate.
//!
//! ```
//! use fulgurite_core::optim::{Cosine, SchedulerConfig};
//!
//! let schedule = Cosine { warmup_steps: 3, min_factor: 0.1, ..Cosine::default() };
//! assert_eq!(schedule.factor(0, Some(103))?, 0.25);
//! assert_eq!(schedule.factor(3, Some(103))?, 1.0);
//! assert!((schedule.factor(53, Some(103))? - 0.55).abs() < 1e-12); // half-way
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

use serde::{Deserialize, Serialize};

use super::optimizer::SchedulerConfig;
use crate::{Error, Result};

/// A constant rate after the warm-up: `scheduler.type = "constant"`.
#[derive(
    Debug, Clone, Default, PartialEq, Serialize, Deserialize, fulgurite_config::Documented,
)]
#[serde(deny_unknown_fields, default)]
pub struct Constant {
    /// Number of steps of the linear warm-up: step `s`, counted from 0, has the factor
    /// `(s + 1) / (warmup_steps + 1)`.
    pub warmup_steps: u64,
}

#[typetag::serde(name = "constant")]
impl SchedulerConfig for Constant {
    fn factor(&self, step: u64, _: Option<u64>) -> Result<f64> {
        Ok(warmup(step, self.warmup_steps))
    }
}

/// Linear decay from 1 to `min_factor` after the warm-up: `scheduler.type = "linear"`.
#[derive(
    Debug, Clone, Default, PartialEq, Serialize, Deserialize, fulgurite_config::Documented,
)]
#[serde(deny_unknown_fields, default)]
pub struct Linear {
    /// Number of steps of the linear warm-up: step `s`, counted from 0, has the factor
    /// `(s + 1) / (warmup_steps + 1)`.
    pub warmup_steps: u64,
    /// The factor at the end of the decay and afterwards, in `[0, 1]`.
    pub min_factor: f64,
    /// The step at which the decay ends, warm-up included; by default the run's length.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_steps: Option<u64>,
}

#[typetag::serde(name = "linear")]
impl SchedulerConfig for Linear {
    fn factor(&self, step: u64, max_steps: Option<u64>) -> Result<f64> {
        let decay =
            Decay::new("linear", self.warmup_steps, self.min_factor, self.decay_steps, max_steps)?;
        Ok(decay.factor(step, |progress| 1.0 - progress))
    }
}

/// Cosine decay from 1 to `min_factor` after the warm-up: `scheduler.type = "cosine"`.
#[derive(
    Debug, Clone, Default, PartialEq, Serialize, Deserialize, fulgurite_config::Documented,
)]
#[serde(deny_unknown_fields, default)]
pub struct Cosine {
    /// Number of steps of the linear warm-up: step `s`, counted from 0, has the factor
    /// `(s + 1) / (warmup_steps + 1)`.
    pub warmup_steps: u64,
    /// The factor at the end of the decay and afterwards, in `[0, 1]`.
    pub min_factor: f64,
    /// The step at which the decay ends, warm-up included; by default the run's length.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_steps: Option<u64>,
}

#[typetag::serde(name = "cosine")]
impl SchedulerConfig for Cosine {
    fn factor(&self, step: u64, max_steps: Option<u64>) -> Result<f64> {
        let decay =
            Decay::new("cosine", self.warmup_steps, self.min_factor, self.decay_steps, max_steps)?;
        let wave = |progress: f64| 0.5 * (1.0 + (std::f64::consts::PI * progress).cos());
        Ok(decay.factor(step, wave))
    }
}

/// A rate that is multiplied by `gamma` every `step_size` steps after the warm-up:
/// `scheduler.type = "step"`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct Step {
    /// Steps between two decays; at least one.
    #[default(1000)]
    pub step_size: u64,
    /// The factor of each decay; zero or more.
    #[default(0.1)]
    pub gamma: f64,
    /// Number of steps of the linear warm-up: step `s`, counted from 0, has the factor
    /// `(s + 1) / (warmup_steps + 1)`.
    pub warmup_steps: u64,
}

#[typetag::serde(name = "step")]
impl SchedulerConfig for Step {
    fn factor(&self, step: u64, _: Option<u64>) -> Result<f64> {
        if self.step_size == 0 {
            return Err(Error::Config("scheduler.step_size must be at least 1, got 0".to_owned()));
        }
        super::groups::at_least_zero("scheduler.gamma", self.gamma)?;
        let decays = step.saturating_sub(self.warmup_steps) / self.step_size;
        Ok(warmup(step, self.warmup_steps) * self.gamma.powf(decays as f64))
    }
}

fulgurite_config::register_scheduler!(
    "constant",
    Constant,
    "A constant rate, after an optional warm-up",
    "{ type = \"constant\", warmup_steps = 100 }"
);
fulgurite_config::register_scheduler!(
    "linear",
    Linear,
    "Linear decay to min_factor, after an optional warm-up",
    "{ type = \"linear\", warmup_steps = 100, min_factor = 0.1 }"
);
fulgurite_config::register_scheduler!(
    "cosine",
    Cosine,
    "Cosine decay to min_factor, after an optional warm-up",
    "{ type = \"cosine\", warmup_steps = 100, min_factor = 0.1 }"
);
fulgurite_config::register_scheduler!(
    "step",
    Step,
    "Decay by gamma every step_size steps, after an optional warm-up",
    "{ type = \"step\", step_size = 1000, gamma = 0.5 }"
);

pub(super) fn warmup(step: u64, warmup_steps: u64) -> f64 {
    if step < warmup_steps { (step + 1) as f64 / (warmup_steps as f64 + 1.0) } else { 1.0 }
}

/// A warm-up, then a decay of limited length.
struct Decay {
    warmup_steps: u64,
    min_factor: f64,
    end: u64,
}

impl Decay {
    fn new(
        name: &str,
        warmup_steps: u64,
        min_factor: f64,
        decay_steps: Option<u64>,
        max_steps: Option<u64>,
    ) -> Result<Self> {
        if !(0.0..=1.0).contains(&min_factor) {
            return Err(Error::Config(format!(
                "scheduler.min_factor must be from 0 to 1, got {min_factor}"
            )));
        }
        if let Some(end) = decay_steps.filter(|&end| end < warmup_steps) {
            return Err(Error::Config(format!(
                "scheduler.decay_steps counts the warm-up too, so {end} cannot be less than \
                 scheduler.warmup_steps, which is {warmup_steps}"
            )));
        }
        let end = decay_steps.or(max_steps).ok_or_else(|| {
            Error::Config(format!(
                "the {name} schedule has to know when it ends: set scheduler.decay_steps or \
                 trainer.max_steps"
            ))
        })?;
        Ok(Self { warmup_steps, min_factor, end })
    }

    /// Returns the factor at `step`. `shape` decays from 1 at 0 to 0 at 1.
    fn factor(&self, step: u64, shape: impl Fn(f64) -> f64) -> f64 {
        if step < self.warmup_steps {
            return warmup(step, self.warmup_steps);
        }
        if step >= self.end {
            return self.min_factor;
        }
        let length = (self.end - self.warmup_steps) as f64;
        let progress = (step - self.warmup_steps) as f64 / length;
        self.min_factor + (1.0 - self.min_factor) * shape(progress)
    }
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    fn assert_table(schedule: &dyn SchedulerConfig, max_steps: Option<u64>, table: &[(u64, f64)]) {
        for &(step, expected) in table {
            let factor = schedule.factor(step, max_steps).unwrap();
            assert!((factor - expected).abs() < 1e-12, "{schedule:?} at {step}: {factor}");
        }
    }

    #[test]
    fn constant_rises_and_stays() {
        let table = [(0, 0.2), (1, 0.4), (2, 0.6), (3, 0.8), (4, 1.0), (5, 1.0), (1_000_000, 1.0)];
        assert_table(&Constant { warmup_steps: 4 }, None, &table);
        assert_table(&Constant::default(), None, &[(0, 1.0), (7, 1.0)]);
    }

    #[test]
    fn linear_decays_in_equal_steps() {
        let decays = Linear { warmup_steps: 1, min_factor: 0.2, decay_steps: None };
        let table = [(0, 0.5), (1, 1.0), (2, 0.8), (3, 0.6), (4, 0.4), (5, 0.2), (6, 0.2)];
        assert_table(&decays, Some(5), &table);
        let own_end = Linear { decay_steps: Some(4), ..Linear::default() };
        assert_table(&own_end, Some(100), &[(0, 1.0), (1, 0.75), (3, 0.25), (4, 0.0), (9, 0.0)]);
    }

    #[test]
    fn cosine_decays_in_half_a_wave() {
        let half = 0.5f64.sqrt();
        let table = [
            (0, 0.5),
            (1, 1.0),
            (2, 0.5 + 0.5 * half),
            (3, 0.5),
            (4, 0.5 - 0.5 * half),
            (5, 0.0),
            (6, 0.0),
        ];
        assert_table(&Cosine { warmup_steps: 1, ..Cosine::default() }, Some(5), &table);
        let to_a_tenth = Cosine { min_factor: 0.1, decay_steps: Some(6), warmup_steps: 0 };
        // cos(pi / 3) = 1/2
        assert_table(&to_a_tenth, None, &[(0, 1.0), (2, 0.1 + 0.9 * 0.75), (4, 0.325), (6, 0.1)]);
    }

    #[test]
    fn step_decays_by_gamma() {
        let schedule = Step { step_size: 2, gamma: 0.5, warmup_steps: 1 };
        let table = [(0, 0.5), (1, 1.0), (2, 1.0), (3, 0.5), (4, 0.5), (5, 0.25), (7, 0.125)];
        assert_table(&schedule, None, &table);
    }

    #[test]
    fn run_may_end_during_warmup() {
        let schedule = Cosine { warmup_steps: 10, ..Cosine::default() };
        assert_table(&schedule, Some(4), &[(0, 1.0 / 11.0), (9, 10.0 / 11.0), (10, 0.0)]);
    }

    #[test]
    fn configured_by_type() {
        let schedule: Box<dyn SchedulerConfig> =
            toml::from_str("type = \"step\"\nstep_size = 3\ngamma = 0.1").unwrap();
        assert_table(&*schedule, None, &[(2, 1.0), (3, 0.1)]);
        let error = toml::from_str::<Box<dyn SchedulerConfig>>("type = \"linear\"\nwarmup = 3");
        let message = error.unwrap_err().message().to_owned();
        assert_says!(message, "unknown field `warmup`, expected one of `warmup_steps` …");
        for name in ["constant", "cosine", "linear", "step"] {
            fulgurite_config::registry::require(fulgurite_config::registry::kind::SCHEDULER, name)
                .unwrap();
            let example = fulgurite_config::registry::plugins()
                .into_iter()
                .find(|p| p.kind == fulgurite_config::registry::kind::SCHEDULER && p.name == name)
                .map(|p| format!("scheduler = {}", p.example))
                .unwrap();
            let table: toml::Table = toml::from_str(&example).unwrap();
            let built: Box<dyn SchedulerConfig> = table["scheduler"].clone().try_into().unwrap();
            assert_eq!(built.typetag_name(), name);
        }
    }

    #[test]
    fn mistakes_are_explained() {
        let message = |s: &dyn SchedulerConfig| s.factor(0, None).unwrap_err().to_string();
        assert_says!(message(&Cosine::default()), "the cosine … when it ends … trainer.max_steps");
        assert_says!(
            message(&Linear { min_factor: 1.5, ..Linear::default() }),
            "scheduler.min_factor must be from 0 to 1, got 1.5"
        );
        assert_says!(
            message(&Linear { warmup_steps: 9, decay_steps: Some(5), min_factor: 0.0 }),
            "scheduler.decay_steps … 5 cannot be less than scheduler.warmup_steps … 9"
        );
        assert_says!(
            message(&Step { step_size: 0, ..Step::default() }),
            "scheduler.step_size must be at least 1, got 0"
        );
        assert_says!(
            message(&Step { gamma: -0.1, ..Step::default() }),
            "scheduler.gamma … zero or more, got -0.1"
        );
    }
}
