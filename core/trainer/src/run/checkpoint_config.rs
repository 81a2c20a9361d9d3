//! The configuration of checkpoints.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};
use fulgurite_checkpoint::{
    CheckpointIO, CheckpointIOConfig, LoadOptions, NameRules, ParameterFilter,
};
use fulgurite_config::registry::kind;
use fulgurite_config::{ConfigType, PluginValue};
use fulgurite_engine::module::check_pattern;

/// When and where checkpoints are saved, and how many are kept: the table `[checkpoint]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointConfig {
    /// The interval of checkpoints, in optimizer steps. Without this key checkpoints are saved
    /// at the end, and after each validation if `save_top_k` and `monitor` are set.
    pub every_n_steps: Option<u64>,
    /// The directory of checkpoints; by default `checkpoints` in the run's directory.
    pub dir: Option<PathBuf>,
    /// Whether a checkpoint is saved when training ends, also by Ctrl-C. After SIGTERM or
    /// SIGUSR1 a checkpoint is always saved.
    #[default(true)]
    pub save_last: bool,
    /// Whether checkpoints are saved in the background, during training; distributed
    /// checkpoints only. This takes additional memory: the size of this rank's shards of the
    /// model and the optimizer's state.
    pub async_save: bool,
    /// Number of the newest checkpoints that are kept. Without this key and `save_top_k`, all
    /// are kept.
    pub keep_last: Option<u64>,
    /// Number of checkpoints that are kept as the best by `monitor`: `-1` is all, `0` none. The
    /// newest checkpoint and the one that the run resumed from are always kept.
    pub save_top_k: Option<i64>,
    /// How many saves in a row may fail, for example on a full disk, before the run ends. The
    /// run goes on with the checkpoints that it has. A run whose last save has failed ends with
    /// that error.
    pub max_failed_saves: u64,
    /// The metric that ranks checkpoints, such as `"val_loss"`.
    pub monitor: Option<String>,
    /// Whether a smaller or a larger value of `monitor` is better.
    #[default(MonitorMode::Min)]
    pub mode: MonitorMode,
    /// Whether to load only the weights of `trainer.ckpt_path`, and start training at step 0.
    /// Any format of weights is accepted then, such as a Hugging Face directory.
    pub weights_only: bool,
    /// Selects and renames the weights that a run starts from: see `[checkpoint.load]` below.
    pub load: LoadConfig,
    /// Whether a run may resume from a checkpoint that was trained on other data. Its position
    /// then counts in the new data.
    pub allow_other_data: bool,
    /// Whether a new run may save to a `dir` that has checkpoints of another run. Checkpoints
    /// of the same step are replaced; the others stay.
    pub overwrite: bool,
    /// The plugin that writes and reads checkpoints.
    #[default(PluginValue::new("local"))]
    pub io: PluginValue,
}

/// Whether smaller or larger values of a metric are better: `checkpoint.mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MonitorMode {
    /// The smallest value is best.
    #[default]
    Min,
    /// The largest value is best.
    Max,
}

impl ConfigType for MonitorMode {
    fn describe() -> String {
        "`\"min\"` or `\"max\"`".to_owned()
    }
}

impl ConfigType for LoadConfig {
    fn describe() -> String {
        "table".to_owned()
    }
}

/// Selects the weights that a run starts from: the table `[checkpoint.load]`. It applies to
/// `trainer.ckpt_path` with `checkpoint.weights_only`, to the module's pretrained weights, and
/// to evaluated weights without a training state. A resumed run loads its whole checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct LoadConfig {
    /// Whether weights that do not fit the model are an error. Otherwise fitting weights are
    /// loaded, the other parameters keep their initial values, and a warning lists them.
    #[default(true)]
    pub strict: bool,
    /// Patterns of the parameters that are loaded, by their names in the model; empty for all.
    pub include: Vec<String>,
    /// Patterns of the parameters that are not loaded and keep their initial values, and of
    /// tensors that may be missing.
    pub exclude: Vec<String>,
    /// Whether only rank 0 reads the weights, and sends them to the other ranks by tensor: for
    /// weights on a disk that other hosts lack. If all ranks can read the weights, loading is
    /// faster without this key.
    pub broadcast_from_rank0: bool,
    /// New names of tensors: a list of `{ from = "pattern", to = "name" }`. The first matching
    /// rule counts. `to` replaces the segments that `from` matches, a `*` in `to` stands for
    /// the text matched by the `*` in `from`, and an empty `to` removes the segments. A list
    /// as `to` gives a tensor several names, so that it fills several parameters.
    pub rename: Vec<RenameRule>,
}

