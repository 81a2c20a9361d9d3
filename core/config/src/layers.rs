//! Layers of configuration: defaults, files and overrides. Later layers win.

use std::ffi::OsString;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use toml::{Table, Value};

use super::KeyDoc;
use super::deserializer::deserialize;
use super::problem::{KnownTable, PathSegment, Problem, error_path, render};
use crate::{Error, Result};
use fulgurite_error::files::read_regular_text;

/// The longest configuration file that is read.
const MAX_FILE: u64 = 16 << 20;

/// A stack of configurations. Later layers win:
///
/// - tables merge key by key; anything else (lists too) is replaced;
/// - a table whose `type` changes is replaced whole, since its other keys are options of another
///   plugin;
/// - a key of a later layer removes the keys that it [excludes](Self::exclusive_keys);
/// - `"name"` and `{ type = "name" }` are equal, so a table over a name adds options to it.
///
/// ```
/// # use fulgurite_core::config::ConfigLayers;
/// let config = ConfigLayers::new()
///     .text("a.toml", "trainer = { strategy = \"fsdp\", max_steps = 5 }")?
///     .set("trainer.strategy.reshard_after_forward=false")?
///     .resolve();
/// assert_eq!(config["trainer"]["strategy"]["type"].as_str(), Some("fsdp"));
/// assert_eq!(config["trainer"]["max_steps"].as_integer(), Some(5));
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct ConfigLayers {
    layers: Vec<Layer>,
    known: Vec<KnownTable>,
    /// Tables, and groups of keys in them.
    exclusive: Vec<(&'static str, ExclusiveKeys)>,
}

/// Groups of keys. At most one of a group is to be set.
type ExclusiveKeys = &'static [&'static [&'static str]];

#[derive(Debug, Clone)]
struct Layer {
    /// The file or override, for messages; `None` for defaults of the program.
    origin: Option<String>,
    table: Table,
    /// Whether it is one `--set` override.
    is_override: bool,
}

impl ConfigLayers {
    /// No layers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a layer of the program's own defaults on top of the layers so far.
    pub fn defaults(self, table: Table) -> Self {
        self.with(None, table)
    }

    /// Puts a layer of the program's own defaults below all others.
    pub fn prepend_defaults(mut self, table: Table) -> Self {
        self.layers.insert(0, Layer { origin: None, table, is_override: false });
        self
    }

    /// Names the keys of a table for messages: where such a key is found at the top level, the
    /// message suggests `name.key`.
    pub fn known_table(mut self, name: &'static str, keys: Vec<KeyDoc>) -> Self {
        self.known.push((name, keys));
        self
    }

    /// Names groups of keys of a top-level table that exclude each other. A layer that sets one of
    /// a group removes the others from the layers before it. So a program's default does not
    /// exclude the user's choice.
    ///
    /// ```
    /// # use fulgurite_core::config::ConfigLayers;
    /// let config = ConfigLayers::new()
    ///     .exclusive_keys("data", &[&["path", "mixture"]])
    ///     .text("defaults", "data.path = \"books\"")?
    ///     .set("data.mixture=[{ path = \"code\", weight = 1.0 }]")?
    ///     .resolve();
    /// assert!(config["data"].get("path").is_none());
    /// # Ok::<(), fulgurite_core::Error>(())
    /// ```
    pub fn exclusive_keys(
        mut self,
        table: &'static str,
        groups: &'static [&'static [&'static str]],
    ) -> Self {
        self.exclusive.push((table, groups));
        self
    }

    /// Adds a TOML file, a regular one of at most 16 MiB.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be read, [`Error::Config`] if it is not TOML; both name it.
    pub fn file(self, path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let text = read_regular_text(path, MAX_FILE).map_err(|error| match error {
            Error::Io { path, source, .. } => {
                Error::Io { action: "reading the configuration file", path, source }
            }
            error => error,
        })?;
        self.text(path.display(), &text)
    }

    /// Adds TOML text; messages call it `name`.
    ///
    /// # Errors
    /// [`Error::Config`] if it is not TOML.
    pub fn text(self, name: impl std::fmt::Display, text: &str) -> Result<Self> {
        let table = text
            .parse::<Table>()
            .map_err(|error| Error::Config(format!("{name}: {}", error.to_string().trim_end())))?;
        Ok(self.with(Some(name.to_string()), table))
    }

    /// Adds one override, `a.b.c=value`. The value is TOML (`3`, `1e-4`, `true`, `["x", "y"]`, `{
    /// type = "fsdp" }`); anything that is not TOML is a string (`fsdp`, `data/train.txt`). Among
    /// consecutive overrides, a `type` may come before or after the options beside it.
    ///
    /// # Errors
    /// [`Error::Config`] without a `=`, for a malformed key, or for a list, table or quoted string
    /// that does not parse.
    pub fn set(self, assignment: &str) -> Result<Self> {
        let table = parse_assignment(assignment)?;
        let mut layers = self.with(Some(format!("--set {assignment}")), table);
        if let Some(layer) = layers.layers.last_mut() {
            layer.is_override = true;
        }
        Ok(layers)
    }

    /// Adds the overrides among the variables of an environment: with the prefix `FULGURITE_`, the variable
    /// `FULGURITE_TRAINER__MAX_STEPS` is the key `trainer.max_steps`. Its value is read as that of
    /// [`set`](Self::set). A variable without `__` is an override only if it names one of `top_level`, for
    /// programs have other variables of that prefix.
    ///
    /// # Errors
    /// [`Error::Config`], with the variable's name, for a part of a key that is empty, for text that is not
    /// UTF-8, and as [`set`](Self::set) for the value.
    pub fn environment(
        self,
        prefix: &str,
        top_level: &[&str],
        variables: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Self> {
        let mut found: Vec<_> = variables
            .into_iter()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
            .filter(|(name, _)| {
                let key = name.strip_prefix(prefix).map(str::to_lowercase);
                key.is_some_and(|key| key.contains("__") || top_level.contains(&key.as_str()))
            })
            .collect();
        // The order of an environment is arbitrary.
        found.sort();
        found.into_iter().try_fold(self, |layers, (name, value)| {
            let wrong = |why: String| Error::Config(format!("{name}: {why}"));
            let value = value.into_string().map_err(|_| wrong("is not UTF-8".to_owned()))?;
            let key = name[prefix.len()..].to_lowercase();
            let path: Vec<_> = key.split("__").collect();
            if path.contains(&"") {
                return Err(wrong(format!(
                    "a part of the key is empty; expected {prefix}TABLE__KEY, such as \
                     {prefix}TRAINER__MAX_STEPS"
                )));
            }
            let value = parse_value(&value).map_err(wrong)?;
            let nested = path.iter().rev().fold(value, |value, part| {
                Value::Table(Table::from_iter([((*part).to_owned(), value)]))
            });
            let Value::Table(table) = nested else { return Ok(layers) };
            let mut layers = layers.with(Some(name), table);
            if let Some(layer) = layers.layers.last_mut() {
                layer.is_override = true;
            }
            Ok(layers)
        })
    }

    fn with(mut self, origin: Option<String>, table: Table) -> Self {
        self.layers.push(Layer { origin, table, is_override: false });
        self
    }

    /// The merged table.
    pub fn resolve(&self) -> Table {
        let mut merged = Table::new();
        // Consecutive overrides are merged with each other first, so that a `type` among them
        // replaces the table of a file and not the options of an earlier override.
        for group in self.layers.chunk_by(|a, b| a.is_override && b.is_override) {
            let mut together = Table::new();
            for layer in group {
                merge_tables(&mut together, layer.table.clone(), group.len() > 1);
            }
            self.take_excluded(&mut merged, &together);
            merge_tables(&mut merged, together, false);
        }
        merged
    }

    /// Takes from `merged` the keys that those of `later` exclude.
    fn take_excluded(&self, merged: &mut Table, later: &Table) {
        for (name, groups) in &self.exclusive {
            let Some(later) = later.get(*name).and_then(Value::as_table) else { continue };
            let Some(merged) = merged.get_mut(*name).and_then(Value::as_table_mut) else {
                continue;
            };
            for group in *groups {
                if group.iter().any(|key| later.contains_key(*key)) {
                    group.iter().for_each(|key| drop(merged.remove(*key)));
                }
            }
        }
    }

    /// The merged table as a `T`.
    ///
    /// # Errors
    /// As [`parse`](super::parse), and names the file or override that the key is from.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T> {
        deserialize(Vec::new(), &Value::Table(self.resolve())).map_err(|e| self.error(e))
    }

    /// The table `key` of the merged configuration as a `T`; empty if no layer has it.
    ///
    /// # Errors
    /// As [`parse`](Self::parse).
    pub fn parse_table<T: DeserializeOwned>(&self, key: &str) -> Result<T> {
        let value = self.resolve().remove(key).unwrap_or_else(|| Table::new().into());
        deserialize(vec![PathSegment::Key(key.to_owned())], &value).map_err(|e| self.error(e))
    }

    fn error(&self, (path, problem): (Vec<PathSegment>, Problem)) -> Error {
        let message = render(&path, &problem, &self.known);
        match self.origin(&error_path(&path, &problem)) {
            Some(origin) => Error::Config(format!("{origin}: {message}")),
            None => Error::Config(message),
        }
    }

    /// The origin of the topmost layer that sets `path`; `None` if that is a default of the
    /// program.
    fn origin(&self, path: &[PathSegment]) -> Option<&str> {
        if path.is_empty() {
            return None;
        }
        let layer = self.layers.iter().rev().find(|layer| mentions(&layer.table, path))?;
        layer.origin.as_deref()
    }
}

fn mentions(table: &Table, path: &[PathSegment]) -> bool {
    let mut keys = path.iter().map_while(|segment| match segment {
        PathSegment::Key(key) => Some(key),
        PathSegment::Index(_) => None,
    });
    let Some(mut value) = keys.next().and_then(|key| table.get(key)) else { return false };
    for key in keys {
        match value {
            Value::Table(table) => match table.get(key) {
                Some(inner) => value = inner,
                None => return false,
            },
            // A name, which is short for a table with this `type`.
            Value::String(_) => return key == "type",
            _ => return true,
        }
    }
    true
}

/// With `partial`, a table without a `type` may get one from a later override of the same group.
fn merge_tables(base: &mut Table, overlay: Table, partial: bool) {
    for (key, value) in overlay {
        match base.get_mut(&key) {
            Some(existing) => merge_values(existing, value, partial),
            None => drop(base.insert(key, value)),
        }
    }
}

fn merge_values(base: &mut Value, overlay: Value, partial: bool) {
    match (&mut *base, overlay) {
        (Value::Table(base), Value::Table(overlay)) => {
            let renamed = matches!(
                (base.get("type"), overlay.get("type")),
                (Some(old), Some(new)) if old != new
            );
            if renamed {
                base.clear();
            }
            merge_tables(base, overlay, partial);
        }
        (Value::String(name), Value::Table(overlay)) => {
            let mut named = Value::Table(with_type(name));
            merge_values(&mut named, Value::Table(overlay), partial);
            *base = named;
        }
        (Value::Table(table), Value::String(name)) if partial || table.contains_key("type") => {
            merge_values(base, Value::Table(with_type(&name)), partial);
        }
        (base, overlay) => *base = overlay,
    }
}

fn with_type(name: &str) -> Table {
    Table::from_iter([("type".to_owned(), Value::String(name.to_owned()))])
}

fn parse_assignment(assignment: &str) -> Result<Table> {
    let wrong = |why: &str| {
        Err(Error::Config(format!(
            "--set {assignment}: {why}; expected key=value, such as trainer.max_steps=100"
        )))
    };
    // A quoted key may contain `=`: the first `=` with a well-formed key before it is the one.
    let mut splits = assignment.match_indices('=').map(|(at, _)| assignment.split_at(at));
    let Some((mut nested, text)) = splits.find_map(|(key, rest)| {
        let one_line = !key.contains(['\n', '#']) && !key.trim_start().starts_with('[');
        let table = one_line.then(|| format!("{key} = 0").parse::<Table>().ok())??;
        Some((table, &rest[1..]))
    }) else {
        return wrong(if assignment.contains('=') {
            "the key is malformed"
        } else {
            "there is no `=`"
        });
    };
    let value =
        parse_value(text).map_err(|why| Error::Config(format!("--set {assignment}: {why}")))?;
    set_leaf(&mut nested, value);
    Ok(nested)
}

/// Sets the leaf of nested tables that have one entry each.
fn set_leaf(table: &mut Table, value: Value) {
    if let Some((_, inner)) = table.iter_mut().next() {
        match inner {
            Value::Table(inner) => set_leaf(inner, value),
            leaf => *leaf = value,
        }
    }
}

fn parse_value(text: &str) -> Result<Value, String> {
    let parsed = format!("value = {text}").parse::<Table>();
    match parsed {
        Ok(mut table) if table.len() == 1 => match table.remove("value") {
            Some(Value::Datetime(_)) | None => Ok(Value::String(text.to_owned())),
            Some(value) => Ok(value),
        },
        Err(error) if text.trim_start().starts_with(['[', '{', '"', '\'']) => {
            Err(format!("{}; strings inside lists and tables need quotes", error.message()))
        }
        _ => Ok(Value::String(text.to_owned())),
    }
}

/// A configuration as a TOML table; keys that are `None` are left out.
///
/// # Errors
/// [`Error::Config`] if TOML cannot hold it (an integer above `i64::MAX`).
pub fn to_table(config: &impl Serialize) -> Result<Table> {
    Table::try_from(config)
        .map_err(|error| Error::Config(format!("the configuration does not fit TOML: {error}")))
}

/// A configuration as TOML text, keys in order of declaration.
///
/// # Errors
/// As [`to_table`].
pub fn to_toml(config: &impl Serialize) -> Result<String> {
    toml::to_string(config)
        .map_err(|error| Error::Config(format!("the configuration does not fit TOML: {error}")))
}
