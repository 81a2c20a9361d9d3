//! Finds the learning rate at which the loss falls fastest.

use std::fmt::Write as _;

use fulgurite_error::{Error, Result};
use fulgurite_trainer::trainer::{Callback, CallbackConfig, HookContext, Hooks, Stage};
use serde::{Deserialize, Serialize};

/// Weight of the earlier losses in the smoothed loss.
const BETA: f64 = 0.98;

/// Number of losses ignored at the beginning and at the end of the curve.
const SKIP: (usize, usize) = (10, 1);

/// Rows of the printed curve.
const ROWS: usize = 20;

/// Finds a learning rate: `{ type = "learning_rate_finder" }`. Trains for some steps with a rate
/// that rises from `min_lr` to `max_lr`, prints the losses and the rate at which they fall fastest,
/// and ends the run. Like Lightning's `Tuner.lr_find`, but a run of its own: start it with
/// `checkpoint.save_last = false` to leave no checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct LearningRateFinderConfig {
    /// The rate of the first step.
    #[default(1e-8)]
    pub min_lr: f64,
    /// The rate of the last step.
    #[default(1.0)]
    pub max_lr: f64,
    /// The number of steps.
    #[default(100)]
    pub num_training_steps: u64,
    /// Whether the rate rises exponentially or linearly.
    #[default(SweepMode::Exponential)]
    pub mode: SweepMode,
    /// Ends the run when the smoothed loss exceeds its minimum by this factor; `0` for never.
    #[default(4.0)]
    pub early_stop_threshold: f64,
}

/// Shape of the rate's rise in a [`LearningRateFinder`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SweepMode {
    /// By the same factor in each step.
    #[default]
    Exponential,
    /// By the same amount in each step.
    Linear,
}

#[typetag::serde(name = "learning_rate_finder")]
impl CallbackConfig for LearningRateFinderConfig {
    fn build(&self) -> Result<Box<dyn Callback>> {
        let Self { min_lr, max_lr, num_training_steps, early_stop_threshold, .. } = *self;
        let wrong = |key: &str, message: String| {
            let message = format!("`trainer.callbacks`, learning_rate_finder: `{key}`: {message}");
            Err(Error::Config(message))
        };
        if !(min_lr > 0.0 && min_lr.is_finite()) {
            return wrong("min_lr", format!("must be above 0, found {min_lr}"));
        }
        if !(max_lr > min_lr && max_lr.is_finite()) {
            return wrong("max_lr", format!("must be above `min_lr` = {min_lr:e}, found {max_lr}"));
        }
        let least = (SKIP.0 + SKIP.1 + 2) as u64;
        if num_training_steps < least {
            let message = format!(
                "must be at least {least}, of which the first {} and the last are not looked at, found \
                 {num_training_steps}",
                SKIP.0
            );
            return wrong("num_training_steps", message);
        }
        if early_stop_threshold.is_nan() || early_stop_threshold < 0.0 {
            let message =
                format!("must be at least 0, which is never, found {early_stop_threshold}");
            return wrong("early_stop_threshold", message);
        }
        Ok(Box::new(LearningRateFinder { config: self.clone(), ..LearningRateFinder::default() }))
    }
}

fulgurite_config::register_callback!(
    "learning_rate_finder",
    LearningRateFinderConfig,
    "Trains with a rising learning rate, suggests one, and ends the run",
    "{ type = \"learning_rate_finder\", min_lr = 1e-8, max_lr = 1.0, num_training_steps = 100 }"
);

/// The callback of [`LearningRateFinderConfig`], with its results.
#[derive(Debug, Clone, Default)]
pub struct LearningRateFinder {
    config: LearningRateFinderConfig,
    curve: Vec<(f64, f64)>,
    average: f64,
    best: f64,
    suggestion: Option<f64>,
    is_done: bool,
}

impl LearningRateFinder {
    /// The rate at which the loss falls fastest; `None` before the end or with too few losses.
    pub fn suggestion(&self) -> Option<f64> {
        self.suggestion
    }

    /// Rates and smoothed losses, in the order of steps.
    pub fn curve(&self) -> &[(f64, f64)] {
        &self.curve
    }

    /// Returns the rate of the next step.
    fn next_lr(&self) -> f64 {
        let LearningRateFinderConfig { min_lr, max_lr, num_training_steps, mode, .. } = self.config;
        let part = self.curve.len() as f64 / (num_training_steps - 1) as f64;
        match mode {
            SweepMode::Exponential => min_lr * (max_lr / min_lr).powf(part),
            SweepMode::Linear => min_lr + (max_lr - min_lr) * part,
        }
    }

    /// Records a step's loss. Returns whether the step was the last.
    fn record(&mut self, loss: f64) -> bool {
        let lr = self.next_lr();
        self.average = BETA * self.average + (1.0 - BETA) * loss;
        let smoothed = self.average / (1.0 - BETA.powi(self.curve.len() as i32 + 1));
        self.curve.push((lr, smoothed));
        let count = self.curve.len();
        if count == 1 || smoothed < self.best {
            self.best = smoothed;
        }
        let threshold = self.config.early_stop_threshold;
        let diverged = threshold > 0.0 && count > 1 && smoothed > threshold * self.best;
        self.is_done = diverged || count as u64 >= self.config.num_training_steps;
        if self.is_done {
            self.suggestion = suggest(&self.curve);
        }
        self.is_done
    }

