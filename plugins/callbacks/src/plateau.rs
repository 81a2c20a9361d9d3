//! Lowers the learning rate when a metric no longer improves.

use fulgurite_error::{Error, Result};
use fulgurite_trainer::run::MonitorMode;
use fulgurite_trainer::trainer::{Callback, CallbackConfig, HookContext, Hooks, SavedState, Stage};
use serde::{Deserialize, Serialize};

/// Multiplies the learning rate by a factor when a metric has not improved for some validations:
/// `{ type = "reduce_lr_on_plateau", monitor = "val_loss", factor = 0.5 }`. Applied on top of the
/// schedule. Like PyTorch's `ReduceLROnPlateau`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields)]
pub struct ReduceLrOnPlateauConfig {
    /// The metric.
    pub monitor: String,
    /// Whether smaller or larger values are better.
    #[serde(default)]
    pub mode: MonitorMode,
    /// Factor for the learning rate, above 0 and below 1.
    #[serde(default = "a_tenth")]
    pub factor: f64,
    /// Number of validations without an improvement that are tolerated.
    #[serde(default = "ten")]
    pub patience: u64,
    /// Minimum relative change that counts as an improvement.
    #[serde(default = "a_ten_thousandth")]
    pub threshold: f64,
    /// Number of validations to skip after the rate was lowered.
    #[serde(default)]
    pub cooldown: u64,
    /// Lower bound of the product of all factors.
    #[serde(default)]
    pub min_factor: f64,
}

fn a_tenth() -> f64 {
    0.1
}

fn ten() -> u64 {
    10
}

fn a_ten_thousandth() -> f64 {
    1e-4
}

fn wrong(key: &str, message: impl std::fmt::Display) -> Error {
    Error::Config(format!("`trainer.callbacks`, reduce_lr_on_plateau: `{key}`: {message}"))
}

#[typetag::serde(name = "reduce_lr_on_plateau")]
impl CallbackConfig for ReduceLrOnPlateauConfig {
    fn build(&self) -> Result<Box<dyn Callback>> {
        if !(self.factor > 0.0 && self.factor < 1.0) {
            let message = format!("must be above 0 and below 1, found {:?}", self.factor);
            return Err(wrong("factor", message));
        }
        for (key, value) in [("threshold", self.threshold), ("min_factor", self.min_factor)] {
            if !(0.0..=1.0).contains(&value) {
                return Err(wrong(key, format!("must be from 0 to 1, found {value:?}")));
            }
        }
        Ok(Box::new(ReduceLrOnPlateau::new(self.clone())))
    }

    fn monitor(&self) -> Option<&str> {
        Some(&self.monitor)
    }
}

fulgurite_config::register_callback!(
    "reduce_lr_on_plateau",
    ReduceLrOnPlateauConfig,
    "Lowers the learning rate when a metric no longer improves",
    "{ type = \"reduce_lr_on_plateau\", monitor = \"val_loss\", factor = 0.5, patience = 2 }"
);

struct ReduceLrOnPlateau {
    config: ReduceLrOnPlateauConfig,
    best: Option<f64>,
    bad: u64,
    cooling: u64,
}

impl ReduceLrOnPlateau {
    fn new(config: ReduceLrOnPlateauConfig) -> Self {
        Self { config, best: None, bad: 0, cooling: 0 }
    }

    /// Records a value. Returns whether to lower the rate.
    fn judge(&mut self, value: f64) -> bool {
        let ReduceLrOnPlateauConfig { mode, threshold, .. } = self.config;
        let improved = |best: f64| match mode {
            MonitorMode::Min => value < best * (1.0 - threshold),
            MonitorMode::Max => value > best * (1.0 + threshold),
        };
        if self.best.is_none_or(improved) && !value.is_nan() {
            (self.best, self.bad) = (Some(value), 0);
        } else {
            self.bad += 1;
        }
        if self.cooling > 0 {
            self.cooling -= 1;
            self.bad = 0;
        }
        let lower = self.bad > self.config.patience;
        if lower {
            (self.cooling, self.bad) = (self.config.cooldown, 0);
        }
        lower
    }
}

impl Callback for ReduceLrOnPlateau {
    fn state_key(&self) -> String {
        format!("reduce_lr_on_plateau({}, {:?})", self.config.monitor, self.config.mode)
    }

    fn decides_by_metrics(&self) -> bool {
        true
    }
}

impl Hooks for ReduceLrOnPlateau {
    fn on_validation_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        if ctx.stage != Stage::Fit {
            return Ok(());
        }
        let Some(&value) = ctx.metrics.get(&self.config.monitor) else {
            let known = ctx.metrics.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            let name = &self.config.monitor;
            let message = format!("there is no metric `{name}`; there are: {known}");
            return Err(wrong("monitor", message));
        };
        if !self.judge(value) {
            return Ok(());
        }
        let mut lowered = None;
        let optimizers = ctx.optimizers_mut().into_iter().flat_map(|all| all.iter_mut());
        // Another callback, such as weight averaging, may hold the rate; it then decides.
        for (_, optimizer) in optimizers.filter(|(_, one)| !one.holds_learning_rate()) {
            let before = optimizer.lr_scale();
            let scale = (before * self.config.factor).max(self.config.min_factor);
            optimizer.set_lr_scale(scale);
            if scale < before {
                lowered = Some(scale);
            }
        }
        if let Some(scale) = lowered {
            let name = &self.config.monitor;
            ctx.print(format!("{name} = {value:.6} is no better: learning rate times {scale:e}"));
        }
        Ok(())
    }

    fn on_save_checkpoint(&mut self, state: &mut SavedState) -> Result<()> {
        state.set("best", &self.best)?;
        state.set("waited", &[self.bad, self.cooling])
    }

    fn on_load_checkpoint(&mut self, state: &SavedState) -> Result<()> {
        self.best = state.get::<Option<f64>>("best")?.flatten();
        [self.bad, self.cooling] = state.get("waited")?.unwrap_or_default();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    fn lowered(json: serde_json::Value, values: &[f64]) -> Vec<usize> {
        let config: ReduceLrOnPlateauConfig = serde_json::from_value(json).unwrap();
        config.build().unwrap();
        let mut plateau = ReduceLrOnPlateau::new(config);
        (0..values.len()).filter(|&i| plateau.judge(values[i])).collect()
    }

    #[test]
    fn the_rate_is_lowered_after_patience() {
        let values = [3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.0, 1.0];
        let json = serde_json::json!({ "monitor": "val_loss", "patience": 1 });
        assert_eq!(lowered(json, &values), [3, 5]);
        let json = serde_json::json!({ "monitor": "val_loss", "patience": 1, "cooldown": 2 });
        assert_eq!(lowered(json, &values), [3]);
        let json = serde_json::json!({ "monitor": "acc", "patience": 0, "mode": "max" });
        assert_eq!(lowered(json, &[0.5, 0.6, 0.6, 0.60001, f64::NAN]), [2, 3, 4]);
    }

    #[test]
    fn wrong_options_are_refused() {
        let error = |json: serde_json::Value| {
            let config: ReduceLrOnPlateauConfig = serde_json::from_value(json).unwrap();
            config.build().err().unwrap().to_string()
        };
        assert_says!(
            error(serde_json::json!({ "monitor": "x", "factor": 1.0 })),
            "`trainer.callbacks`, reduce_lr_on_plateau: `factor` … below 1, found 1.0"
        );
        assert_says!(
            error(serde_json::json!({ "monitor": "x", "threshold": -1.0 })),
            "`trainer.callbacks`, reduce_lr_on_plateau: `threshold` … from 0 to 1, found -1.0"
        );
    }
}
