//! Settings of runs, and their differences.

use std::collections::BTreeMap;

use toml::{Table, Value};

/// A key and its value in each run; `None` where the key is missing.
pub(super) struct Setting {
    pub(super) key: String,
    pub(super) values: Vec<Option<String>>,
}

impl Setting {
    /// Whether the runs have different values.
    pub(super) fn differs(&self) -> bool {
        self.values.windows(2).any(|pair| pair[0] != pair[1])
    }
}

/// All settings of these configurations, by key.
pub(super) fn settings<'a>(configs: impl ExactSizeIterator<Item = &'a Table>) -> Vec<Setting> {
    let runs = configs.len();
    let mut all: BTreeMap<String, Vec<Option<String>>> = BTreeMap::new();
    for (run, config) in configs.enumerate() {
        flatten("", config, &mut |key, value| {
            all.entry(key).or_insert_with(|| vec![None; runs])[run] = Some(value);
        });
    }
    all.into_iter().map(|(key, values)| Setting { key, values }).collect()
}

fn flatten(prefix: &str, table: &Table, put: &mut dyn FnMut(String, String)) {
    for (key, value) in table {
        let key = format!("{prefix}{key}");
        match value {
            Value::Table(inner) if !inner.is_empty() => flatten(&format!("{key}."), inner, put),
            value => put(key, value.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_key_is_a_difference() {
        let first: Table = "seed = 1\n[a]\nx = 1\ny = 'p'".parse().unwrap();
        let second: Table = "seed = 1\n[a]\nx = 2".parse().unwrap();
        let all = settings([&first, &second].into_iter());
        let shown: Vec<String> =
            all.iter().map(|s| format!("{} {:?} {}", s.key, s.values, s.differs())).collect();
        insta::assert_snapshot!(shown.join("\n"), @r#"
        a.x [Some("1"), Some("2")] true
        a.y [Some("\"p\""), None] true
        seed [Some("1"), Some("1")] false
        "#);
    }
}
