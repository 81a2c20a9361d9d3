//! Layers of configuration: defaults, files and overrides. Later layers win.

use std::ffi::OsString;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use toml::{Table, Value};

use super::KeyDoc;
use super::catalogue::KnownTable;
use super::deserializer::deserialize;
use super::problem::{PathSegment, Problem, error_path, render};
use super::suggest::for_variable;
use crate::{Error, Result};
use fulgurite_error::files::read_regular_text;

/// Longest configuration file that is read, in bytes.
const MAX_FILE: u64 = 16 << 20;

/// A stack of configurations. Later layers win:
///
/// - tables merge key by key; anything else (lists too) is replaced;
/// - a table whose `type` changes is replaced whole, since its other keys are options of another
///   plugin;
/// - a key of a later layer removes the keys that it [excludes](Self::exclusive_keys);
/// - `"name"` and `{ type = "name" }` are equal, so a table over a name adds options to it;
/// - a string that begins with `~/` is a path in the home directory; one with `~user/` is refused;
/// - an override `key=null` removes the key's value in the layers below.
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
    /// Variables with the prefix of keys that do not set a key.
    stray: Stray,
}

/// Environment variables with the prefix of keys that name neither a key nor a known variable.
#[derive(Debug, Clone, Default)]
struct Stray {
    prefix: String,
    /// With the prefix.
    names: Vec<String>,
    /// Known variables, without the prefix.
    known: Vec<String>,
}

