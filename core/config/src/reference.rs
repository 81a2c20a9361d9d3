//! The reference of configuration keys, rendered from the declarations.
//!
//! ```
//! use fulgurite_core::config::reference::{self, Section};
//!
//! /// The table `[data]`.
//! #[derive(serde::Serialize, serde::Deserialize, fulgurite_core::config::Documented)]
//! #[serde(deny_unknown_fields, default)]
//! struct DataConfig {
//!     /// Tokens in a sample.
//!     #[default(128)]
//!     seq_len: usize,
//! }
//!
//! let page = reference::markdown(&[Section::of::<DataConfig>("data")?]);
//! assert!(page.contains("| `seq_len` | integer | `128` | Tokens in a sample. |"));
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;

use super::catalogue::{is_list, registered};
use super::plugin::kind_descriptor;
use super::{Documented, KeyDoc, PluginValue, documented_keys};
use crate::registry::PluginDescriptor;
use crate::{Error, Result};

/// A table of the configuration, for the reference.
#[derive(Debug, Clone)]
pub struct Section {
    /// The table's path: `trainer`; empty for the top level.
    pub path: String,
    /// Its keys.
    pub keys: Vec<KeyDoc>,
    /// The defaults of keys, if they have one, as TOML text.
    pub defaults: BTreeMap<String, String>,
}

impl Section {
    /// Returns the section of a table that is [`Documented`].
    ///
    /// # Errors
    /// [`Error::Config`] if the documented keys differ from the keys that serde writes.
    pub fn of<T: Documented + Default + Serialize>(path: &str) -> Result<Self> {
        Self::new(path, T::keys(), &T::default())
    }

    /// Returns the section of any type.
    ///
    /// A [`Documented`] type has its documentation; other types have the keys of their defaults.
    ///
    /// # Errors
    /// If the defaults cannot be serialised.
    pub fn of_any<T: Default + Serialize + 'static>(path: &str) -> Result<Self> {
        let defaults = T::default();
        match documented_keys::<T>() {
            Some(keys) => Ok(Self {
                path: path.to_owned(),
                keys,
                defaults: default_texts(&super::to_table(&defaults)?),
            }),
            None => Self::undocumented(path, &defaults),
        }
    }

    /// Returns a section with the keys and defaults of a table that is not [`Documented`].
    ///
    /// # Errors
    /// If the defaults cannot be serialised.
    pub fn undocumented(path: &str, defaults: &impl Serialize) -> Result<Self> {
        let all = serde_json::to_value(defaults).map_err(Error::other)?;
        let key = |name: &String| KeyDoc { name: name.clone().into(), ty: String::new(), doc: "" };
        let keys = all.as_object().into_iter().flat_map(|object| object.keys()).map(key).collect();
        Self::assemble(path, keys, &all, &super::to_table(defaults)?)
    }

    /// Returns a section from the documentation of its keys and a value with the defaults.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn new(path: &str, keys: Vec<KeyDoc>, defaults: &impl Serialize) -> Result<Self> {
        // JSON has all keys; TOML leaves out keys that are `None`.
        let all = serde_json::to_value(defaults).map_err(Error::other)?;
        Self::assemble(path, keys, &all, &super::to_table(defaults)?)
    }

    fn assemble(
        path: &str,
        keys: Vec<KeyDoc>,
        all: &serde_json::Value,
        defaults: &toml::Table,
    ) -> Result<Self> {
        let mut written: Vec<_> =
            all.as_object().into_iter().flat_map(|o| o.keys().map(String::as_str)).collect();
        let mut documented: Vec<_> = keys.iter().map(|key| key.name.as_ref()).collect();
        written.sort_unstable();
        documented.sort_unstable();
        if written != documented {
            return Err(Error::Config(format!(
                "the reference of `{path}` is out of date: documented are {}; there are {}",
                documented.join(", "),
                written.join(", ")
            )));
        }
        Ok(Self { path: path.to_owned(), keys, defaults: default_texts(defaults) })
    }
}

/// Returns all values except tables, as TOML text.
fn default_texts(defaults: &toml::Table) -> BTreeMap<String, String> {
    let values = defaults.iter().filter(|(_, value)| !value.is_table());
    values.map(|(key, value)| (key.clone(), value.to_string())).collect()
}

