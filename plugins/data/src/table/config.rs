//! The `[data]` table of a [`Table`](super::Table).

use fulgurite_config::{ConfigType, Documented};
use fulgurite_error::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::config::{Paths, check_validation};
use crate::rows::Column;

/// The default fraction of rows for validation.
const VALIDATION_FRACTION: f64 = 0.1;

/// The configuration of a [`Table`](super::Table).
///
/// ```toml
/// [data]
/// path = "houses.csv"
/// features = ["rooms", "area", "city"]
/// target = "price"
/// task = "regression"
/// batch_size = 64
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Documented)]
#[serde(default, deny_unknown_fields)]
pub struct TableConfig {
    /// Files and folders of rows for training. The extension says how they are read: `.csv` and
    /// `.tsv` (with a header), `.jsonl` and `.ndjson` (a JSON object in each line) or, in programs
    /// with the feature `parquet`, `.parquet`.
    #[default(Paths::One(".".into()))]
    pub path: Paths,
    /// Files and folders of rows for validation; then all of `path` is for training.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_path: Option<Paths>,
    /// Files and folders of rows for a test; by default those for validation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub test_path: Option<Paths>,
    /// Files and folders of rows for a prediction, which need no target; by default those for a
    /// test.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predict_path: Option<Paths>,
    /// The fraction of the rows of `path` for validation, chosen at random, the same in every run.
    /// By default 0.1, and 0 with a `validation_path`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_fraction: Option<f64>,
    /// The columns of the model's input, in order. A column of numbers is a number. A column
    /// of names becomes as many columns as there are names: a 1 for the name, and 0.
    pub features: Vec<String>,
    /// Columns among `features` whose numbers are names, such as postal codes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub categories: Vec<String>,
    /// Whether numbers are standardized: less the mean and over the standard deviation of the
    /// training rows.
    #[default(true)]
    pub standardize: bool,
    /// The treatment of values that a row of `features` lacks: `"error"`, or `"mean"`, which takes
    /// the mean of the training rows for a number and no name for a name.
    #[default(OnMissing::Error)]
    pub missing: OnMissing,
    /// The column to predict.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// The kind of target: `"classification"` (each different value is a class) or `"regression"`
    /// (a number). By default names are classes, and numbers with a decimal point are numbers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task: Option<Task>,
    /// Rows in a micro-batch of one data-parallel rank.
    #[default(32)]
    pub batch_size: usize,
    /// Whether training rows are shuffled, differently in each epoch.
    #[default(true)]
    pub shuffle: bool,
}

/// The kind of a table's target: `data.task`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Task {
    /// One of several classes.
    Classification,
    /// A number.
    Regression,
}

impl ConfigType for Task {
    fn describe() -> String {
        "`\"classification\"` or `\"regression\"`".to_owned()
    }
}

/// The treatment of values that a row lacks: `data.missing`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnMissing {
    /// An error that names the row.
    Error,
    /// The mean of the training rows, or no name.
    Mean,
}

impl ConfigType for OnMissing {
    fn describe() -> String {
        "`\"error\"` or `\"mean\"`".to_owned()
    }
}

impl TableConfig {
    pub(super) fn validation_fraction(&self) -> f64 {
        let default = if self.validation_path.is_some() { 0.0 } else { VALIDATION_FRACTION };
        self.validation_fraction.unwrap_or(default)
    }

    /// The columns of features, then the target's.
    pub(super) fn columns(&self) -> Result<Vec<Column>> {
        let fail = |message: String| Err(Error::Config(message));
        if self.features.is_empty() {
            return fail(
                "data.features is missing: name the columns of the model's input".to_owned(),
            );
        }
        if let Some(name) = self.categories.iter().find(|name| !self.features.contains(name)) {
            return fail(format!("data.categories names {name:?}, which data.features does not"));
        }
        let named = self.features.iter().map(|name| ("data.features", name));
        let named: Vec<_> =
            named.chain(self.target.iter().map(|name| ("data.target", name))).collect();
        for (i, (key, name)) in named.iter().enumerate() {
            if named[..i].iter().any(|(_, earlier)| earlier == name) {
                return fail(format!("{key} names the column {name:?} a second time"));
            }
        }
        if self.target.is_none() && self.task.is_some() {
            return fail("data.task is for a table with a data.target; name the column".to_owned());
        }
        if self.batch_size == 0 {
            return fail("data.batch_size must be at least 1, got 0".to_owned());
        }
        let others = [("validation_path", self.validation_path.is_some())];
        check_validation(self.validation_fraction(), &others)?;
        Ok(named.into_iter().map(|(key, name)| Column { key, name: name.clone() }).collect())
    }
}
