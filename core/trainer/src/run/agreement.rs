//! The configuration that must be equal on all ranks.

use toml::{Table, Value};

use super::{RunConfig, TrainerConfig};
use crate::Result;
use fulgurite_config::plugin::kind_descriptor;
use fulgurite_config::registry::{self, PluginDescriptor, kind};
use fulgurite_config::{PluginValue, to_table};
use fulgurite_engine::collective::Agreement;

/// The configuration keys that may differ between ranks.
///
/// They belong to a host, or only rank 0 uses them. The book lists them on the page "What is
/// checked, and what is not".
pub(crate) const HOST_KEYS: [&str; 16] = [
    "trainer.accelerator",
    "trainer.default_root_dir",
    "trainer.devices",
    "trainer.enable_progress_bar",
    "trainer.environment",
    "trainer.job_key_file",
    "trainer.loggers",
    "trainer.memory_check",
    "trainer.num_workers",
    "trainer.prefetch_factor",
    "trainer.process_group.across.interface",
    "trainer.process_group.across.ports",
    "trainer.process_group.host.across.interface",
    "trainer.process_group.interface",
    "trainer.process_group.library",
    "trainer.process_group.ports",
];

const ADVICE: &str = "Start all ranks with the same configuration and the same program; keys that may differ between \
     hosts are in the book, under \"What is checked, and what is not\"";

/// Plugins whose options are compared with defaults filled in, by key and kind.
const PLUGINS: [(&str, &str); 8] = [
    ("optimizer", kind::OPTIMIZER),
    ("scheduler", kind::SCHEDULER),
    ("trainer.strategy", kind::STRATEGY),
    ("trainer.process_group", kind::PROCESS_GROUP),
    ("trainer.process_group.across", kind::PROCESS_GROUP),
    ("trainer.process_group.host", kind::PROCESS_GROUP),
    ("trainer.callbacks", kind::CALLBACK),
    ("checkpoint.io", kind::CHECKPOINT_IO),
];

impl RunConfig<Table, Table> {
    /// Returns the part of this configuration and program that must be equal on all ranks.
    ///
    /// `data_keys` are the keys of `[data]` that may differ.
    ///
    /// # Errors
    /// If TOML cannot hold one of the numbers.
    pub(crate) fn agreement(&self, data_keys: &[&str]) -> Result<Agreement> {
        let mut agreement = Agreement::on("the configuration", ADVICE);
        // TOML holds integers up to `i64::MAX`, but a program may set a larger seed in code.
        agreement.insert("`seed`", self.seed);
        let mut table = Value::Table(to_table(&Self { seed: 0, ..self.clone() })?);
        table.as_table_mut().and_then(|table| table.remove("seed"));
        for (key, kind) in PLUGINS {
            for (path, value) in plugins_at(&mut table, key) {
                let Ok(plugin) = value.clone().try_into::<PluginValue>() else { continue };
                *value = resolved(&plugin, kind, &path);
                let is_named = |p: &PluginDescriptor| p.kind == kind && p.name == plugin.name;
                if let Some(PluginDescriptor { krate, version, .. }) =
                    registry::plugins().into_iter().find(is_named)
                {
                    let version = format_args!("{krate} {version}");
                    agreement.insert(format!("the crate of `{path}`"), version);
                }
            }
        }
        let data_keys: Vec<String> = data_keys.iter().map(|key| format!("data.{key}")).collect();
        let may_differ = |key: &str| {
            HOST_KEYS.iter().any(|one| is_within(key, one))
                || data_keys.iter().any(|one| is_within(key, one))
        };
        let compared = flattened(&table).into_iter().filter(|(key, _)| !may_differ(key));
        agreement.extend(compared.map(|(key, value)| (format!("`{key}`"), value)));
        agreement.insert("the version of fulgurite", env!("CARGO_PKG_VERSION"));
        // The process group "auto" chooses among these.
        let groups = registry::names(kind::PROCESS_GROUP).join(", ");
        agreement.insert("the list of linked process groups", groups);
        Ok(agreement)
    }
}

impl TrainerConfig {
    /// Returns the part that must be equal on all ranks to connect: the process group with its
    /// options.
    ///
    /// # Errors
    /// As [`RunConfig::agreement`].
    pub(crate) fn process_group_agreement(&self) -> Result<Agreement> {
        let trainer = Self { process_group: self.process_group.clone(), ..Self::default() };
        let run = RunConfig { trainer, ..RunConfig::default() };
        let all = run.agreement(&[])?;
        let is_of_group =
            |name: &str| name.contains("trainer.process_group") || !name.contains('`');
        let mut agreement = Agreement::on("the configuration", ADVICE);
        agreement.extend(all.into_values().into_iter().filter(|(name, _)| is_of_group(name)));
        Ok(agreement)
    }
}

