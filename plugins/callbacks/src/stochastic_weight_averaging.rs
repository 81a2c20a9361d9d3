//! Averages the weights over the last epochs.

use std::f64::consts::PI;

use fulgurite_engine::optim::WeightAverage;
use fulgurite_error::{Error, Result, counted};
use fulgurite_trainer::run::CountOrFraction;
use fulgurite_trainer::trainer::{Callback, CallbackConfig, HookContext, Hooks, SavedState};
use serde::{Deserialize, Serialize};

/// Averages the weights over the last epochs:
/// `{ type = "stochastic_weight_averaging", swa_lrs = 1e-2 }`. From a given epoch on, the learning
/// rate moves to `swa_lrs`, and the weights join the mean at the end of each epoch. The mean
/// replaces the weights when training has ended and everything is saved. Like Lightning's
/// `StochasticWeightAveraging`.
///
/// The mean is stored with the optimizer's state (`state.{parameter}.swa` in checkpoints).
/// Checkpoints hold the weights that training continues from, and validations use these weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields)]
pub struct StochasticWeightAveragingConfig {
    /// The learning rate of the averaged epochs.
    pub swa_lrs: f64,
    /// The first averaged epoch, counted from 0, or the fraction of the run's epochs before it.
    #[serde(default = "four_fifths")]
    pub swa_epoch_start: CountOrFraction,
    /// Number of epochs until the rate reaches `swa_lrs`.
    #[serde(default = "ten")]
    pub annealing_epochs: u64,
    /// Shape of the learning rate's way to `swa_lrs`.
    #[serde(default)]
    pub annealing_strategy: AnnealingStrategy,
}

/// Shape of the learning rate's way to `swa_lrs` in a [`StochasticWeightAveragingConfig`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AnnealingStrategy {
    /// Along half a cosine.
    #[default]
    Cos,
    /// Along a line.
    Linear,
}

fn four_fifths() -> CountOrFraction {
    CountOrFraction::Fraction(0.8)
}

fn ten() -> u64 {
    10
}

fn wrong(message: impl std::fmt::Display) -> Error {
    Error::Config(format!("`trainer.callbacks`, stochastic_weight_averaging: {message}"))
}

#[typetag::serde(name = "stochastic_weight_averaging")]
impl CallbackConfig for StochasticWeightAveragingConfig {
    fn build(&self) -> Result<Box<dyn Callback>> {
        let lr = self.swa_lrs;
        if !(lr > 0.0 && lr.is_finite()) {
            return Err(wrong(format!("`swa_lrs`: must be above 0, found {lr}")));
        }
        Ok(Box::new(StochasticWeightAveraging { config: self.clone(), lr_before: None }))
    }
}

fulgurite_config::register_callback!(
    "stochastic_weight_averaging",
    StochasticWeightAveragingConfig,
    "Averages the weights of the last epochs, which have a learning rate of their own",
    "{ type = \"stochastic_weight_averaging\", swa_lrs = 1e-2, swa_epoch_start = 0.8 }"
);

struct StochasticWeightAveraging {
    config: StochasticWeightAveragingConfig,
    /// The learning rate at the start of the first averaged epoch.
    lr_before: Option<f64>,
}

impl StochasticWeightAveraging {
    /// The first averaged epoch.
    fn first_epoch(&self, ctx: &HookContext) -> Result<u64> {
        match (self.config.swa_epoch_start, ctx.max_epochs) {
            (CountOrFraction::Count(epoch), _) => Ok(epoch),
            (fraction, Some(epochs)) => Ok(fraction.of(epochs)),
            (CountOrFraction::Fraction(_), None) => Err(wrong(
                "`swa_epoch_start`: a part of a run needs the run's length, and it has no `max_epochs` or \
                 `max_steps`; give an epoch, such as `swa_epoch_start = 8`",
            )),
        }
    }

    /// The learning rate of averaged epoch `n`, as in `torch.optim.swa_utils.SWALR`.
    fn learning_rate(&self, n: u64, before: f64) -> f64 {
        let part = match self.config.annealing_epochs {
            0 => 1.0,
            epochs => (n as f64 / epochs as f64).min(1.0),
        };
        let part = match self.config.annealing_strategy {
            AnnealingStrategy::Cos => 0.5 * (1.0 - (PI * part).cos()),
            AnnealingStrategy::Linear => part,
        };
        before + (self.config.swa_lrs - before) * part
    }
}

impl StochasticWeightAveraging {
    /// Sets the learning rate if the epoch is averaged.
    fn set_rate(&mut self, ctx: &mut HookContext) -> Result<()> {
        let Some(n) = ctx.epoch.checked_sub(self.first_epoch(ctx)?) else { return Ok(()) };
        let Some(optimizer) = ctx.optimizer_mut() else { return Ok(()) };
        let before = match self.lr_before {
            Some(before) => before,
            None => *self.lr_before.insert(optimizer.learning_rate()?),
        };
        optimizer.set_learning_rate(Some(self.learning_rate(n, before)))
    }

