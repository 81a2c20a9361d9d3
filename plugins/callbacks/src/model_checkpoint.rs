//! More checkpoints than those of the table `[checkpoint]`.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::time::Instant;

use fulgurite_core::run::MonitorMode;
use fulgurite_core::trainer::{
    Callback, CallbackConfig, HookContext, Hooks, SaveRequest, SavedState, Stage,
};
use fulgurite_core::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::file_name::Template;

/// Saves checkpoints besides those of the table `[checkpoint]`, to the same place: `{ type =
/// "model_checkpoint", monitor = "val_loss", save_top_k = 3, filename = "best-{epoch}-{val_loss:.3}" }`.
/// As Lightning's `ModelCheckpoint`; several can be used at once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelCheckpointConfig {
    /// The metric that says which checkpoints are best; without one the newest are.
    #[serde(default)]
    pub monitor: Option<String>,
    /// Whether smaller or larger values are better.
    #[serde(default)]
    pub mode: MonitorMode,
    /// How many checkpoints are kept: `-1` is all, `0` none.
    #[serde(default = "one")]
    pub save_top_k: i64,
    /// The names of checkpoints, with `{epoch}`, `{step}` and metrics such as `{val_loss:.3}`.
    #[serde(default = "epoch_and_step")]
    pub filename: Template,
    /// Whether `{val_loss}` becomes `val_loss=1.5`, and not only `1.5`.
    #[serde(default = "yes")]
    pub auto_insert_metric_name: bool,
    /// Saves every so many optimizer steps.
    #[serde(default)]
    pub every_n_steps: Option<NonZeroU64>,
    /// Saves at the end of every so many epochs; by default of each, where there is no other interval and
    /// nothing is monitored. What is monitored is by default saved after each validation.
    #[serde(default)]
    pub every_n_epochs: Option<NonZeroU64>,
    /// Saves after the step in which so many seconds have passed since the last time.
    #[serde(default)]
    pub every_secs: Option<f64>,
    /// Saves only the weights, from which training cannot go on.
    #[serde(default)]
    pub save_weights_only: bool,
    /// Whether a metric that was not logged when it should is an error.
    #[serde(default = "yes")]
    pub strict: bool,
    /// Prints each checkpoint.
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
            saved_step: None,
        }))
    }

    fn monitor(&self) -> Option<&str> {
        self.monitor.as_deref()
    }
}

fulgurite_core::register_plugin!(
    fulgurite_core::registry::kind::CALLBACK,
    "model_checkpoint",
    "Saves more checkpoints than those of [checkpoint]",
    "{ type = \"model_checkpoint\", monitor = \"val_loss\", save_top_k = 3 }"
);

/// A checkpoint that is kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Kept {
    name: String,
    /// The monitored metric; `None` without one, or if it was not finite.
    score: Option<f64>,
}

/// The callback of [`ModelCheckpointConfig`].
#[derive(Debug)]
pub struct ModelCheckpoint {
    config: ModelCheckpointConfig,
    /// Oldest first.
    kept: Vec<Kept>,
    last_time: Instant,
    saved_step: Option<u64>,
}

impl ModelCheckpoint {
    /// The name of the best checkpoint, by the metric or else the newest, in the place of the run's
    /// checkpoints.
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

    /// The better score first; none is the worst.
    fn compare(&self, a: Option<f64>, b: Option<f64>) -> Ordering {
        match (a, b) {
            (Some(a), Some(b)) if self.config.mode == MonitorMode::Min => a.total_cmp(&b),
            (Some(a), Some(b)) => b.total_cmp(&a),
            (a, b) => b.is_some().cmp(&a.is_some()),
        }
    }

    /// Asks for a checkpoint, if the present one is among the best.
    fn save(&mut self, ctx: &mut HookContext) -> Result<()> {
        if self.config.save_top_k == 0 || self.saved_step == Some(ctx.step) {
            return Ok(());
        }
        let score = match &self.config.monitor {
            None => None,
            Some(monitor) => match ctx.metrics.get(monitor) {
                Some(score) => Some(*score).filter(|score| score.is_finite()),
                None if self.config.strict => {
                    let known =
                        ctx.metrics.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
                    return Err(wrong(
                        "monitor",
                        format!("there is no metric `{monitor}`; there are: {known}"),
                    ));
                }
                None => return Ok(()),
            },
        };
        let values = Values { epoch: ctx.epoch, step: ctx.step, metrics: ctx.metrics };
        let base = self.name(&values)?;
        let Some((name, remove)) = self.keep(base, score) else { return Ok(()) };
        self.saved_step = Some(ctx.step);
        if self.config.verbose {
            ctx.print(format!("saving {name}"));
        }
        let mut request = SaveRequest::default();
        request.name = Some(name);
        request.weights_only = self.config.save_weights_only;
        request.remove = remove;
        ctx.save_checkpoint(request);
        Ok(())
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

    /// The name of a new checkpoint with this score, and those that make room for it; `None` if it is not
    /// among the best.
    fn keep(&mut self, base: String, score: Option<f64>) -> Option<(String, Vec<String>)> {
        let k = usize::try_from(self.config.save_top_k).unwrap_or(usize::MAX);
        let mut remove = Vec::new();
        if self.kept.len() >= k {
            let worst = match self.config.monitor {
                // Of equal ones the newest.
                Some(_) => (0..self.kept.len())
                    .max_by(|&a, &b| self.compare(self.kept[a].score, self.kept[b].score))?,
                None => 0,
            };
            let is_worse = self.compare(score, self.kept[worst].score) != Ordering::Less;
            if self.config.monitor.is_some() && is_worse {
                return None;
            }
            remove.push(self.kept.remove(worst).name);
        }
        // As Lightning's version counter.
        let taken = |name: &str| self.kept.iter().any(|kept| kept.name == name);
        let versions = (1..).map(|version| format!("{base}-v{version}"));
        let name = std::iter::once(base.clone()).chain(versions).find(|name| !taken(name))?;
        remove.retain(|old| *old != name);
        self.kept.push(Kept { name: name.clone(), score });
        Some((name, remove))
    }

    /// Whether neither steps nor time say when to save.
    fn by_events(&self) -> bool {
        self.config.every_n_steps.is_none() && self.config.every_secs.is_none()
    }
}

/// What names are made of.
struct Values<'a> {
    epoch: u64,
    step: u64,
    metrics: &'a BTreeMap<String, f64>,
}

