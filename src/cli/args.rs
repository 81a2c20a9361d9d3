//! The command-line arguments of a training program.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use fulgurite_core::Result;
use fulgurite_core::config::ConfigLayers;
use fulgurite_core::config::reference::{self, Section};
use fulgurite_core::run::{RunConfig, reference_sections};
use serde::de::DeserializeOwned;
use toml::Table;

use super::plugins;

/// The name, description and tables of a training program, for its help.
#[derive(Debug, Clone)]
pub struct Program {
    /// The program's name.
    pub name: &'static str,
    /// One line about it.
    pub about: &'static str,
    /// Its version.
    pub version: &'static str,
    /// The program's own tables of the configuration, for the list of keys.
    pub sections: Vec<Section>,
}

impl Program {
    /// A program without tables of its own. The version is this crate's.
    pub fn new(name: &'static str, about: &'static str) -> Self {
        let version = env!("CARGO_PKG_VERSION");
        Self { name, about, version, sections: Vec::new() }
    }
}

/// A parsed command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CliCommand {
    /// To run the module.
    Run(RunRequest),
    /// To list the plugins that are linked into the program.
    Plugins(plugins::Command),
}

/// The arguments of `fit`, `validate` and `test`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunRequest {
    /// Whether to train, to validate or to test.
    pub action: Action,
    /// Configuration files; later ones win.
    pub config: Vec<PathBuf>,
    /// Overrides `a.b.c=value` of the files, in order.
    pub set: Vec<String>,
    /// Whether to print the resolved configuration and do nothing else.
    pub print_config: bool,
    /// The format of standard output.
    pub output: Output,
}

/// What a run does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Train, and validate on the way.
    Fit,
    /// Validate a checkpoint.
    Validate,
    /// Test a checkpoint.
    Test,
}

/// The format of a run's standard output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Output {
    /// Progress on stderr, for people.
    #[default]
    Human,
    /// One JSON object a line on stdout, for programs; progress still goes to stderr.
    Json,
}

impl RunRequest {
    /// The configuration in layers: the program's defaults, the files, the overrides.
    ///
    /// # Errors
    /// If a file is missing or not TOML, or an override is malformed.
    pub fn layers(&self, defaults: Table) -> Result<ConfigLayers> {
        let layers = ConfigLayers::new().defaults(defaults);
        let layers = self.config.iter().try_fold(layers, ConfigLayers::file)?;
        self.set.iter().try_fold(layers, |layers, assignment| layers.set(assignment))
    }

    /// The checked configuration of the run.
    ///
    /// # Errors
    /// As [`layers`](Self::layers) and [`RunConfig::from_layers`].
    pub fn run_config<M: DeserializeOwned, D: DeserializeOwned>(
        &self,
        defaults: Table,
    ) -> Result<RunConfig<M, D>> {
        RunConfig::from_layers(self.layers(defaults)?)
    }
}

#[derive(Parser)]
#[command(subcommand_required = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train the model, and validate it on the way
    Fit(RunArgs),
    /// Validate the model of `trainer.ckpt_path`
    Validate(RunArgs),
    /// Test the model of `trainer.ckpt_path`
    Test(RunArgs),
    /// The plugins that are linked into this program: strategies, transports, loggers, …
    #[command(subcommand)]
    Plugins(plugins::Command),
}

#[derive(Args)]
struct RunArgs {
    /// A TOML file with configuration; may be given several times, the later over the earlier
    #[arg(short, long, value_name = "FILE")]
    config: Vec<PathBuf>,

    /// Set one key, over all files: trainer.max_steps=100, trainer.strategy=ddp
    ///
    /// The value is TOML (3, 1e-4, true, ["a", "b"], { type = "fsdp" }); anything else is taken as
    /// a string. May be given several times.
    #[arg(short, long, value_name = "KEY=VALUE")]
    set: Vec<String>,

    /// Print the resolved configuration as TOML, and do nothing else
    #[arg(long)]
    print_config: bool,

    /// What to write on standard output
    #[arg(long, value_enum, default_value_t)]
    output: Output,
}

/// Reads a command line; the first of `args` is the program itself.
///
/// # Errors
/// A [`clap::Error`] for wrong arguments, and also for `--help` and `--version`: its
/// [`exit`](clap::Error::exit) prints what is to be printed, with the right exit status.
pub fn parse<I>(program: &Program, args: I) -> Result<CliCommand, clap::Error>
where
    I: IntoIterator,
    I::Item: Into<OsString> + Clone,
{
    let matches = command(program).try_get_matches_from(args)?;
    let (action, run) = match Cli::from_arg_matches(&matches)?.command {
        Command::Fit(run) => (Action::Fit, run),
        Command::Validate(run) => (Action::Validate, run),
        Command::Test(run) => (Action::Test, run),
        Command::Plugins(command) => return Ok(CliCommand::Plugins(command)),
    };
    let RunArgs { config, set, print_config, output } = run;
    Ok(CliCommand::Run(RunRequest { action, config, set, print_config, output }))
}