/// Formats the sections as Markdown, one table each.
pub fn markdown(sections: &[Section]) -> String {
    let mut page = String::new();
    for section in sections {
        let title = match section.path.as_str() {
            "" => "Top level".to_owned(),
            path => format!("`[{path}]`"),
        };
        let _ = write!(page, "## {title}\n\n| key | type | default | |\n|---|---|---|---|\n");
        for key in &section.keys {
            let default =
                section.defaults.get(key.name.as_ref()).map_or("–".into(), |d| format!("`{d}`"));
            let doc = one_line(key.doc).replace('|', "\\|");
            let _ = writeln!(page, "| `{}` | {} | {default} | {doc} |", key.name, key.ty);
        }
        page.push('\n');
    }
    page
}

/// Formats the sections as a list for a terminal.
///
/// Each key has one line, with the first sentence of its documentation.
pub fn plain_text(sections: &[Section]) -> String {
    let mut rows = Vec::new();
    for section in sections {
        for key in &section.keys {
            let name = match section.path.as_str() {
                "" => key.name.to_string(),
                path => format!("{path}.{}", key.name),
            };
            let doc = one_line(key.doc).replace('`', "");
            let ends = [". ", "; "].iter().filter_map(|end| doc.find(end));
            let sentence = doc[..ends.min().unwrap_or(doc.len())].trim_end_matches('.');
            let default = section.defaults.get(key.name.as_ref()).map(|d| format!(" [{d}]"));
            rows.push((name, format!("{sentence}{}", default.unwrap_or_default())));
        }
    }
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    rows.iter().fold(String::new(), |mut text, (name, doc)| {
        let _ = writeln!(text, "  {name:width$}  {doc}");
        text
    })
}

/// Formats the plugins as Markdown: a table for each kind, with the options that have defaults.
pub fn plugins_markdown(plugins: &[PluginDescriptor]) -> String {
    let mut page = String::new();
    let mut kind = "";
    for plugin in plugins {
        if plugin.kind != kind {
            kind = plugin.kind;
            let _ = write!(
                page,
                "\n### `{}`\n\n| type | | options and defaults | example | crate |\n\
                 |---|---|---|---|---|\n",
                plugin_key(kind)
            );
        }
        let code = |text: &str| match text {
            "" => "–".to_owned(),
            text => format!("`{}`", text.replace('|', "\\|")),
        };
        let _ = writeln!(
            page,
            "| `{}` | {} | {} | {} | {} |",
            plugin.name,
            plugin.summary.replace('|', "\\|"),
            code(&default_options(plugin).unwrap_or_default()),
            code(plugin.example),
            plugin.krate,
        );
    }
    page
}

/// Returns the configuration key that selects a plugin of this kind.
pub fn plugin_key(kind: &str) -> &str {
    kind_descriptor(kind).map_or(kind, |kind| kind.key)
}

/// Returns an example configuration that selects a plugin, as a complete line of TOML.
///
/// For instance `trainer.callbacks = [{ type = "early_stopping", … }]`.
pub fn plugin_assignment(plugin: &PluginDescriptor) -> String {
    let key = plugin_key(plugin.kind);
    let value = match plugin.example {
        "" => format!("{:?}", plugin.name),
        example => example.to_owned(),
    };
    if is_list(&registered(), key) {
        return format!("{key} = [{value}]");
    }
    // An option of another plugin: the other plugin must have this option.
    let outer = key.rsplit_once('.').and_then(|(outer, option)| {
        let kind = super::plugin::kind_descriptors().find(|kind| kind.key == outer)?;
        let has_option = |name: &&str| {
            (kind.option_names)(name).is_some_and(|names| names.iter().any(|name| name == option))
        };
        let name = crate::registry::names(kind.kind).into_iter().find(has_option)?;
        Some(format!("{outer} = {{ type = \"{name}\", {option} = {value} }}"))
    });
    outer.unwrap_or_else(|| format!("{key} = {value}"))
}

/// Returns a plugin's options with their defaults, and whether the list is complete.
pub fn option_keys(plugin: &PluginDescriptor) -> (Vec<(KeyDoc, Option<String>)>, bool) {
    let kind = kind_descriptor(plugin.kind);
    let value = PluginValue::new(plugin.name);
    let defaults = kind.and_then(|kind| (kind.options)(&value, "").ok()).unwrap_or_default();
    let names = kind.and_then(|kind| (kind.option_names)(plugin.name));
    let documented = (plugin.keys)();
    let all = documented.is_some() || names.is_some();
    let undocumented = |name: String| KeyDoc { name: name.into(), ty: String::new(), doc: "" };
    let keys = documented.unwrap_or_else(|| {
        let names = names.unwrap_or_else(|| defaults.keys().cloned().collect());
        names.into_iter().map(undocumented).collect()
    });
    let texts = default_texts(&defaults);
    let keys = keys.into_iter().map(|key| {
        let default = texts.get(key.name.as_ref()).cloned();
        (key, default)
    });
    (keys.collect(), all)
}