impl Callback for ModelCheckpoint {
    fn state_key(&self) -> String {
        let ModelCheckpointConfig { monitor, mode, every_n_steps, every_n_epochs, .. } =
            &self.config;
        format!("model_checkpoint({monitor:?}, {mode:?}, {every_n_steps:?}, {every_n_epochs:?})")
    }

    fn decides_by_metrics(&self) -> bool {
        true
    }
}

impl Hooks for ModelCheckpoint {
    fn on_train_start(&mut self, _: &mut HookContext) -> Result<()> {
        self.last_time = Instant::now();
        Ok(())
    }

    fn on_train_step_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        if self.config.every_n_steps.is_some_and(|n| ctx.step.is_multiple_of(n.get())) {
            return self.save(ctx);
        }
        let Some(secs) = self.config.every_secs else { return Ok(()) };
        // Clocks differ, so rank 0's decides.
        let is_due = u8::from(self.last_time.elapsed().as_secs_f64() >= secs);
        if ctx.fabric().broadcast(&is_due.to_string(), 0)? == "1" {
            self.last_time = Instant::now();
            self.save(ctx)?;
        }
        Ok(())
    }

    fn on_validation_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        let by_validation = self.config.monitor.is_some() && self.config.every_n_epochs.is_none();
        if ctx.stage == Stage::Fit && by_validation && self.by_events() {
            return self.save(ctx);
        }
        Ok(())
    }

    fn on_train_epoch_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        let n = match (self.config.every_n_epochs, &self.config.monitor) {
            (Some(n), _) => n.get(),
            (None, None) => 1,
            (None, Some(_)) => return Ok(()),
        };
        if self.by_events() && (ctx.epoch + 1).is_multiple_of(n) { self.save(ctx) } else { Ok(()) }
    }

    fn on_save_checkpoint(&mut self, state: &mut SavedState) -> Result<()> {
        state.set("kept", &self.kept)
    }

    fn on_load_checkpoint(&mut self, state: &SavedState) -> Result<()> {
        self.kept = state.get("kept")?.unwrap_or_default();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checkpoint(json: serde_json::Value) -> ModelCheckpoint {
        let config: ModelCheckpointConfig = serde_json::from_value(json).unwrap();
        config.build().unwrap();
        ModelCheckpoint { config, kept: vec![], last_time: Instant::now(), saved_step: None }
    }

    /// Offers checkpoints s1, s2, … with these scores; what is kept in the end.
    fn kept(json: serde_json::Value, scores: &[f64]) -> Vec<String> {
        let mut checkpoint = checkpoint(json);
        for (i, score) in scores.iter().enumerate() {
            let score = Some(*score).filter(|score| score.is_finite());
            checkpoint.keep(format!("s{}", i + 1), score);
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
    fn names_that_are_taken_get_a_version() {
        let json = serde_json::json!({ "monitor": "val_loss", "save_top_k": 3 });
        let mut checkpoint = checkpoint(json);
        let mut name = |score| checkpoint.keep("same".to_owned(), Some(score)).unwrap().0;
        assert_eq!([name(3.0), name(2.0), name(1.0)], ["same", "same-v1", "same-v2"]);
        assert_eq!(checkpoint.best_model_name(), Some("same-v2"));
        assert_eq!(checkpoint.best_model_score(), Some(1.0));
    }

    #[test]
    fn wrong_options_are_refused() {
        let error = |json: serde_json::Value| {
            let config: ModelCheckpointConfig = serde_json::from_value(json).unwrap();
            config.build().err().unwrap().to_string()
        };
        insta::assert_snapshot!(error(serde_json::json!({ "every_n_steps": 1, "every_n_epochs": 1 })), @"`trainer.callbacks`, model_checkpoint: `every_n_steps`: give one of `every_n_steps`, `every_n_epochs` and `every_secs`; for several, use several callbacks");
        insta::assert_snapshot!(error(serde_json::json!({ "save_top_k": 2 })), @r#"`trainer.callbacks`, model_checkpoint: `save_top_k`: which 2 are the best needs `monitor`, such as "val_loss""#);
        insta::assert_snapshot!(error(serde_json::json!({ "save_top_k": -2 })), @"`trainer.callbacks`, model_checkpoint: `save_top_k`: must be -1 (all), 0 (none) or a number, found -2");
        insta::assert_snapshot!(error(serde_json::json!({ "every_secs": 0.0 })), @"`trainer.callbacks`, model_checkpoint: `every_secs`: must be above 0, found 0.0");
    }
}
