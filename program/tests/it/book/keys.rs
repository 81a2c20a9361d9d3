//! Configuration keys, and configurations in TOML.

use std::collections::BTreeSet;

use fulgurite::core::config::plugin::kind_descriptors;
use fulgurite::core::config::reference::option_keys;
use fulgurite::core::config::{ConfigLayers, documented_keys};
use fulgurite::core::registry;
use fulgurite::core::run::{RunConfig, reference_sections};
use fulgurite::data::{
    ChatDataConfig, LabelledTextsConfig, PreferenceDataConfig, PromptDataConfig, TableConfig,
    TextDataConfig,
};
use fulgurite_models::{GrpoConfig, ModelConfig, PromptsConfig, WritingConfig};
use toml::{Table, Value};

use super::page::Page;
use super::sources::Sources;

/// Plugins behind features, with the types of their options: kind, name, type.
const FEATURES: [(&str, &str, &str); 3] = [
    ("checkpoint.io", "object_store", "ObjectStoreConfig"),
    ("trainer.process_group", "mpi", "Mpi"),
    ("trainer.process_group", "nccl", "Nccl"),
];

/// Plugins in the guides' examples and in the plugin crate; `name` stands for any.
const OF_GUIDES: [&str; 10] = [
    "every_other",
    "journal",
    "sign_momentum",
    "local_sgd",
    "markdown",
    "mine",
    "name",
    "power_sgd",
    "sign_sgd",
    "sum_gradients",
];

/// Keys of tables that the reference does not list, with their types.
const TABLES: [(&str, &str); 5] = [
    ("trainer.strategy.mixed_precision", "MixedPrecisionPolicy"),
    ("trainer.strategy.outer", "OuterSgd"),
    ("trainer.activation_checkpointing", "ActivationCheckpointing"),
    ("data.mixture", "MixtureSource"),
    ("data", "ImageFolderConfig"),
];

/// Tables of a whole configuration.
const TOP: [&str; 8] =
    ["checkpoint", "data", "model", "module", "optimizer", "scheduler", "seed", "trainer"];

/// The keys of the configuration.
pub(super) struct Keys {
    /// Full paths. The keys of `[model]` are those of `fulgurite fit`.
    paths: BTreeSet<String>,
}

impl Keys {
    pub(super) fn of(sources: &Sources) -> Self {
        let mut paths = BTreeSet::new();
        let mut add = |table: &str, key: &str| {
            let dot = if table.is_empty() { "" } else { "." };
            paths.insert(format!("{table}{dot}{key}"));
        };
        for section in reference_sections().unwrap() {
            section.keys.iter().for_each(|key| add(&section.path, &key.name));
        }
        for key in documented_keys::<TextDataConfig>().unwrap() {
            add("data", &key.name);
        }
        for key in documented_keys::<PromptsConfig>().unwrap() {
            add("data", &key.name);
        }
        for key in documented_keys::<LabelledTextsConfig>().unwrap() {
            add("data", &key.name);
        }
        for key in documented_keys::<ChatDataConfig>().unwrap() {
            add("data", &key.name);
        }
        for key in documented_keys::<PreferenceDataConfig>().unwrap() {
            add("data", &key.name);
        }
        for key in documented_keys::<PromptDataConfig>().unwrap() {
            add("data", &key.name);
        }
        for key in documented_keys::<GrpoConfig>().unwrap() {
            add("model.grpo", &key.name);
        }
        for key in documented_keys::<WritingConfig>().unwrap() {
            add("model.generation", &key.name);
        }
        for key in documented_keys::<TableConfig>().unwrap() {
            add("data", &key.name);
        }
        for key in documented_keys::<ModelConfig>().unwrap() {
            add("model", &key.name);
        }
        add("module", "type");
        for plugin in registry::plugins() {
            let kind = kind_descriptors().find(|kind| kind.kind == plugin.kind).unwrap();
            add(kind.key, "type");
            option_keys(&plugin).0.iter().for_each(|(key, _)| add(kind.key, &key.name));
        }
        let tables = TABLES.into_iter().chain(FEATURES.map(|(kind, _, options)| (kind, options)));
        for (table, of) in tables {
            let members: Vec<_> = sources.names.members(of).collect();
            assert!(members.len() > 1, "{of}: {members:?}");
            members.into_iter().for_each(|key| add(table, key));
        }
        // Process groups inside process groups.
        for inner in ["trainer.process_group.across", "trainer.process_group.host"] {
            for key in ["across", "interface", "ports", "across.interface"] {
                add(inner, key);
            }
        }
        Self { paths }
    }