    /// Formats some rows of the curve, and the suggestion.
    fn report(&self) -> String {
        let losses = || self.curve.iter().map(|(_, loss)| *loss);
        let (low, high) = (losses().fold(f64::INFINITY, f64::min), losses().fold(0.0, f64::max));
        let mut text = format!("{:>10}  {:>12}\n", "lr", "loss");
        for (lr, loss) in self.curve.iter().step_by(self.curve.len().div_ceil(ROWS).max(1)) {
            let part = (loss - low) / (high - low).max(f64::MIN_POSITIVE);
            let bar = "#".repeat((40.0 * part.clamp(0.0, 1.0)).round() as usize);
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{lr:>10.2e}  {loss:>12.6}  {bar}");
        }
        match self.suggestion {
            Some(lr) => {
                let _ = write!(text, "suggested learning rate: {lr:.3e} (`optimizer.lr`)");
            }
            None => text.push_str(
                "no learning rate can be suggested, as the loss falls nowhere; try other `min_lr`, `max_lr` or more \
                 steps",
            ),
        }
        text
    }
}

/// Returns the rate where the smoothed loss falls most from one step to the next.
fn suggest(curve: &[(f64, f64)]) -> Option<f64> {
    let (begin, end) = SKIP;
    let looked_at = curve.get(begin..curve.len().checked_sub(end)?)?;
    let slopes =
        looked_at.windows(3).map(|around| (around[1].0, (around[2].1 - around[0].1) / 2.0));
    let steepest = slopes.min_by(|a, b| a.1.total_cmp(&b.1))?;
    // More than the rounding differences of equal losses.
    (steepest.1 < -1e-9 * looked_at[0].1.abs()).then_some(steepest.0)
}

impl Callback for LearningRateFinder {}

impl Hooks for LearningRateFinder {
    fn on_fit_start(&mut self, _: &mut HookContext) -> Result<()> {
        // Resets the state of an earlier run of the same trainer.
        *self = Self { config: self.config.clone(), ..Self::default() };
        Ok(())
    }

    fn on_train_batch_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        if ctx.stage != Stage::Fit || ctx.batch_index > 0 || self.is_done {
            return Ok(());
        }
        let target = self.next_lr();
        for (_, optimizer) in ctx.optimizers_mut().into_iter().flat_map(|all| all.iter_mut()) {
            optimizer.set_learning_rate(Some(target))?;
        }
        Ok(())
    }

    fn on_train_step_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        if self.is_done {
            return Ok(());
        }
        let loss = ctx.metrics.get("train_loss").copied().unwrap_or(f64::NAN);
        if self.record(loss) {
            // If training continues after this run, it continues with its own rate.
            for (_, optimizer) in ctx.optimizers_mut().into_iter().flat_map(|all| all.iter_mut()) {
                optimizer.set_learning_rate(None)?;
            }
            ctx.print(self.report());
            ctx.stop();
        }
        Ok(())
    }

    /// A rate that is too high makes the loss non-finite and ends the run before the threshold
    /// does.
    fn on_exception(&mut self, error: &Error, ctx: &mut HookContext) -> Result<()> {
        if !self.is_done && matches!(error, Error::NonFinite { .. }) && !self.curve.is_empty() {
            self.is_done = true;
            self.suggestion = suggest(&self.curve);
            ctx.print(self.report());
        }
        Ok(())
    }

    fn on_train_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        if !self.is_done {
            let wanted = self.config.num_training_steps;
            ctx.print(format!(
                "learning_rate_finder: the run ended after {} of {wanted} steps, so there is no suggestion; set \
                 `trainer.max_steps` to {wanted} or more",
                self.curve.len()
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    fn finder(config: LearningRateFinderConfig) -> LearningRateFinder {
        config.build().unwrap();
        LearningRateFinder { config, ..LearningRateFinder::default() }
    }

    #[test]
    fn rates_go_from_end_to_end() {
        for mode in [SweepMode::Exponential, SweepMode::Linear] {
            let config = LearningRateFinderConfig { mode, ..LearningRateFinderConfig::default() };
            let mut finder = finder(config);
            while !finder.record(1.0) {}
            let (first, last) = (finder.curve[0].0, finder.curve[99].0);
            assert!((first - 1e-8).abs() < 1e-15 && (last - 1.0).abs() < 1e-9, "{first} {last}");
            assert_eq!((finder.curve.len(), finder.suggestion()), (100, None));
        }
    }

    #[test]
    fn steepest_fall_is_suggested() {
        let mut finder = finder(LearningRateFinderConfig::default());
        // Falls around step 60 and explodes from step 80 on.
        let loss = |step: usize| match step {
            0..60 => 2.0,
            60..80 => 0.5,
            _ => 1e3,
        };
        let mut step = 0;
        while !finder.record(loss(step)) {
            step += 1;
        }
        assert_eq!(step, 80);
        let at =
            finder.curve().iter().position(|(lr, _)| Some(*lr) == finder.suggestion()).unwrap();
        assert!((60..=62).contains(&at), "{at}");
        assert!(finder.report().contains("suggested learning rate"));
    }

    #[test]
    fn wrong_options_are_refused() {
        let error = |json: serde_json::Value| {
            let config: LearningRateFinderConfig = serde_json::from_value(json).unwrap();
            config.build().err().unwrap().to_string()
        };
        assert_says!(
            error(serde_json::json!({ "min_lr": 0.0 })),
            "`trainer.callbacks`, learning_rate_finder: `min_lr` … above 0, found 0"
        );
        assert_says!(
            error(serde_json::json!({ "max_lr": 1e-9 })),
            "`trainer.callbacks`, learning_rate_finder: `max_lr` … above `min_lr` = 1e-8 …"
        );
        assert_says!(
            error(serde_json::json!({ "num_training_steps": 12 })),
            "`trainer.callbacks`, learning_rate_finder: `num_training_steps` … at least 13 …"
        );
    }
}
