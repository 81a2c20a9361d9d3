//! Stops a run whose metric no longer improves.

use fulgurite_error::{Error, Result, counted};
use fulgurite_trainer::run::MonitorMode;
use fulgurite_trainer::trainer::{Callback, CallbackConfig, HookContext, Hooks, SavedState, Stage};
use serde::{Deserialize, Serialize};

/// Stops when a metric has not improved for some validations:
/// `{ type = "early_stopping", monitor = "val_loss", patience = 3 }`. Like Lightning's
/// `EarlyStopping`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields)]
pub struct EarlyStoppingConfig {
    /// The metric.
    pub monitor: String,
    /// Whether smaller or larger values are better.
    #[serde(default)]
    pub mode: MonitorMode,
    /// How many validations without an improvement are waited for.
    #[serde(default = "three")]
    pub patience: u64,
    /// Minimum change that counts as an improvement.
    #[serde(default)]
    pub min_delta: f64,
    /// Stops as soon as the metric is at least as good as this value.
    #[serde(default)]
    pub stopping_threshold: Option<f64>,
    /// Stops as soon as the metric is worse than this value.
    #[serde(default)]
    pub divergence_threshold: Option<f64>,
    /// Stops when the metric is not finite.
    #[serde(default = "yes")]
    pub check_finite: bool,
    /// Checks at the end of each training epoch instead of after each validation.
    #[serde(default)]
    pub check_on_train_epoch_end: bool,
    /// Whether a missing metric is an error; otherwise the check is skipped.
    #[serde(default = "yes")]
    pub strict: bool,
    /// Prints each improvement.
    #[serde(default)]
    pub verbose: bool,
}

fn three() -> u64 {
    3
}

fn yes() -> bool {
    true
}

#[typetag::serde(name = "early_stopping")]
impl CallbackConfig for EarlyStoppingConfig {
    fn build(&self) -> Result<Box<dyn Callback>> {
        let wrong = |key: &str, message: String| {
            Err(Error::Config(format!("`trainer.callbacks`, early_stopping: `{key}`: {message}")))
        };
        if self.monitor.is_empty() {
            return wrong("monitor", "must name a metric, such as \"val_loss\"".to_owned());
        }
        if !(self.min_delta.is_finite() && self.min_delta >= 0.0) {
            return wrong("min_delta", format!("must be at least 0, found {:?}", self.min_delta));
        }
        for (key, value) in [
            ("stopping_threshold", self.stopping_threshold),
            ("divergence_threshold", self.divergence_threshold),
        ] {
            if value.is_some_and(f64::is_nan) {
                return wrong(key, "must be a number".to_owned());
            }
        }
        Ok(Box::new(EarlyStopping { config: self.clone(), waited: 0, best: None, reason: None }))
    }

    fn monitor(&self) -> Option<&str> {
        Some(&self.monitor)
    }
}

fulgurite_config::register_callback!(
    "early_stopping",
    EarlyStoppingConfig,
    "Stops when a metric no longer improves",
    "{ type = \"early_stopping\", monitor = \"val_loss\", patience = 3 }"
);

/// The callback of [`EarlyStoppingConfig`].
#[derive(Debug)]
pub struct EarlyStopping {
    config: EarlyStoppingConfig,
    waited: u64,
    best: Option<f64>,
    reason: Option<String>,
}

impl EarlyStopping {
    /// The best value so far.
    pub fn best_score(&self) -> Option<f64> {
        self.best
    }

    /// The reason why it stopped the run; `None` if it has not.
    pub fn stopping_reason(&self) -> Option<&str> {
        self.reason.as_deref()
    }

    fn check(&mut self, ctx: &mut HookContext) -> Result<()> {
        if ctx.stage != Stage::Fit || self.reason.is_some() {
            return Ok(());
        }
        let name = self.config.monitor.clone();
        let Some(&value) = ctx.metrics.get(&name) else {
            if !self.config.strict {
                return Ok(());
            }
            let known = ctx.metrics.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            return Err(Error::Config(format!(
                "`trainer.callbacks`, early_stopping: `monitor`: there is no metric `{name}`; there \
                 are: {known}"
            )));
        };
        let is_global_zero = ctx.is_global_zero();
        if let Some(reason) = self.judge(value) {
            let text = format!("early stopping after step {}: {reason}", ctx.step);
            if is_global_zero {
                ctx.print(text);
            }
            self.reason = Some(reason);
            ctx.stop();
        } else if self.config.verbose && self.waited == 0 {
            ctx.print(format!("{name} improved to {value:.6}"));
        }
        Ok(())
    }

    /// Records a value. Returns the reason to stop, if any.
    fn judge(&mut self, value: f64) -> Option<String> {
        let EarlyStoppingConfig { monitor, mode, .. } = &self.config;
        // With this sign, larger is better.
        let sign = match mode {
            MonitorMode::Min => -1.0,
            MonitorMode::Max => 1.0,
        };
        if self.config.check_finite && !value.is_finite() {
            return Some(format!("{monitor} is {value}"));
        }
        if let Some(limit) = self.config.stopping_threshold
            && sign * value >= sign * limit
        {
            return Some(format!("{monitor} = {value:.6} has reached {limit}"));
        }
        if let Some(limit) = self.config.divergence_threshold
            && sign * value < sign * limit
        {
            return Some(format!("{monitor} = {value:.6} is worse than {limit}"));
        }
        let improved = |best: f64| sign * (value - best) > self.config.min_delta || best.is_nan();
        if self.best.is_none_or(improved) {
            (self.best, self.waited) = (Some(value), 0);
            return None;
        }
        self.waited += 1;
        let best = self.best.unwrap_or(f64::NAN);
        (self.waited >= self.config.patience).then(|| {
            let validations = counted(self.waited, "validation");
            format!("{monitor} has not improved on {best:.6} in {validations}")
        })
    }
}

