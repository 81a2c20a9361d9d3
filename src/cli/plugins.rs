//! `plugins list` and `plugins show`: the plugins that are linked into a program.

use std::fmt::Write as _;

use clap::Subcommand;

use fulgurite_core::config::nearest;
use fulgurite_core::config::reference::{Section, option_keys, plain_text, plugin_assignment};
use fulgurite_core::registry::{self, PluginDescriptor};
use fulgurite_core::{Error, Result};
use serde_json::json;

use super::print;

/// The subcommands of `plugins`.
#[derive(Debug, Clone, PartialEq, Eq, Subcommand)]
pub enum Command {
    /// List all plugins
    List {
        /// As a JSON array
        #[arg(long)]
        json: bool,
    },
    /// Show one plugin, with an example of its configuration
    Show {
        /// The plugin's name: its `type` in a configuration
        name: String,
    },
}

/// Prints the plugins that are linked into this program.
///
/// # Errors
/// If no plugin has the given name, two plugins of a kind share a name, or stdout cannot be
/// written.
pub fn run(command: &Command) -> Result<()> {
    let all = registry::plugins();
    match command {
        Command::List { json: false } => print(&list(&all))?,
        Command::List { json: true } => print(&list_json(&all))?,
        Command::Show { name } => print(&show(&all, name)?)?,
    }
    registry::validate()
}

/// The plugins as a table for a terminal.
pub fn list(plugins: &[PluginDescriptor]) -> String {
    let header = ["KIND", "NAME", "CRATE", "VERSION"];
    let cells = |p: &PluginDescriptor| [p.kind, p.name, p.krate, p.version];
    let widths: [usize; 4] = std::array::from_fn(|i| {
        plugins.iter().map(|p| cells(p)[i].len()).chain([header[i].len()]).max().unwrap_or(0)
    });
    let mut text = String::new();
    let mut row = |cells: [&str; 4], last: &str| {
        let mut line = String::new();
        for (cell, width) in cells.iter().zip(widths) {
            let _ = write!(line, "{cell:width$}  ");
        }
        let _ = writeln!(text, "{}", (line + last).trim_end());
    };
    row(header, "SUMMARY");
    for plugin in plugins {
        row(cells(plugin), plugin.summary);
    }
    text
}

/// The plugins as a JSON array of objects.
pub fn list_json(plugins: &[PluginDescriptor]) -> String {
    let all: Vec<_> = plugins
        .iter()
        .map(|p| {
            json!({
                "kind": p.kind, "name": p.name, "crate": p.krate, "version": p.version,
                "summary": p.summary, "example": p.example,
            })
        })
        .collect();
    format!("{:#}\n", serde_json::Value::Array(all))
}

/// Describes all plugins with this name, of any kind.
///
/// # Errors
/// [`Error::Config`] if no plugin has this name.
pub fn show(plugins: &[PluginDescriptor], name: &str) -> Result<String> {
    let mut text = String::new();
    for plugin in plugins.iter().filter(|plugin| plugin.name == name) {
        if !text.is_empty() {
            text.push('\n');
        }
        let _ = writeln!(text, "{} `{}`", plugin.kind, plugin.name);
        if !plugin.summary.is_empty() {
            let _ = writeln!(text, "  {}", plugin.summary);
        }
        let _ = writeln!(text, "  example: {}", plugin_assignment(plugin));
        let _ = writeln!(text, "  from:    {} {}", plugin.krate, plugin.version);
        let (keys, _) = option_keys(plugin);
        let (keys, defaults): (Vec<_>, Vec<_>) = keys.into_iter().unzip();
        let defaults = keys
            .iter()
            .zip(defaults)
            .filter_map(|(key, default)| Some((key.name.to_string(), default?)));
        let options = Section { path: String::new(), defaults: defaults.collect(), keys };
        if !options.keys.is_empty() {
            let _ = writeln!(text, "  options [default]:");
            for line in plain_text(&[options]).lines() {
                let _ = writeln!(text, "  {}", line.trim_end());
            }
        }
    }
    if text.is_empty() {
        let mut names: Vec<_> = plugins.iter().map(|plugin| plugin.name).collect();
        names.sort_unstable();
        names.dedup();
        let owned: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let found = match nearest(name, &owned) {
            Some(near) => format!("did you mean `{near}`? (`plugins list` shows all)"),
            None => format!("there are {}", names.join(", ")),
        };
        return Err(Error::Config(format!("no linked plugin is named `{name}`; {found}")));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    const PLUGINS: &[PluginDescriptor] = &[
        PluginDescriptor {
            kind: "logger",
            name: "csv",
            krate: "fulgurite-loggers",
            version: "0.1.0",
            summary: "metrics.csv",
            example: "\"csv\"",
            keys: || None,
        },
        PluginDescriptor {
            kind: "strategy",
            name: "local_sgd",
            krate: "their-crate",
            version: "2.0.0",
            summary: "",
            example: "{ type = \"local_sgd\", every = 4 }",
            keys: || None,
        },
    ];

    #[test]
    fn plugins_are_listed() {
        insta::assert_snapshot!(list(PLUGINS), @r#"
KIND      NAME       CRATE              VERSION  SUMMARY
logger    csv        fulgurite-loggers  0.1.0    metrics.csv
strategy  local_sgd  their-crate        2.0.0
"#);
        let json: serde_json::Value = serde_json::from_str(&list_json(PLUGINS)).unwrap();
        assert_eq!(json[1]["crate"], "their-crate");
        assert_eq!(json.as_array().unwrap().len(), 2);
    }

    #[test]
    fn plugin_is_shown_with_an_example() {
        insta::assert_snapshot!(show(PLUGINS, "csv").unwrap(), @r#"
logger `csv`
  metrics.csv
  example: trainer.loggers = ["csv"]
  from:    fulgurite-loggers 0.1.0
"#);
        insta::assert_snapshot!(show(PLUGINS, "local_sgd").unwrap(), @r#"
strategy `local_sgd`
  example: trainer.strategy = { type = "local_sgd", every = 4 }
  from:    their-crate 2.0.0
"#);
        assert_says!(show(PLUGINS, "cvs").unwrap_err(), "no linked … `cvs`; did you mean `csv`? …");
        assert_says!(show(PLUGINS, "wandb").unwrap_err(), "no linked … `wandb` … csv, local_sgd");
    }
}
