//! Checkpoints in addition to the configuration's `[checkpoint]` table.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::time::Instant;

use fulgurite_error::{Error, Result};
use fulgurite_trainer::run::MonitorMode;
use fulgurite_trainer::trainer::{
    Callback, CallbackConfig, HookContext, Hooks, SaveRequest, SavedState, Stage,
};
use serde::{Deserialize, Serialize};

use crate::file_name::Template;

/// Saves checkpoints in addition to the `[checkpoint]` table, to the same place:
/// `{ type = "model_checkpoint", monitor = "val_loss", save_top_k = 3 }`. Like Lightning's
/// `ModelCheckpoint`; several can be used at once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields)]
pub struct ModelCheckpointConfig {
    /// The metric that ranks checkpoints; without a metric, the newest is the best.
    #[serde(default)]
    pub monitor: Option<String>,
    /// Whether smaller or larger values are better.
    #[serde(default)]
    pub mode: MonitorMode,
    /// Number of checkpoints to keep: `-1` for all, `0` for none.
    #[serde(default = "one")]
    pub save_top_k: i64,
    /// The names of checkpoints, with `{epoch}`, `{step}` and metrics such as `{val_loss:.3}`.
    #[serde(default = "epoch_and_step")]
    pub filename: Template,
    /// Whether `{val_loss}` becomes `val_loss=1.5` instead of `1.5`.
    #[serde(default = "yes")]
    pub auto_insert_metric_name: bool,
    /// Interval between saves, in optimizer steps.
    #[serde(default)]
    pub every_n_steps: Option<NonZeroU64>,
    /// Interval between saves at the ends of epochs, in epochs. By default 1, unless another
    /// interval is set. With a monitored metric, the default also saves after each validation. A
    /// monitored checkpoint needs the metric's value of its own step: one that is due earlier is
    /// saved when the metric is next logged.
    #[serde(default)]
    pub every_n_epochs: Option<NonZeroU64>,
    /// Saves after the first step that ends this many seconds after the last save.
    #[serde(default)]
    pub every_secs: Option<f64>,
    /// Saves only the weights; training cannot resume from them.
    #[serde(default)]
    pub save_weights_only: bool,
    /// Whether a missing metric after a validation is an error.
    #[serde(default = "yes")]
    pub strict: bool,
    /// Prints a line for each saved checkpoint.
    #[serde(default)]
    pub verbose: bool,
}

fn one() -> i64 {
    1
}

fn yes() -> bool {
    true
}

fn epoch_and_step() -> Template {
    Template::parse("{epoch}-{step}").expect("it is one")
}

fn wrong(key: &str, message: impl std::fmt::Display) -> Error {
    Error::Config(format!("`trainer.callbacks`, model_checkpoint: `{key}`: {message}"))
}

#[typetag::serde(name = "model_checkpoint")]
impl CallbackConfig for ModelCheckpointConfig {
    fn build(&self) -> Result<Box<dyn Callback>> {
        let intervals = [
            self.every_n_steps.is_some(),
            self.every_n_epochs.is_some(),
            self.every_secs.is_some(),
        ];
        if intervals.iter().filter(|is_set| **is_set).count() > 1 {
            return Err(wrong(
                "every_n_steps",
                "give one of `every_n_steps`, `every_n_epochs` and `every_secs`; for several, use \
                 several callbacks",
            ));
        }
        if let Some(secs) = self.every_secs
            && !(secs.is_finite() && secs > 0.0)
        {
            return Err(wrong("every_secs", format!("must be above 0, found {secs:?}")));
        }
        match self.save_top_k {
            k if k < -1 => {
                let message = format!("must be -1 (all), 0 (none) or a number, found {k}");
                return Err(wrong("save_top_k", message));
            }
            k if k > 1 && self.monitor.is_none() => {
                let message =
                    format!("which {k} are the best needs `monitor`, such as \"val_loss\"");
                return Err(wrong("save_top_k", message));
            }
            _ => {}
        }
        Ok(Box::new(ModelCheckpoint {
            config: self.clone(),
            kept: Vec::new(),
            last_time: Instant::now(),
            is_due: false,
            offered_step: None,
        }))
    }