/// Groups of keys. Only one key of a group may be set.
type ExclusiveKeys = &'static [&'static [&'static str]];

#[derive(Debug, Clone)]
struct Layer {
    /// The file or override, for messages; `None` for the program's defaults.
    origin: Option<String>,
    table: Table,
    /// Whether it is one `--set` override.
    is_override: bool,
    /// The key that the override removes.
    removes: Option<Vec<String>>,
}

impl Layer {
    fn new(origin: Option<String>, table: Table) -> Self {
        Self { origin, table, is_override: false, removes: None }
    }
}

impl ConfigLayers {
    /// Creates an empty stack.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a layer of the program's own defaults on top of the layers so far.
    pub fn defaults(self, table: Table) -> Self {
        self.with(None, table)
    }

    /// Puts a layer of the program's own defaults below all others.
    pub fn prepend_defaults(mut self, table: Table) -> Self {
        self.layers.insert(0, Layer::new(None, table));
        self
    }

    /// Names the keys of a program's own table, for messages.
    ///
    /// If such a key is found in another table, the message suggests `name.key`. Tables of crates
    /// are known by [`register_table!`](crate::register_table).
    pub fn known_table(mut self, name: &'static str, keys: Vec<KeyDoc>) -> Self {
        self.known.push((name, keys));
        self
    }

    /// Names groups of keys of a top-level table that exclude each other.
    ///
    /// A layer that sets a key of a group removes the group's other keys from earlier layers. So a
    /// program's default does not exclude the user's choice.
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

    /// Adds a TOML file, a regular file of at most 16 MiB.
    ///
    /// Relative paths in it are relative to the working directory of the process, as on the command
    /// line.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read. [`Error::Config`] if it is not TOML, or if its
    /// name says YAML or JSON. All errors name the file.
    pub fn file(self, path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let extension = path.extension().map(|extension| extension.to_ascii_lowercase());
        let other = match extension.as_ref().and_then(|extension| extension.to_str()) {
            Some("yaml" | "yml") => Some("YAML"),
            Some("json" | "jsonc" | "json5") => Some("JSON"),
            _ => None,
        };
        if let Some(format) = other {
            return Err(Error::Config(format!(
                "{}: {format} by its name; a configuration is TOML: `[trainer]` and below it `max_steps = 100`",
                path.display()
            )));
        }
        let text = read_regular_text(path, MAX_FILE).map_err(|error| match error {
            Error::Io { path, source, .. } => {
                Error::Io { action: "reading the configuration file", path, source }
            }
            error => error,
        })?;
        self.text(path.display(), &text)
    }

    /// Adds TOML text, which messages call `name`.
    ///
    /// # Errors
    /// [`Error::Config`] if the text is not TOML.
    pub fn text(self, name: impl std::fmt::Display, text: &str) -> Result<Self> {
        let mut table = text.parse::<Table>().map_err(|error| {
            let hint = error.span().map_or("", |span| syntax_hint(text, span.start));
            Error::Config(format!("{name}: {}{hint}", error.to_string().trim_end()))
        })?;
        expand_home(&mut table).map_err(|why| Error::Config(format!("{name}: {why}")))?;
        Ok(self.with(Some(name.to_string()), table))
    }

    /// Adds one override, `a.b.c=value`.
    ///
    /// The value is TOML (`3`, `1e-4`, `true`, `["x", "y"]`, `{ type = "fsdp" }`); any other text
    /// is a string (`fsdp`, `data/train.txt`). Among consecutive overrides, a `type` may come
    /// before or after the options beside it. The value `null` removes the key's value in the
    /// layers below; the text is `'"null"'`.
    ///
    /// # Errors
    /// [`Error::Config`] without a `=`, for a malformed key, or for a list, table or quoted string
    /// that does not parse.
    pub fn set(self, assignment: &str) -> Result<Self> {
        let origin = format!("--set {assignment}");
        let (path, text) = split_assignment(assignment)?;
        self.override_with(origin, path, text)
    }

    /// Adds the override of one key; messages call it `origin`.
    fn override_with(mut self, origin: String, path: Vec<String>, text: &str) -> Result<Self> {
        let wrong = |why: String| Error::Config(format!("{origin}: {why}"));
        let mut layer = Layer::new(Some(origin.clone()), Table::new());
        layer.is_override = true;
        if text.trim() == "null" {
            layer.removes = Some(path);
        } else {
            let value = parse_value(text).map_err(wrong)?;
            let nested = path
                .into_iter()
                .rev()
                .fold(value, |value, part| Value::Table(Table::from_iter([(part, value)])));
            if let Value::Table(table) = nested {
                layer.table = table;
            }
            expand_home(&mut layer.table).map_err(wrong)?;
        }
        self.layers.push(layer);
        Ok(self)
    }

    /// Adds the overrides among environment variables.
    ///
    /// With the prefix `FULGURITE_`, the variable `FULGURITE_TRAINER__MAX_STEPS` is the key
    /// `trainer.max_steps`. Its value is read as in [`set`](Self::set). A variable without `__` is
    /// an override only if it names one of `top_level`. `others` are the program's other variables
    /// with the prefix, written without it. The rest is kept for
    /// [`check_variables`](Self::check_variables).
    ///
    /// # Errors
    /// [`Error::Config`], with the variable's name, for an empty part of a key, for text that is
    /// not UTF-8, and as [`set`](Self::set) for the value.
    pub fn environment(
        mut self,
        prefix: &str,
        top_level: &[&str],
        others: &[&str],
        variables: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Self> {
        let mut found: Vec<_> = variables
            .into_iter()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
            .filter(|(name, _)| {
                name.strip_prefix(prefix).is_some_and(|name| !others.contains(&name))
            })
            .collect();
        // The environment has an arbitrary order.
        found.sort();
        let is_key = |(name, _): &(String, OsString)| {
            let key = name[prefix.len()..].to_lowercase();
            key.contains("__") || top_level.contains(&key.as_str())
        };
        let (found, stray): (Vec<_>, Vec<_>) = found.into_iter().partition(is_key);
        self.stray.prefix = prefix.to_owned();
        self.stray.names.extend(stray.into_iter().map(|(name, _)| name));
        self.stray.known.extend(others.iter().map(|&other| other.to_owned()));
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
            let path = path.into_iter().map(str::to_owned).collect();
            layers.override_with(name, path, &value)
        })
    }

    /// Checks the remaining variables with the prefix of keys, which do not have an effect.
    ///
    /// Returns the variables that resemble neither a key nor a known variable: another program may
    /// own them.
    ///
    /// # Errors
    /// [`Error::Config`] if a variable resembles a key, such as `FULGURITE_TRAINER_MAX_STEPS` with
    /// one underscore, or a known variable.
    pub fn check_variables(&self) -> Result<&[String]> {
        let Stray { prefix, names, known } = &self.stray;
        let known: Vec<&str> = known.iter().map(String::as_str).collect();
        for name in names {
            let written = name.strip_prefix(prefix.as_str()).unwrap_or(name);
            if let Some(meant) = for_variable(written, &known, &self.known) {
                return Err(Error::Config(format!(
                    "the variable {name} has no effect; did you mean {prefix}{meant}? (In a variable two \
                     underscores stand for the point of a key.)"
                )));
            }
        }
        Ok(names)
    }

    fn with(mut self, origin: Option<String>, table: Table) -> Self {
        self.layers.push(Layer::new(origin, table));
        self
    }

    /// Returns the merged table.
    pub fn resolve(&self) -> Table {
        let mut merged = Table::new();
        // Consecutive overrides are merged with each other first, so that a `type` among them
        // replaces the table of a file and not the options of an earlier override.
        for group in self.layers.chunk_by(|a, b| a.is_override && b.is_override) {
            let mut together = Table::new();
            for layer in group {
                if let Some(path) = &layer.removes {
                    remove(&mut together, path);
                    remove(&mut merged, path);
                }
                merge_tables(&mut together, layer.table.clone(), group.len() > 1);
            }
            self.take_excluded(&mut merged, &together);
            merge_tables(&mut merged, together, false);
        }
        merged
    }

    /// Removes from `merged` the keys that are excluded by keys of `later`.
    fn take_excluded(&self, merged: &mut Table, later: &Table) {
        for (name, groups) in &self.exclusive {
            let Some(later) = later.get(*name).and_then(Value::as_table) else { continue };
            let Some(merged) = merged.get_mut(*name).and_then(Value::as_table_mut) else {
                continue;
            };
            for group in *groups {
                let (set, others): (Vec<&str>, Vec<&str>) =
                    group.iter().partition(|key| later.contains_key(**key));
                // A map that is set again keeps its other entries.
                if !set.is_empty() {
                    others.into_iter().for_each(|key| drop(merged.remove(key)));
                }
            }
        }
    }

    /// Parses the merged table as a `T`.
    ///
    /// # Errors
    /// As [`parse`](super::parse); also names the file or override that set the key.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T> {
        deserialize(Vec::new(), &Value::Table(self.resolve())).map_err(|e| self.error(e))
    }

    /// Parses the table `key` of the merged configuration as a `T`; empty if no layer has it.
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

    /// Returns the origin of the topmost layer that sets `path`; `None` for a default of the
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
            // A name is short for a table with this `type`.
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