/// A rule of `checkpoint.load.rename`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RenameRule {
    /// A pattern of tensors, or modules, in the checkpoint.
    pub from: String,
    /// The new name in the model, or several.
    pub to: NewNames,
}

/// The new names of a tensor, in a rule of `checkpoint.load.rename`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a name or a list of names")]
pub enum NewNames {
    /// One name.
    One(String),
    /// Several names, for a tensor that fills several parameters.
    Several(Vec<String>),
}

impl NewNames {
    /// The names.
    pub fn as_slice(&self) -> &[String] {
        match self {
            Self::One(name) => std::slice::from_ref(name),
            Self::Several(names) => names,
        }
    }
}

impl ConfigType for RenameRule {
    fn describe() -> String {
        "table of `from` and `to`".to_owned()
    }
}

impl LoadConfig {
    /// Returns the options of loading.
    pub fn options(&self) -> LoadOptions {
        let pairs = |rule: &RenameRule| -> Vec<(String, String)> {
            rule.to.as_slice().iter().map(|to| (rule.from.clone(), to.clone())).collect()
        };
        let rename = self.rename.iter().flat_map(pairs).collect();
        let chooses = !self.include.is_empty() || !self.exclude.is_empty();
        LoadOptions {
            strict: self.strict,
            broadcast_from_rank0: self.broadcast_from_rank0,
            filter: chooses.then(|| ParameterFilter::selecting(&self.include, &self.exclude)),
            names: NameRules { rename, ..NameRules::default() },
            advice: Some(
                "Where names differ, change them with `checkpoint.load.rename`; leave out what is not to be \
                 loaded, such as a new head, with `checkpoint.load.exclude`, or set \
                 `checkpoint.load.strict = false` to load whatever fits",
            ),
            ..LoadOptions::default()
        }
    }

    /// Checks the patterns.
    pub(crate) fn validate(&self) -> Result<()> {
        let froms = self.rename.iter().map(|rule| &rule.from);
        let keys = [("include", &self.include), ("exclude", &self.exclude)];
        let patterns =
            keys.into_iter().flat_map(|(key, patterns)| patterns.iter().map(move |p| (key, p)));
        for (key, pattern) in patterns.chain(froms.map(|from| ("rename", from))) {
            check_pattern(pattern).map_err(|message| {
                Error::Config(format!(
                    "`checkpoint.load.{key}`: {message}; write the path of a module or parameter, such as \
                     `model.layers.*.mlp`"
                ))
            })?;
        }
        for RenameRule { from, to } in &self.rename {
            if to.as_slice().is_empty() {
                return Err(Error::Config(format!(
                    "`checkpoint.load.rename`: `{from}` has an empty list of new names; leave tensors out with \
                     `checkpoint.load.exclude`"
                )));
            }
            let lacks = |to: &&String| to.matches('*').count() > from.matches('*').count();
            if let Some(to) = to.as_slice().iter().find(lacks) {
                return Err(Error::Config(format!(
                    "`checkpoint.load.rename`: `{to}` has more `*` than `{from}`, so that nothing is known to put \
                     there"
                )));
            }
        }
        let is_repeated = |(i, rule): &(usize, &RenameRule)| {
            self.rename[..*i].iter().any(|other| other.from == rule.from)
        };
        if let Some((_, rule)) = self.rename.iter().enumerate().find(is_repeated) {
            return Err(Error::Config(format!(
                "`checkpoint.load.rename`: two rules are from `{}`; write one, with a list as `to`",
                rule.from
            )));
        }
        Ok(())
    }
}

impl CheckpointConfig {
    /// Opens `dir` with the configured `io`.
    ///
    /// # Errors
    /// If the plugin is not linked or its options are wrong.
    pub fn open(&self, dir: &Path) -> Result<Arc<dyn CheckpointIO>> {
        self.io
            .build::<Box<dyn CheckpointIOConfig>>(kind::CHECKPOINT_IO, "checkpoint.io")?
            .build(dir)
    }

