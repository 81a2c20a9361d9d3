//! The book's generated pages match the code.

use std::collections::BTreeSet;
use std::path::Path;

use fulgurite::core::config::plugin::kind_descriptors;
use fulgurite::core::config::reference;
use fulgurite::core::registry::{self, kind};
use fulgurite::core::run::reference_sections;
use fulgurite::nn::layer_table;

const INTRODUCTION: &str = "# Configuration

<!-- Generated from the declarations. To renew: UPDATE_DOCS=1 cargo test --test reference -->

A run is configured in TOML. Files stack (`--config a.toml --config b.toml`), and single keys are
set on the command line (`--set trainer.max_steps=100`). Later layers win: tables merge key by key,
lists and values are replaced, and a table whose `type` changes is replaced whole.

All overrides of a command line are one layer, so it makes no difference whether
`--set data.type=tokens` stands before or after `--set data.path=tokens.u16`.

A key whose type is *plugin* takes a name, or a table with `type` and the plugin's options:
`strategy = \"ddp\"` is short for `strategy = { type = \"ddp\" }`.

";

#[test]
fn configuration_reference_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/src/reference/configuration.md");
    let keys = reference::markdown(&reference_sections().unwrap());
    let plugins = reference::plugins_markdown(&registry::plugins());
    let page = format!("{INTRODUCTION}{keys}## Plugins\n{plugins}");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, page).unwrap();
        return;
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == page,
        "{} is stale; renew it with UPDATE_DOCS=1 cargo test --test reference",
        path.display()
    );
}

/// The tables of layers begin with these lines and end at an empty line.
#[test]
fn tables_of_layers_are_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/src/guides/layers.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let mut renewed = page.clone();
    for table in layer_table::markdown() {
        let first = table.lines().next().unwrap();
        let start = renewed.find(&format!("{first}\n")).unwrap_or_else(|| panic!("no `{first}`"));
        let end = renewed[start..].find("\n\n").map_or(renewed.len(), |end| start + end + 1);
        renewed.replace_range(start..end, &table);
    }
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, renewed).unwrap();
        return;
    }
    assert!(
        renewed == page,
        "{} is stale; renew it with UPDATE_DOCS=1 cargo test --test reference",
        path.display()
    );
}

/// The text of all Rust files of the workspace.
fn code() -> String {
    fn sources(folder: &Path, into: &mut String) {
        for entry in std::fs::read_dir(folder).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                sources(&path, into);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                into.push_str(&std::fs::read_to_string(path).unwrap());
                into.push('\n');
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut code = String::new();
    for folder in ["bench", "core", "plugins", "program", "src", "strategies", "tests"] {
        sources(&root.join(folder), &mut code);
    }
    code
}

/// The last column of these pages' tables names tests.
#[test]
fn tests_named_by_pages_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let code = code();
    for page in ["checklist.md", "src/concepts/checkpoint-failures.md"] {
        let text = std::fs::read_to_string(root.join("docs").join(page)).unwrap();
        let rows = text.lines().filter_map(|line| line.strip_prefix('|')?.strip_suffix('|'));
        let cells = rows.filter_map(|row| row.rsplit_once('|')).map(|(_, last)| last);
        let names: Vec<&str> = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect();
        assert!(names.len() > 30, "{page}: {names:?}");
        for name in names {
            assert!(code.contains(&format!("fn {name}(")), "{page}: there is no `{name}`");
        }
    }
}

/// Whether a page names a plugin: in backticks or in quotes.
fn names(page: &str, plugin: &str) -> bool {
    [format!("`{plugin}`"), format!("\"{plugin}\"")].iter().any(|name| page.contains(name))
}

#[test]
fn lists_of_the_book_have_every_plugin() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/src");
    for (kind, pages) in [
        (kind::STRATEGY, &["introduction.md", "guides/strategies.md"][..]),
        (kind::LOGGER, &["guides/loggers.md"]),
        (kind::CALLBACK, &["guides/callbacks.md"]),
        (kind::ENVIRONMENT, &["guides/clusters.md"]),
        (kind::PROCESS_GROUP, &["guides/processes.md"]),
    ] {
        for page in pages {
            let text = std::fs::read_to_string(root.join(page)).unwrap();
            let missing: Vec<_> =
                registry::names(kind).into_iter().filter(|name| !names(&text, name)).collect();
            assert!(missing.is_empty(), "{page} does not have {missing:?}");
        }
    }
    // Where each kind is chosen.
    let page = std::fs::read_to_string(root.join("guides/writing-a-plugin.md")).unwrap();
    for kind in kind_descriptors() {
        assert!(page.contains(&format!("| `{}` |", kind.key)), "{} is in no row", kind.key);
    }
}