/// Returns a hint about text that is not TOML here, but looks like JSON, YAML or Python.
fn syntax_hint(text: &str, at: usize) -> &'static str {
    if text.trim_start().starts_with('{') {
        return "\nThis looks like JSON; a configuration is TOML.";
    }
    let line_start = text.get(..at).and_then(|before| before.rfind('\n')).map_or(0, |end| end + 1);
    let line = text[line_start..].lines().next().unwrap_or_default();
    let value = line.split_once('=').map(|(_, value)| value.split('#').next().unwrap_or_default());
    match value.unwrap_or_default().trim() {
        "null" | "None" | "none" | "nil" | "~" => {
            "\nTOML has no null: leave the key out for no value."
        }
        "True" | "False" => "\nTOML writes `true` and `false`.",
        "" if value.is_none() && line.contains(':') => {
            "\nThis looks like YAML; a configuration is TOML: `[trainer]` and below it `max_steps = 100`."
        }
        _ => "",
    }
}

/// Removes the value at a path, if there is one.
fn remove(table: &mut Table, path: &[String]) {
    match path {
        [] => {}
        [key] => drop(table.remove(key)),
        [key, rest @ ..] => {
            if let Some(Value::Table(inner)) = table.get_mut(key) {
                remove(inner, rest);
            }
        }
    }
}