/// Formats a configuration as TOML, with a comment before each documented key.
///
/// Keys without a value are comments.
///
/// # Errors
/// If TOML cannot represent it.
pub fn commented_toml(config: &toml::Table, sections: &[Section]) -> Result<String> {
    let mut text = String::new();
    let top = sections.iter().find(|section| section.path.is_empty());
    let (tables, values): (Vec<_>, Vec<_>) =
        in_order(config, top).into_iter().partition(|(_, value)| value.is_table());
    write_values(&mut text, top, values)?;
    for (name, value) in tables {
        let Some(table) = value.as_table() else { continue };
        let about = top.and_then(|top| top.keys.iter().find(|key| *key.name == **name));
        text.push('\n');
        // Drops a reference to another part of the page.
        comment(&mut text, about.map_or("", |key| key.doc.split("; see").next().unwrap_or("")));
        let _ = writeln!(text, "[{name}]");
        let options = plugin_section(name, table);
        let section = sections.iter().find(|section| section.path == *name).or(options.as_ref());
        write_values(&mut text, section, in_order(table, section))?;
    }
    Ok(text)
}

/// Returns the options of the plugin that a table selects, if any.
fn plugin_section(key: &str, table: &toml::Table) -> Option<Section> {
    let kind = super::plugin::kind_descriptors().find(|kind| kind.key == key)?;
    let name = table.get("type")?.as_str()?;
    let plugins = crate::registry::plugins();
    let plugin = plugins.iter().find(|plugin| plugin.kind == kind.kind && plugin.name == name)?;
    let keys = option_keys(plugin).0.into_iter().map(|(key, _)| key).collect();
    Some(Section { path: key.to_owned(), keys, defaults: BTreeMap::new() })
}

/// Sorts the entries of a table in the order of its documentation; undocumented ones come first.
fn in_order<'a>(
    table: &'a toml::Table,
    section: Option<&Section>,
) -> Vec<(&'a String, &'a toml::Value)> {
    let place = |name: &str| section?.keys.iter().position(|key| key.name == name);
    let mut entries: Vec<_> = table.iter().collect();
    entries.sort_by_key(|(name, _)| place(name));
    entries
}

/// Writes keys with values, tables inline, each after its documentation; then keys without a value.
fn write_values(
    text: &mut String,
    section: Option<&Section>,
    values: Vec<(&String, &toml::Value)>,
) -> Result<()> {
    for (name, value) in &values {
        let key = section.and_then(|section| section.keys.iter().find(|key| *key.name == ***name));
        comment(text, key.map_or("", |key| key.doc));
        // toml quotes the key if necessary.
        let entry = toml::Table::from_iter([((*name).clone(), toml::Value::Boolean(true))]);
        let quoted = super::to_toml(&entry)?;
        let _ = writeln!(text, "{} = {value}", quoted.trim_end().trim_end_matches(" = true"));
    }
    // At the top level the tables follow later.
    let Some(section) = section.filter(|section| !section.path.is_empty()) else { return Ok(()) };
    for key in &section.keys {
        if !values.iter().any(|(name, _)| **name == key.name) {
            comment(text, key.doc);
            let ty = match key.ty.trim_end_matches(", optional") {
                "" => "not set",
                ty => ty,
            };
            let _ = writeln!(text, "# {} = ({ty})", key.name);
        }
    }
    Ok(())
}

fn comment(text: &mut String, doc: &str) {
    const WIDTH: usize = 98;
    let mut line = String::new();
    for word in doc.split_whitespace() {
        if !line.is_empty() && line.len() + 1 + word.len() > WIDTH {
            let _ = writeln!(text, "#{line}");
            line.clear();
        }
        line.push(' ');
        line.push_str(word);
    }
    if !line.is_empty() {
        let _ = writeln!(text, "#{line}");
    }
}

/// Formats a plugin's options as `lr = 0.001, …`; `None` if the options need a value without a
/// default.
fn default_options(plugin: &PluginDescriptor) -> Option<String> {
    let kind = kind_descriptor(plugin.kind)?;
    let options = (kind.options)(&PluginValue::new(plugin.name), "").ok()?;
    let options: Vec<_> = options.iter().map(|(key, value)| format!("{key} = {value}")).collect();
    Some(options.join(", "))
}

pub(super) fn one_line(doc: &str) -> String {
    doc.split_whitespace().collect::<Vec<_>>().join(" ")
}