    /// Drops the resumed run's mean if it includes epochs before this run's first averaged epoch.
    /// This happens if `swa_epoch_start` is a fraction and the run is now longer.
    fn begin_anew(&mut self, first: u64, ctx: &mut HookContext) -> Result<()> {
        let own = (ctx.epoch + 1).saturating_sub(first);
        let Some(optimizer) = ctx.optimizer_mut() else { return Ok(()) };
        if optimizer.average().map_or(0, WeightAverage::updates) <= own {
            return Ok(());
        }
        optimizer.set_average(WeightAverage::mean(optimizer.parameters())?);
        optimizer.set_learning_rate(None)?;
        self.lr_before = None;
        ctx.print(format!(
            "the mean of the weights begins anew: the resumed run had epochs in it before epoch {first}, \
             counted from 0, which is the first one now"
        ));
        self.set_rate(ctx)
    }
}

impl Callback for StochasticWeightAveraging {}

impl Hooks for StochasticWeightAveraging {
    fn setup(&mut self, ctx: &mut HookContext) -> Result<()> {
        let Some(optimizers) = ctx.optimizers_mut() else { return Ok(()) };
        if optimizers.names().count() > 1 {
            return Err(wrong(
                "the module has several optimizers, and the mean is of one's parameters",
            ));
        }
        // Resets the state of an earlier run of the same trainer.
        self.lr_before = None;
        for (_, optimizer) in optimizers.iter_mut() {
            if optimizer.average().is_some() {
                return Err(wrong(
                    "another callback keeps an average of the weights, and there can be one",
                ));
            }
            optimizer.set_average(WeightAverage::mean(optimizer.parameters())?);
        }
        Ok(())
    }

    fn on_train_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        let first = self.first_epoch(ctx)?;
        match ctx.max_epochs {
            // `fast_dev_run` has only one epoch.
            Some(epochs) if first >= epochs && !ctx.fast_dev_run => Err(wrong(format!(
                "`swa_epoch_start`: the run has {}, counted from 0, so that none is averaged from \
                 epoch {first} on",
                counted(epochs, "epoch")
            ))),
            _ => self.begin_anew(first, ctx),
        }
    }

    fn on_train_epoch_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        self.set_rate(ctx)
    }

    fn on_train_epoch_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        if ctx.epoch < self.first_epoch(ctx)? {
            return Ok(());
        }
        ctx.optimizer_mut().map_or(Ok(()), |optimizer| optimizer.update_average())
    }

    // Everything is saved by then: a resumed run continues from the weights, not from their mean.
    fn on_fit_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        let Some(optimizer) = ctx.optimizer_mut() else { return Ok(()) };
        let updates = optimizer.average().map_or(0, WeightAverage::updates);
        if updates > 0 {
            optimizer.swap_average()?;
            let epochs = counted(updates, "epoch");
            ctx.print(format!("the weights are the mean of those after {epochs}"));
        }
        Ok(())
    }

    fn on_save_checkpoint(&mut self, state: &mut SavedState) -> Result<()> {
        self.lr_before.map_or(Ok(()), |lr| state.set("lr_before", &lr))
    }

    fn on_load_checkpoint(&mut self, state: &SavedState) -> Result<()> {
        self.lr_before = state.get("lr_before")?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    #[test]
    fn the_rate_goes_over_as_in_pytorch() {
        // torch.optim.swa_utils.SWALR(optimizer with lr 0.1, swa_lr=0.02, anneal_epochs=4)
        let rates = |annealing_strategy, annealing_epochs| {
            let config = StochasticWeightAveragingConfig {
                swa_lrs: 0.02,
                swa_epoch_start: four_fifths(),
                annealing_epochs,
                annealing_strategy,
            };
            let callback = StochasticWeightAveraging { config, lr_before: None };
            [0, 1, 2, 3, 4, 5].map(|n| (callback.learning_rate(n, 0.1) * 1e6).round() / 1e6)
        };
        let line = [0.1, 0.08, 0.06, 0.04, 0.02, 0.02];
        assert_eq!(rates(AnnealingStrategy::Linear, 4), line);
        let cosine = [0.1, 0.088284, 0.06, 0.031716, 0.02, 0.02];
        assert_eq!(rates(AnnealingStrategy::Cos, 4), cosine);
        assert_eq!(rates(AnnealingStrategy::Cos, 0), [0.02; 6]);
    }

    #[test]
    fn a_rate_is_a_positive_number() {
        let config = serde_json::json!({ "swa_lrs": 0.0 });
        let config: StochasticWeightAveragingConfig = serde_json::from_value(config).unwrap();
        let error = config.build().err().unwrap().to_string();
        assert_says!(error, "`trainer.callbacks` … `swa_lrs` … above 0, found 0");
    }
}
