//! All possible keys of a program's configuration, so that messages can say where a key belongs.

use super::KeyDoc;
use super::plugin::kind_descriptors;
use super::reference::option_keys;
use crate::registry::plugins;

/// A configuration table that a crate declares with [`register_table!`](crate::register_table).
#[derive(Debug, Clone, Copy)]
pub struct TableDescriptor {
    /// The table's path: `trainer`; empty for the top level.
    pub path: &'static str,
    /// Its keys.
    pub keys: fn() -> Vec<KeyDoc>,
}

inventory::collect!(TableDescriptor);

/// Registers a table for messages: `register_table!("trainer", TrainerConfig::keys)`.
///
/// The message about an unknown key then points to this table if it has the key. A program names
/// its own tables with [`ConfigLayers::known_table`](crate::ConfigLayers::known_table).
#[macro_export]
macro_rules! register_table {
    ($path:literal, $keys:expr) => {
        $crate::__private::inventory::submit! {
            $crate::TableDescriptor { path: $path, keys: $keys }
        }
    };
}

/// A program's own table and its keys.
pub(crate) type KnownTable = (&'static str, Vec<KeyDoc>);

/// A possible key of the configuration.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct KnownKey {
    /// The table's path; empty for the top level.
    pub table: String,
    /// The key, without its table.
    pub name: String,
    /// For a plugin's option: the plugin's kind and name.
    pub plugin: Option<(&'static str, &'static str)>,
    /// Whether the plugin is an item of a list.
    pub in_list: bool,
}

impl KnownKey {
    fn new(table: &str, key: &KeyDoc) -> Self {
        Self { table: table.to_owned(), name: key.name.to_string(), plugin: None, in_list: false }
    }

    /// Returns the path of the key: `trainer.max_steps`.
    pub(crate) fn path(&self) -> String {
        match self.table.as_str() {
            "" => self.name.clone(),
            table => format!("{table}.{}", self.name),
        }
    }
}

/// Returns all keys, sorted: of registered tables, of `known`, and the options of plugins.
pub(crate) fn known_keys(known: &[KnownTable]) -> Vec<KnownKey> {
    let mut tables = registered();
    tables.extend(known.iter().cloned());
    let mut keys: Vec<KnownKey> = tables
        .iter()
        .flat_map(|(table, keys)| keys.iter().map(|key| KnownKey::new(table, key)))
        .collect();
    for plugin in plugins() {
        let Some(kind) = kind_descriptors().find(|kind| kind.kind == plugin.kind) else { continue };
        let in_list = is_list(&tables, kind.key);
        let of_plugin = Some((plugin.kind, plugin.name));
        keys.extend(option_keys(&plugin).0.iter().map(|(key, _)| KnownKey {
            plugin: of_plugin,
            in_list,
            ..KnownKey::new(kind.key, key)
        }));
    }
    keys.sort();
    keys.dedup();
    keys
}

/// Returns the tables that crates have registered.
pub(crate) fn registered() -> Vec<KnownTable> {
    inventory::iter::<TableDescriptor>().map(|table| (table.path, (table.keys)())).collect()
}

/// Whether the key at a path takes a list.
pub(crate) fn is_list(tables: &[KnownTable], path: &str) -> bool {
    let (table, name) = path.rsplit_once('.').unwrap_or(("", path));
    let mut keys = tables.iter().filter(|of| of.0 == table).flat_map(|of| &of.1);
    keys.any(|key| key.name == name && key.ty.starts_with("list"))
}