    fn monitor(&self) -> Option<&str> {
        self.monitor.as_deref()
    }
}

fulgurite_config::register_callback!(
    "model_checkpoint",
    ModelCheckpointConfig,
    "Saves more checkpoints than those of [checkpoint]",
    "{ type = \"model_checkpoint\", monitor = \"val_loss\", save_top_k = 3 }"
);

/// A kept checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Kept {
    name: String,
    /// The monitored metric; `None` without a metric or if it was not finite.
    score: Option<f64>,
}

/// The callback of [`ModelCheckpointConfig`].
#[derive(Debug)]
pub struct ModelCheckpoint {
    config: ModelCheckpointConfig,
    /// Oldest first.
    kept: Vec<Kept>,
    last_time: Instant,
    /// Whether a checkpoint is due, or still waits for the metric's value.
    is_due: bool,
    /// The last step that was considered.
    offered_step: Option<u64>,
}

/// The decision to save a checkpoint.
#[derive(Debug, Serialize, Deserialize)]
struct Choice {
    new: Kept,
    /// Index of the kept checkpoint that it replaces.
    replaces: Option<usize>,
}

impl ModelCheckpoint {
    /// Name of the best checkpoint (by the metric, or else the newest) in the run's checkpoint
    /// directory.
    pub fn best_model_name(&self) -> Option<&str> {
        let best = match self.config.monitor {
            Some(_) => self.kept.iter().min_by(|a, b| self.compare(a.score, b.score)),
            None => self.kept.last(),
        };
        best.map(|kept| kept.name.as_str())
    }

    /// The monitored metric of the best checkpoint.
    pub fn best_model_score(&self) -> Option<f64> {
        let best = self.best_model_name()?;
        self.kept.iter().find(|kept| kept.name == best)?.score
    }

    /// Orders the better score first; a missing score is the worst.
    fn compare(&self, a: Option<f64>, b: Option<f64>) -> Ordering {
        match (a, b) {
            (Some(a), Some(b)) if self.config.mode == MonitorMode::Min => a.total_cmp(&b),
            (Some(a), Some(b)) => b.total_cmp(&a),
            (a, b) => b.is_some().cmp(&a.is_some()),
        }
    }

    /// Requests a checkpoint if one is due and this step is among the best. If the metric's latest
    /// value belongs to an earlier step, the checkpoint stays due until the metric is logged again.
    /// Collective if a checkpoint is due.
    fn save_if_due(&mut self, ctx: &mut HookContext) -> Result<()> {
        let is_off = self.config.save_top_k == 0 || ctx.fast_dev_run;
        self.is_due &= !is_off && self.offered_step != Some(ctx.step);
        if !self.is_due {
            return Ok(());
        }
        let monitor = self.config.monitor.as_deref();
        if monitor.is_some_and(|monitor| ctx.metric_step(monitor) != Some(ctx.step)) {
            return Ok(());
        }
        self.is_due = false;
        self.offered_step = Some(ctx.step);
        // Rank 0 decides: the metric may differ between ranks, and only one rank should list the
        // directory.
        let choice = if ctx.is_global_zero() { self.choose(ctx)? } else { None };
        let Some(choice) = ctx.fabric().broadcast(&choice, 0)? else { return Ok(()) };
        if self.config.verbose {
            ctx.print(format!("saving {}", choice.new.name));
        }
        let mut request = SaveRequest::default();
        request.name = Some(choice.new.name.clone());
        request.weights_only = self.config.save_weights_only;
        request.remove = self.apply(choice);
        ctx.save_checkpoint(request);
        Ok(())
    }

    /// Decides about a checkpoint of this step; `None` if it is not among the best.
    fn choose(&self, ctx: &HookContext) -> Result<Option<Choice>> {
        let score = self.config.monitor.as_ref().and_then(|monitor| ctx.metrics.get(monitor));
        let score = score.copied().filter(|score| score.is_finite());
        let Some(replaces) = self.admit(score) else { return Ok(None) };
        let base = self.name(&Values { epoch: ctx.epoch, step: ctx.step, metrics: ctx.metrics })?;
        let names = ctx.checkpoint_names()?;
        let old = replaces.map(|index| self.kept[index].name.as_str());
        // Like Lightning's version counter. The name of the replaced checkpoint is free again.
        let is_free = |name: &str| {
            (old == Some(name) || !names.contains(name)) && ctx.resumed_from() != Some(name)
        };
        let versions = (1u64..).map(|version| format!("{base}-v{version}"));
        let mut candidates = std::iter::once(base.clone()).chain(versions);
        let name = candidates.find(|name| is_free(name)).expect("it is endless");
        Ok(Some(Choice { new: Kept { name, score }, replaces }))
    }

