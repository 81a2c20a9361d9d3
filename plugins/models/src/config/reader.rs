//! Reading the keys of a model, as `transformers` does.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::fmt::Display;

use fulgurite_error::{Error, Result};
use serde_json::{Map, Value};

use super::keys::{self, FOREIGN, KeyKind, OF_HEADS};
use super::model_config::ModelConfig;

/// The keys of one model: the table `[model]`, and under it `config.json`.
///
/// Remembers which keys were asked for, so that [`finish`](Self::finish) finds the others.
pub(crate) struct Reader<'a> {
    config: &'a ModelConfig,
    asked: RefCell<BTreeSet<String>>,
    unapplied: Cell<Option<(&'static str, f64)>>,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(config: &'a ModelConfig) -> Self {
        Self { config, asked: RefCell::default(), unapplied: Cell::default() }
    }

    /// The model's type, for messages.
    pub(crate) fn model_type(&self) -> &str {
        self.config.model_type()
    }

    /// Returns the value of a key; `None` if it is missing or `null`.
    pub(crate) fn value(&self, name: &str) -> Option<&'a Value> {
        self.asked.borrow_mut().insert(name.to_owned());
        self.raw(name)
    }

    /// Whether the configuration sets a key, not a model's file.
    pub(crate) fn is_set(&self, name: &str) -> bool {
        self.config.get(name).is_some()
    }

    fn raw(&self, name: &str) -> Option<&'a Value> {
        let of_file = || self.config.file().and_then(|(_, values)| values.get(name));
        self.config.get(name).or_else(of_file).filter(|value| !is_none(name, value))
    }

    /// An error about a key, which names its file or its place in the configuration.
    pub(crate) fn wrong(&self, name: &str, message: impl Display) -> Error {
        match self.config.file() {
            Some((file, values))
                if self.config.get(name).is_none() && values.contains_key(name) =>
            {
                Error::Config(format!("{}: `{name}`: {message}", file.display()))
            }
            _ => Error::Config(format!("`model.{name}`: {message}")),
        }
    }

    fn missing(&self, name: &str) -> Error {
        let message = "it is missing, and the model's shape follows from it";
        match self.config.file() {
            Some((file, _)) => Error::Config(format!("{}: `{name}`: {message}", file.display())),
            None => Error::Config(format!("`model.{name}`: {message}; set it")),
        }
    }

    /// Returns a value of the key's kind.
    fn checked(&self, name: &str) -> Result<Option<&'a Value>> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let kind = keys::find(name).map(|key| key.kind);
        match kind {
            Some(kind) if !kind.accepts(value) => {
                Err(self.wrong(name, format!("expected {}, found {value}", kind.expected())))
            }
            _ => Ok(Some(value)),
        }
    }

    /// Returns a size with a default of the caller's.
    pub(crate) fn optional_size(&self, name: &str) -> Result<Option<usize>> {
        Ok(self.checked(name)?.and_then(Value::as_u64).map(|size| size as usize))
    }

    pub(crate) fn size(&self, name: &str) -> Result<usize> {
        self.optional_size(name)?.ok_or_else(|| self.missing(name))
    }

    pub(crate) fn size_or(&self, name: &str, default: usize) -> Result<usize> {
        Ok(self.optional_size(name)?.unwrap_or(default))
    }

    pub(crate) fn optional_number(&self, name: &str) -> Result<Option<f64>> {
        Ok(self.checked(name)?.and_then(Value::as_f64))
    }

    pub(crate) fn number_or(&self, name: &str, default: f64) -> Result<f64> {
        Ok(self.optional_number(name)?.unwrap_or(default))
    }

    /// A number of at least 0 and less than 1.
    pub(crate) fn probability(&self, name: &str, default: f64) -> Result<f64> {
        let value = self.number_or(name, default)?;
        match (0.0..1.0).contains(&value) {
            true => Ok(value),
            false => {
                Err(self.wrong(name, format!("must be at least 0 and below 1, found {value:?}")))
            }
        }
    }

    /// The epsilon of a norm.
    pub(crate) fn eps(&self, name: &str, default: f64) -> Result<f64> {
        let value = self.number_or(name, default)?;
        match (0.0..=1.0).contains(&value) {
            true => Ok(value),
            false => Err(self.wrong(name, format!("must be from 0 to 1, found {value:?}"))),
        }
    }

    /// The standard deviation of initial weights.
    pub(crate) fn initializer_range(&self) -> Result<f64> {
        self.deviation("initializer_range", 0.02)
    }

    /// The factor of the standard deviations of T5's initial weights.
    pub(crate) fn initializer_factor(&self) -> Result<f64> {
        self.deviation("initializer_factor", 1.0)
    }

    fn deviation(&self, name: &str, default: f64) -> Result<f64> {
        let value = self.number_or(name, default)?;
        match (0.0..=1e3).contains(&value) {
            true => Ok(value),
            false => Err(self.wrong(name, format!("must be from 0 to 1000, found {value:?}"))),
        }
    }

    /// Whether the key has the value `null`.
    pub(crate) fn is_null(&self, name: &str) -> bool {
        let of_file = || self.config.file().and_then(|(_, values)| values.get(name));
        self.config.get(name).or_else(of_file).is_some_and(|value| is_none(name, value))
    }

    /// A size for which `null` means none, with the default for a missing key.
    pub(crate) fn nullable_size(
        &self,
        name: &str,
        default: Option<usize>,
    ) -> Result<Option<usize>> {
        Ok(self.optional_size(name)?.or(default.filter(|_| !self.is_null(name))))
    }

    /// A number for which `null` means none, with the default for a missing key.
    pub(crate) fn nullable_number(&self, name: &str, default: Option<f64>) -> Result<Option<f64>> {
        Ok(self.optional_number(name)?.or(default.filter(|_| !self.is_null(name))))
    }

    pub(crate) fn integer_or(&self, name: &str, default: usize) -> Result<usize> {
        Ok(self.checked(name)?.and_then(Value::as_u64).map_or(default, |n| n as usize))
    }

    pub(crate) fn flag_or(&self, name: &str, default: bool) -> Result<bool> {
        Ok(self.checked(name)?.and_then(Value::as_bool).unwrap_or(default))
    }

    /// A flag of `config.json`, whatever the configuration sets; `None` without a file or the key.
    pub(crate) fn flag_of_file(&self, name: &str) -> Option<bool> {
        self.config.file().and_then(|(_, values)| values.get(name)).and_then(Value::as_bool)
    }

    pub(crate) fn text(&self, name: &str) -> Result<Option<&'a str>> {
        Ok(self.checked(name)?.and_then(Value::as_str))
    }

    pub(crate) fn table(&self, name: &str) -> Result<Option<&'a Map<String, Value>>> {
        Ok(self.checked(name)?.and_then(Value::as_object))
    }

    pub(crate) fn list(&self, name: &str) -> Result<Option<&'a Vec<Value>>> {
        Ok(self.checked(name)?.and_then(Value::as_array))
    }

    /// Asks for a key that the model can only have with this value.
    pub(crate) fn fixed(&self, name: &str, only: impl Into<Value>) -> Result<()> {
        let only = only.into();
        let same = |value: &Value| match (value.as_f64(), only.as_f64()) {
            (Some(value), Some(only)) => value == only,
            _ => *value == only,
        };
        match self.value(name).filter(|value| !same(value)) {
            None => Ok(()),
            Some(value) => {
                let model_type = self.model_type();
                let message = format!(
                    "only {only} is supported in a model of type \"{model_type}\", found {value}"
                );
                Err(self.wrong(name, message))
            }
        }
    }

    /// Asks for the dropout of attention's probabilities, which is not applied.
    pub(crate) fn attention_dropout(&self, name: &'static str, default: f64) {
        let dropout = self.value(name).and_then(Value::as_f64).unwrap_or(default);
        self.unapplied.set(Some((name, dropout)).filter(|_| dropout != 0.0));
    }

    /// Returns the key and the value of a dropout that the model does not apply.
    pub(crate) fn unapplied_dropout(&self) -> Option<(&'static str, f64)> {
        self.unapplied.get()
    }

    /// Refuses keys that the family has not asked for and that change what a model computes.
    ///
    /// # Errors
    /// If the table `[model]` sets such a key, or `config.json` has one that switches something on.
    pub(crate) fn finish(&self) -> Result<()> {
        let asked = self.asked.borrow();
        let model_type = self.model_type();
        // The configuration of a checkpoint has all keys of the file that it came from.
        let counts = |name: &str, value: &Value| !OF_HEADS.contains(&name) && switches_on(value);
        let set = self.config.values().iter();
        let mut unknown = set.filter(|(key, _)| !asked.contains(**key));
        if let Some((key, _)) = unknown.find(|(key, value)| counts(key, value)) {
            let message = format!("a model of type \"{model_type}\" has no such key; leave it out");
            return Err(self.wrong(key, message));
        }
        let Some((file, values)) = self.config.file() else { return Ok(()) };
        let mut ignored = Vec::new();
        for (name, value) in values.iter().filter(|(name, _)| !asked.contains(*name)) {
            let is_known = keys::find(name).is_some() || FOREIGN.contains(&name.as_str());
            if is_known && counts(name, value) {
                let message = format!(
                    "a model of type \"{model_type}\" has no such key here, and it would change the results; found \
                     {value}"
                );
                return Err(self.wrong(name, message));
            }
            ignored.push(name.as_str());
        }
        tracing::debug!("{}: ignored keys: {}", file.display(), ignored.join(", "));
        Ok(())
    }
}

/// Whether a value stands for none: `null`, and for want of it in TOML `false`.
fn is_none(name: &str, value: &Value) -> bool {
    let is_flag = || keys::find(name).is_some_and(|key| key.kind == KeyKind::Flag);
    value.is_null() || (*value == Value::Bool(false) && !is_flag())
}

/// Whether a value asks for something: not null, false, zero, empty or a plain text.
fn switches_on(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(flag) => *flag,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(list) => !list.is_empty(),
        Value::Object(table) => !table.is_empty(),
    }
}