/// Returns the plugin values at a key: the value itself, or the elements of its list, each with its
/// path.
fn plugins_at<'a>(table: &'a mut Value, key: &str) -> Vec<(String, &'a mut Value)> {
    let found = key.split('.').try_fold(table, |table, segment| table.get_mut(segment));
    match found {
        None => Vec::new(),
        Some(Value::Array(list)) => {
            let named = |(i, value)| (format!("{key}[{i}]"), value);
            list.iter_mut().enumerate().map(named).collect()
        }
        Some(value) => vec![(key.to_owned(), value)],
    }
}

/// Returns a plugin's `type` with all of its options, written or default.
fn resolved(plugin: &PluginValue, kind: &str, path: &str) -> Value {
    let all = kind_descriptor(kind).and_then(|kind| (kind.options)(plugin, path).ok());
    let options = all.unwrap_or_else(|| plugin.options.clone());
    PluginValue { name: plugin.name.clone(), options }.to_table().into()
}

/// Returns whether a flattened key is `parent`, or lies in a table or list under it.
fn is_within(key: &str, parent: &str) -> bool {
    let key: String = key
        .split('.')
        .map(|segment| segment.split('[').next().unwrap_or_default())
        .collect::<Vec<_>>()
        .join(".");
    key.strip_prefix(parent).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Flattens a table to values by dotted path, such as `trainer.callbacks[0].patience`.
fn flattened(value: &Value) -> Vec<(String, String)> {
    fn add(path: String, value: &Value, all: &mut Vec<(String, String)>) {
        match value {
            Value::Table(table) if !table.is_empty() => {
                for (key, value) in table {
                    let dot = if path.is_empty() { "" } else { "." };
                    add(format!("{path}{dot}{key}"), value, all);
                }
            }
            Value::Array(list) if !list.is_empty() => {
                for (i, value) in list.iter().enumerate() {
                    add(format!("{path}[{i}]"), value, all);
                }
            }
            value => all.push((path, value.to_string())),
        }
    }
    let mut all = Vec::new();
    add(String::new(), value, &mut all);
    all
}

#[cfg(test)]
mod tests {
    use fulgurite_config::Documented as _;

    use super::*;

    #[test]
    fn flattened_keys_are_paths() {
        let table = toml::toml! { a = { b = [1, { c = "x" }], d = [] } };
        let text = |(key, value)| format!("{key} = {value}");
        let all: Vec<String> = flattened(&table.into()).into_iter().map(text).collect();
        assert_eq!(all, ["a.b[0] = 1", "a.b[1].c = \"x\"", "a.d = []"]);
    }

    #[test]
    fn a_key_covers_nested_keys() {
        assert!(is_within("data.mixture[1].path", "data.mixture.path"));
        assert!(is_within("data.path[2]", "data.path"));
        assert!(is_within("trainer.loggers[0].type", "trainer.loggers"));
        assert!(!is_within("data.path_of_labels", "data.path"));
        assert!(!is_within("data.mixture[1].weight", "data.mixture.path"));
    }

    #[test]
    fn host_keys_exist_and_are_in_the_book() {
        let keys = crate::run::TrainerConfig::keys();
        let book = include_str!("../../../../docs/src/concepts/checked.md");
        for key in HOST_KEYS {
            let of_trainer = key.split('.').nth(1).unwrap();
            assert!(keys.iter().any(|known| known.name == of_trainer), "{key}");
            assert!(book.contains(&format!("`{key}`")), "{key}");
        }
    }

    #[test]
    fn seeds_of_64_bits_are_compared() {
        let of = |seed| {
            let run = RunConfig { seed, ..RunConfig::default() };
            run.agreement(&[]).unwrap().into_values()["`seed`"].clone()
        };
        assert_eq!(of(u64::MAX), u64::MAX.to_string());
    }

    #[test]
    fn options_are_compared_with_their_defaults() {
        let of = |optimizer: PluginValue, logger: &str| {
            let mut run = RunConfig { optimizer, ..RunConfig::default() };
            run.trainer.loggers = vec![logger.into()];
            format!("{:?}", run.agreement(&[]).unwrap())
        };
        let adamw = of("adamw".into(), "csv");
        assert!(adamw.contains("`optimizer.lr`"), "{adamw}");
        assert_eq!(adamw, of(PluginValue::new("adamw").with("weight_decay", 0.01), "jsonl"));
        assert_ne!(adamw, of(PluginValue::new("adamw").with("lr", 0.5), "csv"));
    }
}