    fn name(&self, values: &Values) -> Result<String> {
        let value = |key: &str| match key {
            "epoch" => Some(values.epoch as f64),
            "step" => Some(values.step as f64),
            _ => values.metrics.get(key).copied(),
        };
        let name = self.config.filename.fill(self.config.auto_insert_metric_name, &value);
        name.map_err(|message| wrong("filename", message))
    }

    /// Decides whether a checkpoint with this score is kept: `None` if the score is not among the
    /// best, else the index of the checkpoint that it replaces, if any.
    fn admit(&self, score: Option<f64>) -> Option<Option<usize>> {
        let k = usize::try_from(self.config.save_top_k).unwrap_or(usize::MAX);
        if self.kept.len() < k {
            return Some(None);
        }
        if self.config.monitor.is_none() {
            return Some(Some(0));
        }
        // Among equals, the newest.
        let worst = (0..self.kept.len())
            .max_by(|&a, &b| self.compare(self.kept[a].score, self.kept[b].score))?;
        let is_better = self.compare(score, self.kept[worst].score) == Ordering::Less;
        is_better.then_some(Some(worst))
    }

    /// Records a new checkpoint. Returns the names of the checkpoints to remove for it.
    fn apply(&mut self, Choice { new, replaces }: Choice) -> Vec<String> {
        let old = replaces.map(|index| self.kept.remove(index).name);
        let remove = old.into_iter().filter(|old| *old != new.name).collect();
        self.kept.push(new);
        remove
    }

    /// Whether neither a step interval nor a time interval is set.
    fn by_events(&self) -> bool {
        self.config.every_n_steps.is_none() && self.config.every_secs.is_none()
    }
}

/// The values that fill in a file name.
struct Values<'a> {
    epoch: u64,
    step: u64,
    metrics: &'a BTreeMap<String, f64>,
}

impl Callback for ModelCheckpoint {
    fn state_key(&self) -> String {
        let ModelCheckpointConfig {
            monitor, mode, filename, every_n_steps, every_n_epochs, ..
        } = &self.config;
        let own = match *filename == epoch_and_step() {
            true => String::new(),
            false => format!(", {filename}"),
        };
        format!(
            "model_checkpoint({monitor:?}, {mode:?}, {every_n_steps:?}, {every_n_epochs:?}{own})"
        )
    }

    fn decides_by_metrics(&self) -> bool {
        true
    }
}