/// Replaces `~` by the home directory in strings that begin with `~/`.
fn expand_home(table: &mut Table) -> Result<(), String> {
    fn expand(value: &mut Value) -> Result<(), String> {
        match value {
            Value::String(text) => {
                let Some((user, rest)) = text.strip_prefix('~').and_then(|t| t.split_once('/'))
                else {
                    return Ok(());
                };
                if !user.is_empty() {
                    return Err(format!("`{text}`: `~{user}` is not known; write the whole path"));
                }
                let home = std::env::var("HOME").ok().filter(|home| !home.is_empty());
                let Some(home) = home else {
                    return Err(format!("`{text}`: HOME is not set; write the whole path"));
                };
                *text = format!("{}/{rest}", home.trim_end_matches('/'));
                Ok(())
            }
            Value::Array(values) => values.iter_mut().try_for_each(expand),
            Value::Table(table) => table.iter_mut().try_for_each(|(_, value)| expand(value)),
            _ => Ok(()),
        }
    }
    table.iter_mut().try_for_each(|(_, value)| expand(value))
}

/// Splits `a.b.c=value` into the path of the key and the text of the value.
fn split_assignment(assignment: &str) -> Result<(Vec<String>, &str)> {
    let wrong = |why: &str| {
        Err(Error::Config(format!(
            "--set {assignment}: {why}; expected key=value, such as trainer.max_steps=100"
        )))
    };
    // A quoted key may contain `=`: the split is at the first `=` after a well-formed key.
    let mut splits = assignment.match_indices('=').map(|(at, _)| assignment.split_at(at));
    let found = splits.find_map(|(key, rest)| {
        let one_line = !key.contains(['\n', '#']) && !key.trim_start().starts_with('[');
        let table = one_line.then(|| format!("{key} = 0").parse::<Table>().ok())??;
        Some((leaf_path(&table), &rest[1..]))
    });
    match found {
        Some(found) => Ok(found),
        None if assignment.contains("+=") => {
            wrong("nothing can be appended to a list; write the whole list")
        }
        None if assignment.contains('=') => wrong("the key is malformed"),
        None => wrong("there is no `=`"),
    }
}

/// Returns the path of the leaf of nested tables that have one entry each.
fn leaf_path(table: &Table) -> Vec<String> {
    let Some((key, value)) = table.iter().next() else { return Vec::new() };
    let mut path = vec![key.clone()];
    if let Value::Table(inner) = value {
        path.extend(leaf_path(inner));
    }
    path
}

fn parse_value(text: &str) -> Result<Value, String> {
    if text.trim() == "None" {
        return Err("write `null` for no value, or \"None\" in quotes for a text".to_owned());
    }
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

/// Converts a configuration to a TOML table; keys that are `None` are left out.
///
/// # Errors
/// [`Error::Config`] if TOML cannot represent it (an integer above `i64::MAX`).
pub fn to_table(config: &impl Serialize) -> Result<Table> {
    Table::try_from(config)
        .map_err(|error| Error::Config(format!("the configuration does not fit TOML: {error}")))
}

/// Converts a configuration to TOML text, with keys in order of declaration.
///
/// # Errors
/// As [`to_table`].
pub fn to_toml(config: &impl Serialize) -> Result<String> {
    toml::to_string(config)
        .map_err(|error| Error::Config(format!("the configuration does not fit TOML: {error}")))
}