    /// Whether this is a key, or the end of a key's path.
    fn has(&self, key: &str) -> bool {
        let end = format!(".{key}");
        self.paths.contains(key) || self.paths.iter().any(|path| path.ends_with(&end))
    }

    /// Whether a key is a table that has keys.
    fn is_table(&self, key: &str) -> bool {
        let inner = format!("{key}.");
        let within = format!(".{inner}");
        self.paths.iter().any(|path| path.starts_with(&inner) || path.contains(&within))
    }

    /// A complaint, unless the key exists.
    pub(super) fn complaint(&self, key: &str) -> Option<String> {
        let known = self.has(key) || TOP.contains(&key) || is_free(key);
        (!known).then(|| format!("there is no key `{key}`"))
    }

    /// The first mistake in assignments `key=value` of a command line, over these defaults.
    pub(super) fn assignments(&self, assignments: &[String], defaults: &Table) -> Option<String> {
        let mut layers = ConfigLayers::new().defaults(defaults.clone());
        for assignment in assignments {
            let key = assignment.split('=').next().unwrap_or_default();
            if let Some(complaint) = self.complaint(key) {
                return Some(complaint);
            }
            layers = match layers.set(assignment) {
                Ok(layers) => layers,
                Err(error) => return Some(error.to_string()),
            };
        }
        self.check(&layers.resolve())
    }

    /// The first mistake in a configuration.
    fn check(&self, table: &Table) -> Option<String> {
        let mut table = table.clone();
        // Any model and data are accepted; some need a tokenizer or files.
        for (name, keys) in [("model", "model"), ("data", "data")] {
            let inner = table.remove(name).and_then(|inner| inner.as_table().cloned());
            for (key, _) in inner.unwrap_or_default() {
                let path = format!("{keys}.{key}");
                if name == "data" && !self.paths.contains(&path) {
                    return Some(format!("there is no key `{path}`"));
                }
            }
        }
        replace_unlinked(&mut table, "");
        let text = toml::to_string(&table).unwrap();
        let layers = ConfigLayers::new().text("page", &text);
        let run = layers.and_then(RunConfig::<Table, Table>::from_layers);
        let error = run.and_then(|run| run.check_plugins()).err()?;
        let text = error.to_string();
        Some(text.lines().next().unwrap_or_default().trim_start_matches("page: ").to_owned())
    }
}

/// Keys of maps, which users name freely.
fn is_free(key: &str) -> bool {
    ["trainer.strategy.parallelize.plan.", "checkpoint.io.options.", "data.validation_sets."]
        .iter()
        .any(|table| key.starts_with(table))
}

/// Removes choices of plugins that this program does not link.
fn replace_unlinked(table: &mut Table, path: &str) {
    let unlinked = |path: &str, name: &str| {
        OF_GUIDES.contains(&name)
            || FEATURES.iter().any(|(kind, plugin, _)| {
                (*kind == path || path.ends_with("across")) && *plugin == name
            })
    };
    table.retain(|key, value| {
        let path = if path.is_empty() { key.to_string() } else { format!("{path}.{key}") };
        let name = match value {
            Value::String(name) => Some(name.clone()),
            Value::Table(table) => table.get("type").and_then(Value::as_str).map(str::to_owned),
            _ => None,
        };
        if name.is_some_and(|name| unlinked(&path, &name)) {
            return false;
        }
        match value {
            Value::Table(table) => replace_unlinked(table, &path),
            // Loggers and callbacks.
            Value::Array(all) => all.retain(|one| {
                let name = one.as_str().or_else(|| one.get("type")?.as_str());
                name.is_none_or(|name| !unlinked(&path, name))
            }),
            _ => {}
        }
        true
    });
}

