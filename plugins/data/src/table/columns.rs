//! From values of rows to numbers.

use std::collections::BTreeSet;

use fulgurite_error::{Error, Result};
use serde_json::Value;

use super::config::{OnMissing, TableConfig, Task};
use crate::rows::{Column, Row};

/// The most names of a column. Each name is a column of the model's input.
const MAX_NAMES: usize = 1 << 14;

/// Encodes a column of features as numbers.
#[derive(Debug)]
enum Encoding {
    /// `std` is `None` if numbers stay as they are.
    Number {
        mean: f64,
        std: Option<f64>,
    },
    Names(Vec<String>),
}

/// The columns of a table, as its training rows define them.
#[derive(Debug)]
pub(super) struct Columns {
    features: Vec<(Column, Encoding)>,
    missing: OnMissing,
    pub(super) target: Option<Target>,
}

/// The column to predict.
#[derive(Debug)]
pub(super) struct Target {
    column: Column,
    /// Its place in a row.
    at: usize,
    /// The classes, in order; `None` for numbers.
    pub(super) classes: Option<Vec<String>>,
}

/// The targets of rows.
#[derive(Debug, Default)]
pub(super) enum Answers {
    /// Rows without targets.
    #[default]
    None,
    Classes(Vec<i64>),
    Numbers(Vec<f32>),
}

/// The number of a value; `None` for names and lists.
fn number(value: &Value, is_text: bool) -> Option<f64> {
    let number = match value {
        Value::String(text) if is_text => text.trim().parse().ok(),
        Value::Bool(value) => Some(f64::from(u8::from(*value))),
        value => value.as_f64(),
    };
    number.filter(|number| number.is_finite())
}

