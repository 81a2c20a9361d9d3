//! The reference of configuration keys, rendered from the declarations themselves.
//!
//! ```
//! use fulgurite_core::config::reference;
//!
//! let page = reference::markdown(&reference::sections()?);
//! assert!(page.contains("| `max_steps` |"));
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;
use serde::de::DeserializeOwned;
use toml::Table;

use super::run::top_level;
use super::{CheckpointConfig, Documented, KeyDoc, PluginValue, RunConfig};
use crate::registry::{PluginDescriptor, kind};
use crate::trainer::TrainerConfig;
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
    /// The section of a declared table.
    ///
    /// # Errors
    /// [`Error::Config`] if the documented keys are not the keys that serde writes.
    pub fn of<T: Documented>(path: &str) -> Result<Self> {
        Self::new(path, T::keys(), &T::default())
    }

    /// A section of a table that is not documented: its keys and their defaults.
    ///
    /// # Errors
    /// If the defaults cannot be serialised.
    pub fn undocumented(path: &str, defaults: &impl Serialize) -> Result<Self> {
        let all = serde_json::to_value(defaults).map_err(Error::other)?;
        let key = |name: &String| KeyDoc { name: name.clone().into(), ty: String::new(), doc: "" };
        let keys = all.as_object().into_iter().flat_map(|object| object.keys()).map(key).collect();
        Self::new(path, keys, defaults)
    }

    /// A section from documentation and a value holding the defaults.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn new(path: &str, keys: Vec<KeyDoc>, defaults: &impl Serialize) -> Result<Self> {
        // JSON, because TOML leaves out the keys that have no value.
        let all = serde_json::to_value(defaults).map_err(Error::other)?;
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
        let defaults = super::to_table(defaults)?;
        let text = |value: &toml::Value| match value {
            toml::Value::Table(_) => None,
            other => Some(other.to_string()),
        };
        let defaults =
            defaults.iter().filter_map(|(key, value)| Some((key.clone(), text(value)?))).collect();
        Ok(Self { path: path.to_owned(), keys, defaults })
    }
}

/// The sections that the framework itself declares.
///
/// # Errors
/// As [`Section::new`].
pub fn sections() -> Result<Vec<Section>> {
    Ok(vec![
        Section::new("", top_level(), &RunConfig::<Table, Table>::default())?,
        Section::of::<TrainerConfig>("trainer")?,
        Section::of::<CheckpointConfig>("checkpoint")?,
    ])
}

/// The sections as Markdown, a table each.
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

/// The sections as a list for a terminal: one key a line, and the first sentence about it.
pub fn plain(sections: &[Section]) -> String {
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

/// The key that plugins of a kind are chosen with.
pub fn plugin_key(kind: &str) -> &str {
    match kind {
        kind::STRATEGY => "trainer.strategy",
        kind::PROCESS_GROUP => "trainer.process_group",
        kind::ENVIRONMENT => "trainer.environment",
        kind::LOGGER => "trainer.loggers",
        kind::PARALLELIZE => "trainer.strategy.parallelize",
        kind::CHECKPOINT_IO => "checkpoint.io",
        other => other,
    }
}

/// A plugin's options as `lr = 0.001, …`; `None` if some have no default.
fn default_options(plugin: &PluginDescriptor) -> Option<String> {
    fn written<T: DeserializeOwned + Serialize>(plugin: &PluginDescriptor) -> Option<Table> {
        let built: T = PluginValue::new(plugin.name).build(plugin.kind, "").ok()?;
        super::to_table(&built).ok()
    }
    let mut options = match plugin.kind {
        kind::OPTIMIZER => written::<Box<dyn crate::optim::OptimizerConfig>>(plugin),
        kind::SCHEDULER => written::<Box<dyn crate::optim::SchedulerConfig>>(plugin),
        kind::PROCESS_GROUP => written::<Box<dyn crate::collective::ProcessGroupConfig>>(plugin),
        kind::STRATEGY => written::<Box<dyn crate::strategy::StrategyConfig>>(plugin),
        kind::PARALLELIZE => written::<Box<dyn crate::strategy::ParallelizeConfig>>(plugin),
        kind::CHECKPOINT_IO => written::<Box<dyn crate::checkpoint::CheckpointIOConfig>>(plugin),
        kind::LOGGER => written::<Box<dyn crate::trainer::LoggerConfig>>(plugin),
        _ => None,
    }?;
    options.remove("type");
    let options: Vec<_> = options.iter().map(|(key, value)| format!("{key} = {value}")).collect();
    Some(options.join(", "))
}

/// The full path of a key of the framework's own, for the hint to somebody who left out the table.
pub(super) fn path_of(key: &str) -> Option<String> {
    let own = [("trainer", TrainerConfig::keys()), ("checkpoint", CheckpointConfig::keys())];
    own.iter()
        .find(|(_, keys)| keys.iter().any(|k| k.name == key))
        .map(|(table, _)| format!("{table}.{key}"))
}

fn one_line(doc: &str) -> String {
    doc.split_whitespace().collect::<Vec<_>>().join(" ")
}