fn command(program: &Program) -> clap::Command {
    let name = program.name;
    let examples = format!(
        "Examples:\n  \
         {name} fit\n  \
         {name} fit --config base.toml --config large.toml\n  \
         {name} fit --set trainer.devices=4 --set trainer.strategy=fsdp\n  \
         {name} fit --config run.toml --set trainer.ckpt_path=last\n  \
         {name} validate --config run.toml --set trainer.ckpt_path=checkpoints/step-1000\n  \
         {name} fit --config run.toml --print-config\n  \
         {name} plugins list"
    );
    // A test checks that the framework's tables match their declarations.
    let mut sections = reference_sections().unwrap_or_default();
    sections.extend(program.sections.iter().cloned());
    let help = format!(
        "{examples}\n\nConfiguration keys [default]:\n{}",
        reference::plain_text(&sections)
    );
    let short = format!("{examples}\n\nFor all configuration keys: {name} fit --help");
    let with_help =
        |command: clap::Command| command.after_help(short.clone()).after_long_help(help.clone());
    with_help(Cli::command())
        .name(name)
        .bin_name(name)
        .about(program.about)
        .version(program.version)
        .mut_subcommand("fit", with_help)
        .mut_subcommand("validate", with_help)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program() -> Program {
        Program::new("pretrain", "Trains a language model")
    }

    fn request(args: &[&str]) -> RunRequest {
        match parse(&program(), [&["pretrain"], args].concat()).unwrap() {
            CliCommand::Run(request) => request,
            other @ CliCommand::Plugins(_) => panic!("{other:?} is no run"),
        }
    }

    fn refusal(args: &[&str]) -> String {
        parse(&program(), [&["pretrain"], args].concat()).unwrap_err().to_string()
    }

    #[test]
    fn arguments_make_a_request() {
        let request = request(&[
            "fit", "--config", "a.toml", "-s", "x=1", "--config", "b.toml", "--set", "x=2",
            "--output", "json",
        ]);
        assert_eq!(
            request,
            RunRequest {
                action: Action::Fit,
                config: vec!["a.toml".into(), "b.toml".into()],
                set: vec!["x=1".to_owned(), "x=2".to_owned()],
                print_config: false,
                output: Output::Json,
            }
        );
    }

    #[test]
    fn every_program_lists_its_plugins() {
        let command = |args: &[&str]| {
            let all = [&["pretrain", "plugins"], args].concat();
            parse(&program(), all).unwrap()
        };
        let list = plugins::Command::List { json: true };
        assert_eq!(command(&["list", "--json"]), CliCommand::Plugins(list));
        let show = plugins::Command::Show { name: "fsdp".to_owned() };
        assert_eq!(command(&["show", "fsdp"]), CliCommand::Plugins(show));
        insta::assert_snapshot!(refusal(&["plugins", "--help"]), @r"
        The plugins that are linked into this program: strategies, transports, loggers, …

        Usage: pretrain plugins <COMMAND>

        Commands:
          list  List all plugins
          show  Show one plugin, with an example of its configuration
          help  Print this message or the help of the given subcommand(s)

        Options:
          -h, --help  Print help
        ");
    }

    #[test]
    fn overrides_win_over_files_and_files_over_defaults() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            path.display().to_string()
        };
        let first = file("first.toml", "seed = 1\ntrainer = { max_steps = 1, devices = 2 }");
        let second = file("second.toml", "[trainer]\nmax_steps = 2");
        let request =
            request(&["validate", "--set", "seed=3", "--config", &first, "--config", &second]);
        assert_eq!(request.action, Action::Validate);
        let defaults = toml::toml! { trainer = { devices = 1, num_nodes = 4 } };
        let run = request.run_config::<Table, Table>(defaults).unwrap();
        let trainer = &run.trainer;
        assert_eq!((run.seed, trainer.max_steps, trainer.num_nodes), (3, Some(2), 4));
        assert_eq!(trainer.devices, fulgurite_core::run::Devices::Count(2));
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = request(&["fit", "--config", "none.toml"]).layers(Table::new()).unwrap_err();
        insta::assert_snapshot!(error, @"reading the configuration file none.toml: No such file or directory (os error 2)");
    }

    #[test]
    fn wrong_arguments_are_refused() {
        insta::assert_snapshot!(refusal(&["fti"]), @r#"
error: unrecognized subcommand 'fti'

Usage: pretrain <COMMAND>

For more information, try '--help'.
"#);
        insta::assert_snapshot!(refusal(&["fit", "--output", "yaml"]), @r#"
error: invalid value 'yaml' for '--output <OUTPUT>'
  [possible values: human, json]

For more information, try '--help'.
"#);
    }

    #[test]
    fn the_help_has_examples_and_all_keys() {
        insta::assert_snapshot!(refusal(&["fit", "-h"]), @r#"
Train the model, and validate it on the way

Usage: pretrain fit [OPTIONS]

Options:
  -c, --config <FILE>    A TOML file with configuration; may be given several times, the later over the earlier
  -s, --set <KEY=VALUE>  Set one key, over all files: trainer.max_steps=100, trainer.strategy=ddp
      --print-config     Print the resolved configuration as TOML, and do nothing else
      --output <OUTPUT>  What to write on standard output [default: human] [possible values: human, json]
  -h, --help             Print help (see more with '--help')

Examples:
  pretrain fit
  pretrain fit --config base.toml --config large.toml
  pretrain fit --set trainer.devices=4 --set trainer.strategy=fsdp
  pretrain fit --config run.toml --set trainer.ckpt_path=last
  pretrain validate --config run.toml --set trainer.ckpt_path=checkpoints/step-1000
  pretrain fit --config run.toml --print-config
  pretrain plugins list

For all configuration keys: pretrain fit --help
"#);
        let long = refusal(&["fit", "--help"]);
        for section in reference_sections().unwrap() {
            for key in section.keys {
                let dot = if section.path.is_empty() { "" } else { "." };
                let name = format!("  {}{dot}{} ", section.path, key.name);
                assert!(long.contains(&name), "{name} is not in\n{long}");
            }
        }
    }
}
