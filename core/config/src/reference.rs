//! The reference of configuration keys, rendered from the declarations.
//!
//! ```
//! use fulgurite_core::config::reference::{self, Section};
//!
//! fulgurite_core::config_struct! {
//!     /// The table `[data]`.
//!     struct DataConfig {
//!         /// Tokens in a sample.
//!         seq_len: usize = 128,
//!     }
//! }
//!
//! let page = reference::markdown(&[Section::of::<DataConfig>("data")?]);
//! assert!(page.contains("| `seq_len` | integer | `128` | Tokens in a sample. |"));
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;

use super::plugin::kind_descriptor;
use super::{Documented, KeyDoc, PluginValue};
use crate::registry::PluginDescriptor;
use crate::{Error, Result};

/// One table of the configuration, for the reference.
#[derive(Debug, Clone)]
pub struct Section {
    /// The table's path: `trainer`; empty for the top level.
    pub path: String,
    /// Its keys.
    pub keys: Vec<KeyDoc>,
    /// The defaults of keys that have one, as TOML text.
    pub defaults: BTreeMap<String, String>,
}

impl Section {
    /// The section of a table declared with [`config_struct!`](crate::config_struct).
    ///
    /// # Errors
    /// [`Error::Config`] if the documented keys are not the keys that serde writes.
    pub fn of<T: Documented>(path: &str) -> Result<Self> {
        Self::new(path, T::keys(), &T::default())
    }

    /// A section with the keys and defaults of a table that is not [`Documented`].
    ///
    /// # Errors
    /// If the defaults cannot be serialised.
    pub fn undocumented(path: &str, defaults: &impl Serialize) -> Result<Self> {
        let all = serde_json::to_value(defaults).map_err(Error::other)?;
        let key = |name: &String| KeyDoc { name: name.clone().into(), ty: String::new(), doc: "" };
        let keys = all.as_object().into_iter().flat_map(|object| object.keys()).map(key).collect();
        Self::assemble(path, keys, &all, &super::to_table(defaults)?)
    }

    /// A section from the documentation of its keys and a value with the defaults.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn new(path: &str, keys: Vec<KeyDoc>, defaults: &impl Serialize) -> Result<Self> {
        // JSON has all keys; TOML leaves out those that are `None`.
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
        let text = |value: &toml::Value| match value {
            toml::Value::Table(_) => None,
            other => Some(other.to_string()),
        };
        let defaults =
            defaults.iter().filter_map(|(key, value)| Some((key.clone(), text(value)?))).collect();
        Ok(Self { path: path.to_owned(), keys, defaults })
    }
}

/// The sections as Markdown, one table each.
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

/// The sections as a list for a terminal: one key a line, with the first sentence of its
/// documentation.
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

/// The plugins as Markdown: a table for each kind, with the options that have defaults.
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

/// The key of the configuration that chooses a plugin of this kind.
pub fn plugin_key(kind: &str) -> &str {
    kind_descriptor(kind).map_or(kind, |kind| kind.key)
}

/// A plugin's options as `lr = 0.001, …`; `None` if one of them has no default.
fn default_options(plugin: &PluginDescriptor) -> Option<String> {
    let kind = kind_descriptor(plugin.kind)?;
    let options = (kind.options)(&PluginValue::new(plugin.name), "").ok()?;
    let options: Vec<_> = options.iter().map(|(key, value)| format!("{key} = {value}")).collect();
    Some(options.join(", "))
}

fn one_line(doc: &str) -> String {
    doc.split_whitespace().collect::<Vec<_>>().join(" ")
}