    /// Returns whether a run with this configuration saves checkpoints by itself.
    pub(crate) fn will_save(&self) -> bool {
        self.save_last || self.every_n_steps.is_some() || self.save_top_k.is_some()
    }

    /// Checks ranges, and keys that depend on each other.
    ///
    /// # Errors
    /// [`Error::Config`] that names the key.
    pub fn validate(&self) -> Result<()> {
        let wrong = |key: &str, message: String| {
            Err(Error::Config(format!("`checkpoint.{key}`: {message}")))
        };
        self.load.validate()?;
        if self.every_n_steps == Some(0) {
            let message = "must be at least 1; leave it out to save none on the way";
            return wrong("every_n_steps", message.to_owned());
        }
        if self.keep_last == Some(0) {
            let message = "must be at least 1, as the newest is always kept; leave it out to keep \
                           all that `checkpoint.save_top_k` does not remove";
            return wrong("keep_last", message.to_owned());
        }
        match self.save_top_k {
            Some(k) if k < -1 => {
                let message = format!("must be -1 (all), 0 (none) or a number of them, found {k}");
                wrong("save_top_k", message)
            }
            Some(k) if k > 0 && self.monitor.is_none() => {
                let message = format!(
                    "which {k} are the best needs `checkpoint.monitor`, such as \"val_loss\"; to \
                     keep the newest, set `checkpoint.keep_last`"
                );
                wrong("save_top_k", message)
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::RunConfig;
    use fulgurite_config::ConfigLayers;
    use fulgurite_test_message::assert_says;

    fn checkpoint(keys: &str) -> Result<CheckpointConfig> {
        let text = format!("[checkpoint]\n{keys}");
        let layers = ConfigLayers::new().text("run.toml", &text)?;
        RunConfig::<toml::Table, toml::Table>::from_layers(layers).map(|run| run.checkpoint)
    }

    #[test]
    fn wrong_values_are_refused() {
        let error = |keys| checkpoint(keys).unwrap_err();
        assert_says!(error("every_n_steps = 0"), "`checkpoint.every_n_steps` … at least 1 …");
        assert_says!(error("keep_last = 0"), "`checkpoint.keep_last`: must be at least 1 …");
        assert_says!(error("save_top_k = -2"), "`checkpoint.save_top_k`: must be -1 … found -2");
        assert_says!(error("save_top_k = 3"), "`checkpoint.save_top_k`: which 3 are the best …");
        assert_says!(error("mode = 'least'"), r#"run.toml: `checkpoint.mode` … found "least""#);
        assert_says!(
            error("load = { exclude = ['head.'] }"),
            "`checkpoint.load.exclude` … empty …"
        );
        assert_says!(
            error("load = { rename = [{ from = 'a', to = 'b' }, { from = 'a', to = 'c' }] }"),
            "`checkpoint.load.rename`: two rules are from `a` … a list as `to`"
        );
        assert_says!(
            error("load = { rename = [{ from = 'a', to = [] }] }"),
            "`checkpoint.load.rename`: `a` has an empty list … `checkpoint.load.exclude`"
        );
        assert_says!(
            error("load = { rename = [{ from = 'a', to = ['b', 'b.*'] }] }"),
            "`checkpoint.load.rename`: `b.*` has more `*` than `a` …"
        );
        assert_says!(
            error("load = { rename = [{ from = 'a', to = 'b.*' }] }"),
            "`checkpoint.load.rename`: `b.*` has more `*` than `a` …"
        );
        assert_says!(
            error("load = { rename = [{ from = 'a', too = 'b' }] }"),
            "run.toml: unknown key `checkpoint.load.rename[0].too`; did you mean `to`? …"
        );
        assert_says!(
            error("load = { stirct = false }"),
            "… unknown key `checkpoint.load.stirct` …"
        );
        for keys in ["save_top_k = -1", "save_top_k = 0", "save_top_k = 2\nmonitor = 'val_loss'"] {
            checkpoint(keys).unwrap();
        }
    }
}