/// Complaints about a page, with their lines.
pub(super) fn wrong(page: &Page, keys: &Keys) -> Vec<(usize, String)> {
    let mut wrong = Vec::new();
    for span in &page.spans {
        if let Some(complaint) = of_span(&span.text, keys) {
            wrong.push((span.line, complaint));
        }
    }
    for block in page.blocks.iter().filter(|block| block.language == "toml") {
        let table = match block.text.parse::<Table>() {
            Ok(table) => table,
            Err(error) => {
                wrong.push((block.line, format!("no TOML: {}", error.message())));
                continue;
            }
        };
        if table.keys().all(|key| TOP.contains(&key.as_str()))
            && let Some(complaint) = keys.check(&table)
        {
            wrong.push((block.line, complaint));
        }
    }
    wrong
}

fn of_span(text: &str, keys: &Keys) -> Option<String> {
    let name = |text: &str| {
        !text.is_empty()
            && text.split('.').all(|part| {
                !part.is_empty()
                    && part
                        .chars()
                        .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
            })
    };
    // A table's header.
    if let Some(inner) = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        let inner = inner.trim_matches(['[', ']']);
        return match name(inner) && inner.contains('.') {
            true => keys.complaint(inner),
            false => None,
        };
    }
    // A plugin with options.
    if text.starts_with("{ type = ") && !text.contains('…') {
        return of_plugin(text);
    }
    let (key, value) = match text.split_once('=') {
        Some((key, value)) => (key.trim(), Some(value.trim())),
        None => (text, None),
    };
    if !name(key) || is_file(key) {
        return None;
    }
    let (table, _) = key.rsplit_once('.').unwrap_or(("", key));
    let first = key.split('.').next().unwrap_or_default();
    let is_key = TOP.contains(&first) || (!table.is_empty() && keys.is_table(table));
    // Parameter names begin with `model.` too.
    if table.is_empty() || !is_key || first == "model" {
        return None;
    }
    if let Some(complaint) = keys.complaint(key) {
        return Some(complaint);
    }
    let table = format!("{key} = {}", value?).parse::<Table>().ok()?;
    // Options of a strategy need the strategy's name, too.
    let is_whole = TOP.contains(&first) && !key.starts_with("trainer.strategy.");
    match is_whole && !text.contains('…') {
        true => keys.check(&table),
        false => None,
    }
}

/// Whether this is a file name.
fn is_file(key: &str) -> bool {
    ["json", "jsonl", "lock", "safetensors", "toml"]
        .iter()
        .any(|end| key.strip_suffix(end).is_some_and(|start| start.ends_with('.')))
}

/// Checks a table that chooses a plugin of any kind.
fn of_plugin(text: &str) -> Option<String> {
    let table = format!("plugin = {text}").parse::<Table>().ok()?;
    let table = table["plugin"].as_table()?;
    let name = table.get("type")?.as_str()?;
    let is_feature = FEATURES.iter().any(|(_, plugin, _)| *plugin == name);
    if is_feature || OF_GUIDES.contains(&name) {
        return None;
    }
    let plugins = registry::plugins();
    let named: Vec<_> = plugins.iter().filter(|plugin| plugin.name == name).collect();
    // Activation checkpointing and profilers are also chosen by `type`.
    if named.is_empty() {
        let others = ["full", "none", "rowwise", "selective", "trace"];
        return (!others.contains(&name)).then(|| format!("there is no plugin `{name}`"));
    }
    let has_all = |plugin: &&registry::PluginDescriptor| {
        let (options, all) = option_keys(plugin);
        let has = |key: &String| key == "type" || options.iter().any(|(of, _)| of.name == **key);
        !all || table.keys().all(has)
    };
    (!named.iter().any(has_all)).then(|| format!("no plugin `{name}` has the options of `{text}`"))
}