impl Callback for EarlyStopping {
    fn state_key(&self) -> String {
        format!("early_stopping({}, {:?})", self.config.monitor, self.config.mode)
    }

    fn decides_by_metrics(&self) -> bool {
        true
    }
}

impl Hooks for EarlyStopping {
    fn on_validation_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        if self.config.check_on_train_epoch_end { Ok(()) } else { self.check(ctx) }
    }

    fn on_train_epoch_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        if self.config.check_on_train_epoch_end { self.check(ctx) } else { Ok(()) }
    }

    fn on_save_checkpoint(&mut self, state: &mut SavedState) -> Result<()> {
        state.set("waited", &self.waited)?;
        state.set("best", &self.best)
    }

    fn on_load_checkpoint(&mut self, state: &SavedState) -> Result<()> {
        self.waited = state.get("waited")?.unwrap_or(0);
        self.best = state.get::<Option<f64>>("best")?.flatten();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    fn stopping(json: serde_json::Value) -> EarlyStopping {
        let config: EarlyStoppingConfig = serde_json::from_value(json).unwrap();
        config.build().unwrap();
        EarlyStopping { config, waited: 0, best: None, reason: None }
    }

    /// Returns how many of the values it takes to stop, and the reason.
    fn run(mut stopping: EarlyStopping, values: &[f64]) -> (usize, String) {
        for (i, value) in values.iter().enumerate() {
            if let Some(reason) = stopping.judge(*value) {
                return (i + 1, reason);
            }
        }
        (values.len(), "goes on".to_owned())
    }

    #[test]
    fn patience_is_counted() {
        let values = [3.0, 2.0, 2.5, 2.0, 1.9, 2.0, 2.0, 2.0];
        let config = serde_json::json!({ "monitor": "val_loss" });
        insta::assert_debug_snapshot!(run(stopping(config), &values), @r#"
        (
            8,
            "val_loss has not improved on 1.900000 in 3 validations",
        )
        "#);
        let config = serde_json::json!({ "monitor": "val_loss", "patience": 2 });
        assert_eq!(run(stopping(config), &values).0, 4);
        let config = serde_json::json!({ "monitor": "val_loss", "patience": 2, "min_delta": 1.0 });
        assert_eq!(run(stopping(config), &values).0, 3, "an improvement of 1 is not above 1");
        let config = serde_json::json!({ "monitor": "acc", "mode": "max", "patience": 1 });
        assert_eq!(run(stopping(config), &[0.1, 0.2, 0.3, 0.3]).0, 4);
        let config = serde_json::json!({ "monitor": "acc", "mode": "max", "patience": 0 });
        assert_eq!(run(stopping(config), &[0.1, 0.2, 0.1]).0, 3, "as soon as it is no better");
    }

    #[test]
    fn thresholds_and_non_finite_values_stop() {
        let with = |key: &str, value: f64, values: &[f64]| {
            let mut config = serde_json::json!({ "monitor": "val_loss" });
            config[key] = value.into();
            run(stopping(config), values)
        };
        insta::assert_debug_snapshot!(with("stopping_threshold", 1.0, &[3.0, 1.0, 5.0]), @r#"
        (
            2,
            "val_loss = 1.000000 has reached 1",
        )
        "#);
        insta::assert_debug_snapshot!(with("divergence_threshold", 4.0, &[3.0, 4.0, 5.0]), @r#"
        (
            3,
            "val_loss = 5.000000 is worse than 4",
        )
        "#);
        let nan = [3.0, f64::NAN, 2.0, 2.0, 2.0, 2.0];
        let config = serde_json::json!({ "monitor": "val_loss" });
        assert_eq!(run(stopping(config), &nan), (2, "val_loss is NaN".to_owned()));
        let config = serde_json::json!({ "monitor": "val_loss", "check_finite": false });
        assert_eq!(run(stopping(config), &nan).0, 6);
        let config = serde_json::json!({ "monitor": "val_loss", "check_finite": false });
        assert_eq!(run(stopping(config), &[f64::NAN, 2.0, 1.0, 1.0]).1, "goes on");
    }

    #[test]
    fn wrong_options_are_refused() {
        let error = |json: serde_json::Value| {
            let config: EarlyStoppingConfig = serde_json::from_value(json).unwrap();
            config.build().err().unwrap().to_string()
        };
        assert_says!(
            error(serde_json::json!({ "monitor": "" })),
            "`trainer.callbacks`, early_stopping: `monitor`: must name a metric …"
        );
        assert_says!(
            error(serde_json::json!({ "monitor": "x", "min_delta": -1.0 })),
            "`trainer.callbacks`, early_stopping: `min_delta` … at least 0, found -1.0"
        );
    }
}