/// Variables other than keys must be in a page's table, and in the list of known variables.
#[test]
fn every_variable_is_documented() {
    fn variables(folder: &Path, found: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(folder).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() && entry.file_name() != "tests" {
                variables(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(path).unwrap();
                let text = text.split("#[cfg(test)]").next().unwrap();
                let names =
                    text.split("\"FULGURITE_").skip(1).filter_map(|rest| rest.split('"').next());
                found.extend(names.filter(|name| !name.is_empty()).map(str::to_owned));
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = BTreeSet::new();
    for folder in ["core", "plugins", "program", "src", "strategies"] {
        variables(&root.join(folder), &mut found);
    }
    assert!(found.len() > 6, "{found:?}");
    let page = std::fs::read_to_string(root.join("docs/src/guides/command-line.md")).unwrap();
    let arguments = std::fs::read_to_string(root.join("src/cli/args.rs")).unwrap();
    let (_, list) = arguments.split_once("const VARIABLES").unwrap();
    let known = list.split("];").next().unwrap();
    for name in found {
        assert!(page.contains(&format!("`FULGURITE_{name}`")), "{name} is not on the page");
        assert!(known.contains(&format!("\"{name}\"")), "{name} is not in VARIABLES");
    }
}

/// A row of the checklist: its name in marks, its state, and its tests.
#[derive(Debug)]
struct Row {
    /// The software's name and the first column: `torchtune: is_distributed`.
    name: String,
    state: String,
    tests: Vec<String>,
}

fn checklist() -> Vec<Row> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/checklist.md");
    let text = std::fs::read_to_string(path).unwrap();
    let mut software = String::new();
    let mut rows = Vec::new();
    for line in text.lines() {
        if let Some(title) = line.strip_prefix("## ") {
            software = title.split_whitespace().nth(1).unwrap().to_owned();
        }
        let Some(cells) = line.strip_prefix("| ").and_then(|line| line.strip_suffix('|')) else {
            continue;
        };
        let cells: Vec<&str> = cells.split(" |").map(str::trim).collect();
        let [there, _, state, tests] = cells[..] else { panic!("not four columns: {line}") };
        if there != "there" {
            let tests = tests.split('`').skip(1).step_by(2).map(str::to_owned).collect();
            let name = format!("{software}: {}", there.replace('`', ""));
            rows.push(Row { name, state: state.to_owned(), tests });
        }
    }
    rows
}

/// Marks above a test, `// checklist: torchtune: is_distributed`, name the rows that the test
/// supports. Authors of changes see the marks, and each row names only tests with its mark.
#[test]
fn checklist_rows_and_tests_name_each_other() {
    const MARK: &str = "// checklist: ";
    let (rows, code) = (checklist(), code());
    assert!(rows.len() > 80, "{}", rows.len());
    // Pairs of a marked row and its test.
    let mut marked: Vec<(String, String)> = Vec::new();
    let mut above: Vec<&str> = Vec::new();
    for line in code.lines().map(str::trim) {
        if let Some(row) = line.strip_prefix(MARK) {
            above.push(row);
        } else if let Some(name) = line.split("fn ").nth(1).and_then(|rest| rest.split('(').next())
        {
            marked.extend(above.drain(..).map(|row| (row.to_owned(), name.to_owned())));
        } else {
            let between = line.starts_with("#[") || line.starts_with("//");
            assert!(above.is_empty() || between, "a mark above no test: {above:?}");
        }
    }
    let mut complaints = Vec::new();
    for row in &rows {
        for test in &row.tests {
            if !marked.iter().any(|(name, by)| *name == row.name && by == test) {
                complaints.push(format!("above `{test}` there is no line `{MARK}{}`", row.name));
            }
        }
        if row.state.starts_with("yes") && row.tests.is_empty() {
            complaints.push(format!("`{}` is yes, and no test shows it", row.name));
        }
    }
    for (name, test) in &marked {
        if !rows.iter().any(|row| row.name == *name && row.tests.contains(test)) {
            complaints
                .push(format!("`{test}` is marked with `{name}`, whose row does not name it"));
        }
    }
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

#[test]
fn core_forbids_all_workspace_methods() {
    let forbidden = |path: &str| -> Vec<String> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
        let table: toml::Table = std::fs::read_to_string(path).unwrap().parse().unwrap();
        let methods = table["disallowed-methods"].as_array().unwrap().iter();
        methods.map(|method| method["path"].as_str().unwrap().to_owned()).collect()
    };
    let (everywhere, in_core) = (forbidden("clippy.toml"), forbidden("core/clippy.toml"));
    assert!(everywhere.iter().all(|method| in_core.contains(method)), "{everywhere:?} {in_core:?}");
    assert!(in_core.len() > everywhere.len());
}