impl Hooks for ModelCheckpoint {
    fn on_train_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        self.last_time = Instant::now();
        self.offered_step = None;
        // Checkpoints of another directory or of an earlier run of the trainer are not this run's.
        if ctx.resumed_from().is_none() && !ctx.goes_on() {
            self.kept.clear();
            self.is_due = false;
        }
        Ok(())
    }

    fn on_train_step_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        self.is_due |= self.config.every_n_steps.is_some_and(|n| ctx.step.is_multiple_of(n.get()));
        if let Some(secs) = self.config.every_secs {
            // Clocks differ, so rank 0 decides.
            let is_due = self.last_time.elapsed().as_secs_f64() >= secs;
            if ctx.fabric().broadcast(&is_due, 0)? {
                self.last_time = Instant::now();
                self.is_due = true;
            }
        }
        self.save_if_due(ctx)
    }

    fn on_validation_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        if ctx.stage != Stage::Fit {
            return Ok(());
        }
        let Some(monitor) = &self.config.monitor else { return Ok(()) };
        self.is_due |= self.by_events() && self.config.every_n_epochs.is_none();
        let is_missing = self.is_due && !ctx.metrics.contains_key(monitor);
        if is_missing && self.config.strict && self.config.save_top_k != 0 {
            let known = ctx.metrics.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            let message = format!("there is no metric `{monitor}`; there are: {known}");
            return Err(wrong("monitor", message));
        }
        self.save_if_due(ctx)
    }

    fn on_train_epoch_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        let n = self.config.every_n_epochs.map_or(1, NonZeroU64::get);
        self.is_due |= self.by_events() && (ctx.epoch + 1).is_multiple_of(n);
        self.save_if_due(ctx)
    }

    fn on_train_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        if let Some(monitor) = &self.config.monitor
            && self.is_due
            && !ctx.metrics.contains_key(monitor)
        {
            ctx.print(format!(
                "model_checkpoint has saved nothing: there is no metric `{monitor}`"
            ));
        }
        Ok(())
    }

    fn on_save_checkpoint(&mut self, state: &mut SavedState) -> Result<()> {
        state.set("kept", &self.kept)?;
        if self.is_due { state.set("is_due", &true) } else { Ok(()) }
    }

    fn on_load_checkpoint(&mut self, state: &SavedState) -> Result<()> {
        self.kept = state.get("kept")?.unwrap_or_default();
        self.is_due = state.get("is_due")?.unwrap_or_default();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    fn checkpoint(json: serde_json::Value) -> ModelCheckpoint {
        let config: ModelCheckpointConfig = serde_json::from_value(json).unwrap();
        config.build().unwrap();
        ModelCheckpoint {
            config,
            kept: vec![],
            last_time: Instant::now(),
            is_due: false,
            offered_step: None,
        }
    }

    /// Offers checkpoints s1, s2, … with these scores. Returns the kept ones.
    fn kept(json: serde_json::Value, scores: &[f64]) -> Vec<String> {
        let mut checkpoint = checkpoint(json);
        for (i, score) in scores.iter().enumerate() {
            let score = Some(*score).filter(|score| score.is_finite());
            if let Some(replaces) = checkpoint.admit(score) {
                let new = Kept { name: format!("s{}", i + 1), score };
                checkpoint.apply(Choice { new, replaces });
            }
        }
        checkpoint.kept.into_iter().map(|kept| kept.name).collect()
    }

    #[test]
    fn the_best_are_kept() {
        let scores = [3.0, 1.0, 2.0, 2.0, 5.0];
        let top = |k: i64, mode: &str| {
            let json = serde_json::json!({ "monitor": "val_loss", "save_top_k": k, "mode": mode });
            kept(json, &scores)
        };
        assert_eq!(top(1, "min"), ["s2"]);
        assert_eq!(top(2, "min"), ["s2", "s3"], "of equal ones the older");
        assert_eq!(top(2, "max"), ["s1", "s5"]);
        assert_eq!(top(-1, "min").len(), 5);
        assert_eq!(kept(serde_json::json!({}), &scores), ["s5"], "without a metric the newest");
        let json = serde_json::json!({ "monitor": "val_loss", "save_top_k": 2 });
        assert_eq!(kept(json, &[f64::NAN, 4.0, f64::NAN, 5.0]), ["s2", "s4"], "none is the worst");
    }

    #[test]
    fn wrong_options_are_refused() {
        let error = |json: serde_json::Value| {
            let config: ModelCheckpointConfig = serde_json::from_value(json).unwrap();
            config.build().err().unwrap().to_string()
        };
        assert_says!(
            error(serde_json::json!({ "every_n_steps": 1, "every_n_epochs": 1 })),
            "`trainer.callbacks`, model_checkpoint: `every_n_steps`: give one of …"
        );
        assert_says!(
            error(serde_json::json!({ "save_top_k": 2 })),
            "`trainer.callbacks`, model_checkpoint: `save_top_k`: which 2 … needs `monitor` …"
        );
        assert_says!(
            error(serde_json::json!({ "save_top_k": -2 })),
            "`trainer.callbacks`, model_checkpoint: `save_top_k`: must be -1 … found -2"
        );
        assert_says!(
            error(serde_json::json!({ "every_secs": 0.0 })),
            "`trainer.callbacks`, model_checkpoint: `every_secs` … above 0, found 0.0"
        );
    }
}