/// The name that a value is; `None` for lists and tables.
fn name(value: &Value) -> Option<String> {
    match value {
        Value::String(name) => Some(name.clone()),
        Value::Bool(_) | Value::Number(_) => Some(value.to_string()),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}

/// The numbers of a column; `None` for a column of names.
///
/// # Errors
/// If some values are numbers and others are not.
fn numbers(column: &Column, at: usize, rows: &[&Row]) -> Result<Option<Vec<f64>>> {
    let of = |row: &&Row| row.values[at].as_ref().and_then(|value| number(value, row.is_text));
    let found: Vec<Option<f64>> = rows.iter().map(of).collect();
    let without = rows.iter().zip(&found).find(|(_, number)| number.is_none());
    match (without, found.iter().any(Option::is_some)) {
        (None, _) => Ok(found.into_iter().collect()),
        (Some(_), false) => Ok(None),
        (Some((row, _)), true) => {
            let advice = match column.key {
                "data.target" => "set data.task",
                _ => "name the column in data.categories",
            };
            let Column { key, name } = column;
            let value = row.values[at].as_ref().unwrap_or(&Value::Null);
            Err(row.place.wrong(format!(
                "has {value} under {name:?} ({key}), where other rows have numbers: correct it, or {advice}"
            )))
        }
    }
}

/// The different names of a column, numbers among them by size.
fn names(column: &Column, at: usize, rows: &[&Row]) -> Result<Vec<String>> {
    let mut all = BTreeSet::new();
    for row in rows {
        let Some(value) = &row.values[at] else { continue };
        all.insert(name(value).ok_or_else(|| no_value(row, column, value))?);
    }
    let mut all: Vec<String> = all.into_iter().collect();
    if all.iter().all(|name| name.parse::<f64>().is_ok()) {
        all.sort_by(|a, b| {
            let [a, b] = [a, b].map(|name| name.parse().unwrap_or(0.0));
            f64::total_cmp(&a, &b)
        });
    }
    Ok(all)
}

fn no_value(row: &Row, column: &Column, value: &Value) -> Error {
    let Column { key, name } = column;
    row.place
        .wrong(format!("has {value} under {name:?} ({key}), which is neither a number nor a name"))
}

impl Columns {
    /// Finds the names, means and deviations of training rows.
    ///
    /// # Errors
    /// If a value is neither a number nor a name, a column is empty or has too many names, or it is
    /// not clear what the target is.
    pub(super) fn of(config: &TableConfig, columns: &[Column], rows: &[&Row]) -> Result<Self> {
        let mut features = Vec::new();
        for (at, column) in columns[..config.features.len()].iter().enumerate() {
            let given: Vec<&Row> =
                rows.iter().copied().filter(|row| row.values[at].is_some()).collect();
            if given.is_empty() {
                return Err(Error::Data(format!(
                    "no training row has a value under {:?} ({})",
                    column.name, column.key
                )));
            }
            let numbers = match config.categories.contains(&column.name) {
                true => None,
                false => numbers(column, at, &given)?,
            };
            let encoding = match numbers {
                Some(numbers) => {
                    let count = numbers.len() as f64;
                    let mean = numbers.iter().sum::<f64>() / count;
                    let squares: f64 = numbers.iter().map(|x| (x - mean) * (x - mean)).sum();
                    let std = (squares / count).sqrt();
                    // A column of one number becomes 0.
                    let std = if std > 0.0 { std } else { 1.0 };
                    Encoding::Number { mean, std: config.standardize.then_some(std) }
                }
                None => Encoding::Names(names(column, at, rows)?),
            };
            if let Encoding::Names(names) = &encoding
                && names.len() > MAX_NAMES
            {
                return Err(Error::Data(format!(
                    "{:?} ({}) has {} different names, and may have {MAX_NAMES}; leave the column out, or encode it \
                     as numbers",
                    column.name,
                    column.key,
                    names.len()
                )));
            }
            features.push((column.clone(), encoding));
        }
        let target = match columns.get(config.features.len()) {
            Some(column) => Some(Target::of(config.task, column, config.features.len(), rows)?),
            None => None,
        };
        Ok(Self { features, missing: config.missing, target })
    }

    /// The names of the numbers of a row.
    pub(super) fn feature_names(&self) -> Vec<String> {
        let mut all = Vec::new();
        for (Column { name, .. }, encoding) in &self.features {
            match encoding {
                Encoding::Number { .. } => all.push(name.clone()),
                Encoding::Names(names) => {
                    all.extend(names.iter().map(|value| format!("{name}={value}")));
                }
            }
        }
        all
    }

    /// Appends the numbers of a row's features. Returns whether a name is in no training row.
    ///
    /// # Errors
    /// If a value is missing, or a name where the training rows have numbers.
    pub(super) fn add_features(&self, row: &Row, out: &mut Vec<f32>) -> Result<bool> {
        let mut unknown = false;
        for (at, (column, encoding)) in self.features.iter().enumerate() {
            let value = match (&row.values[at], self.missing) {
                (None, OnMissing::Error) => {
                    return Err(row.place.wrong(format!(
                        "has no value under {:?} ({}); give it one, or set data.missing = \"mean\"",
                        column.name, column.key
                    )));
                }
                (value, _) => value.as_ref(),
            };
            match encoding {
                Encoding::Number { mean, std } => {
                    let number = match value {
                        Some(value) => number(value, row.is_text).ok_or_else(|| {
                            row.place.wrong(format!(
                                "has {value} under {:?} ({}), where the training rows have numbers",
                                column.name, column.key
                            ))
                        })?,
                        None => *mean,
                    };
                    out.push(std.map_or(number, |std| (number - mean) / std) as f32);
                }
                Encoding::Names(names) => {
                    let given = match value {
                        Some(value) => {
                            Some(name(value).ok_or_else(|| no_value(row, column, value))?)
                        }
                        None => None,
                    };
                    let place = names.iter().position(|name| Some(name) == given.as_ref());
                    unknown |= given.is_some() && place.is_none();
                    out.extend((0..names.len()).map(|i| f32::from(u8::from(Some(i) == place))));
                }
            }
        }
        Ok(unknown)
    }
}

impl Target {
    fn of(task: Option<Task>, column: &Column, at: usize, rows: &[&Row]) -> Result<Self> {
        let mut is_decimal = false;
        for row in rows {
            is_decimal |= match Self::given(column, at, row)? {
                Value::String(text) => row.is_text && text.trim().parse::<i64>().is_err(),
                value => value.is_f64(),
            };
        }
        let task = match task {
            Some(task) => task,
            None if rows
                .iter()
                .all(|row| row.values[at].as_ref().is_some_and(Value::is_boolean)) =>
            {
                Task::Classification
            }
            None if numbers(column, at, rows)?.is_none() => Task::Classification,
            None if is_decimal => Task::Regression,
            None => {
                return Err(Error::Config(format!(
                    "{:?} (data.target) has integers, which may be classes or numbers to predict: set data.task to \
                     \"classification\" or \"regression\"",
                    column.name
                )));
            }
        };
        let classes = match task {
            Task::Classification => Some(names(column, at, rows)?),
            Task::Regression => None,
        };
        Ok(Self { column: column.clone(), at, classes })
    }

    fn given<'a>(column: &Column, at: usize, row: &'a Row) -> Result<&'a Value> {
        row.values[at].as_ref().ok_or_else(|| {
            row.place.wrong(format!("has no value under {:?} ({})", column.name, column.key))
        })
    }

    /// Reads the targets of rows.
    ///
    /// # Errors
    /// If a row is without a target, or its target is not among the training rows'.
    pub(super) fn read(&self, rows: &[&Row]) -> Result<Answers> {
        match &self.classes {
            Some(classes) => {
                let class = |row: &&Row| self.class(classes, row);
                rows.iter().map(class).collect::<Result<_>>().map(Answers::Classes)
            }
            None => {
                let number = |row: &&Row| self.number(row);
                rows.iter().map(number).collect::<Result<_>>().map(Answers::Numbers)
            }
        }
    }

    fn class(&self, classes: &[String], row: &Row) -> Result<i64> {
        let value = Self::given(&self.column, self.at, row)?;
        let given = name(value).ok_or_else(|| no_value(row, &self.column, value))?;
        match classes.iter().position(|class| *class == given) {
            Some(class) => Ok(class as i64),
            None => Err(row.place.wrong(format!(
                "has {value} under {:?} ({}), which is none of the classes {}",
                self.column.name,
                self.column.key,
                classes.join(", ")
            ))),
        }
    }

    fn number(&self, row: &Row) -> Result<f32> {
        let value = Self::given(&self.column, self.at, row)?;
        let number = number(value, row.is_text).ok_or_else(|| {
            row.place.wrong(format!(
                "has {value} under {:?} ({}), which is no number",
                self.column.name, self.column.key
            ))
        })?;
        Ok(number as f32)
    }
}
